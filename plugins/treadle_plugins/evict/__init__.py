"""Which cached blocks are forgotten first."""
