"""Executors: what computes a step's plan."""
