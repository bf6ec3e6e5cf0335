"""Attention on a CPU: kernels written with Numba, read straight from the block table."""
