"""What a person sees of a run's data before it trains: numbers, sample rows, the loss mask as text."""
