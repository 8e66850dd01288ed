"""The command line: the group of commands and what they share. Each file imports late: `--help` answers at once."""
