"""Predictive training: steps predicted from the last ones, accepted on evidence, checked, and undone if they hurt."""
