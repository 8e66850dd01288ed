"""What looks at a machine, a config or a device before it is trusted: checks, validation, self-test, measurements."""
