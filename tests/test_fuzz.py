"""Whatever a client sends, it costs that client's contribution and nothing else, for every method and phase.

Real answers of a real round are recorded, and mutated copies are handed to a copy of the strategy as it stood when
the answers came. Seeds are fixed: the same inputs each time.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_kd import registry
from flwr_kd.models import build_model
from flwr_kd.public_data.messages import SoftPredictions, unpack_predictions
from flwr_kd.seeding import derive_seed
from flwr_kd.server.records import Node, Reply, RoundStats
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedgkt.messages import ClientFeatures
from flwr_kd.strategies.fedhkd import HyperKnowledge
from flwr_kd.strategies.fedproto.messages import Prototypes
from flwr_kd.testing.faults import Fault
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import Payload, PayloadError
from tests import mutate

METHODS = list(registry.methods())
LONGEST_LINE = 500
MUTATIONS = 500
"""Mutated replies per case in the slow tier; ``--mutations`` says how many there are in this run."""
AGGREGATED, LEAST_AGGREGATED = 60 / 500, 20
"""Share of them that are aggregated as well, which takes longer, and how many at least."""
CLIENTS, HOSTILE = 4, 1
"""Clients, and the position of the one whose answers are mutated."""
QUICK = {
    "server_epochs": 1,
    "sector_epochs": 1,
    "finetune_epochs": 1,
    "generator_steps": 2,
    "synthetic_samples": 16,
}


@dataclass(frozen=True)
class Case:
    """A method with hyper-parameters and a model."""

    name: str
    method: str
    settings: tuple[str, ...] = ()
    model: str = "mlp"


CASES = {case.name: case for case in (
    *(Case(name, name) for name in METHODS),
    Case("fedavg, batch norm", "fedavg", model="resnet8"),
    Case("feddf, batch norm", "feddf", model="resnet8"),
    Case("ktpfl-weights, batch norm", "ktpfl-weights", model="resnet8"),
    Case("fedgkt, float16", "fedgkt", ("send-test-features=false", "feature-dtype=float16")),
    Case("ktpfl, uint8", "ktpfl", ("precision=uint8",)),
    Case("fedmd, float16", "fedmd", ("precision=float16",)),
)}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """A phase of a round, as the strategy stood when its answers came."""

    phase: str
    server_round: int
    strategy: KDStrategy
    messages: list[Message]
    answers: list[RecordDict]
    arrays: ArrayRecord | None


@dataclass(frozen=True)
class Recorded:
    """Two rounds of a case: all phases of both, and the handshakes' answers by node."""

    initial: ArrayRecord
    scenes: dict[tuple[int, str], Scene]
    handshakes: dict[int, dict[str, Any]]
    federation: Any


# ---------------------------------------------------------------------- recording


@functools.cache
def recorded(make: Any, name: str) -> Recorded:
    """Run two rounds of a case, and keep what was asked and answered."""
    case = CASES[name]
    federation, initial, options = prepared(make, case)
    scenes: dict[tuple[int, str], Scene] = {}
    real = KDStrategy._aggregate

    def noting(
        self: KDStrategy, phase: str, server_round: int, pairs: Iterable[Any], arrays: ArrayRecord | None
    ) -> Any:
        told = list(pairs)
        if told:
            messages = [message for message, _ in told]
            answers = [mutate.fresh(answer.content) for _, answer in told]
            scenes[server_round, phase] = Scene(
                phase, server_round, copy.deepcopy(self), messages, answers, arrays
            )
        if phase == "distill" and "distill-again" in self.phases:
            # The last phase is for those who lead in place of a failed one.
            told[0] = (told[0][0], None)
        return real(self, phase, server_round, told, arrays)

    with quiet(), mock.patch.object(KDStrategy, "_aggregate", noting):
        strategy = strategy_of(federation, case, options)
        grid = InlineGrid(federation.app(), CLIENTS)
        strategy.start(grid, initial, num_rounds=2)
        assert {phase for _, phase in scenes} == set(strategy.phases)
        handshakes = {}
        for node in grid.get_node_ids():
            config = {**strategy.config.to_wire(), flower_records.SEED: strategy.seed}
            (message_id,) = grid.push_messages([flower_records.properties_message(node, config=config)])
            (answer,) = grid.pull_messages([message_id])
            handshakes[node] = flower_records.read_properties(answer)
    return Recorded(initial, scenes, handshakes, federation)


def prepared(make: Any, case: Case) -> tuple[Any, ArrayRecord, dict[str, Any]]:
    federation = make(case.method, CLIENTS)
    if case.model == "mlp":
        return federation, federation.initial(), {}
    federation.models = [case.model] * CLIENTS
    model = build_model(case.model, input_shape=(1, 4, 4), num_classes=4, seed=0, feature_dim=8)
    options = {"model": model} if federation.method.public_at == "server" else {}
    return federation, ArrayRecord(model.state_dict()), options


def strategy_of(federation: Any, case: Case, options: Mapping[str, Any]) -> KDStrategy:
    known = {field.name for field in fields(federation.method.config_class)}
    quick = [f"{name.replace('_', '-')}={value}" for name, value in QUICK.items() if name in known]
    strategy: KDStrategy = federation.strategy(*quick, *case.settings, **options)
    return strategy


def foreign(make: Any, name: str) -> list[RecordDict]:
    """Answers of other methods, phases and rounds, with each kind of payload."""
    names = dict.fromkeys([name, "fedgkt", "fedhkd", "fedproto", "fedmd", "fedhead"])
    return [scene.answers[0] for each in names for scene in recorded(make, each).scenes.values()]


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect Flower's warnings instead of printing them."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield lines
    finally:
        logger.handlers, logger.propagate = before


# ---------------------------------------------------------------------- what must hold


class Faults:
    """Collects what is wrong, so that one run shows every kind of fault once."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.inputs = 0

    def add(self, kind: str, what: str) -> None:
        self.found.setdefault(kind[:150], what[:700])

    def none(self) -> None:
        assert not self.found, f"{len(self.found)} kinds of faults:\n" + "\n".join(
            f"- {kind!a}\n    {what!a}" for kind, what in self.found.items()
        )


def check_line(line: str, node: Node | int | str, what: str, faults: Faults) -> None:
    """A warning of a dropped answer names the node, and cannot flood or forge the log."""
    kind = line.partition("dropped: ")[2] or line
    if str(node) not in line:
        faults.add(f"names no node: {kind}", what)
    if len(line) > LONGEST_LINE:
        faults.add(f"{len(line)} characters: {kind}", what)
    if not line.isprintable():
        faults.add(f"not printable: {kind}", what)
    if "unexpected" in line:
        faults.add(f"unforeseen: {kind}", what)


def check_valid(reply: Reply, strategy: KDStrategy, phase: str, what: str, faults: Faults) -> None:
    """What is accepted is what the aggregation may rely on; checked here in another way than there."""
    problems = []
    node, count = reply.node, reply.num_examples
    if type(count) is not int or not 0 <= count <= strategy.max_examples:
        problems.append(f"num_examples {count!r}")
    template = strategy.template_of(node)
    names = template.names if phase in strategy.reply_arrays else ()
    if len(reply.arrays) != len(names):
        problems.append(f"{len(reply.arrays)} arrays")
    for name, dtype, shape, array in zip(
        template.names, template.dtypes, template.shapes, reply.arrays, strict=False
    ):
        if array.dtype != np.dtype(dtype) or array.shape != shape or not array.dtype.isnative:
            problems.append(f"array {name}: {array.dtype} {array.shape}")
        elif not np.isfinite(array).all() or (name.endswith("running_var") and array.min() < 0):
            problems.append(f"array {name}: values")
    for name, value in reply.metrics.items():
        if type(value) is not float or not np.isfinite(value):
            problems.append(f"metric {name[:80]!r}: {value!r}")
        if name in ("local-accuracy", "local-top5") and not 0 <= value <= 1:
            problems.append(f"metric {name}: {value!r}")
    expected = strategy.reply_payloads.get(phase)
    if type(reply.payload) is not (expected or type(None)):
        problems.append(f"payload {type(reply.payload).__name__}")
    elif reply.payload is not None:
        problems += broken_rules(reply.payload, node, strategy, count)
    for problem in problems:
        faults.add(f"accepted: {problem}", what)


def broken_rules(payload: Payload, node: Node, strategy: KDStrategy, count: int) -> list[str]:
    """The rules of the method's messages, in plain Python."""
    found = []
    for field in fields(payload):  # type: ignore[arg-type]
        value = getattr(payload, field.name)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
            found.append(f"{field.name} is not finite")
        if field.name in ("features", "test_features", "prototypes", "representations"):
            found += [f"{field.name} up to {x}" for x in np.abs(value).ravel().tolist() if x > 65504][:1]
    match payload:
        case Prototypes() | HyperKnowledge():
            classes, counts = payload.classes.tolist(), payload.counts.tolist()
            if classes != sorted(set(classes)) or not set(classes) <= set(range(node.num_classes)):
                found.append(f"classes {classes}")
            if min(counts, default=1) < 1 or sum(counts) > count < strategy.max_examples:
                found.append(f"counts {counts}")
            width = payload.prototypes if isinstance(payload, Prototypes) else payload.representations
            if width.shape != (len(classes), node.feature_dim):
                found.append(f"shape {width.shape}")
            if isinstance(payload, Prototypes) and payload.num_classes != node.num_classes:
                found.append(f"{payload.num_classes} classes")
            if isinstance(payload, HyperKnowledge):
                found += broken_distributions(payload.predictions, (len(classes), node.num_classes), 1e-3)
        case SoftPredictions():
            rows = strategy.payload_dims("train", node)["K"]
            if payload.predictions.dtype.name != strategy.config.to_wire()["precision"]:
                found.append(f"dtype {payload.predictions.dtype}")
            values = payload.predictions.astype(np.float64)
            if payload.predictions.dtype == np.uint8:
                values = unpack_predictions(payload.predictions).numpy()
            found += broken_distributions(values, (rows, node.num_classes), 0.02)
        case ClientFeatures():
            rows = payload.index.tolist()
            if sorted(rows) != list(range(node.num_examples)) or count != len(rows):
                found.append(f"index {rows}")
            labels = [*payload.labels.tolist(), *payload.test_labels.tolist()]
            if not set(labels) <= set(range(node.num_classes)):
                found.append(f"labels {labels}")
            allowed = node.num_test_examples if strategy.config.to_wire()["send-test-features"] else 0
            if len(payload.test_labels) > allowed:
                found.append(f"{len(payload.test_labels)} test rows")
            if payload.features.shape != (len(rows), node.feature_dim):
                found.append(f"shape {payload.features.shape}")
        case _:
            found.append(f"no rules are known for {type(payload).__name__}")
    return found


def broken_distributions(values: Any, shape: tuple[int, ...], tolerance: float) -> list[str]:
    found = []
    if values.shape != shape:
        found.append(f"shape {values.shape}, expected {shape}")
    for row in values.tolist():
        if min(row) < 0 or abs(sum(row) - 1) > tolerance + 1e-6:
            found.append("a row is no distribution")
    return found


def bits(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as something that is equal only if every bit is."""
    return {name: (value.dtype.str, value.shape, value.tobytes()) for name, value in arrays.items()}


def unpacked(record: ArrayRecord | None) -> dict[str, Any]:
    return {} if record is None else {name: a.numpy() for name, a in record.items() if name != "_empty"}


def knowledge(message: Message) -> Any:
    """What a message's payload holds; safetensors writes its metadata in any order."""
    payload = message.content.config_records["fitins.config"].get("payload")
    return None if payload is None else mutate.parts_of(payload)


def infinite(arrays: Mapping[str, Any]) -> list[str]:
    return [
        name for name, value in arrays.items() if value.dtype.kind == "f" and not np.isfinite(value).all()
    ]


@dataclass
class Outcome:
    """What a phase's answers led to, to the last bit; ``sent`` is what the clients are sent next."""

    arrays: dict[str, Any]
    state: dict[str, Any]
    stats: dict[str, Any]
    told: list[Any]
    sent: list[Any]
    trained: dict[int, int]
    lines: list[str]
    infinite: list[str]


def outcome(scene: Scene, replies: Sequence[Message | None], *, hooks: bool = False) -> Outcome:
    """Aggregate answers on a copy of the strategy, and go on to what it sends next."""
    strategy = copy.deepcopy(scene.strategy)
    strategy.stats = RoundStats(scene.server_round)
    with quiet() as lines:
        if hooks:
            strategy._hooked, strategy._hooked_arrays = scene.messages, scene.arrays
            new, metrics = strategy.aggregate_train(scene.server_round, [r for r in replies if r is not None])
            arrays = new if new is not None else scene.arrays
            told: list[Any] = sorted((metrics or {}).items())
            answered: list[Node] = []
            left: list[str] = []
        else:
            pairs = zip(scene.messages, replies, strict=True)
            found, new = strategy._aggregate(scene.phase, scene.server_round, pairs, scene.arrays)
            arrays = new if new is not None else scene.arrays
            told = [(r.node.node_id, r.num_examples, sorted(r.metrics.items())) for r in found]
            answered = [reply.node for reply in found]
            left = list(strategy.phases[strategy.phases.index(scene.phase) + 1 :])
        nodes = sorted(strategy._roster.nodes.values(), key=lambda node: node.order)
        sent: list[Message] = []
        server_round = scene.server_round
        while left and not sent:
            phase = left.pop(0)
            chosen = strategy.select(phase, server_round, nodes, answered)
            if chosen:
                outgoing = list(strategy.configure_phase(phase, server_round, chosen, arrays))
                sent = strategy._train_messages(phase, server_round, outgoing, {})
        state = strategy.state_arrays()
        if not sent:
            if not hooks:
                arrays = strategy.finish_round(server_round, arrays) or arrays
            state = strategy.state_arrays()
            chosen = strategy.select(strategy.phases[0], server_round + 1, nodes, [])
            outgoing = list(strategy.configure_phase(strategy.phases[0], server_round + 1, chosen, arrays))
            sent = strategy._train_messages(strategy.phases[0], server_round + 1, outgoing, {})
        stats = strategy.stats
    next_arrays = [unpacked(m.content.array_records["fitins.parameters"]) for m in sent]
    everything = {**unpacked(arrays), **{f"state {k}": v for k, v in state.items()}}
    for i, each in enumerate(next_arrays):
        everything |= {f"sent {i} {name}": value for name, value in each.items()}
    numbers = {
        "train_loss": stats.train_loss, "local_accuracy": stats.local_accuracy, "accuracy": stats.server_accuracy,
        "participants": stats.participants, "failures": stats.failures, "void": stats.void,
    }  # fmt: skip
    losses = {k: np.float64(v) for k, v in numbers.items() if isinstance(v, float)}
    return Outcome(
        bits(unpacked(arrays)),
        bits(state),
        numbers,
        told,
        [(m.metadata.dst_node_id, bits(a), knowledge(m)) for m, a in zip(sent, next_arrays, strict=True)],
        dict(strategy._last_trained),
        lines,
        infinite(everything | losses),
    )


def honest(scene: Scene) -> list[Message]:
    return [
        Message(mutate.fresh(answer), reply_to=message)
        for message, answer in zip(scene.messages, scene.answers, strict=True)
    ]


def hostile(scene: Scene) -> int:
    return min(HOSTILE, len(scene.messages) - 1)


def without(scene: Scene, position: int) -> list[Message | None]:
    """Everyone's answers, but an error in the place of one."""
    replies: list[Message | None] = list(honest(scene))
    replies[position] = mutate.failed(scene.messages[position], "boom")
    return replies


def mutated(scene: Scene, rng: random.Random, others: Sequence[RecordDict]) -> tuple[Message, str]:
    position = hostile(scene)
    content = mutate.fresh(scene.answers[position])
    what = mutate.mutate(content, rng, others)
    return Message(content, reply_to=scene.messages[position]), what


def check_dropped(
    lines: list[str], node: Node, reply: Reply | None, strategy: KDStrategy, what: str, faults: Faults
) -> None:
    """Exactly one warning per dropped answer; none of one that is used, but of what it says."""
    if reply is None:
        if len(lines) != 1:
            faults.add(f"{len(lines)} warnings", f"{what}: {lines}")
    elif any("(max_examples)" not in line and "has lost its personal model" not in line for line in lines):
        faults.add("a warning of an answer that is used", f"{what}: {lines}")
    for line in lines:
        check_line(line, node, f"{what}: {line[:300]}", faults)


# ---------------------------------------------------------------------- reading

every_case = pytest.mark.parametrize("name", list(CASES))


def test_the_inputs_are_at_least_ten_thousand() -> None:
    # Each test below counts what it fed, so that these are no mere intentions.
    assert len(CASES) * MUTATIONS >= 10_000
    assert {case.method for case in CASES.values()} == set(registry.methods())


@every_case
@pytest.mark.fuzz
def test_a_mutated_answer_is_refused_or_valid(name: str, federation: Any, mutations: int) -> None:
    scenes = list(recorded(federation, name).scenes.values())
    others, faults = foreign(federation, name), Faults()
    refused = 0
    for number, scene in enumerate(scenes):
        strategy, message = copy.deepcopy(scene.strategy), scene.messages[hostile(scene)]
        node = strategy._roster.nodes[message.metadata.dst_node_id]
        before = bits(strategy.state_arrays()), dict(strategy._last_trained), dict(strategy._roster.nodes)
        for i in range(number, mutations, len(scenes)):
            rng = random.Random(derive_seed(0, "read", name, i))
            reply, how = mutated(scene, rng, others)
            what = f"{name}, {scene.phase}, input {i}: {how}"
            strategy._capped.clear()
            failures = strategy.stats.failures
            with quiet() as lines:
                found = strategy._checked(scene.phase, message, reply)
            faults.inputs += 1
            refused += found is None
            check_dropped(lines, node, found, strategy, what, faults)
            if strategy.stats.failures != failures + (found is None):
                faults.add("failures are miscounted", what)
            if found is not None:
                check_valid(found, strategy, scene.phase, what, faults)
        assert (
            bits(strategy.state_arrays()),
            dict(strategy._last_trained),
            dict(strategy._roster.nodes),
        ) == before
    faults.none()
    assert faults.inputs == mutations
    # Mutations that never harm, or always do, would show nothing. In a few dozen the share is known less well.
    assert mutations / 5 < refused < mutations * (0.95 if mutations >= MUTATIONS else 1)


@every_case
def test_a_strange_error_reply_is_one_short_line(name: str, federation: Any) -> None:
    scenes, faults = recorded(federation, name).scenes.values(), Faults()
    for scene in scenes:
        strategy, message = copy.deepcopy(scene.strategy), scene.messages[hostile(scene)]
        node = strategy._roster.nodes[message.metadata.dst_node_id]
        for i, reason in enumerate(mutate.REASONS):
            with quiet() as lines:
                found = strategy._checked(scene.phase, message, mutate.failed(message, reason, code=i % 9))
            assert found is None
            check_dropped(lines, node, found, strategy, f"reason {i}", faults)
        no_content = Message(RecordDict(), reply_to=message)
        no_content.__dict__["_content"] = None
        for odd in (None, no_content, PayloadError("x" * 5000 + mutate.FORGED)):
            with quiet() as lines:
                assert strategy._checked(scene.phase, message, odd) is None
            check_dropped(lines, node, None, strategy, f"{type(odd).__name__} for an answer", faults)
    faults.none()


# ---------------------------------------------------------------------- whole aggregations


@every_case
@pytest.mark.fuzz
def test_an_aggregation_is_that_of_the_others_or_of_finite_numbers(
    name: str, federation: Any, mutations: int
) -> None:
    count = max(round(mutations * AGGREGATED), LEAST_AGGREGATED)
    scenes = [s for (r, _), s in recorded(federation, name).scenes.items() if r == 2]
    others, faults = foreign(federation, name), Faults()
    used = 0
    for number, scene in enumerate(scenes):
        position = hostile(scene)
        node = scene.strategy._roster.nodes[scene.messages[position].metadata.dst_node_id]
        expected = outcome(scene, without(scene, position))
        compared = 0
        for i in range(number, count, len(scenes)):
            rng = random.Random(derive_seed(0, "aggregate", name, i))
            reply, how = mutated(scene, rng, others)
            what = f"{name}, {scene.phase}, input {i}: {how}"
            again = Message(mutate.fresh(reply.content), reply_to=scene.messages[position])
            with quiet():
                checked = copy.deepcopy(scene.strategy)._checked(scene.phase, scene.messages[position], again)
            faults.inputs += 1
            used += checked is not None
            if checked is None:
                # How it is refused makes no difference any more: a few will do.
                compared += 1
                if compared > 4:
                    continue
            replies: list[Message | None] = list(honest(scene))
            replies[position] = reply
            try:
                found = outcome(scene, replies)
            except Exception as error:
                faults.add(f"{type(error).__name__}: {error}", what)
                continue
            if checked is None:
                check_same(found, expected, node, what, faults)
            for each in found.infinite:
                faults.add(f"not finite: {each}", what)
            for line in found.lines:
                if len(line) > LONGEST_LINE or not line.isprintable() or "unexpected" in line:
                    faults.add(f"warning: {line}", what)
    faults.none()
    assert faults.inputs == count
    assert used


def check_same(found: Outcome, expected: Outcome, node: Node, what: str, faults: Faults) -> None:
    """Everything is what it is where that client failed, but for the one line that says why."""
    for field in fields(Outcome):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "lines":
            mine, theirs = ([line for line in lines if str(node) not in line] for lines in (mine, theirs))
        if mine != theirs:
            faults.add(f"{field.name} is not that of the others alone", what)


# ---------------------------------------------------------------------- knowledge that decodes and lies

WITH_PAYLOAD = [n for n, case in CASES.items() if registry.get(case.method).strategy.reply_payloads]
every_payload = pytest.mark.parametrize("name", WITH_PAYLOAD)


def parts(payload: Payload) -> tuple[dict[str, Any], dict[str, Any]]:
    """A payload's arrays and scalars."""
    values = {field.name: getattr(payload, field.name) for field in fields(payload)}  # type: ignore[arg-type]
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in values.items() if name not in arrays}


def knowing(scene: Scene, data: bytes, num_examples: int | None = None) -> Message:
    """The hostile client's answer with other knowledge, and another count."""
    position = hostile(scene)
    content = mutate.fresh(scene.answers[position])
    content.config_records[mutate.METRICS]["payload"] = data
    if num_examples is not None:
        content.metric_records[mutate.COUNT]["num_examples"] = num_examples
    return Message(content, reply_to=scene.messages[position])


def sent_payload(scene: Scene) -> Payload:
    """The hostile client's honest knowledge."""
    kind = scene.strategy.reply_payloads[scene.phase]
    return kind.from_bytes(mutate.payload_of(scene.answers[hostile(scene)]))


@st.composite
def lies(draw: Any, true: Payload, count: int) -> tuple[bytes, int, str]:
    """A well-formed message of the payload's class whose sizes, types, numbers or scalars need not be right."""
    arrays, scalars = parts(true)
    letters: dict[str, int] = {}
    specs = {f.name: f.metadata["array"] for f in fields(true) if "array" in f.metadata}  # type: ignore[arg-type]
    for name, spec in specs.items():
        letters |= dict(zip(spec.shape, arrays[name].shape, strict=True))
    if draw(st.integers(0, 3)) == 0:
        letter = draw(st.sampled_from(sorted(letters)))
        letters[letter] = draw(st.sampled_from([0, 1, letters[letter] + 1, max(letters[letter] - 1, 0), 40]))
    # Most are right but for one field: else the first check would stop nearly all.
    changed = draw(st.lists(st.sampled_from(sorted(specs)), max_size=2))
    made = {}
    for name, spec in specs.items():
        shape = tuple(letters[letter] for letter in spec.shape)
        value = np.resize(arrays[name], shape)
        if name in changed:
            value = draw(_other_numbers(value))
        made[name] = value
    if scalars and draw(st.integers(0, 4)) == 0:
        scalars[draw(st.sampled_from(sorted(scalars)))] = draw(st.sampled_from(mutate.NUMBERS))
    rows = next(iter(letters.values()))
    claimed = draw(st.sampled_from([count] * 4 + [0, 1, rows, count + 1, 2**40, 2**53]))
    return mutate.encode(type(true), made, scalars), claimed, ", ".join([*changed, str(letters)])


@st.composite
def _other_numbers(draw: Any, value: Any) -> Any:
    pool = mutate.FLOATS if value.dtype.kind == "f" else mutate.WHOLE
    kinds = ["edit", "edit", "edit", "rows", "constant", "ascending", "descending", "random", "dtype"]
    with np.errstate(all="ignore"):
        numbers = np.array(pool, dtype=object if value.dtype.kind != "f" else None).astype(
            np.int64 if value.dtype.kind != "f" else np.float64
        ).astype(value.dtype)  # fmt: skip
    flat = value.copy().reshape(-1)
    match draw(st.sampled_from(kinds)):
        case "edit" if flat.size:
            for _ in range(draw(st.integers(1, 3))):
                flat[draw(st.integers(0, flat.size - 1))] = draw(st.sampled_from(list(numbers)))
        case "rows" if len(value):
            order = draw(st.lists(st.integers(0, len(value) - 1), min_size=len(value), max_size=len(value)))
            flat = value[order].reshape(-1)
        case "constant":
            flat[:] = draw(st.sampled_from(list(numbers)))
        case "ascending":
            flat = np.sort(flat)
        case "descending":
            flat = np.sort(flat)[::-1]
        case "random" if flat.size:
            flat = numbers[draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1, max_size=20))]
            flat = np.resize(flat, value.size)
        case "dtype":
            kind = draw(st.sampled_from(["f4", "f2", "f8", "i8", "i4", "u1", "?"]))
            with np.errstate(all="ignore"):
                flat = flat.astype(kind)
    return flat.reshape(value.shape)


@every_payload
def test_knowledge_that_lies_is_refused_or_harmless(name: str, federation: Any) -> None:
    scene = recorded(federation, name).scenes[2, "train"]
    position = hostile(scene)
    node = scene.strategy._roster.nodes[scene.messages[position].metadata.dst_node_id]
    true, count = sent_payload(scene), scene.answers[position].metric_records[mutate.COUNT]["num_examples"]
    expected = outcome(scene, without(scene, position))
    faults, strategy = Faults(), copy.deepcopy(scene.strategy)
    accepted = 0

    @settings(max_examples=80, derandomize=True, database=None, deadline=None)
    @given(lies(true, count))
    def feed(lie: tuple[bytes, int, str]) -> None:
        nonlocal accepted
        data, claimed, what = lie
        strategy._capped.clear()
        with quiet() as lines:
            found = strategy._checked(scene.phase, scene.messages[position], knowing(scene, data, claimed))
        faults.inputs += 1
        check_dropped(lines, node, found, strategy, what, faults)
        if found is None:
            return
        accepted += 1
        check_valid(found, strategy, scene.phase, what, faults)
        replies: list[Message | None] = list(honest(scene))
        replies[position] = knowing(scene, data, claimed)
        try:
            made = outcome(scene, replies)
        except Exception as error:
            faults.add(f"{type(error).__name__}: {error}", what)
            return
        for each in made.infinite:
            faults.add(f"not finite: {each}", what)
        # The others are there, whatever this one says.
        if [t for t in made.told if t[0] != node.node_id] != expected.told:
            faults.add("the others' answers are not used", what)

    feed()
    faults.none()
    assert faults.inputs >= 80
    assert accepted >= 5


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def _set(name: str, index: Any, value: Any) -> Change:
    def change(arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][index] = value

    return change


def _rows(order: Any, *names: str) -> Change:
    def change(arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        arrays |= {name: arrays[name][order] for name in (names or arrays) if len(arrays[name])}

    return change


def _all(name: str, value: Any) -> Change:
    return lambda arrays, scalars: arrays.update({name: np.array(value, dtype=arrays[name].dtype)})


def _classes(predictions: Any = None, **others: Any) -> Change:
    """Knowledge of all four classes, which a client with few samples of each need not have."""

    def change(arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        arrays |= {
            "classes": np.arange(4),
            "representations": np.zeros((4, 8), np.float32),
            "predictions": np.eye(4, dtype=np.float32) if predictions is None else np.float32(predictions),
            "counts": np.ones(4, np.int64),
        }
        arrays |= {name: np.asarray(value, dtype=arrays[name].dtype) for name, value in others.items()}

    return change


_SAMPLES = ("index", "features", "logits", "labels")
_SKEW = np.repeat(np.float32([[0.25, 0.25, 0.25, 0.24]]), 32, axis=0)
BROKEN: dict[str, list[tuple[str, Change, str]]] = {
    "fedproto": [
        ("a class beyond C", _set("classes", -1, 4), "ascending"),
        ("a class below 0", _set("classes", 0, -1), "expected bits"),
        ("a class twice", _set("classes", 1, 0), "expected bits"),
        ("classes in another order", _rows([1, 0, 2, 3]), "expected bits"),
        ("differences that wrap", _all("classes", [0, 2**63 - 1, -(2**63) + 5, 3]), "expected bits"),
        ("a count of 0", _set("counts", 0, 0), "counts"),
        ("a negative count", _set("counts", 0, -(2**63)), "counts"),
        ("more samples than there are", _set("counts", 0, 10**6), "knowledge of"),
        ("counts whose sum wraps", _all("counts", [2**40] * 4), "knowledge of"),
        ("NaN", _set("prototypes", (0, 0), np.nan), "not finite"),
        ("infinity", _set("prototypes", (0, 0), -np.inf), "not finite"),
        ("beyond float16", _set("prototypes", (0, 0), 65520), "within"),
        ("float32's least", _set("prototypes", (0, 0), np.finfo("f4").min), "within"),
        ("another C", lambda a, s: s.update(num_classes=5), "5 classes"),
        ("no C", lambda a, s: s.update(num_classes=0), "num_classes"),
        ("a fraction of a class", lambda a, s: s.update(num_classes=4.0), "must be int"),
        ("a missing row", lambda a, s: a.update(classes=a["classes"][1:]), "3 positions, expected 4"),
        ("another D", lambda a, s: a.update(prototypes=a["prototypes"][:, 1:]), "shape"),
        ("float64", lambda a, s: a.update(prototypes=a["prototypes"].astype("f8")), "dtype"),
    ],
    "fedhkd": [
        ("rows that do not sum to 1", _set("predictions", (0, 0), 2.0), "sum to 1"),
        ("negative predictions", _set("predictions", 0, [-0.5, 0.5, 0.5, 0.5]), "sum to 1"),
        ("infinite predictions", _set("predictions", (0, 0), np.inf), "not finite"),
        ("predictions of float32's largest", _set("predictions", 0, [3e38, -3e38, 1, 0]), "sum to 1"),
        ("differences that wrap", _classes(classes=[0, 2**63 - 1, -(2**63) + 5, 3]), "expected bits"),
        ("another C", _classes(np.eye(4, 5)), "shape"),
        ("NaN", _set("representations", (0, 0), np.nan), "not finite"),
        ("beyond float16", _set("representations", (0, 0), -65520), "within"),
    ],
    "fedgkt": [
        ("a label of C", _set("labels", 0, 4), "labels"),
        ("a label below 0", _set("labels", 0, -1), "labels"),
        ("a sample twice", _set("index", 0, 1), "once"),
        ("a sample beyond N", _set("index", 0, 25), "once"),
        ("a sample far out", _set("index", 0, 2**63 - 1), "once"),
        ("a sample below 0", _set("index", 0, -(2**63)), "once"),
        ("a missing row", _rows(slice(1, None), *_SAMPLES), "once"),
        ("the last row missing", _rows(slice(0, 24), *_SAMPLES), "shape"),
        ("every row twice", _rows(list(range(25)) * 2, *_SAMPLES), "once"),
        ("no rows", _rows(slice(0, 0), *_SAMPLES), "shape"),
        ("a label of a test row of C", _set("test_labels", 0, 4), "test_labels"),
        ("more test rows than were told", _rows([*list(range(8)), 0], "test_features", "test_labels"), "test rows"),
        ("features beyond float16", _set("features", (0, 0), 65520.0), "within"),
        ("features of float32's least", _set("features", (0, 0), -3e38), "within"),
        ("NaN", _set("features", (0, 0), np.nan), "not finite"),
        ("infinite logits", _set("logits", (0, 0), np.inf), "not finite"),
        ("float64", lambda a, s: a.update(logits=a["logits"].astype("f8")), "dtype"),
    ],
    "fedgkt, float16": [
        (
            "test rows unasked",
            lambda a, s: a.update(test_labels=a["labels"][:1], test_features=a["features"][:1]),
            "test rows",
        ),
    ],
    "fedmd": [
        ("rows that do not sum to 1", lambda a, s: a.update(predictions=_SKEW * np.float32(0.9)), "sum to 1"),
        ("negative predictions", _set("predictions", 0, [-0.5, 0.5, 0.5, 0.5]), "in \\[0, 1\\]"),
        ("NaN", _set("predictions", (0, 0), np.nan), "not finite"),
        ("float32's largest", _set("predictions", (0, 0), 3e38), "in \\[0, 1\\]"),
        ("zeros", _all("predictions", np.zeros((32, 4))), "sum to 1"),
        ("a missing sample", _rows(slice(1, None)), "shape"),
        ("a sample too many", _rows([*list(range(32)), 0]), "shape"),
        ("another precision", lambda a, s: a.update(predictions=a["predictions"].astype("f2")), "asked for"),
    ],
    "ktpfl, uint8": [
        ("zeros", _all("predictions", np.zeros((32, 4))), "255"),
        ("no row's largest is 255", _all("predictions", np.full((32, 4), 254)), "255"),
        ("another precision", lambda a, s: a.update(predictions=_SKEW), "asked for"),
    ],
}  # fmt: skip
HARMLESS: dict[str, list[tuple[str, Change]]] = {
    "fedproto": [
        ("float16's largest", lambda a, s: a["prototypes"].fill(-65504)),
        ("float32's smallest", lambda a, s: a["prototypes"].fill(1e-45)),
        ("no classes", _rows(slice(0, 0))),
    ],
    "fedhkd": [
        ("float16's largest", _classes(representations=np.full((4, 8), 65504))),
        ("one-hot predictions", _classes()),
        ("no classes", _rows(slice(0, 0))),
    ],
    "fedgkt": [
        ("samples in another order", _rows(list(range(25))[::-1], *_SAMPLES)),
        ("features of float16's largest", lambda a, s: a["features"].fill(65504)),
        ("logits of float32's largest", lambda a, s: a["logits"].fill(np.finfo("f4").max)),
        ("logits of both ends", _set("logits", slice(None), [3.4e38, -3.4e38, 0, 1e-45])),
        ("float16", lambda a, s: a.update(features=a["features"].astype("f2"))),
    ],
    "feddkc-kkr": [("logits of both ends", _set("logits", slice(None), [3.4e38, -3.4e38, 0, 1e-45]))],
    "feddkc-skr": [
        ("logits of both ends", _set("logits", slice(None), [3.4e38, -3.4e38, 0, 1e-45])),
        ("logits all alike", lambda a, s: a["logits"].fill(-3e38)),
    ],
    "fedmd": [("one-hot predictions", lambda a, s: a.update(predictions=np.eye(4, dtype="f4")[[0] * 32]))],
    "ktpfl": [
        ("one-hot predictions", lambda a, s: a.update(predictions=np.eye(4, dtype="f4")[[0] * 32])),
        ("sums at the edge", lambda a, s: a.update(predictions=_SKEW)),
    ],
    "sim-pfl": [("one-hot predictions", lambda a, s: a.update(predictions=np.eye(4, dtype="f4")[[0] * 32]))],
    "ktpfl, uint8": [("all 255", lambda a, s: a["predictions"].fill(255))],
    "fedmd, float16": [("sums at the edge", lambda a, s: a.update(predictions=_SKEW.astype("f2")))],
}


def changed(scene: Scene, change: Change) -> bytes:
    true = sent_payload(scene)
    arrays, scalars = parts(true)
    arrays = {name: value.copy() for name, value in arrays.items()}
    change(arrays, scalars)
    return mutate.encode(type(true), arrays, scalars)


@pytest.mark.parametrize(
    ("name", "what", "change", "text"),
    [pytest.param(n, *row, id=f"{n}: {row[0]}") for n, rows in BROKEN.items() for row in rows],
)
def test_a_broken_rule_is_named(name: str, what: str, change: Change, text: str, federation: Any) -> None:
    scene = recorded(federation, name).scenes[2, "train"]
    message = scene.messages[hostile(scene)]
    with quiet() as lines:
        found = copy.deepcopy(scene.strategy)._checked(
            "train", message, knowing(scene, changed(scene, change))
        )
    assert found is None
    (line,) = lines
    assert re.search(text, line), line
    assert "unexpected" not in line


@pytest.mark.parametrize(
    ("name", "what", "change"),
    [pytest.param(n, *row, id=f"{n}: {row[0]}") for n, rows in HARMLESS.items() for row in rows],
)
def test_extremes_within_the_rules_do_no_harm(name: str, what: str, change: Change, federation: Any) -> None:
    scene = recorded(federation, name).scenes[2, "train"]
    position = hostile(scene)
    replies: list[Message | None] = list(honest(scene))
    replies[position] = knowing(scene, changed(scene, change))
    found = outcome(scene, replies)
    assert found.infinite == []
    assert found.stats["participants"] == CLIENTS
    assert not [line for line in found.lines if "dropped" in line]
    # From everyone as well.
    replies = [
        knowing(replace(scene, messages=[m] * CLIENTS), changed(scene, change)) for m in scene.messages
    ]
    assert outcome(scene, replies).infinite == []


# ---------------------------------------------------------------------- whose answer, and to what

SINGLE = [name for name, case in CASES.items() if len(registry.get(case.method).strategy.phases) == 1]


@pytest.mark.parametrize("name", SINGLE)
def test_flowers_loop_gets_what_ours_gets(name: str, federation: Any) -> None:
    scene = recorded(federation, name).scenes[2, "train"]
    position, others, faults = hostile(scene), foreign(federation, name), Faults()
    node = scene.strategy._roster.nodes[scene.messages[position].metadata.dst_node_id]
    expected, undisturbed = (
        outcome(scene, without(scene, position), hooks=True),
        outcome(scene, honest(scene), hooks=True),
    )
    for i in range(8):
        rng = random.Random(derive_seed(0, "hooks", name, i))
        reply, how = mutated(scene, rng, others)
        with quiet():
            again = Message(mutate.fresh(reply.content), reply_to=scene.messages[position])
            refused = copy.deepcopy(scene.strategy)._checked("train", scene.messages[position], again) is None
        replies: list[Message] = honest(scene)
        replies[position] = reply
        # In whatever order they come, and with what nobody asked for among them.
        replies += [stray(scene, 0, "never-sent"), stray(scene, 0, ""), *honest(scene)[2:]]
        rng.shuffle(replies)
        found = outcome(scene, replies, hooks=True)
        if refused:
            check_same(found, expected, node, how, faults)
        for each in found.infinite:
            faults.add(f"not finite: {each}", how)
    # An answer given twice counts once: the first.
    for second in (
        mutate.failed(scene.messages[position], "boom"),
        mutated(scene, random.Random(1), others)[0],
    ):
        twice: list[Message | None] = [*honest(scene), second]
        check_same(outcome(scene, twice, hooks=True), undisturbed, node, "twice", faults)
    nobody = outcome(scene, [stray(scene, 0, "never-sent")], hooks=True)
    assert nobody.stats["void"]
    assert nobody.state == bits(scene.strategy.state_arrays())
    faults.none()


def stray(scene: Scene, position: int, to: str) -> Message:
    """An honest answer to another message than the one that was sent."""
    reply = Message(mutate.fresh(scene.answers[position]), reply_to=scene.messages[position])
    reply.metadata.__dict__["_reply_to_message_id"] = to
    return reply


class Strays(InlineGrid):
    """Gives, before each answer, answers to other messages, and now and then an error in its own code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: list[Message] = []
        self.pulls = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        if self.pulls % 7 == 0:
            raise ValueError("cannot be decoded" + mutate.FORGED)
        found = list(super().pull_messages(message_ids))
        odd, self.before = self.before[-3:], [*self.before, *found]
        return [*odd, *found, *odd]


@pytest.mark.parametrize("name", METHODS)
def test_answers_to_other_messages_change_nothing(name: str, federation: Any, numbers: Any) -> None:
    case = CASES[name]
    fed, initial, options = prepared(federation, case)
    results = []
    for kind in (InlineGrid, Strays):
        with quiet() as lines:
            grid = kind(fed.app(), CLIENTS)
            results.append(strategy_of(fed, case, options).start(grid, initial, num_rounds=2))
        assert [line for line in lines if "node" in line] == []
    assert numbers(results[0]) == numbers(results[1])


@pytest.mark.parametrize("name", METHODS)
def test_another_rounds_or_phases_answer_is_refused_or_valid(name: str, federation: Any) -> None:
    scenes, faults = recorded(federation, name).scenes, Faults()
    for (server_round, phase), scene in scenes.items():
        position = hostile(scene)
        node = scene.strategy._roster.nodes[scene.messages[position].metadata.dst_node_id]
        expected = outcome(scene, without(scene, position))
        for (other_round, other_phase), other in scenes.items():
            what = f"{phase} of round {server_round} was answered with {other_phase} of round {other_round}"
            replies: list[Message | None] = list(honest(scene))
            replies[position] = Message(mutate.fresh(other.answers[0]), reply_to=scene.messages[position])
            found = outcome(scene, replies)
            faults.inputs += 1
            dropped = [line for line in found.lines if "is dropped" in line]
            if dropped:
                check_dropped(dropped, node, None, scene.strategy, what, faults)
                check_same(found, expected, node, what, faults)
            for each in found.infinite:
                faults.add(f"not finite: {each}", what)
    faults.none()
    assert faults.inputs == len(scenes) ** 2


@every_case
def test_whole_runs_outlive_mutated_answers(name: str, federation: Any) -> None:
    case, others = CASES[name], foreign(federation, name)
    fed, initial, options = prepared(federation, case)
    rng = random.Random(derive_seed(0, "runs", name))
    fed_in = []

    def garble(content: RecordDict) -> None:
        fed_in.append(mutate.mutate(content, rng, others))

    faults = {i: Fault("garbage", garble=garble) for i in (1, 2)}
    with quiet() as lines:
        grid = InlineGrid(fed.app(), CLIENTS, faults=faults)
        strategy = strategy_of(fed, case, options)
        result = strategy.start(grid, initial, num_rounds=2)
    assert len(fed_in) >= 4
    # A valid model of the largest numbers goes into a mean like any other; who trains from there may not succeed.
    poisoned = [line for line in lines if "the training loss is" in line]
    for stats in result.rounds:
        assert stats.participants + stats.failures >= CLIENTS
        if stats.server_round == 1 or not poisoned:
            assert {0, 3} <= set(stats.clients), fed_in
            assert not stats.void
            for value in (stats.train_loss, stats.local_accuracy):
                assert value is not None
                assert np.isfinite(value), fed_in
    arrays = unpacked(result.arrays) | strategy.state_arrays()
    assert infinite(arrays) == [], fed_in
    for line in lines:
        assert len(line) <= LONGEST_LINE, fed_in
        assert line.isprintable(), fed_in
        assert "unexpected" not in line, fed_in


# ---------------------------------------------------------------------- handshake


class Told(InlineGrid):
    """Nodes whose answers to the handshake are given beforehand; an Error in place of some."""

    def __init__(self, answers: Mapping[int, dict[str, Any] | RecordDict | str | None]) -> None:
        self.answers = answers
        self.sent: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message_id = f"handshake-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.sent[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            message = self.sent[message_id]
            answer = self.answers[message.metadata.dst_node_id]
            if answer is None or isinstance(answer, str):
                yield mutate.failed(message, answer)
                continue
            if not isinstance(answer, RecordDict):
                answer = RecordDict({"getpropertiesres.properties": ConfigRecord(answer)})
            yield Message(answer, reply_to=message)


@pytest.mark.parametrize("name", METHODS)
def test_a_hostile_handshake_refuses_that_node_only(name: str, federation: Any) -> None:
    run = recorded(federation, name)
    faults = Faults()
    nodes = sorted(run.handshakes, key=lambda node: run.handshakes[node]["partition-id"])
    liar = nodes[HOSTILE]
    others = [node for node in nodes if node != liar]
    # At the start of a run, all together; and later, when the others are known.
    first, later = run.scenes[1, "train"], run.scenes[2, "train"]
    beginning = strategy_of(*prepared_again(run, name))
    tried = {first.strategy._roster.nodes[liar]}
    rounds: Counter[str] = Counter()
    for number, (what, lie) in enumerate(mutate.properties(run.handshakes[liar])):
        for known in (False, True) if number % 4 == 0 else (False,):
            strategy = copy.deepcopy(later.strategy) if known else beginning
            if known:
                del strategy._roster.nodes[liar]
            else:
                strategy._begin(run.initial)
            with quiet() as lines:
                try:
                    grid = Told({**run.handshakes, liar: lie})
                    found = (
                        strategy._roster.refresh(grid) if known else strategy._roster.wait(grid, CLIENTS - 1)
                    )
                except Exception as error:
                    faults.add(f"{type(error).__name__}: {error}", what)
                    continue
            faults.inputs += 1
            check_handshake(strategy, found, liar, others, lines, what, faults, known=known)
            taken = strategy._roster.nodes.get(liar)
            kind = what.partition("=")[0]
            if not known and taken is not None and taken not in tried and rounds[kind] < 4:
                tried.add(taken)
                rounds[kind] += 1
                go_on_with(strategy, first, found, liar, what, faults)
    faults.none()
    assert faults.inputs >= 300
    assert len(tried) > 5


@pytest.mark.parametrize("name", METHODS)
def test_a_liar_that_comes_first_does_not_decide_for_the_others(name: str, federation: Any) -> None:
    run = recorded(federation, name)
    liar, *others = run.handshakes
    strategy = strategy_of(*prepared_again(run, name))
    strategy._timeout = 30.0
    lies = [{"num-classes": 5}, {"feature-shape": "[9]"}, {"arrays": '[["a"], ["float32"], [[1]]]'}]
    for lie in [*lies, {"public-digest": "a"}, {"num-examples": -1}]:
        grid = Told({liar: run.handshakes[liar] | lie})

        def come(*_: Any, grid: Told = grid) -> None:
            # Whoever waits for more clients pauses first.
            grid.answers = {**grid.answers, **{node: run.handshakes[node] for node in others}}

        strategy._begin(run.initial)
        with quiet() as lines, mock.patch("flwr_kd.server.strategy.time.sleep", come):
            found = strategy._roster.wait(grid, CLIENTS - 1)
        assert set(others) <= {node.node_id for node in found}, (lie, lines)
        assert set(refusals(strategy)) <= {liar}


@pytest.mark.parametrize("name", ["fedavg", "fedhead", "ktpfl"])
def test_what_is_no_handshake_refuses_that_node_only(name: str, federation: Any) -> None:
    run, faults = recorded(federation, name), Faults()
    liar, *others = run.handshakes
    strategy = strategy_of(*prepared_again(run, name))
    answer = run.scenes[1, "train"].answers[0]
    properties = "getpropertiesres.properties"
    odd = [RecordDict(), RecordDict({properties: ArrayRecord()}), RecordDict({properties: MetricRecord()})]
    odd += [RecordDict({mutate.FORGED: ConfigRecord(), "r" * 5000: ConfigRecord()}), mutate.fresh(answer)]
    for number, lie in enumerate([*mutate.REASONS, *odd]):
        strategy._begin(run.initial)
        with quiet() as lines:
            found = strategy._roster.wait(Told({**run.handshakes, liar: lie}), CLIENTS - 1)
        assert sorted(node.node_id for node in found) == sorted(others)
        if len(lines) != 1:
            faults.add(f"{len(lines)} warnings", f"{number}: {lines}")
        for line in lines:
            check_line(line, liar, f"{number}: {line[:300]}", faults)
    faults.none()


def prepared_again(run: Recorded, name: str) -> tuple[Any, Case, dict[str, Any]]:
    federation, _, options = prepared(lambda *_: run.federation, CASES[name])
    return federation, CASES[name], options


def refusals(strategy: KDStrategy) -> dict[int, str]:
    return {**strategy._roster.malformed, **strategy._roster.refused}


def check_handshake(
    strategy: KDStrategy,
    found: list[Node],
    liar: int,
    others: list[int],
    lines: list[str],
    what: str,
    faults: Faults,
    *,
    known: bool,
) -> None:
    if not set(others) <= set(strategy._roster.nodes):
        faults.add(f"another is refused: {refusals(strategy)}", what)
    keys = {strategy._roster.nodes[node].key for node in others if node in strategy._roster.nodes}
    if (
        {node.key for node in found}
        - keys
        - {strategy._roster.nodes[liar].key if liar in strategy._roster.nodes else None}
    ):
        faults.add("nobody's key", what)
    # Two that claim one partition cannot be told apart when both are new; who was there before keeps its place.
    there = {node.node_id if known else node.key for node in found}
    if not (set(others) if known else keys) <= there:
        faults.add("another is left out", what)
    refused = liar not in strategy._roster.nodes
    if refused and (set(refusals(strategy)) != {liar} or len(lines) != 1):
        faults.add(f"{len(lines)} warnings", f"{what}: {lines}")
    if any("is left out" in line for line in lines) and any("comes in place" in line for line in lines):
        faults.add("two warnings that contradict each other", f"{what}: {lines}")
    for line in lines:
        check_line(line, liar if refused else "node", f"{what}: {line[:300]}", faults)
    for reason in refusals(strategy).values():
        if len(reason) > LONGEST_LINE or not reason.isprintable():
            faults.add(f"refused: {reason}", what)


def go_on_with(
    strategy: KDStrategy, scene: Scene, nodes: list[Node], liar: int, what: str, faults: Faults
) -> None:
    """A node that lied in its handshake and was taken in answers a round with what fits what it said."""
    answers = dict(zip((m.metadata.dst_node_id for m in scene.messages), scene.answers, strict=True))
    strategy.stats = RoundStats(1)
    with quiet() as lines:
        try:
            strategy.begin(nodes)
            chosen = strategy.select("train", 1, nodes, [])
            arrays = scene.arrays
            messages = strategy._train_messages(
                "train", 1, list(strategy.configure_phase("train", 1, chosen, arrays)), {}
            )
            pairs = []
            for i, message in enumerate(messages):
                message.metadata.__dict__["_message_id"] = f"round-{i}"
                content = mutate.fresh(answers[message.metadata.dst_node_id])
                if message.metadata.dst_node_id == liar:
                    fit_to(strategy, strategy._roster.nodes[liar], content)
                pairs.append((message, Message(content, reply_to=message)))
            told, new = strategy._aggregate("train", 1, iter(pairs), arrays)
        except Exception as error:
            faults.add(f"then {type(error).__name__}: {error}", what)
            return
    for line in lines:
        if len(line) > LONGEST_LINE or not line.isprintable() or "unexpected" in line:
            faults.add(f"warning: {line}", what)
    if len({reply.node.node_id for reply in told} - {liar}) < len({n.node_id for n in nodes} - {liar}):
        faults.add("then the others' answers are not used", what)
    if bad := infinite(unpacked(new) | strategy.state_arrays()):
        faults.add(f"then not finite: {bad}", what)


def fit_to(strategy: KDStrategy, node: Node, content: RecordDict) -> None:
    """Give an answer the sizes that its sender told, where they are small, else no rows of them."""
    kind = strategy.reply_payloads.get("train")
    if kind is None:
        return
    dims = dict(strategy.payload_dims("train", node))
    made = {}
    for field in fields(kind):  # type: ignore[arg-type]
        spec = field.metadata.get("array")
        if spec is not None:
            sizes = [dims.get(axis, 0 if max(dims.values()) > 1000 else 1) for axis in spec.shape]
            if any(size > 10**5 for size in sizes):
                sizes[0] = 0
            if (
                any(size >= 2**62 for size in sizes)
                or np.prod([max(s, 1) for s in sizes], dtype=float) > 1e15
            ):
                return
            value = np.zeros(sizes, dtype=spec.dtype.split("|")[-1])
            if field.name == "index":
                value[:] = np.arange(len(value))
            elif field.name == "counts":
                value[:] = 1
            elif field.name == "predictions" and value.size:
                value[:, 0] = 255 if value.dtype == np.uint8 else 1
            made[field.name] = value
    if kind is SoftPredictions:
        made["predictions"] = made["predictions"].astype(strategy.config.to_wire()["precision"])
    scalars = {"num_classes": node.num_classes} if kind is Prototypes else {}
    content.config_records[mutate.METRICS]["payload"] = mutate.encode(kind, made, scalars)
    rows = len(made.get("index", [0] * 50))
    content.metric_records[mutate.COUNT]["num_examples"] = rows


# ---------------------------------------------------------------------- memory and counts

# JSON is what grows most: "[]," is three characters, and in Python a list of 56 bytes and a reference of 8, which
# makes 21 times; a header's entries come to 22. What is claimed and did not come must not count at all.
TIMES, FIXED = 32, 64 * 1024


def peak_of(scene: Scene, content: RecordDict) -> tuple[int, int, list[str]]:
    """Return the most memory that reading an answer took beside itself, its size, and the warnings."""
    strategy, message = copy.deepcopy(scene.strategy), scene.messages[hostile(scene)]
    strategy._checked(scene.phase, message, honest(scene)[hostile(scene)])  # what is loaded once
    size = flower_records.nbytes(content) + sum(
        len(v) for record in content.config_records.values() for v in record.values() if isinstance(v, str)
    )
    reply = Message(content, reply_to=message)
    with quiet() as lines:
        tracemalloc.start()
        try:
            strategy._checked(scene.phase, message, reply)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return peak, size, lines


def claims(scene: Scene) -> Iterator[tuple[str, RecordDict]]:
    """Answers that claim to be huge, or whose headers are made to grow when they are read."""
    answer = scene.answers[hostile(scene)]

    def payload(data: bytes) -> RecordDict:
        content = mutate.fresh(answer)
        content.config_records[mutate.METRICS]["payload"] = data
        return content

    files = [("nothing, and a header of 2^62", mutate.safetensors_file("{}", length=2**62))]
    files += [
        ("deep", mutate.safetensors_file("[" * 50_000)),
        ("deep too", mutate.safetensors_file('{"a":' * 10_000)),
    ]
    kind = scene.strategy.reply_payloads.get(scene.phase)
    if kind is not None:
        header, body = mutate.parts_of(mutate.payload_of(answer))
        for name in [name for name in header if name != "__metadata__"]:
            for shape in ([2**40], [2**31, 2**31], [0, 2**62], [2**62, 0], [1] * 5000, [0] * 10_000):
                claim = {**header, name: {**header[name], "shape": shape}}
                files.append((f"{name} {str(shape)[:30]}", mutate.safetensors_file(json.dumps(claim), body)))
            claim = {**header, name: {**header[name], "data_offsets": [0, 2**40]}}
            files.append((f"{name} ends at 2^40", mutate.safetensors_file(json.dumps(claim), body)))
        metadata = header["__metadata__"]
        for what, text in (
            ("lists", "[" + "[]," * 20_000 + "[]]"),
            ("mappings", "[" + "{}," * 20_000 + "{}]"),
        ):
            claim = {**header, "__metadata__": {**metadata, "scalars": text}}
            files.append((f"scalars of {what}", mutate.safetensors_file(json.dumps(claim), body)))
        many = {f"{i:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(1000)}
        files.append(("many fields", mutate.safetensors_file(json.dumps({"__metadata__": metadata, **many}))))
        texts = {f"{i:x}": "" for i in range(5000)}
        files.append(
            ("much metadata", mutate.safetensors_file(json.dumps({"__metadata__": metadata | texts})))
        )
    yield from ((f"payload: {what}", payload(data)) for what, data in files)
    names = [name for name in answer.array_records[mutate.ARRAYS] if name != "_empty"]
    for shape in (
        "(1099511627776,)",
        "(2147483648, 2147483648)",
        "(0, 4611686018427387904)",
        "(-1,)",
        "(1" + ", 1" * 4000 + ")",
    ):
        for descr in ("'<f4'", "'|V1000000000'", "[('a', '<f4', (1000000000,))]", "'<U1000000000'"):
            text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
            content = mutate.fresh(answer)
            for name in names[:1] or ["0"]:
                content.array_records[mutate.ARRAYS][name] = mutate.as_array(
                    mutate.npy_file(text, b"\0" * 16)
                )
            yield f"array: {descr} {shape[:30]}", content
    content = mutate.fresh(answer)
    long = mutate.npy_file("(" * 50_000, version=b"\x02\x00")
    content.array_records[mutate.ARRAYS][(names or ["0"])[0]] = mutate.as_array(long)
    yield "array: a long header", content


@every_case
def test_what_is_claimed_takes_no_memory(name: str, federation: Any) -> None:
    faults = Faults()
    for (server_round, _), scene in recorded(federation, name).scenes.items():
        if server_round == 1:
            continue
        for what, content in claims(scene):
            peak, size, lines = peak_of(scene, content)
            faults.inputs += 1
            if peak > TIMES * size + FIXED:
                faults.add(f"{peak} bytes", f"{scene.phase}: {what} of {size} bytes")
            if len(lines) != 1 or "unexpected" in lines[0] or len(lines[0]) > LONGEST_LINE:
                faults.add(f"warnings {lines}", f"{scene.phase}: {what}")
    faults.none()
    assert faults.inputs > 20


@every_case
def test_a_payload_beyond_the_limit_is_not_decoded(name: str, federation: Any) -> None:
    for (server_round, _), scene in recorded(federation, name).scenes.items():
        if server_round == 1:
            continue
        position = hostile(scene)
        node = scene.strategy._roster.nodes[scene.messages[position].metadata.dst_node_id]
        kind = scene.strategy.reply_payloads.get(scene.phase, SoftPredictions)
        # Well-formed, and all there: 50 MB.
        names = [f.name for f in fields(kind) if "array" in f.metadata]  # type: ignore[arg-type]
        data = mutate.encode(kind, {names[0]: np.zeros(50 * 2**20, np.uint8)}, {})
        content = mutate.fresh(scene.answers[position])
        content.config_records[mutate.METRICS]["payload"] = data
        peak, _, lines = peak_of(scene, content)
        assert peak < flower_records.nbytes(scene.answers[position]) + FIXED
        (line,) = lines
        if scene.phase not in scene.strategy.reply_payloads:
            assert "expected none" in line
            continue
        limit, true = scene.strategy.payload_limit(scene.phase, node), sent_payload(scene)
        assert re.search(rf"{len(data)} bytes is more than .*{limit}", line)
        # Tight: all that this node can have to say, and not much more.
        needed = sum(value.nbytes for value in parts(true)[0].values())
        assert needed <= limit <= 16 * 1024


@pytest.mark.parametrize("name", ["fedavg", "pfeddf", "ktpfl"])
def test_an_array_beyond_the_model_is_not_copied(name: str, federation: Any) -> None:
    scene = recorded(federation, name).scenes[2, "train"]
    content = mutate.fresh(scene.answers[hostile(scene)])
    content.array_records[mutate.ARRAYS]["0"] = Array(np.zeros(50 * 2**20 // 4, np.float32))
    peak, size, lines = peak_of(scene, content)
    assert size > 50 * 2**20
    assert peak < FIXED
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["fedavg", "ktpfl-weights", "fedhyb", "fedhead"])
def test_an_honest_answer_takes_a_small_multiple_of_its_size(name: str, federation: Any) -> None:
    scene = recorded(federation, name).scenes[2, "train"]
    peak, size, lines = peak_of(scene, mutate.fresh(scene.answers[hostile(scene)]))
    assert lines == []
    assert size > 15_000
    assert peak < size + FIXED


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedhyb-1", "fedhkd"])
def test_a_claimed_count_weighs_no_more_than_max_examples(name: str, federation: Any) -> None:
    """24, 2^53, 26 and 27 samples with max_examples=100: the liar's share is 100/177, not all."""
    scene = recorded(federation, name).scenes[2, "train"]
    capped = replace(scene, strategy=copy.deepcopy(scene.strategy))
    capped.strategy.max_examples = 100
    replies: list[Message | None] = list(honest(scene))
    content = mutate.fresh(scene.answers[HOSTILE])
    content.metric_records[mutate.COUNT]["num_examples"] = 2**53
    for array in list(content.array_records[mutate.ARRAYS]):
        old = content.array_records[mutate.ARRAYS][array].numpy()
        content.array_records[mutate.ARRAYS][array] = Array(np.full_like(old, 177))
    replies[HOSTILE] = Message(content, reply_to=scene.messages[HOSTILE])
    found = outcome(capped, replies)
    models = [
        [a.numpy().astype(np.float64) for n, a in r.content.array_records[mutate.ARRAYS].items()]
        for r in honest(scene)
    ]
    for i, (_, shape, data) in enumerate(found.arrays.values()):
        got = np.frombuffer(data, np.float32).reshape(shape)
        others = sum(w * models[k][i] for k, w in ((0, 24), (2, 26), (3, 27)))
        np.testing.assert_allclose(got, (others + 100 * 177) / 177, rtol=1e-6)
    assert [line for line in found.lines if "max_examples" in line] == [
        f"{scene.strategy._roster.nodes[scene.messages[HOSTILE].metadata.dst_node_id]} claims {2**53} samples, "
        "and counts as 100 (max_examples)"
    ]


def test_claimed_class_counts_weigh_no_more_than_max_examples(federation: Any) -> None:
    scene = recorded(federation, "fedproto").scenes[2, "train"]
    capped = replace(scene, strategy=copy.deepcopy(scene.strategy))
    capped.strategy.max_examples = 100
    true = sent_payload(scene)
    arrays, scalars = parts(true)
    lie = {**arrays, "counts": np.full(4, 2**40), "prototypes": np.full((4, 8), 118, np.float32)}
    replies: list[Message | None] = list(honest(scene))
    replies[HOSTILE] = knowing(scene, mutate.encode(type(true), lie, scalars), 2**53)
    state = outcome(capped, replies).state
    told = [Prototypes.from_bytes(mutate.payload_of(a)) for a in scene.answers]
    total = sum(told[k].counts[:, None] * told[k].prototypes.astype(np.float64) for k in (0, 2, 3))
    count = sum(told[k].counts for k in (0, 2, 3)) + 100
    got = np.frombuffer(state["means"][2], np.float32).reshape(4, 8)
    np.testing.assert_allclose(got, (total + 100 * 118) / count[:, None], rtol=1e-6)


# ---------------------------------------------------------------------- evaluation


def renamed(content: RecordDict, old: str, new: str) -> RecordDict:
    return RecordDict({key.replace(old, new, 1): record for key, record in content.items()})  # type: ignore[arg-type]


def test_a_mutated_evaluation_is_refused_or_finite(federation: Any) -> None:
    fed = federation("fedavg", CLIENTS)
    strategy = fed.strategy(fraction_evaluate=1.0)
    grid, faults = InlineGrid(fed.app(), CLIENTS), Faults()
    with quiet():
        arrays = strategy.start(grid, fed.initial(), num_rounds=1).arrays
        nodes = sorted(strategy._roster.nodes.values(), key=lambda node: node.order)
        messages = strategy._evaluate_messages(1, nodes, arrays, {})
        ids = list(grid.push_messages(messages))
        answers = [mutate.fresh(next(iter(grid.pull_messages([each]))).content) for each in ids]
    # The mutations know the names of training's records.
    as_training = [renamed(answer, "evaluateres", "fitres") for answer in answers]
    others = [recorded(federation, "fedhkd").scenes[2, "train"].answers[0]]
    replies = [Message(mutate.fresh(a), reply_to=m) for m, a in zip(messages, answers, strict=True)]
    expected = strategy._mean_evaluation(
        zip([*messages[:1], *messages[2:]], [*replies[:1], *replies[2:]], strict=True)
    )
    dropped = 0
    for i in range(600):
        rng = random.Random(derive_seed(0, "evaluate", i))
        content = mutate.fresh(as_training[HOSTILE])
        if i % 3:
            what = mutate.mutate(content, rng, others, mutate.OTHERS)
        else:
            value = rng.choice([*mutate.NUMBERS, [], [1.5] * 2000, [float("nan")]])
            content["fitres.loss"] = MetricRecord({rng.choice(["loss", "loss", "los"]): value})
            what = f"loss of {type(value).__name__}"
        replies[HOSTILE] = Message(renamed(content, "fitres", "evaluateres"), reply_to=messages[HOSTILE])
        failures = strategy.stats.failures
        with quiet() as lines:
            found = strategy._mean_evaluation(zip(messages, replies, strict=True))
        assert found is not None
        if strategy.stats.failures > failures:
            dropped += 1
            if len(lines) != 1 or dict(found) != dict(expected or {}):
                faults.add("a dropped evaluation counts", f"{what}: {lines}")
        elif lines:
            faults.add("a warning of what is used", f"{what}: {lines}")
        for line in lines:
            check_line(line, nodes[HOSTILE], what, faults)
        if not all(np.isfinite(value) for value in found.values()):
            faults.add(f"not finite: {dict(found)}", what)
    faults.none()
    assert 100 < dropped < 500
