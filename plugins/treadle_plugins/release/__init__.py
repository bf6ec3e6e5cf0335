"""When a finished request's blocks go."""
