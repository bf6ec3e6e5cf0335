"""Models for tests of whole engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from treadle import Engine
    from treadle_plugins.models.load import LoadedModel


@pytest.fixture(scope="session")
def default_reference() -> LoadedModel:
    """The default model in float32 with transformers' own attention."""
    import torch

    from treadle_plugins.models.load import load
    from treadle_plugins.models.resolve import resolve
    from treadle_plugins.models.source import DEFAULT_NAME

    return load(resolve(DEFAULT_NAME), torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="session")
def default_engine() -> Callable[..., Engine]:
    """Makes engines of the default model in float32, which is read from the disk once only."""
    from support.reference import ModelCache
    from treadle import Engine

    shelf = ModelCache()

    def make(*plugins: object, forward: str = "auto", **values: Any) -> Engine:
        values.setdefault("pool", {"memory": "256MiB"})
        execute = {"strategy": "torch", "dtype": "float32", "forward": forward}
        with shelf.in_use():
            return Engine.load(plugins=plugins, execute=execute, **values)

    return make
