"""Model files that are not whole are told before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from treadle.errors import ModelError
from treadle_plugins.models.check import check, check_gguf, check_safetensors, read_json, weights_digest
from treadle_plugins.models.source import ModelSource


def safetensors(data: bytes = bytes(16), **changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


def folder_with(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / name.replace("__", "-").replace("_dot_", ".")).write_bytes(content)
    return folder


def directory(path: Path) -> ModelSource:
    return ModelSource("m", "directory", path, "directory")


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    check(directory(folder_with(tmp_path, model_dot_safetensors=safetensors())))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut off or no safetensors file"),
        (b"\xff" * 64, "its header should take 18446744073709551615 of 64 bytes"),
        (safetensors()[:40], "cut off or no safetensors file"),
        (safetensors()[:-1], "is damaged: it has .* bytes and should have"),
        (safetensors() + b"x", "is damaged: it has"),
        (struct.pack("<Q", 8) + b"garbage!", "its header is no list of tensors"),
        (struct.pack("<Q", 2) + b"[]", "its header is no list of tensors"),
        (struct.pack("<Q", 2) + b"{}", "its header is no list of tensors"),
        (safetensors(data_offsets=None), "its header is no list of tensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    ],
)
def test_damaged_safetensors_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        check_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no GGUF file: it starts with b''"),
        (b"PK\x03\x04" + bytes(40), "no GGUF file: it starts with"),
        (b"GGUF\x03\x00\x00\x00", "is cut off"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_what_is_no_gguf_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        check_gguf(path)
    assert str(path) in str(caught.value)


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    folder_with(tmp_path, model__1_dot_safetensors=safetensors())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"2 of 3 weight files are missing .* model-2\.safetensors, model-3"):
        check(directory(tmp_path))


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": 3}])
def test_an_index_without_shards_is_an_error(tmp_path: Path, index: dict[str, object]) -> None:
    folder_with(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names no weights"):
        check(directory(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [("q4.gguf", "name one itself, such as"), ("pytorch_model.bin", "convert them to safetensors"), ("x", "Fetch the")],
)
def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path, name: str, words: str) -> None:
    folder_with(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=f"holds no weights.*{words}"):
        check(directory(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\ufffe"])
def test_damaged_settings_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-16")
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        read_json(tmp_path / "config.json")


def test_the_digest_follows_the_weights_and_not_their_place(tmp_path: Path) -> None:
    one = folder_with(tmp_path / "one", model_dot_safetensors=safetensors())
    same = folder_with(tmp_path / "same", model_dot_safetensors=safetensors())
    other = folder_with(tmp_path / "other", model_dot_safetensors=safetensors(data=bytes(15) + b"\x01"))
    assert weights_digest(directory(one)) == weights_digest(directory(same))
    assert weights_digest(directory(one)) != weights_digest(directory(other))
