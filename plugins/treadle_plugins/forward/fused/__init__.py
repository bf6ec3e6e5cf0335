"""A forward pass for CPUs: packed weights, fused operations, and a report of what could not be fused."""
