"""What comes from the host instead of being computed, and what is written there."""
