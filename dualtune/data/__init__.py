"""From the sources of a config to micro-batches: rows, conversations, tokens, documents, order."""
