"""The fast pieces of the training step, each beside the plain code that says what it computes."""
