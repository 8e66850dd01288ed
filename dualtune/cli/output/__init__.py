"""What a command prints: terminals, progress, live lines."""
