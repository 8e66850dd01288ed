"""How long a training step takes, by formula: operations, bytes and launches against the limits of a machine."""
