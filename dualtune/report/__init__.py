"""Pages to read in a browser, each one file that needs nothing else."""
