"""How a model continues texts: loading it for inference, choosing tokens, many rows at once."""
