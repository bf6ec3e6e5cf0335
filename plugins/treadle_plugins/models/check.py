"""What can be told about model files without loading them: that they are whole, and which weights they hold.

Nothing here imports torch or transformers. Every problem is a ModelError that names the file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

from treadle.errors import ModelError
from treadle_plugins.models.source import ModelSource

CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
_SAMPLES = 64
_SAMPLE_BYTES = 65_536


def check(source: ModelSource) -> None:
    """Raise ModelError when the files of `source` are missing, cut off or of another format."""
    if source.kind == "gguf":
        check_gguf(source.path)
    else:
        check_directory(source.path)


def check_directory(folder: Path) -> None:
    """Raise ModelError unless `folder` holds a readable config.json and every safetensors file whole."""
    read_json(folder / CONFIG)
    for path in weight_files(folder):
        check_safetensors(path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`, sorted; each exists."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise ModelError(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX}. {_other_weights(folder)}")
    shards = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{folder / _INDEX} names no weights: it has no weight_map. Fetch the model again")
    names = sorted({str(name) for name in shards.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing from {folder}: {_few(missing)}; "
            f"{_INDEX} names them. Fetch the model again"
        )
    return [folder / name for name in names]


def check_safetensors(path: Path) -> None:
    """Raise ModelError unless the header of `path` can be read and accounts for every byte of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        _refuse_pointer(path, start + file.read(32))
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is cut off or no safetensors file: its header should take {length} of {size} bytes")
        file.seek(8)
        end = _data_end(path, file.read(length))
    if 8 + length + end != size:
        raise ModelError(f"{path} is damaged: it has {size} bytes and should have {8 + length + end}. Fetch it again")


def check_gguf(path: Path) -> None:
    """Raise ModelError unless `path` starts as a GGUF file does; whether all tensors are there, `load` finds out."""
    with path.open("rb") as file:
        start = file.read(40)
    _refuse_pointer(path, start)
    if start[:4] != b"GGUF":
        raise ModelError(
            f"{path} is no GGUF file: it starts with {start[:4]!r} instead of b'GGUF'. "
            "A model is a GGUF file, or a folder with config.json and safetensors"
        )
    if len(start) < 24:
        raise ModelError(f"{path} is cut off: a GGUF header alone takes 24 bytes, the file has {len(start)}. Fetch it again")


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises ModelError when it is missing or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}. Fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: it holds a {type(value).__name__} instead of an object. Fetch it again")
    return value


def weights_digest(source: ModelSource) -> str:
    """A short digest of the weights of `source`: sizes, headers, and samples spread evenly over each file.

    Two fine-tunes of a model differ in nearly every byte, so samples tell them apart; reading all of a large model
    would take longer than loading it.
    """
    folder = source.path
    files = [folder] if source.kind == "gguf" else [folder / CONFIG, *weight_files(folder)]
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for offset in sorted({index * max(0, size - _SAMPLE_BYTES) // _SAMPLES for index in range(_SAMPLES + 1)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _data_end(path: Path, header: bytes) -> int:
    """Bytes of tensor data that a safetensors header promises."""
    try:
        entries = json.loads(header)
        return max(int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: its header is no list of tensors ({error}). Fetch it again") from error


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the weights themselves; run `git lfs pull` in its folder")


def _other_weights(folder: Path) -> str:
    """What to do about a folder whose weights are of a kind that is not loaded."""
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return f"It holds GGUF files: name one itself, such as {folder / gguf[0]}"
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        return f"It holds {_few(pickles)}, pickles that can run code when loaded; convert them to safetensors"
    return "Fetch the model again, or name another folder"


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
