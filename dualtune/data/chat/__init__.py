"""Conversations: the formats of rows, and chat templates in their sandbox."""
