"""Where a model's files are, and the name of the model that is used when none is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_NAME = "smollm2-135m-instruct"
DEFAULT_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class ModelSource:
    """Files of one model on this machine, complete as far as can be told without loading them."""

    name: str
    """What the user asked for."""
    kind: Literal["directory", "gguf"]
    path: Path
    """The folder that holds config.json and safetensors, or the GGUF file."""
    origin: str
    """Where the files came from: `directory`, `file`, `cache`, `hub`, `hub cache`, or a wheel's name and version."""
