"""Who gives way when memory is short, and what becomes of its KV."""
