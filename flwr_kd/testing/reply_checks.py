"""Checks of reading: a mutated reply is refused or valid, and refusing it is one warning."""

from __future__ import annotations

import copy
import random
from typing import Any

from flwr.app import Message, RecordDict

from flwr_kd.seeding import derive_seed
from flwr_kd.testing import inside
from flwr_kd.testing.federation import quiet
from flwr_kd.testing.hostile_values import FORGED, REASONS, failed
from flwr_kd.testing.outcomes import (
    Findings,
    bits,
    check_dropped,
    check_valid,
    ensure,
    equal,
    hostile,
    mutated,
    node_of,
)
from flwr_kd.testing.recording import Case, foreign_replies, recorded
from flwr_kd.transport.payload import PayloadError

__all__ = ["error_replies", "mutated_replies"]

MANY = 500
"""From this number of mutations on, the share of those that are refused is known well."""


def mutated_replies(case: Case, mutations: int, seed: int) -> None:
    """Check that a mutated reply is refused with one warning, or keeps all rules; reading it changes no state."""
    scenes = list(recorded(case).scenes.values())
    others, findings = foreign_replies(case), Findings()
    refused = 0
    for number, scene in enumerate(scenes):
        strategy, message, node = (
            copy.deepcopy(scene.strategy),
            scene.messages[hostile(scene)],
            node_of(scene),
        )
        before = bits(strategy.state_arrays()), inside.last_trained(strategy), inside.nodes_by_id(strategy)
        for i in range(number, mutations, len(scenes)):
            rng = random.Random(derive_seed(seed, "read", str(case), i))
            reply, how = mutated(scene, rng, others)
            what = f"{case}, {scene.phase}, input {i}: {how}"
            inside.forget_warnings(strategy)
            failures = strategy.stats.failures
            with quiet() as lines:
                accepted = inside.read_reply(strategy, scene.phase, message, reply)
            findings.inputs += 1
            refused += accepted is None
            check_dropped(lines, node, accepted, what, findings)
            if strategy.stats.failures != failures + (accepted is None):
                findings.add("failures are miscounted", what)
            if accepted is not None:
                check_valid(accepted, strategy, scene.phase, case.rules, what, findings)
        after = bits(strategy.state_arrays()), inside.last_trained(strategy), inside.nodes_by_id(strategy)
        ensure(after == before, f"reading replies of phase {scene.phase} changed the state", "no change")
    findings.none()
    equal("inputs", findings.inputs, mutations)
    # Mutations that never harm, or always do, would show nothing.
    most = mutations * (0.95 if mutations >= MANY else 1)
    ensure(
        mutations / 5 < refused < most, f"{refused} of {mutations} mutations were refused", "some, not all"
    )


def error_replies(case: Case) -> None:
    """Check that an error reply with any reason, an empty reply and none at all are one short warning each."""
    findings = Findings()
    for scene in recorded(case).scenes.values():
        strategy, message, node = (
            copy.deepcopy(scene.strategy),
            scene.messages[hostile(scene)],
            node_of(scene),
        )
        for i, reason in enumerate(REASONS):
            with quiet() as lines:
                accepted = inside.read_reply(
                    strategy, scene.phase, message, failed(message, reason, code=i % 9)
                )
            ensure(accepted is None, f"an error reply with reason {i} was used", "it is dropped")
            check_dropped(lines, node, accepted, f"reason {i}", findings)
        no_content = Message(RecordDict(), reply_to=message)
        no_content.__dict__["_content"] = None
        strange: list[Any] = [None, no_content, PayloadError("x" * 5000 + FORGED)]
        for each in strange:
            what = f"{type(each).__name__} for a reply"
            with quiet() as lines:
                accepted = inside.read_reply(strategy, scene.phase, message, each)
            ensure(accepted is None, f"{what} was used", "it is dropped")
            check_dropped(lines, node, None, what, findings)
    findings.none()
