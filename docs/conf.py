"""Sphinx: the pages, by MyST. What is made from the code is in them already, see generate.py."""

from __future__ import annotations

from importlib import metadata

project = "Treadle"
author = "the Treadle authors"
copyright = "the Treadle authors"
try:
    release = metadata.version("treadle")
except metadata.PackageNotFoundError:  # built from a checkout that is not installed
    release = "unreleased"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Treadle"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
