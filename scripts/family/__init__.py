"""What scripts/families.py is made of: tiny models, the stages that each goes through, and the page."""
