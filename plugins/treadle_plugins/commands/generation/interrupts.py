"""Ctrl-C as a flag that is looked at between steps, so that no step is torn apart."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While it is open, Ctrl-C raises KeyboardInterrupt until `soften`; from then on the first only sets `asked`.

    A second one raises KeyboardInterrupt at once; whatever error follows from that while the block is left is left out. The
    handler that was there before comes back at the end. Nothing is changed where signals are ignored, or on other threads than
    the main one.
    """

    def __init__(self) -> None:
        self.asked = False
        """Whether the user wants an orderly end."""
        self._soft = False
        self._torn = False
        self._before: Any = None

    def soften(self) -> None:
        """From now on somebody looks at `asked`."""
        self._soft = True

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._torn and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the signature of signal.signal
        if self._soft and not self.asked:
            self.asked = True
            return
        self._torn = True
        raise KeyboardInterrupt
