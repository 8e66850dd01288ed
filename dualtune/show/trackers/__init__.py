"""Trackers of experiments: each follows metrics.jsonl in a process of its own, so that none can stop or slow a run."""
