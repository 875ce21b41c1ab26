"""Whatever a client sends, it costs that client's contribution and nothing else, for every method and phase.

The checks of :mod:`flwr_kd.testing` record real replies of real rounds and hand mutated copies to a copy of the
strategy as it stood when the replies arrived. Seeds are fixed: the same inputs each time.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, Message, MetricRecord, RecordDict

from flwr_kd import registry
from flwr_kd.seeding import derive_seed
from flwr_kd.strategies.fedproto import Prototypes
from flwr_kd.testing import CHECKS, Federation, inside
from flwr_kd.testing.federation import quiet
from flwr_kd.testing.hostile_values import NUMBERS, fresh
from flwr_kd.testing.matrix import OF_MESSAGE_CLIENTS, Check
from flwr_kd.testing.mutations import OTHERS, mutate
from flwr_kd.testing.outcomes import (
    Findings,
    check_line,
    honest,
    knowing,
    node_of,
    outcome,
    payload_parts,
    sent_payload,
)
from flwr_kd.testing.payload_mutations import encode, payload_of
from flwr_kd.testing.recording import CLIENTS, HOSTILE, Case, Scene, case_of, cases, recorded
from flwr_kd.testing.reply_parts import arrays_of, set_count
from flwr_kd.transport.inline_grid import InlineGrid
from tests.tiers import simplest

SLOW_TIER = 500
"""Mutated replies per case in the slow tier; ``--mutations`` says how many there are in this run."""
CASES = [case for name in registry.methods() for case in cases(name)]
AVERAGING = [
    name
    for name, method in registry.methods().items()
    if method.strategy.sends_weights and method.strategy.phases == ("train",) and not method.public_at
]
"""Methods whose new global arrays are the mean of the clients' arrays."""
KINDS = {kind: name for name, kind in reversed(simplest().items())}.values()
"""The simplest method of each kind."""


def parameters(*, fuzzes: bool) -> list[object]:
    return [
        pytest.param(
            str(case),
            check.name,
            id=f"{check.name}-{case}",
            marks=marks(check, case),
        )
        for check in CHECKS.values()
        if check.recorded and check.fuzzes == fuzzes
        for name in registry.methods()
        for case in check.cases(name)
        if name in KINDS or not check.name.endswith(OF_MESSAGE_CLIENTS)
    ]


def marks(check: Check, case: Case) -> list[pytest.MarkDecorator]:
    """Return a check's markers; one worker runs all checks of a case, which share the recorded rounds.

    Replies of clients of the Message API differ in how they are read, which does not depend on the method: one
    method of each kind is checked. They share the replies of other methods that are mixed in.
    """
    if check.name.endswith(OF_MESSAGE_CLIENTS):
        return [pytest.mark.xdist_group("records of message clients"), pytest.mark.long]
    return [pytest.mark.xdist_group(f"records of {case}"), pytest.mark.first_variant]


def test_the_inputs_are_at_least_ten_thousand() -> None:
    # Each check counts its inputs, so that these are no mere intentions.
    assert len(CASES) * SLOW_TIER >= 10_000
    assert {case.method_name for case in CASES} == set(registry.methods())


@pytest.mark.parametrize(("name", "check"), parameters(fuzzes=False))
def test_the_method_passes(name: str, check: str) -> None:
    CHECKS[check](case_of(name))


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "check"), parameters(fuzzes=True))
def test_the_method_passes_with_mutations(name: str, check: str, mutations: int) -> None:
    CHECKS[check](case_of(name), mutations=mutations)


# ---------------------------------------------------------------------- counts


def with_bound(scene: Scene, bound: int) -> Scene:
    """Return a scene with ``max_examples``, whose hostile client said 2^53 - 1 in the handshake."""
    strategy = copy.deepcopy(scene.strategy)
    strategy.max_examples = bound
    nodes = strategy.current_run.roster.nodes
    liar = node_of(scene).node_id
    nodes[liar] = replace(nodes[liar], num_examples=2**53 - 1)
    return replace(scene, strategy=strategy)


@pytest.mark.parametrize("name", AVERAGING)
def test_a_claimed_count_weighs_no_more_than_max_examples(name: str) -> None:
    """24, 2^53, 26 and 27 samples with max_examples=100: the malicious client's share is 100/177, not all."""
    scene = recorded(Case(name)).scenes[2, "train"]
    capped = with_bound(scene, 100)
    replies: list[Message | None] = list(honest(scene))
    content = fresh(scene.answers[HOSTILE])
    set_count(content, 2**53)
    for array in list(arrays_of(content)):
        old = arrays_of(content)[array].numpy()
        arrays_of(content)[array] = Array(np.full_like(old, 177))
    replies[HOSTILE] = Message(content, reply_to=scene.messages[HOSTILE])
    result = outcome(capped, replies)
    models = [[a.numpy().astype(np.float64) for a in arrays_of(r.content).values()] for r in honest(scene)]
    for i, (_, shape, data) in enumerate(result.arrays.values()):
        got = np.frombuffer(data, np.float32).reshape(shape)
        others = sum(w * models[k][i] for k, w in ((0, 24), (2, 26), (3, 27)))
        np.testing.assert_allclose(got, (others + 100 * 177) / 177, rtol=1e-6)
    assert [line for line in result.lines if "max_examples" in line] == [
        f"{node_of(scene)} claims {2**53} samples, and counts as 100: the bound is max_examples=100"
    ]


def test_claimed_class_counts_weigh_no_more_than_max_examples() -> None:
    scene = recorded(Case("fedproto")).scenes[2, "train"]
    capped = with_bound(scene, 100)
    true = sent_payload(scene)
    arrays, scalars = payload_parts(true)
    lie = {**arrays, "counts": np.full(4, 2**40), "prototypes": np.full((4, 8), 118, np.float32)}
    replies: list[Message | None] = list(honest(scene))
    replies[HOSTILE] = knowing(scene, encode(type(true), lie, scalars), 2**53)
    state = outcome(capped, replies).state
    payloads = [Prototypes.from_bytes(payload_of(answer)) for answer in scene.answers]
    total = sum(payloads[k].counts[:, None] * payloads[k].prototypes.astype(np.float64) for k in (0, 2, 3))
    count = sum(payloads[k].counts for k in (0, 2, 3)) + 100
    got = np.frombuffer(state["means"][2], np.float32).reshape(4, 8)
    np.testing.assert_allclose(got, (total + 100 * 118) / count[:, None], rtol=1e-6)


# ---------------------------------------------------------------------- evaluation


def renamed(content: RecordDict, old: str, new: str) -> RecordDict:
    return RecordDict({key.replace(old, new, 1): record for key, record in content.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize("message_api", [False, True])
def test_a_mutated_evaluation_is_refused_or_finite(message_api: bool) -> None:
    federation = Federation("fedavg", CLIENTS, message_api=range(CLIENTS) if message_api else ())
    strategy = federation.strategy(fraction_evaluate=1.0)
    grid, findings = InlineGrid(federation.app(), CLIENTS), Findings()
    with quiet():
        arrays = strategy.start(grid, federation.initial(), num_rounds=1).arrays
        nodes = inside.nodes_in_order(strategy)
        messages = inside.evaluate_messages(strategy, 1, nodes, arrays)
        ids = list(grid.push_messages(messages))
        answers = [fresh(next(iter(grid.pull_messages([each]))).content) for each in ids]
    # The mutations know the names of training's records.
    as_training = [renamed(answer, "evaluateres", "fitres") for answer in answers]
    others = [recorded(Case("fedhkd", message_api=message_api)).scenes[2, "train"].answers[0]]
    replies = [Message(fresh(a), reply_to=m) for m, a in zip(messages, answers, strict=True)]
    expected = inside.mean_evaluation(
        strategy, zip([*messages[:1], *messages[2:]], [*replies[:1], *replies[2:]], strict=True)
    )
    dropped = 0
    for i in range(600):
        rng = random.Random(derive_seed(0, "evaluate", i))
        content = fresh(as_training[HOSTILE])
        if i % 3:
            what = mutate(content, rng, others, OTHERS)
        else:
            value = rng.choice([*NUMBERS, [], [1.5] * 2000, [float("nan")]])
            loss = {rng.choice(["loss", "loss", "los"]): value}
            if message_api:
                content["metrics"] = MetricRecord({"num-examples": 8, **loss})  # type: ignore[dict-item]
            else:
                content["fitres.loss"] = MetricRecord(loss)  # type: ignore[arg-type]
            what = f"loss of {type(value).__name__}"
        replies[HOSTILE] = Message(renamed(content, "fitres", "evaluateres"), reply_to=messages[HOSTILE])
        failures = strategy.stats.failures
        with quiet() as lines:
            mean = inside.mean_evaluation(strategy, zip(messages, replies, strict=True))
        assert mean is not None
        if strategy.stats.failures > failures:
            dropped += 1
            if len(lines) != 1 or dict(mean) != dict(expected or {}):
                findings.add("a dropped evaluation counts", f"{what}: {lines}")
        elif lines:
            findings.add("a warning of what is used", f"{what}: {lines}")
        for line in lines:
            check_line(line, nodes[HOSTILE], what, findings)
        if not all(np.isfinite(value) for value in mean.values()):
            findings.add(f"not finite: {dict(mean)}", what)
    findings.none()
    assert 100 < dropped < 500
