"""Signals that end the command: Ctrl-C, SIGTERM, a terminal that is closed."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

__all__ = ["Interrupted", "Interrupts"]

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ENDING_SECONDS = 12.0
"""Seconds after a signal when the process ends, whatever still holds it: a computation that no signal reaches."""


class Interrupted(Exception):  # noqa: N818
    """The user has ended the command; the text says what is kept."""


class Interrupts:
    """While it is entered, the first signal raises ``KeyboardInterrupt``, and further ones are ignored.

    So what ends orderly is not disturbed by an impatient second Ctrl-C. Signals that the process ignores, as under
    ``nohup``, stay ignored. In a thread other than the main one signals stay as they are.

    Attributes
    ----------
    number : int or None
        The signal that came.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def code(self) -> int:
        """The exit status: 128 and the signal's number."""
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def leave(self) -> NoReturn:
        """End the process at once: Python's own end would wait for threads that still work."""
        # Temporary folders are removed by functions that are registered for the exit.
        with suppress(Exception):
            atexit._run_exitfuncs()
        self._end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that was forked from this one, for example a DataLoader's.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.number is not None:
            return
        self.number = number
        # What is broken off now fails in many threads, and nobody wants to read how.
        logging.disable()
        sys.unraisablehook = threading.excepthook = _say_nothing
        watchdog = threading.Timer(_ENDING_SECONDS, self._end)
        watchdog.daemon = True
        watchdog.start()
        raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(self.code)


def _say_nothing(args: Any) -> None:
    """Take the place of a hook that prints a traceback."""
