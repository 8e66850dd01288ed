"""What a step of a config costs: measured, and by formula."""
