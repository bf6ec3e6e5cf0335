"""Which free blocks a request gets."""
