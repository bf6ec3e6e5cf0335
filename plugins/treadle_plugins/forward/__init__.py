"""The forward pass: what the torch executor asks of one, and a fast one for CPUs."""
