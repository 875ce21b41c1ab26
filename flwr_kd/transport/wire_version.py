"""The version of what travels between server and client, which the handshake carries."""

from __future__ import annotations

from flwr_kd.text import shown

__all__ = ["VERSION", "WIRE_VERSION", "version_mismatch"]

WIRE_VERSION = 2
"""Version of what travels besides payloads, which have versions of their own: the keys of configs, properties and
metrics, and what they mean. flwr-kd 0.1 had version 1, and did not name it."""
VERSION = "wire-version"


def version_mismatch(version: object, *, theirs: str, ours: str) -> str | None:
    """Say why a peer's version of the wire does not fit, and what to do; None if it fits.

    Parameters
    ----------
    version : object
        What the peer named in the handshake; None if it named nothing.
    theirs, ours : str
        ``"client"`` and ``"server"``, or the other way round.

    Examples
    --------
    >>> print(version_mismatch(None, theirs="client", ours="server"))
    the client names no wire version, as flwr-kd before 0.2; the server's is 2: update flwr-kd at the client
    >>> print(version_mismatch(3, theirs="server", ours="client"))
    the server's wire version is 3, the client's is 2: install the same version of flwr-kd at both
    """
    if type(version) is int and version == WIRE_VERSION:
        return None
    if version is None:
        return (
            f"the {theirs} names no wire version, as flwr-kd before 0.2; the {ours}'s is {WIRE_VERSION}: "
            f"update flwr-kd at the {theirs}"
        )
    return (
        f"the {theirs}'s wire version is {shown(version)}, the {ours}'s is {WIRE_VERSION}: install the same "
        "version of flwr-kd at both"
    )
