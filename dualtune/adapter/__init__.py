"""What an adapter is: its hyperparameters, the names and shapes of its tensors, their initial values, dropout.

Reading an adapter needs only NumPy, neither torch nor MLX.
"""
