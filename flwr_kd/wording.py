"""Messages in the words of the interface that the reader uses, and warnings that are logged once per run.

The same message names ``--set noise=none`` on the command line, ``noise="none"`` in Python, and the run config in a
Flower App. The command and the apps say which interface is in use; without that it is Python.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from flwr_kd.checks import Scalar

__all__ = [
    "Interface",
    "assignment",
    "begin_run",
    "one_comparison",
    "option",
    "speak",
    "speaking",
    "warn_once",
    "warn_once_as",
]


class Interface(Enum):
    """How a user states options."""

    PYTHON = "Python"
    COMMAND = "command line"
    APP = "run config"


_interface = Interface.PYTHON
_lock = threading.Lock()
_comparisons = 0
_logged: set[str] = set()


def _make_lock() -> None:
    """Make a new lock in a forked process: the thread that may have held the old one is not there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_lock)


def speak(interface: Interface) -> None:
    """Name options in the words of this interface from now on, in all threads of the process."""
    global _interface
    _interface = interface


@contextmanager
def speaking(interface: Interface) -> Iterator[None]:
    """Name options in the words of this interface within a block.

    >>> with speaking(Interface.COMMAND):
    ...     option("force"), assignment("noise", "none")
    ('--force', '--set noise=none')
    >>> option("force"), assignment("noise", "none")
    ('force=True', 'noise="none"')
    """
    before = _interface
    speak(interface)
    try:
        yield
    finally:
        speak(before)


def option(name: str, value: Scalar = True) -> str:
    """Return how an option is given, for example in a hint; ``name`` is written with underscores.

    >>> option("backend", "inline")
    'backend="inline"'
    """
    if _interface is Interface.COMMAND:
        flag = f"--{name.replace('_', '-')}"
        return flag if value is True else f"{flag} {value}"
    return _assigned(name, value)


def assignment(name: str, value: Scalar) -> str:
    """Return how a hyper-parameter is set."""
    if _interface is Interface.COMMAND:
        return f"--set {name.replace('_', '-')}={value}"
    return _assigned(name, value)


def _assigned(name: str, value: Scalar) -> str:
    if _interface is Interface.APP:
        return f"{name.replace('_', '-')}={json.dumps(value)} in the run config"
    return f"{name}={json.dumps(value) if isinstance(value, str) else value}"


def begin_run() -> None:
    """Forget which warnings have been logged, unless the run is one of a comparison's."""
    with _lock:
        if not _comparisons:
            _logged.clear()


@contextmanager
def one_comparison() -> Iterator[None]:
    """Log each warning of the runs within a block once."""
    global _comparisons
    begin_run()
    with _lock:
        _comparisons += 1
    try:
        yield
    finally:
        with _lock:
            _comparisons -= 1


def warn_once(text: str, *values: object) -> None:
    """Log a warning with Flower's log, unless its run or comparison has logged it already.

    Parameters
    ----------
    text : str
        With placeholders of :mod:`logging`. The same text with other values is the same warning.
    *values : object
        For the placeholders.
    """
    if warn_once_as(text):
        logging.getLogger("flwr").warning(text, *values, extra={"once": text})


def warn_once_as(text: str) -> bool:
    """Return whether a warning is new to its run or comparison, and note it: for those that come from processes.

    Parameters
    ----------
    text : str
        As :func:`warn_once` takes it; records of its warnings have it as attribute ``once``.
    """
    with _lock:
        if text in _logged:
            return False
        _logged.add(text)
        return True
