"""Who steps, and who waits: the engine's own thread, or whichever thread waits for a request.

stepping thread   step . step . step ..... (nothing to do: sleeps until an arrival) ..... step
other threads     submit -> wake                  result(): waits for its own request's watcher alone
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treadle.contracts import Clock
from treadle.errors import EngineStopped, WrongCall
from treadle.logs import get_logger
from treadle.request import LiveRequest

log = get_logger(__name__)
LOOK_AGAIN_S = 0.5
"""Most seconds that a thread which waits for a request sleeps before it looks again, whatever else happens."""


class Loop:
    """Calls `step`, on one thread at a time."""

    def __init__(self, step: Callable[[], float | None], clock: Clock, give_up: Callable[[BaseException], None]) -> None:
        """`give_up` hears of what ended the engine's own thread."""
        self._step = step
        self._clock = clock
        self._give_up = give_up
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._stepping: int | None = None
        """Identity of the thread that steps now."""
        self._watching = threading.Lock()
        self._arrival = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.closed = False

    # --- stepping ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """One thread at a time. Raises WrongCall where waiting for the turn would be for ever."""
        self.check_caller(what)
        with self._turn:
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None
                if self._thread not in (None, threading.current_thread()):
                    self.wake()  # the engine's own thread may be about to wait for an arrival that this turn has taken

    def check_caller(self, what: str) -> None:
        """Raise WrongCall in a hook, where the step that waits for the hook would be waited for; and in a forked process."""
        self.check_process()
        if self._stepping == threading.get_ident():
            raise WrongCall(f"{what} was called from a hook, within a step: hooks may submit and cancel, neither step nor wait")

    def check_process(self) -> None:
        """Raise WrongCall in a process that was forked after the engine was made: its threads and locks did not come along."""
        if os.getpid() != self._pid:
            raise WrongCall(f"this engine was made in process {self._pid}, and this one was forked from it; make an engine here")

    def start(self) -> None:
        """Step on a thread of the engine's own until `close`."""
        self.check_process()
        with self._starting:
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(target=self._run, name="treadle", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Let the engine's own thread come to its end."""
        self.closed = True
        self._arrival.set()
        with self._starting:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while True:
                until_s = self._step()
                if self.closed:  # looked at after the step has cleared the arrival: `close` sets it once more
                    break
                if until_s is None:
                    self._arrival.wait()
                else:
                    self.pause(until_s)
        except EngineStopped:
            pass  # closed between two steps, or failed: then everybody has been told
        except BaseException as error:
            log.error("stepping_stopped", error=f"{type(error).__name__}: {error}")
            with self.turn("giving up"):
                self._give_up(error)
        finally:
            self._thread = None

    # --- arrivals ---------------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something was posted."""
        self._arrival.set()

    def begin_step(self) -> None:
        """What was posted until now is about to be read."""
        self._arrival.clear()

    def pause(self, until_s: float | None, most_s: float | None = None) -> None:
        """Sleep until a clock time or an arrival. A virtual clock jumps instead."""
        now = self._clock.now()
        if until_s is None or until_s <= now or self._clock.wait(until_s):
            return
        left = min(until_s - now, threading.TIMEOUT_MAX)
        self._arrival.wait(left if most_s is None else min(left, most_s))

    # --- waiting ----------------------------------------------------------------------------------------------------------------

    def watch(self, request: LiveRequest, watcher: Callable[[], None]) -> None:
        """Call `watcher`, on the stepping thread, whenever something of the request is published."""
        with self._watching:
            request.watch(watcher)

    def unwatch(self, request: LiveRequest, watcher: Callable[[], None]) -> None:
        """Call it no more."""
        with self._watching:
            request.unwatch(watcher)

    def wait_for(self, request: LiveRequest, reached: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `reached()`, which something published of the request makes true; step meanwhile when no thread does.

        Raises TimeoutError, and WrongCall on the stepping thread.
        """
        if reached():
            return
        self.check_caller("waiting for a request")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        published = threading.Event()
        self.watch(request, published.set)
        try:
            while not reached():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"not reached within {timeout_s} s")
                published.clear()
                self._wait_or_step(published, reached, left)
        finally:
            self.unwatch(request, published.set)

    def _wait_or_step(self, published: threading.Event, reached: Callable[[], bool], left: float | None) -> None:
        if reached():
            return
        most_s = LOOK_AGAIN_S if left is None else min(left, LOOK_AGAIN_S)
        if self._thread is not None:
            # a thread that ends publishes everybody's end; should it have ended just now, we look again
            published.wait(most_s)
            return
        try:
            until_s = self._step()
        except EngineStopped:
            if reached():  # another thread's step was the engine's last
                return
            if not self.closed:
                raise
            published.wait(0.05)  # `close` is about to publish everybody's end
            return
        if not reached():
            # the step of another thread may reach it just now, and have taken the arrival that would end this pause
            self.pause(until_s, most_s)
