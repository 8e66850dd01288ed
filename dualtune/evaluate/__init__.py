"""A model with its adapter in use: evaluation, generation, tasks with an answer, fingerprints."""
