"""Measurements: what the core itself costs, and what a policy does to latency and throughput."""
