"""Flower's mods around a client: which of them work on what its method sends, and what they leave out.

A mod is a function between Flower and the client, which the client cannot ask for; it is seen among the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from flwr_kd.checks import ConfigError

__all__ = ["CLIPPING", "active_mods", "check_mods", "name_of"]

CLIPPING = frozenset({"fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod"})
"""Mods that clip the update of a model's weights."""
_READING = frozenset({*CLIPPING, "arrays_size_mod"})
"""Mods that read a reply's arrays. The last one fails on what Flower sends for a ``NumPyClient`` without arrays."""
_PACKAGES = ("flwr.client.mod.", "flwr.clientapp.mod.")
_MESSAGE_APP = "flwr_kd.client.message_app"


def active_mods() -> list[str]:
    """Return the names of Flower's own mods through which the current call came, of those that may be unfit."""
    names: list[str] = []
    reading, frame = _READING, sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == _MESSAGE_APP:
            reading = CLIPPING
        if module.startswith(_PACKAGES):
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name if owner is None else type(owner).__name__
            if name in reading:
                names.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def name_of(mod: Any) -> tuple[str, str]:
    """Return the name of a mod, a function or an object, and the module that defines it.

    >>> from flwr.clientapp.mod import fixedclipping_mod
    >>> name_of(fixedclipping_mod)
    ('fixedclipping_mod', 'flwr.clientapp.mod.centraldp_mods')
    """
    named = mod if hasattr(mod, "__name__") else type(mod)
    return str(named.__name__), str(named.__module__)


def check_mods(
    mods: Sequence[str],
    phases: Sequence[str],
    received: Sequence[npt.NDArray[Any]],
    sent: Sequence[npt.NDArray[Any]],
) -> None:
    """Refuse mods that cannot work on what is exchanged in a round; Flower's own errors do not say why.

    Parameters
    ----------
    mods : sequence of str
        As from :func:`active_mods`.
    phases : sequence of str
        The phases of a round.
    received, sent : sequence of ndarray
        The arrays that the client received and that it replies with.

    Raises
    ------
    ConfigError
        If a mod reads arrays that are not there in every phase, or cannot scale them.
    """
    for mod in mods:
        remedy = "remove it" if mod in CLIPPING else "use message_size_mod, or flwr_kd.client_app"
        if len(phases) > 1:
            raise ConfigError(
                f"{mod} works on rounds in which weights are exchanged once, and this method's have the phases "
                f"{', '.join(phases)}: {remedy}"
            )
        if not sent:
            raise ConfigError(
                f"{mod} works on a model's weights, and this method's clients send none: {remedy}"
            )
        if mod in CLIPPING and len(received) != len(sent):
            raise ConfigError(
                f"{mod} clips the difference to the weights that a client received, and the client sends "
                f"{len(sent)} arrays for {len(received)}: {remedy}"
            )
        whole = next((array.dtype.name for array in sent if array.dtype.kind != "f"), None)
        if mod in CLIPPING and whole is not None:
            raise ConfigError(
                f"{mod} cannot scale arrays of {whole}, such as BatchNorm's counter num_batches_tracked: use a "
                "model without them, for example with GroupNorm"
            )
