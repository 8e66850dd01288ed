"""The checks of the self-test: each looks at one thing that only a device can show."""
