"""Commands that train, and that look at one run."""
