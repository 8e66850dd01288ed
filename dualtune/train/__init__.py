"""The training loop and what surrounds it: schedule, metrics, run directory, checkpoints, generation."""
