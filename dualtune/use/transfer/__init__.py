"""Moving an adapter or an unfinished run to another machine: push and pull."""
