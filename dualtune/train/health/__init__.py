"""What the numbers of a run mean: guards while it trains, a verdict when it has ended."""
