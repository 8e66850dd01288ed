"""What of MLX itself is checked and set before it computes: its version, its memory, its precision."""
