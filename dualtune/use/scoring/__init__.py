"""How good answers are: metrics, predictions, base against adapter, leaks of held-out rows, tasks of lm-eval."""
