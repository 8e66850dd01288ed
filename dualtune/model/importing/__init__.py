"""Adapters that other tools wrote, or that are damaged: diagnosed, repaired, imported."""
