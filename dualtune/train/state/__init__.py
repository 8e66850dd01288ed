"""The run directory: its lock, checkpoints and metrics, and what a resume compares."""
