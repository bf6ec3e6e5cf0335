"""How keys and values are stored."""
