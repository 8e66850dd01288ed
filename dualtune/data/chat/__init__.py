"""Tool calls in the text of an answer: how a chat template writes them, and reading them back as they come."""
