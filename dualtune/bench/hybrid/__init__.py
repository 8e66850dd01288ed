"""Predictive training beside what it must beat: arms, seeds, controls of equal cost."""
