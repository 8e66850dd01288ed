"""Whether an adapter computes here what it computed where it was trained."""
