"""What the shared checks need to know of FedDKC: FedGKT's rules, and logits that are hard to refine."""

from __future__ import annotations

from dataclasses import replace

from flwr_kd.rules import Example

from ..fedgkt.rules import RULES as FEDGKT_RULES

__all__ = ["RULES"]

RULES = replace(
    FEDGKT_RULES,
    examples=(
        *FEDGKT_RULES.examples,
        Example("logits all alike", lambda arrays, scalars: arrays["logits"].fill(-3e38)),
    ),
)
"""What a client's features, logits and labels must satisfy."""
