"""Shapes of models without a memory formula, counted on their classes without weights."""
