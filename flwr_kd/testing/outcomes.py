"""What a phase's replies led to, and what must hold of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from flwr_kd.rules import Rules
from flwr_kd.server.records import Node, Reply, RoundStats
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing import inside
from flwr_kd.testing.federation import first_difference, quiet
from flwr_kd.testing.hostile_values import failed, fresh
from flwr_kd.testing.mutations import mutate
from flwr_kd.testing.payload_mutations import parts_of, payload_of
from flwr_kd.testing.recording import HOSTILE, Scene
from flwr_kd.testing.reply_parts import set_count, set_payload
from flwr_kd.transport.flower_records import layout_of
from flwr_kd.transport.payload import Payload
from flwr_kd.wording import begin_run

__all__ = [
    "LONGEST_LINE",
    "CheckError",
    "Findings",
    "Outcome",
    "bits",
    "check_dropped",
    "check_line",
    "check_same",
    "check_valid",
    "ensure",
    "equal",
    "honest",
    "hostile",
    "infinite",
    "knowing",
    "mutated",
    "node_of",
    "outcome",
    "payload_parts",
    "same_numbers",
    "sent_payload",
    "unpacked",
    "without",
]

LONGEST_LINE = 500
"""Maximum number of characters of a line that quotes a client."""
Strategy = KDStrategy[Any, Any]
Numbers = list[tuple[Any, ...]]
"""What :func:`flwr_kd.testing.federation.numbers` returns."""


class CheckError(AssertionError):
    """A method does not pass a check; the text names both, and says what happened and what is expected."""


def ensure(condition: Any, happened: str, expected: str) -> None:
    """Raise :class:`CheckError` unless a condition holds."""
    if not condition:
        raise CheckError(f"{happened}; expected: {expected}")


def equal(what: str, value: Any, expected: Any) -> None:
    """Raise :class:`CheckError` unless two values are equal."""
    if value != expected:
        raise CheckError(f"{what}: got {_brief(value)}; expected: {_brief(expected)}")


def same_numbers(happened: str, result: Numbers, other: Numbers, expected: str = "the same numbers") -> None:
    """Raise :class:`CheckError` unless two runs have the same numbers; the text names the first that differs."""
    if result != other:
        raise CheckError(f"{happened}: {first_difference(result, other)}; expected: {expected}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 700 else f"{text[:700]} ... ({len(text)} characters)"


class Findings:
    """Collects what is wrong, so that one run shows every kind of fault once."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.inputs = 0

    def add(self, kind: str, what: str) -> None:
        """Note what happened; ``what`` is the input with which it did."""
        self.kinds.setdefault(kind[:150], what[:700])

    def none(self) -> None:
        """Raise :class:`CheckError` if anything was noted."""
        lines = "\n".join(f"- {kind!a}\n    with {what!a}" for kind, what in self.kinds.items())
        ensure(not self.kinds, f"{len(self.kinds)} kinds of faults:\n{lines}\n", "none")


# ---------------------------------------------------------------------- warnings and replies


def check_line(line: str, node: Node | int | str, what: str, findings: Findings) -> None:
    """Note a warning of a dropped reply that does not name the node, or could flood or forge the log."""
    kind = line.partition("dropped: ")[2] or line
    if str(node) not in line:
        findings.add(f"the warning names no node: {kind}", what)
    if len(line) > LONGEST_LINE:
        findings.add(f"the warning has {len(line)} characters: {kind}", what)
    if not line.isprintable():
        findings.add(f"the warning is not printable: {kind}", what)
    if "unexpected" in line:
        findings.add(f"no check foresaw it: {kind}", what)


def check_dropped(
    lines: list[str], node: Node, reply: Reply[Any] | None, what: str, findings: Findings
) -> None:
    """Note a dropped reply without exactly one warning, and a warning of a reply that is used as it is."""
    if reply is None:
        if len(lines) != 1:
            findings.add(f"{len(lines)} warnings", f"{what}: {lines}")
    elif any(
        "samples, and counts as" not in line and "has lost its personal model" not in line for line in lines
    ):
        findings.add("a warning of a reply that is used", f"{what}: {lines}")
    for line in lines:
        check_line(line, node, f"{what}: {line[:300]}", findings)


def check_valid(
    reply: Reply[Any], strategy: Strategy, phase: str, rules: Rules | None, what: str, findings: Findings
) -> None:
    """Note what an accepted reply has that the aggregation may not be given; checked in another way than there."""
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
        if (
            name.endswith(("-accuracy", "-top5"))
            and name.startswith(("local-", "trained-", "common-"))
            and not 0 <= value <= 1
        ):
            problems.append(f"metric {name}: {value!r}")
    expected = strategy.reply_payloads.get(phase)
    if type(reply.payload) is not (expected or type(None)):
        problems.append(f"payload {type(reply.payload).__name__}")
    elif reply.payload is not None:
        if rules is None:
            problems.append(f"{type(reply.payload).__name__}, for which the registration names no rules_path")
        else:
            problems += rules.violations(reply.payload, node, strategy, count)
    for problem in problems:
        findings.add(f"accepted: {problem}", what)


# ---------------------------------------------------------------------- outcomes of a phase


def bits(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as something that is equal only if every bit is."""
    return {name: (value.dtype.str, value.shape, value.tobytes()) for name, value in arrays.items()}


def unpacked(record: ArrayRecord | None) -> dict[str, Any]:
    """Return a record's arrays by name."""
    return {} if record is None else {name: a.numpy() for name, a in record.items() if name != "_empty"}


def _all_unpacked(records: Sequence[ArrayRecord]) -> list[dict[str, Any]]:
    """Return the arrays of several records by name; what the records have in common is decoded once."""
    decoded: dict[int, Any] = {}
    found = []
    for record in records:
        arrays = {name: value for name, value in record.items() if name != "_empty"}
        for value in arrays.values():
            if id(value.data) not in decoded:
                decoded[id(value.data)] = value.numpy()
        found.append({name: decoded[id(value.data)] for name, value in arrays.items()})
    return found


def infinite(arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of arrays with a number that is not finite."""
    return [
        name for name, value in arrays.items() if value.dtype.kind == "f" and not np.isfinite(value).all()
    ]


def _knowledge(message: Message) -> Any:
    """Return what a message's payload holds; safetensors writes its metadata in any order."""
    payload = message.content.config_records[layout_of(message.content).config].get("payload")
    return parts_of(payload) if isinstance(payload, bytes) else None


@dataclass
class Outcome:
    """What a phase's replies led to, to the last bit; ``sent`` is what the clients are sent next."""

    arrays: dict[str, Any]
    state: dict[str, Any]
    stats: dict[str, Any]
    used: list[Any]
    sent: list[Any]
    trained: dict[int, int]
    lines: list[str]
    infinite: list[str]


def outcome(scene: Scene, replies: Sequence[Message | None], *, as_flower: bool = False) -> Outcome:
    """Aggregate replies on a copy of the strategy, and go on to what it sends next.

    Parameters
    ----------
    scene : Scene
        The phase.
    replies : sequence of Message or None
        One for each message, None if none arrived; with ``as_flower`` any.
    as_flower : bool
        Through the hooks that Flower's own loop calls.
    """
    strategy = copy.deepcopy(scene.strategy)
    strategy.stats = RoundStats(scene.server_round)
    begin_run()  # each outcome has all its warnings
    with quiet() as lines:
        answered: list[Node] = []
        left: list[str] = []
        if as_flower:
            present = [reply for reply in replies if reply is not None]
            new, metrics = inside.aggregate_as_flower(
                strategy, scene.server_round, scene.messages, present, scene.arrays
            )
            used: list[Any] = sorted(metrics.items())
        else:
            pairs = zip(scene.messages, replies, strict=True)
            accepted, new = inside.aggregate(strategy, scene.phase, scene.server_round, pairs, scene.arrays)
            used = [(r.node.node_id, r.num_examples, sorted(r.metrics.items())) for r in accepted]
            answered = [reply.node for reply in accepted]
            left = list(strategy.phases[strategy.phases.index(scene.phase) + 1 :])
        arrays = new if new is not None else scene.arrays
        arrays, state, sent = _next_messages(
            strategy, scene.server_round, arrays, answered, left, finish=not as_flower
        )
        stats = strategy.stats
    next_arrays = _all_unpacked([m.content.array_records[layout_of(m.content).arrays] for m in sent])
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
        used,
        [(m.metadata.dst_node_id, bits(a), _knowledge(m)) for m, a in zip(sent, next_arrays, strict=True)],
        inside.last_trained(strategy),
        lines,
        infinite(everything | losses),
    )


def _next_messages(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord | None,
    answered: list[Node],
    left: list[str],
    *,
    finish: bool,
) -> tuple[ArrayRecord | None, dict[str, Any], list[Message]]:
    """Go on to the round's next phase that sends anything, or to the next round's first."""
    nodes = inside.nodes_in_order(strategy)
    for phase in left:
        chosen = strategy.select(phase, server_round, nodes, answered)
        if chosen:
            sent = inside.train_messages(strategy, phase, server_round, chosen, arrays)
            if sent:
                return arrays, strategy.state_arrays(), sent
    if finish:
        arrays = strategy.finish_round(server_round, arrays) or arrays
    state = strategy.state_arrays()
    chosen = strategy.select(strategy.phases[0], server_round + 1, nodes, [])
    return (
        arrays,
        state,
        inside.train_messages(strategy, strategy.phases[0], server_round + 1, chosen, arrays),
    )


def check_same(mine: Outcome, expected: Outcome, node: Node, what: str, findings: Findings) -> None:
    """Note where an outcome is not that of the others alone, but for the line that says why a reply is dropped."""
    for field in fields(Outcome):
        one, other = getattr(mine, field.name), getattr(expected, field.name)
        if field.name == "lines":
            one, other = ([line for line in lines if str(node) not in line] for lines in (one, other))
        if one != other:
            findings.add(f"{field.name} is not that of the others alone", what)


# ---------------------------------------------------------------------- a scene with one reply changed


def hostile(scene: Scene) -> int:
    """Return the position of the client whose reply is changed."""
    return min(HOSTILE, len(scene.messages) - 1)


def node_of(scene: Scene) -> Node:
    """Return the client whose reply is changed."""
    return inside.nodes_by_id(scene.strategy)[scene.messages[hostile(scene)].metadata.dst_node_id]


def honest(scene: Scene) -> list[Message]:
    """Return everyone's replies as they were."""
    return [
        Message(fresh(answer), reply_to=message)
        for message, answer in zip(scene.messages, scene.answers, strict=True)
    ]


def without(scene: Scene, position: int) -> list[Message | None]:
    """Return everyone's replies, but an error in place of one."""
    replies: list[Message | None] = list(honest(scene))
    replies[position] = failed(scene.messages[position], "boom")
    return replies


def mutated(scene: Scene, rng: random.Random, others: Sequence[RecordDict]) -> tuple[Message, str]:
    """Return the hostile client's reply after a mutation, and the mutation's name."""
    position = hostile(scene)
    content = fresh(scene.answers[position])
    what = mutate(content, rng, others)
    return Message(content, reply_to=scene.messages[position]), what


def knowing(scene: Scene, data: bytes, num_examples: int | None = None) -> Message:
    """Return the hostile client's reply with another payload, and another sample count."""
    position = hostile(scene)
    content = fresh(scene.answers[position])
    set_payload(content, data)
    if num_examples is not None:
        set_count(content, num_examples)
    return Message(content, reply_to=scene.messages[position])


def sent_payload(scene: Scene) -> Payload:
    """Return the hostile client's honest payload."""
    kind: type[Payload] = scene.strategy.reply_payloads[scene.phase]
    return kind.from_bytes(payload_of(scene.answers[hostile(scene)]))


def payload_parts(payload: Payload) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a payload's arrays and scalars by name."""
    values = {field.name: getattr(payload, field.name) for field in fields(payload)}  # type: ignore[arg-type]
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in values.items() if name not in arrays}
