"""How alike two rows are: exactly, by a hash of what they say, and nearly, by the shingles of their text."""
