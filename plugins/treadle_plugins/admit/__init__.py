"""When waiting requests start."""
