"""How many bytes soft predictions of public samples have."""

from __future__ import annotations

from flwr_kd.formulas import Sent, Situation, Term

__all__ = ["predictions_sent", "sizes"]


def predictions_sent(down: str, up: str) -> tuple[Sent, ...]:
    """Return soft predictions of public samples up, and targets for them down: P·C values each way.

    Parameters
    ----------
    down, up : str
        Where the paper says so.
    """
    which = (("positions", Term("A", "bits")),)
    digest = (("digest of the public data", Term("", "S64")),)
    samples = "the paper does not say how a client knows the round's public samples"
    return (
        Sent("train", "down", "knowledge", (), samples, which + digest),
        Sent("train", "up", "knowledge", (Term("P·C"),), up),
        Sent("distill", "down", "knowledge", (Term("P·C"),), down, which),
    )


def sizes(situation: Situation) -> dict[str, int]:
    """Return A, the public samples that there are, and P, those of a round."""
    return {"A": situation.public, "P": min(int(situation.number("public_samples")), situation.public)}
