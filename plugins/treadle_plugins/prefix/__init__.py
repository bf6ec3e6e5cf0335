"""Which blocks already hold the start of a request."""
