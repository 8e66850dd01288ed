"""The checking commands: a machine, an environment or a config, judged before anything is trained."""
