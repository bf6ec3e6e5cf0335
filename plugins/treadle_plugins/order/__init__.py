"""Who is next."""
