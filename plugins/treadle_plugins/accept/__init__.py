"""Who is queued."""
