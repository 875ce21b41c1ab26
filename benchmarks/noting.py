"""Lets Ray's workers note something after each message that they answer, for overhead.py and scale.py."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr import clientapp
from flwr.app import Context, Message
from flwr.clientapp import ClientApp


class Noting(ClientApp):  # type: ignore[misc]
    """A ClientApp that writes what `note` returns after each message, in a file of its process."""

    def __init__(self, client_fn: Callable[[Context], Any], folder: str) -> None:
        self.folder = folder
        super().__init__(client_fn=client_fn)

    def note(self) -> dict[str, Any]:
        raise NotImplementedError

    def __call__(self, message: Message, context: Context) -> Message:
        begun = time.perf_counter()
        reply = super().__call__(message, context)
        seconds = time.perf_counter() - begun
        line = {"round": message.metadata.group_id, "call": seconds, "pid": os.getpid(), **self.note()}
        with (Path(self.folder) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return reply


@contextmanager
def noted(app: Callable[[Callable[[Context], Any], str], Noting]) -> Iterator[list[dict[str, Any]]]:
    """Give simulations the app of a client_fn and a folder; the list has its lines after the block."""
    lines: list[dict[str, Any]] = []
    real = clientapp.ClientApp
    with tempfile.TemporaryDirectory() as folder:
        clientapp.ClientApp = lambda client_fn: app(client_fn, folder)  # type: ignore[misc, assignment]
        try:
            yield lines
        finally:
            clientapp.ClientApp = real  # type: ignore[misc]
        for file in Path(folder).glob("*.jsonl"):
            lines += map(json.loads, file.read_text(encoding="utf-8").splitlines())
