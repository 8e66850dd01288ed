"""Training on the model's own samples: drawing them, rewards, environments."""
