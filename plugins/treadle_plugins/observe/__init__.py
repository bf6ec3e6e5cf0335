"""Plugins that watch: they decide nothing."""
