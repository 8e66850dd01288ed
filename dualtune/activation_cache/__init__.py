"""The activation cache: hidden states below the lowest adapter, computed once for each document and kept on disk."""
