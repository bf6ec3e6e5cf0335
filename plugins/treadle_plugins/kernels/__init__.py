"""What kernels for a CPU are made of, for the families that have some: attention and the forward pass."""
