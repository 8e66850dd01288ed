"""Layer streaming: a base larger than memory, whose layers are read from their files whenever they compute."""
