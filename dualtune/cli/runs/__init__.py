"""Commands about the runs of a directory: listed, compared, cleaned."""
