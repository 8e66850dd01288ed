"""Commands that train, and that look at runs."""
