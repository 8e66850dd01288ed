"""What a person sees of a run while it trains: its numbers so far, the time left, its log, its table in a notebook."""
