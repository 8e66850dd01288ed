"""What a run can minimize besides the plain loss, and what other models say for it."""
