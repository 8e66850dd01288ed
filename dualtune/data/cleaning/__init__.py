"""Cleaning a data set: clean rows beside a list of those left out, and a report of personal data."""
