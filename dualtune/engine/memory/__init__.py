"""How much memory training takes, by formula: the shapes of models and the estimate."""
