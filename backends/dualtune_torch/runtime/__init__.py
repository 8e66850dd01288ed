"""What of torch itself is set while an engine computes."""
