"""The self-test of a device: what only it can show, in one archive to send back."""
