"""The command line. One small file per command; its imports stand inside it, so that `--help` answers at once."""
