"""Training for clients of the Tinker API, on one base model."""
