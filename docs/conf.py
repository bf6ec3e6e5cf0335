"""Sphinx: MyST for the pages, autodoc for the reference."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sphinx.application import Sphinx

project = "Treadle"
author = "the Treadle authors"
copyright = "the Treadle authors"
try:
    release = metadata.version("treadle")
except metadata.PackageNotFoundError:  # built from a checkout that is not installed
    release = "unreleased"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Treadle"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings put code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_type_aliases = {"Path_": "tuple[str, ...]"}


def keep_pictures(*event: Any) -> None:
    """Mark indented pictures in docstrings as literal text, which reStructuredText would take for quotations.

    Called with Sphinx's arguments of `autodoc-process-docstring`, of which only the last, the lines, matters.
    """
    lines: list[str] = event[-1]
    kept: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if inside and line and not indented:
            inside = False
        elif not inside and indented and _after_paragraph(kept):
            kept += ["::", ""]
            inside = True
        kept.append(line)
    lines[:] = kept


def _after_paragraph(lines: list[str]) -> bool:
    """Whether the next line follows a blank line behind a paragraph that announces no literal text itself."""
    if not lines or lines[-1]:
        return False
    paragraph = next((line for line in reversed(lines) if line), "")
    return not paragraph.endswith("::") and not paragraph.startswith((" ", "- ", ".. "))


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", keep_pictures)
