"""Commands after a run: an adapter measured, used, converted and moved."""
