"""Configs of other trainers, translated: one table a trainer, and what reads a file by it."""
