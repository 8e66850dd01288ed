"""The fast pieces. Each stands beside the plain one, which it must equal, and falls back to it."""
