"""The built-in commands: each an entry point, as those of any other package are."""
