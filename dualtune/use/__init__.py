"""A model with its adapter in use: chat, HTTP, scores, export, verification, push and pull."""
