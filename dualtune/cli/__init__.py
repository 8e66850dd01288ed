"""The command line, one file a command. Each file imports late: `--help` answers at once."""
