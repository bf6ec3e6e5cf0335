"""Fetching a model from the hub, or from the hub's cache on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from treadle.errors import ModelError

PATTERNS = ("*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
"""Weights, settings and tokenizer; no pickles, no code, no copies in other formats."""
IGNORED = ("*/*", "consolidated*")
"""Sub-folders and second copies of the weights, in other formats."""
PROBE_S = 4.0
"""Longest time to find out whether the hub can be reached, in seconds."""


class HubSnapshot(Protocol):
    """Brings a model of the hub to this machine."""

    def __call__(self, name: str, offline: bool) -> tuple[Path, str]:
        """Folder of the model and where it came from. Raises ModelError with the reason when it cannot be had."""
        ...


def hub_snapshot(name: str, offline: bool) -> tuple[Path, str]:
    """The model `name` from the hub, or from the hub's cache when the hub cannot be asked.

    The hub is asked first, since only it knows which files a model has: a cache that an interrupted download left
    behind may lack some. That question takes at most `PROBE_S` seconds without network.
    """
    try:
        from huggingface_hub import constants, snapshot_download  # 0.2 s that other models need not pay
    except ImportError as error:
        raise ModelError(f"huggingface_hub is not installed ({error})") from error
    silence = "offline was asked for" if offline else "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    unreachable = silence or _why_unreachable(name)
    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(IGNORED),
            etag_timeout=PROBE_S,
            local_files_only=bool(unreachable),
        )
    except Exception as error:  # any of the hub's, the network's or the disk's errors: each is a reason, none is hidden
        if unreachable:
            raise ModelError(f"{unreachable}, and {name!r} is not in the hub's cache") from error
        raise ModelError(f"downloading {name!r} from the hub failed: {_first_line(error)}") from error
    return Path(folder), "hub cache" if unreachable else "hub"


def _why_unreachable(name: str) -> str:
    """Why the hub cannot be asked about `name`; empty when it can. Raises ModelError when the hub says no."""
    from huggingface_hub import HfApi, errors  # as above

    try:
        within(PROBE_S, lambda: HfApi().model_info(name, timeout=PROBE_S))
    except errors.GatedRepoError as error:
        raise ModelError(f"{name!r} asks for its licence to be accepted on the hub; accept it and log in") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"the hub knows no model {name!r}; check the spelling, or log in if it is private") from error
    except TimeoutError:
        return f"the hub did not answer within {PROBE_S:g} s"
    except errors.HfHubHTTPError as error:
        return f"the hub answered with an error ({_first_line(error)})"
    except Exception as error:  # the hub's HTTP library, and so its errors' types, differ from release to release
        return f"the hub cannot be reached ({_first_line(error)})"
    return ""


def within(limit_s: float, work: Callable[[], object]) -> None:
    """Run `work`; raise its exception, or TimeoutError after `limit_s` seconds, when it is left to itself.

    A thread, because looking up a host name cannot be given a time limit.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name="treadle-hub-probe")
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if raised:
        raise raised[0]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
