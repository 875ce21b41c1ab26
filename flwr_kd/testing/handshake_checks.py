"""Checks of the handshake: whatever one node reports, it is refused alone, and the others are not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_kd.server.records import Node, RoundStats
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing import inside
from flwr_kd.testing.federation import quiet
from flwr_kd.testing.hostile_handshakes import properties
from flwr_kd.testing.hostile_values import FORGED, REASONS, failed, fresh
from flwr_kd.testing.outcomes import LONGEST_LINE, Findings, check_line, ensure, equal, infinite, unpacked
from flwr_kd.testing.payload_mutations import encode
from flwr_kd.testing.recording import CLIENTS, HOSTILE, Case, Scene, recorded
from flwr_kd.testing.reply_parts import set_count, set_payload
from flwr_kd.transport.flower_records import PROPERTIES
from flwr_kd.transport.inline_grid import InlineGrid

__all__ = ["hostile_handshakes", "liar_that_comes_first", "what_is_no_handshake"]

Strategy = KDStrategy[Any, Any]


class _Prepared(InlineGrid):
    """Nodes whose replies to the handshake are given beforehand; a text stands for an error with that reason."""

    def __init__(self, answers: Mapping[int, dict[str, Any] | RecordDict | str | None]) -> None:
        self.answers = answers
        self.sent: dict[str, Message] = {}

    def bound(self, seconds: float) -> None:
        """Nobody works here: the replies are there."""

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
                yield failed(message, answer)
                continue
            if not isinstance(answer, RecordDict):
                answer = RecordDict({PROPERTIES: ConfigRecord(answer)})
            yield Message(answer, reply_to=message)


def _first_phase(case: Case, server_round: int) -> Scene:
    scenes = recorded(case).scenes
    return next(scene for (r, _), scene in scenes.items() if r == server_round)


def hostile_handshakes(case: Case) -> None:
    """Check that a node with impossible properties is refused alone, at the start of a run and later."""
    run, findings = recorded(case), Findings()
    nodes = sorted(run.handshakes, key=lambda node: run.handshakes[node]["partition-id"])
    liar = nodes[HOSTILE]
    others = [node for node in nodes if node != liar]
    first, later = _first_phase(case, 1), _first_phase(case, 2)
    beginning = case.strategy(run.federation)
    tried = {inside.nodes_by_id(first.strategy)[liar]}
    rounds: Counter[str] = Counter()
    for number, (what, lie) in enumerate(properties(run.handshakes[liar])):
        for known in (False, True) if number % 4 == 0 else (False,):
            strategy = copy.deepcopy(later.strategy) if known else beginning
            if known:
                inside.forget_node(strategy, liar)
            else:
                inside.begin(strategy, run.initial)
            grid = _Prepared({**run.handshakes, liar: lie})
            with quiet() as lines:
                try:
                    present = (
                        inside.refresh_nodes(strategy, grid)
                        if known
                        else inside.wait_for_nodes(strategy, grid, CLIENTS - 1)
                    )
                except Exception as error:
                    findings.add(f"{type(error).__name__}: {error}", what)
                    continue
            findings.inputs += 1
            _check_handshake(strategy, present, liar, others, lines, what, findings, known=known)
            accepted = inside.nodes_by_id(strategy).get(liar)
            kind = what.partition("=")[0]
            if not known and accepted is not None and accepted not in tried and rounds[kind] < 4:
                tried.add(accepted)
                rounds[kind] += 1
                _go_on_with(case, strategy, first, present, liar, what, findings)
    findings.none()
    ensure(findings.inputs >= 300, f"{findings.inputs} handshakes were tried", "at least 300")
    ensure(len(tried) > 5, f"{len(tried)} lies were accepted", "more than 5, which have no effect on others")


def liar_that_comes_first(case: Case) -> None:
    """Check that a malicious node that is there before the others does not decide what is expected of them."""
    run = recorded(case)
    liar, *others = run.handshakes
    strategy = case.strategy(run.federation)
    lies: list[dict[str, Any]] = [
        {"num-classes": 5},
        {"feature-shape": "[9]"},
        {"arrays": '[["a"], ["float32"], [[1]]]'},
    ]
    for lie in [*lies, {"public-digest": "a"}, {"num-examples": -1}]:
        grid = _Prepared({liar: run.handshakes[liar] | lie})

        def come(*_: Any, grid: _Prepared = grid) -> None:
            # A strategy that waits for more clients pauses first.
            grid.answers = {**grid.answers, **{node: run.handshakes[node] for node in others}}

        inside.begin(strategy, run.initial, timeout=30.0)
        with quiet() as lines, inside.pausing(come):
            present = inside.wait_for_nodes(strategy, grid, CLIENTS - 1)
        missing = set(others) - {node.node_id for node in present}
        ensure(not missing, f"with {lie}, {missing} are left out: {lines}", "the others are accepted")
        refused = set(inside.refusals(strategy)) - {liar}
        ensure(not refused, f"with {lie}, {refused} are refused", "at most the liar")


def what_is_no_handshake(case: Case) -> None:
    """Check that a node that replies with an error or with other records is refused alone, with one warning."""
    run, findings = recorded(case), Findings()
    liar, *others = run.handshakes
    strategy = case.strategy(run.federation)
    answer = _first_phase(case, 1).answers[0]
    odd = [RecordDict(), RecordDict({PROPERTIES: ArrayRecord()}), RecordDict({PROPERTIES: MetricRecord()})]
    odd += [RecordDict({FORGED: ConfigRecord(), "r" * 5000: ConfigRecord()}), fresh(answer)]
    for number, lie in enumerate([*REASONS, *odd]):
        inside.begin(strategy, run.initial)
        with quiet() as lines:
            grid = _Prepared({**run.handshakes, liar: lie})
            present = inside.wait_for_nodes(strategy, grid, CLIENTS - 1)
        equal(f"accepted nodes, reply {number}", sorted(node.node_id for node in present), sorted(others))
        if len(lines) != 1:
            findings.add(f"{len(lines)} warnings", f"{number}: {lines}")
        for line in lines:
            check_line(line, liar, f"{number}: {line[:300]}", findings)
    findings.none()


def _check_handshake(
    strategy: Strategy,
    present: list[Node],
    liar: int,
    others: list[int],
    lines: list[str],
    what: str,
    findings: Findings,
    *,
    known: bool,
) -> None:
    accepted, refusals = inside.nodes_by_id(strategy), inside.refusals(strategy)
    if not set(others) <= set(accepted):
        findings.add(f"another is refused: {refusals}", what)
    keys = {accepted[node].key for node in others if node in accepted}
    of_liar = {accepted[liar].key} if liar in accepted else set()
    if {node.key for node in present} - keys - of_liar:
        findings.add("nobody's key", what)
    # Two new nodes that claim one partition cannot be told apart; a node that was kept before keeps its place.
    kept = {node.node_id if known else node.key for node in present}
    if not (set(others) if known else keys) <= kept:
        findings.add("another is left out", what)
    refused = liar not in accepted
    if refused and (set(refusals) != {liar} or len(lines) != 1):
        findings.add(f"{len(lines)} warnings", f"{what}: {lines}")
    if any("is left out" in line for line in lines) and any("comes in place" in line for line in lines):
        findings.add("two warnings that contradict each other", f"{what}: {lines}")
    for line in lines:
        check_line(line, liar if refused else "node", f"{what}: {line[:300]}", findings)
    for reason in refusals.values():
        if len(reason) > LONGEST_LINE or not reason.isprintable():
            findings.add(f"refused: {reason}", what)


def _go_on_with(
    case: Case, strategy: Strategy, scene: Scene, nodes: list[Node], liar: int, what: str, findings: Findings
) -> None:
    """Let a node whose lie was accepted reply in a round with what fits its lie."""
    answers = dict(zip((m.metadata.dst_node_id for m in scene.messages), scene.answers, strict=True))
    strategy.stats = RoundStats(1)
    with quiet() as lines:
        try:
            strategy.begin(nodes)
            chosen = strategy.select(scene.phase, 1, nodes, [])
            messages = inside.train_messages(strategy, scene.phase, 1, chosen, scene.arrays)
            pairs = []
            for i, message in enumerate(messages):
                message.metadata.__dict__["_message_id"] = f"round-{i}"
                content = fresh(answers[message.metadata.dst_node_id])
                if message.metadata.dst_node_id == liar:
                    _fit_to(case, strategy, scene.phase, inside.nodes_by_id(strategy)[liar], content)
                pairs.append((message, Message(content, reply_to=message)))
            used, new = inside.aggregate(strategy, scene.phase, 1, iter(pairs), scene.arrays)
        except Exception as error:
            findings.add(f"then {type(error).__name__}: {error}", what)
            return
    for line in lines:
        if len(line) > LONGEST_LINE or not line.isprintable() or "unexpected" in line:
            findings.add(f"warning: {line}", what)
    if len({reply.node.node_id for reply in used} - {liar}) < len({n.node_id for n in nodes} - {liar}):
        findings.add("then the others' replies are not used", what)
    if bad := infinite(unpacked(new) | strategy.state_arrays()):
        findings.add(f"then not finite: {bad}", what)


def _fit_to(case: Case, strategy: Strategy, phase: str, node: Node, content: RecordDict) -> None:
    """Give a reply a payload of the sizes that its sender reported, or no rows of them if they are large."""
    kind, rules = strategy.reply_payloads.get(phase), case.rules
    if kind is None or rules is None:
        return
    dims = dict(strategy.payload_dims(phase, node))
    arrays = {}
    for field in fields(kind):  # type: ignore[arg-type]
        spec = field.metadata.get("array")
        if spec is not None:
            sizes = [dims.get(axis, 0 if max(dims.values()) > 1000 else 1) for axis in spec.shape]
            if any(size > 10**5 for size in sizes):
                sizes[0] = 0
            too_many = np.prod([max(size, 1) for size in sizes], dtype=float) > 1e15
            if too_many or any(size >= 2**62 for size in sizes):
                return
            arrays[field.name] = np.zeros(sizes, dtype=spec.dtype.split("|")[-1])
    scalars, rows = rules.fill(arrays, node, strategy)
    set_payload(content, encode(kind, arrays, scalars))
    set_count(content, rows)
