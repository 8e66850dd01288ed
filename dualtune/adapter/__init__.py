"""What an adapter is: its hyperparameters, the names and shapes of its tensors, their initial values, dropout.

Reading an adapter needs NumPy alone, neither torch nor MLX.
"""
