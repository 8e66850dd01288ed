"""Sweeps: runs of one config with other values, one after another in a process that loads the base model once."""
