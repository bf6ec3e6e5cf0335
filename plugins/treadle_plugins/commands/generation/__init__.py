"""What `treadle generate` does, imported when it runs: reading, stepping, writing."""
