"""The processes of a run, as its loop sees them."""
