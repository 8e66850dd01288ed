"""A command on another machine over ssh: its port is forwarded here, and what it saves comes home."""
