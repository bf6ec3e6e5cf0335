"""The built-in strategies of Treadle: ordinary plugins, with no access that a stranger lacks."""
