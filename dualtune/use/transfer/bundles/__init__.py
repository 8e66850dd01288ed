"""A bundle: one file that carries an adapter or a run, read without trust."""
