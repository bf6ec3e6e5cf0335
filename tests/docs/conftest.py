"""What tests of the documentation share."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    """The script that writes the generated parts of pages."""
    folder = Path(__file__).resolve().parents[2] / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # as for a script: its neighbours can be imported
        return importlib.import_module("generate")
