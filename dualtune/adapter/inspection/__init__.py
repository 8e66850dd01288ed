"""What an adapter directory holds, and how two of them differ."""
