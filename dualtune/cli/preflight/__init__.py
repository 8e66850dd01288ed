"""Commands before a run: what the machine, the config and the data are."""
