"""What this machine is and which backend suits it, found without importing torch or MLX."""
