"""Attention over the block pool: what a backend is asked for, and the backends."""
