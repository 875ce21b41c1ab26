"""What the shared checks need to know of FedHKD+DaFKD's payload: the rules and examples of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flwr_kd.rules import Arrays, Rules, Scalars
from flwr_kd.transport.payload import Payload

from ..dafkd.rules import SCORES, score_violations
from ..fedhkd.rules import RULES as KNOWLEDGE
from .messages import ScoredKnowledge

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES"]


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, ScoredKnowledge)
    texts = KNOWLEDGE.violations(payload, node, strategy, num_examples)
    return texts + score_violations(payload.scores, strategy)


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    return KNOWLEDGE.fill(arrays, node, strategy)


RULES = Rules(
    _violations,
    _fill,
    (*(example for example in KNOWLEDGE.examples if example.name != "no classes"), *SCORES),
)
"""What a client's hyper-knowledge and scores must satisfy."""
