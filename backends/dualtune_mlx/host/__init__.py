"""What comes from the host instead of being computed."""
