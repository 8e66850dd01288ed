"""What scripts/families.py is made of: tiny models of every family, the stages they go through, and the page of results."""
