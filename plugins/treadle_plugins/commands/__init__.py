"""Commands that ship with Treadle and are ordinary plugins."""
