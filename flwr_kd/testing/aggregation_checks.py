"""Checks of aggregation: whatever one client replies, the others' contributions count as if it had failed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from flwr_kd.seeding import derive_seed
from flwr_kd.server.records import Node
from flwr_kd.testing import inside
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import numbers, quiet
from flwr_kd.testing.hostile_values import FORGED, failed, fresh
from flwr_kd.testing.kept_runs import undisturbed
from flwr_kd.testing.mutations import mutate
from flwr_kd.testing.outcomes import (
    LONGEST_LINE,
    Findings,
    Outcome,
    bits,
    check_dropped,
    check_same,
    ensure,
    equal,
    honest,
    hostile,
    infinite,
    mutated,
    node_of,
    outcome,
    same_numbers,
    unpacked,
    without,
)
from flwr_kd.testing.recording import CLIENTS, Case, Scene, foreign_replies, recorded
from flwr_kd.transport.inline_grid import InlineGrid

__all__ = [
    "aggregations_of_mutated_replies",
    "flowers_own_loop",
    "replies_of_other_phases",
    "replies_to_other_messages",
    "whole_runs_with_mutated_replies",
]

AGGREGATED, LEAST_AGGREGATED = 60 / 500, 20
"""Share of the mutations that are aggregated as well, which takes longer, and how many at least."""
MOST_TRIES = 20
"""How many times as many mutations are drawn where none of them is used."""
REFUSED_COMPARED = 4
"""How a reply is refused makes no difference to the aggregation: a few are enough."""


def _check_lines(lines: Iterable[str], what: str, findings: Findings) -> None:
    for line in lines:
        if len(line) > LONGEST_LINE or not line.isprintable() or "unexpected" in line:
            findings.add(f"warning: {line}", what)


def aggregations_of_mutated_replies(case: Case, mutations: int, seed: int) -> None:
    """Check that with a mutated reply an aggregation is that of the others, or has finite numbers."""
    count = max(round(mutations * AGGREGATED), LEAST_AGGREGATED)
    scenes = [scene for (r, _), scene in recorded(case).scenes.items() if r == 2]
    others, findings = foreign_replies(case), Findings()
    used, expected = 0, [outcome(scene, without(scene, hostile(scene))) for scene in scenes]
    compared = [0] * len(scenes)
    for i in range(MOST_TRIES * count):
        # Of a small model's replies most mutations are refused: more are drawn until one is not.
        if i >= count and used:
            break
        number = i % len(scenes)
        scene = scenes[number]
        position, node = hostile(scene), node_of(scene)
        rng = random.Random(derive_seed(seed, "aggregate", str(case), i))
        reply, how = mutated(scene, rng, others)
        what = f"{case}, {scene.phase}, input {i}: {how}"
        again = Message(fresh(reply.content), reply_to=scene.messages[position])
        with quiet():
            accepted = inside.read_reply(
                copy.deepcopy(scene.strategy), scene.phase, scene.messages[position], again
            )
        findings.inputs += 1
        used += accepted is not None
        compared[number] += accepted is None
        if accepted is not None or compared[number] <= REFUSED_COMPARED:
            wanted = None if accepted is not None else expected[number]
            _aggregate_one(scene, reply, node, wanted, what, findings)
    findings.none()
    ensure(used, f"none of {findings.inputs} mutated replies was used", "some")


def _aggregate_one(
    scene: Scene, reply: Message, node: Node, expected: Outcome | None, what: str, findings: Findings
) -> None:
    """Aggregate with one reply in its place; ``expected`` is the outcome where it is refused."""
    replies: list[Message | None] = list(honest(scene))
    replies[hostile(scene)] = reply
    try:
        result = outcome(scene, replies)
    except Exception as error:
        findings.add(f"{type(error).__name__}: {error}", what)
        return
    if expected is not None:
        check_same(result, expected, node, what, findings)
    for each in result.infinite:
        findings.add(f"not finite: {each}", what)
    _check_lines(result.lines, what, findings)


def flowers_own_loop(case: Case) -> None:
    """Check that replies in any order lead through the hooks of Flower's own loop to what they lead to in ours."""
    scene = recorded(case).scenes[2, "train"]
    position, others, findings, node = hostile(scene), foreign_replies(case), Findings(), node_of(scene)
    expected = outcome(scene, without(scene, position), as_flower=True)
    undisturbed = outcome(scene, honest(scene), as_flower=True)
    for i in range(8):
        rng = random.Random(derive_seed(0, "hooks", str(case), i))
        reply, how = mutated(scene, rng, others)
        again = Message(fresh(reply.content), reply_to=scene.messages[position])
        with quiet():
            accepted = inside.read_reply(
                copy.deepcopy(scene.strategy), "train", scene.messages[position], again
            )
        replies: list[Message] = honest(scene)
        replies[position] = reply
        # Among them are replies to messages that were not sent.
        replies += [_stray(scene, 0, "never-sent"), _stray(scene, 0, ""), *honest(scene)[2:]]
        rng.shuffle(replies)
        result = outcome(scene, replies, as_flower=True)
        if accepted is None:
            check_same(result, expected, node, how, findings)
        for each in result.infinite:
            findings.add(f"not finite: {each}", how)
    # Only the first of two replies to the same message counts.
    for second in (
        failed(scene.messages[position], "boom"),
        mutated(scene, random.Random(1), others)[0],
    ):
        twice: list[Message | None] = [*honest(scene), second]
        check_same(outcome(scene, twice, as_flower=True), undisturbed, node, "twice", findings)
    nobody = outcome(scene, [_stray(scene, 0, "never-sent")], as_flower=True)
    ensure(nobody.stats["void"], "a round with a stray reply alone is not void", "void")
    ensure(nobody.state == bits(scene.strategy.state_arrays()), "a void round changed the state", "no change")
    findings.none()


def _stray(scene: Scene, position: int, to: str) -> Message:
    """Return an honest reply to another message than the one that was sent."""
    reply = Message(fresh(scene.answers[position]), reply_to=scene.messages[position])
    reply.metadata.__dict__["_reply_to_message_id"] = to
    return reply


class _Strays(InlineGrid):
    """Gives, before each reply, replies to other messages, and now and then an error in its own code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: list[Message] = []
        self.pulls = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        if self.pulls % 7 == 0:
            raise ValueError("cannot be decoded" + FORGED)
        replies = list(super().pull_messages(message_ids))
        strays, self.before = self.before[-3:], [*self.before, *replies]
        return [*strays, *replies, *strays]


def replies_to_other_messages(case: Case) -> None:
    """Check that a grid that delivers replies to other messages, or fails now and then, changes no number."""
    federation = case.federation()
    with quiet() as lines:
        grid = _Strays(federation.app(), CLIENTS)
        result = federation.strategy().start(grid, federation.initial(), num_rounds=2)
    equal("warnings that name a node", [line for line in lines if "node" in line], [])
    expected = numbers(undisturbed(case).result)
    same_numbers("the numbers differ", numbers(result), expected, "the same as without strays")


def replies_of_other_phases(case: Case) -> None:
    """Check that a reply of another round or phase is refused, or leads to finite numbers."""
    scenes, findings = recorded(case).scenes, Findings()
    for (server_round, phase), scene in scenes.items():
        position, node = hostile(scene), node_of(scene)
        expected = outcome(scene, without(scene, position))
        for (other_round, other_phase), other in scenes.items():
            what = f"{phase} of round {server_round} was answered with {other_phase} of round {other_round}"
            replies: list[Message | None] = list(honest(scene))
            replies[position] = Message(fresh(other.answers[0]), reply_to=scene.messages[position])
            result = outcome(scene, replies)
            findings.inputs += 1
            dropped = [line for line in result.lines if "is dropped" in line]
            if dropped:
                check_dropped(dropped, node, None, what, findings)
                check_same(result, expected, node, what, findings)
            for each in result.infinite:
                findings.add(f"not finite: {each}", what)
    findings.none()
    equal("inputs", findings.inputs, len(scenes) ** 2)


def whole_runs_with_mutated_replies(case: Case) -> None:
    """Check that a run in which two of four clients reply with mutations goes on with the others."""
    others, federation = foreign_replies(case), case.federation()
    rng = random.Random(derive_seed(0, "runs", str(case)))
    names: list[str] = []

    def garble(content: RecordDict) -> None:
        names.append(mutate(content, rng, others))

    faults = {i: Fault("garbage", garble=garble) for i in (1, 2)}
    with quiet() as lines:
        grid = InlineGrid(federation.app(), CLIENTS, faults=faults)
        strategy = case.strategy(federation)
        result = strategy.start(grid, case.initial(), num_rounds=2)
    ensure(len(names) >= 4, f"{len(names)} replies were mutated", "at least 4")
    # A valid model of the largest numbers goes into a mean like any other, and training from there may not succeed.
    poisoned = any("the training loss is" in line for line in lines)
    for stats in result.rounds:
        where = f"round {stats.server_round}, with {names}"
        total = stats.participants + stats.failures
        ensure(total >= CLIENTS, f"{total} participants and failures in {where}", f"at least {CLIENTS}")
        if stats.server_round == 1 or not poisoned:
            ensure({0, 3} <= set(stats.clients), f"clients {sorted(stats.clients)} in {where}", "0 and 3")
            ensure(not stats.void, f"void: {where}", "the honest clients are enough")
            for value in (stats.train_loss, stats.local_accuracy):
                ensure(value is not None and np.isfinite(value), f"{value} in {where}", "finite numbers")
    equal(
        f"arrays that are not finite, with {names}",
        infinite(unpacked(result.arrays) | strategy.state_arrays()),
        [],
    )
    for line in lines:
        ensure(
            len(line) <= LONGEST_LINE and line.isprintable() and "unexpected" not in line,
            f"warning {line!a}, with {names}",
            "short, printable, and of a check that foresaw it",
        )
