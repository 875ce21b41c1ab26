"""Faults of single nodes, injected into an in-process grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import (
    Message,
    RecordDict,
)

from flwr_kd.checks import ConfigError
from flwr_kd.testing.garbage import GARBAGE

__all__ = ["FAULTS", "Fault"]

FAULTS = ("raise", "silent", "late", "garbage")
"""Kinds of faults of a client."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong at one node.

    Parameters
    ----------
    kind : str
        ``"raise"``: the ClientApp raises; ``"silent"``: no answer ever; ``"late"``: the answer is there only
        when the server no longer asks for it, after it has sent further messages; ``"garbage"``: the answer is
        mutilated by ``garble``.
    rounds : collection of int, optional
        The rounds (Flower's ``group_id``) in which it happens; all if None. The handshake is spared.
    garble : callable, optional
        Changes the answer's content in place; all of :data:`GARBAGE` in turn if None.
    """

    kind: str
    rounds: frozenset[int] | None = None
    garble: Callable[[RecordDict], None] | None = None

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ConfigError(f"kind must be one of {', '.join(FAULTS)}, got {self.kind!r}")

    def mutilate(self, content: RecordDict, number: int) -> None:
        """Change a reply's content in place, by ``garble`` or the garbage whose turn it is."""
        garble = self.garble or list(GARBAGE.values())[number % len(GARBAGE)]
        garble(content)

    def applies(self, message: Message) -> bool:
        """Say whether it happens for this message."""
        if message.metadata.message_type == "get_properties":
            return False
        return self.rounds is None or message.metadata.group_id in {str(r) for r in self.rounds}
