"""Checks of whole runs: faults, garbage, seeds and resumption."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from flwr_kd.learning.device import one_thread
from flwr_kd.server.records import HandshakeError, KDResult, RoundStats, VoidRoundsError
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing import inside
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import WORK_SECONDS, numbers, quiet
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.testing.kept_runs import FAULTY, raising, undisturbed
from flwr_kd.testing.outcomes import CheckError, ensure, equal, same_numbers
from flwr_kd.testing.recording import Case
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.process_grid import ProcessGrid

__all__ = [
    "another_model_is_refused",
    "clients_may_come_later",
    "faulty_client_costs_its_own_contribution",
    "garbage_is_dropped_or_harmless",
    "learning_goes_on",
    "measuring_changes_nothing",
    "message_clients_give_the_same_numbers",
    "method_is_described",
    "models_may_differ",
    "node_ids_do_not_matter",
    "processes_give_the_same_numbers",
    "resumed_run_equals",
    "reused_models_give_the_same_numbers",
    "round_without_replies_changes_nothing",
    "same_seed_same_numbers",
    "state_survives_save_and_resume",
    "strategy_can_be_started_again",
    "threads_give_the_same_numbers",
    "two_rounds_reach_everyone",
]

WAIT = 0.1
"""Seconds to wait for clients that do not reply. The others have all the time they need, see ``WORK_SECONDS``."""
ALWAYS_DROPPED = ("negative-examples", "metrics-of-nan", "no-records", "other-records", "payload-of-text")
"""Garbage that no method may take for a reply."""


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flwr-kd-check-") as name:
        yield Path(name)


def method_is_described(case: Case) -> None:
    """Check that the registration is complete, and agrees with the classes."""
    method = case.method
    ensure(method.paper and method.exchanged, "paper or exchanged is empty", "both say something")
    equal("the registration's global_model", method.global_model, method.strategy.sends_weights)
    equal("the registration's takes_multi_label", method.takes_multi_label, method.client.takes_multi_label)
    if method.strategy.sends_weights:
        ensure(
            not method.client.personal, "the client is personal, and the strategy has a global model", "one"
        )
    elif not method.strategy.reply_arrays:
        ensure(
            method.client.personal,
            "no weights are sent, and the client is not personal",
            "it keeps its model",
        )
    for half, kind in (("strategy", method.strategy), ("client", method.client)):
        equal(f"config_class of the {half}", kind.config_class, method.config_class)
    for parameter, _, _, text in method.config_class.help():
        ensure(text, f"hyper-parameter {parameter} has no help", "each has a text")
    ensure(
        bool(method.strategy.reply_payloads) == (method.rules is not None),
        f"rules_path is {method.rules_path!r}, and reply_payloads is {dict(method.strategy.reply_payloads)}",
        "rules for the payloads that clients send, and none if they send none",
    )


def two_rounds_reach_everyone(case: Case) -> None:
    """Check that two rounds reach all clients, are measured, and send something down from the second on."""
    result = undisturbed(case).result
    equal("rounds", [r.server_round for r in result.rounds], [1, 2])
    for stats in result.rounds:
        where = f"round {stats.server_round}"
        equal(f"participants and failures of {where}", (stats.participants, stats.failures), (4, 0))
        accuracy = stats.local_accuracy
        ensure(
            accuracy is not None and accuracy > 0.3, f"local accuracy of {where} is {accuracy}", "over 0.3"
        )
        equal(f"partitions in {where}", set(stats.bytes_by_partition), {0, 1, 2, 3})
        up = sum(up for _, up in stats.bytes_by_partition.values())
        ensure(
            stats.bytes_up == up > 0, f"bytes up of {where}: {stats.bytes_up}, by client {up}", "equal, not 0"
        )
    ensure(result.rounds[1].bytes_down > 0, "nothing is sent down in round 2", "something")


def clients_may_come_later(case: Case) -> None:
    """Check that a round may draw only clients that no round before has drawn, with initial arrays or without."""
    federation, kind = case.federation(clients=8), case.method.strategy
    starts = [federation.initial()]
    if kind.uses_initial_arrays and not kind.sends_weights:
        starts.append(ArrayRecord())
    for initial in starts:
        with quiet():
            _, result = federation.run(rounds=4, initial=initial, fraction_train=0.25)
        drawn = [set(stats.bytes_by_partition) for stats in result.rounds]
        ensure(not drawn[2] & (drawn[0] | drawn[1]), f"the rounds drew {drawn}", "new clients in the third")
        for stats in result.rounds:
            where = f"participants and failures of round {stats.server_round}"
            equal(where, (stats.participants, stats.failures), (2, 0))


def learning_goes_on(case: Case) -> None:
    """Check that six rounds reach a local accuracy that is above the first round's and above 0.75."""
    _, result = case.federation().run(rounds=6)
    first, last = result.rounds[0].local_accuracy or 0.0, result.rounds[-1].local_accuracy or 0.0
    ensure(
        last > first and last > 0.75,
        f"local accuracy {first:.3f} in round 1, {last:.3f} in round 6",
        "more than in round 1, and more than 0.75",
    )


def measuring_changes_nothing(case: Case) -> None:
    """Check that common accuracy and global on clients are measured when asked for, and change no other number."""
    rounds, federation = 3, case.federation()
    _, without = federation.run(rounds=rounds)
    federation.common = 20
    _, result = federation.run(rounds=rounds, measure="every:2")
    same_numbers("the other numbers differ", numbers(result), numbers(without))
    for one, other in zip(result.rounds, without.rounds, strict=True):
        where, due = f"round {one.server_round}", one.server_round > 1
        expected = [key for key in one.clients if due]
        equal(f"clients with a common accuracy in {where}", _having("common-accuracy", one), expected)
        expected = [key for key in one.clients if due and case.method.strategy.sends_weights]
        equal(f"clients with global-on-clients in {where}", _having("global-on-clients", one), expected)
        equal(f"means in {where}", one.common_accuracy is not None, due)
        equal(f"what was measured without being asked for in {where}", _having("common-accuracy", other), [])


def _having(name: str, stats: RoundStats) -> list[int]:
    return [key for key, values in stats.clients.items() if name in values]


def faulty_client_costs_its_own_contribution(case: Case, kind: str) -> None:
    """Check that a client that fails in round 1 costs its own contribution to that round, and nothing else."""
    other = raising(case)
    result = other if kind == "raise" else _with_a_fault(case, kind)
    equal(
        "participants, failures by round",
        [(r.participants, r.failures) for r in result.rounds],
        [(3, 1), (4, 0)],
    )
    first = result.rounds[0]
    ensure(
        FAULTY in first.bytes_by_partition or first.bytes_down == 0,
        f"bytes are counted for partitions {sorted(first.bytes_by_partition)}",
        "those sent to the faulty client count",
    )
    equal("bytes from the faulty client", first.bytes_by_partition.get(FAULTY, (0, 0))[1], 0)
    same_numbers(
        "round 1 differs from that with a client that raises", numbers(result)[:1], numbers(other)[:1]
    )


def _with_a_fault(case: Case, kind: str) -> KDResult:
    faults = {FAULTY: Fault(kind, frozenset({1}))}
    with quiet():
        return case.federation().run(grid={"faults": faults}, timeout=WAIT)[1]


def garbage_is_dropped_or_harmless(case: Case, kind: str) -> None:
    """Check that a mutilated reply in round 1 is dropped if it must be, and all numbers stay finite."""
    fault = Fault("garbage", frozenset({1}), garble=GARBAGE[kind])
    with quiet():
        strategy, result = case.federation().run(grid={"faults": {2: fault}})
    first, second = result.rounds
    equal("participants and failures of round 1 together", first.participants + first.failures, 4)
    ensure(first.participants >= 3, f"{first.participants} participants in round 1", "at least 3")
    equal("participants and failures of round 2", (second.participants, second.failures), (4, 0))
    for value in [*strategy.state_arrays().values(), *(a.numpy() for a in result.arrays.values())]:
        ensure(np.isfinite(value).all(), "arrays or state are not finite", "finite numbers")
    must_drop = (
        kind in ALWAYS_DROPPED
        or (strategy.reply_payloads and "payload" in kind)
        or (strategy.reply_arrays and "arrays" in kind)
    )
    if must_drop:
        equal("failures of round 1", first.failures, 1)


def round_without_replies_changes_nothing(case: Case, kind: str) -> None:
    """Check that a round in which all clients fail changes no arrays and no state, and the next one is complete."""
    faults = {i: Fault(kind, frozenset({1})) for i in range(4)}
    federation = case.federation()
    strategy = federation.strategy()
    grid = InlineGrid(federation.app(), federation.clients, faults=faults, work_seconds=WORK_SECONDS)
    result = None
    try:
        with quiet():
            strategy.start(grid, federation.initial(), num_rounds=1, timeout=WAIT)
    except VoidRoundsError as error:
        result = error.result
    if result is None:
        raise CheckError("start() returned, and the only round was void; expected: a VoidRoundsError")
    stats = result.rounds[0]
    equal("participants and failures", (stats.participants, stats.failures), (0, 4))
    equal("state_arrays() after a void round", strategy.state_arrays(), {})
    before = [a.data for a in federation.initial().values()] if case.method.global_model else []
    ensure(
        [a.data for a in result.arrays.values()] == before,
        "the arrays changed",
        "the initial ones, or none without a global model",
    )
    with quiet():
        _, longer = federation.run(rounds=2, grid={"faults": faults}, timeout=WAIT)
    equal("participants of the round after", longer.rounds[1].participants, 4)


def same_seed_same_numbers(case: Case) -> None:
    """Check that the same seed gives the same numbers, and another seed others."""
    one = numbers(undisturbed(case).result)
    again, other = (numbers(case.federation().run(seed=seed)[1]) for seed in (0, 1))
    same_numbers("two runs with seed 0 differ", again, one)
    ensure(one != other, "runs with seeds 0 and 1 are the same", "other numbers")


def node_ids_do_not_matter(case: Case) -> None:
    """Check that numbers do not depend on the node ids that Flower draws."""
    one, other = (
        numbers(case.federation().run(grid={"seed": seed}, fraction_train=0.5)[1]) for seed in (1, 2)
    )
    same_numbers("runs with other node ids differ", other, one, "the same numbers: draw by partition id")


def strategy_can_be_started_again(case: Case) -> None:
    """Check that a strategy that is started twice begins anew."""
    federation = case.federation()
    strategy = federation.strategy()
    _, second = (
        strategy.start(
            InlineGrid(federation.app(), federation.clients), federation.initial(), num_rounds=rounds
        )
        for rounds in (1, 2)
    )
    same_numbers(
        "the second start has other numbers than the first one of another strategy",
        numbers(second),
        numbers(undisturbed(case).result),
        "the same: reset all state",
    )


def threads_give_the_same_numbers(case: Case) -> None:
    """Check that clients in threads give the same numbers as clients in turn."""
    one = numbers(undisturbed(case).result)
    three = numbers(case.federation().run(grid={"workers": 3})[1])
    same_numbers("3 threads give other numbers than 1", three, one)


def reused_models_give_the_same_numbers(case: Case) -> None:
    """Check that clients which are lent one model after the other give the numbers of clients that build theirs."""
    reused, federation = undisturbed(case), case.federation()
    federation.pool = None
    equal("the models that were built for clients in turn", reused.built, len(set(federation.models)))
    same_numbers("reused models give other numbers", numbers(reused.result), numbers(federation.run()[1]))


def message_clients_give_the_same_numbers(case: Case) -> None:
    """Check that clients of the Message API, beside a ``NumPyClient``, give the same numbers, to the last bit."""
    federation = case.federation()
    federation.message_api = range(1, federation.clients)
    strategy, result = federation.run()
    kinds = [node.message_api for node in inside.nodes_in_order(strategy)]
    equal("which clients are of the Message API", kinds, [False, True, True, True])
    same_numbers(
        "clients of the Message API give other numbers",
        numbers(result),
        numbers(undisturbed(case).result),
        "those of a NumPyClient",
    )


def processes_give_the_same_numbers(case: Case) -> None:
    """Check that clients in processes give the same numbers, to the last bit, as clients in turn."""
    with one_thread():
        one = numbers(undisturbed(case).result)
        two = numbers(case.federation().run(kind=ProcessGrid, grid={"workers": 2})[1])
    same_numbers("2 processes give other numbers than this one", two, one)


def _same_state(a: KDStrategy[Any, Any], b: KDStrategy[Any, Any]) -> bool:
    left, right = a.state_arrays(), b.state_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def state_survives_save_and_resume(case: Case) -> None:
    """Check that a checkpoint holds the arrays and all of the strategy's state."""
    federation = case.federation()
    with _folder() as folder:
        saved, first = federation.run(rounds=2, checkpoint_dir=folder)
        restored = federation.strategy(checkpoint_dir=folder, resume=True)
        inside.begin(restored, federation.initial())
        checkpoint = inside.load_checkpoint(restored)
    ensure(checkpoint is not None, "no checkpoint was written", "one")
    last, arrays = checkpoint or (0, None)
    equal("the checkpoint's round", last, 2)
    ensure(_same_state(saved, restored), "state_arrays() after loading differs", "the same arrays")
    if case.method.global_model:
        loaded = {name: value.data for name, value in (arrays or ArrayRecord()).items()}
        ensure(loaded == {name: a.data for name, a in first.arrays.items()}, "the arrays differ", "the same")


def resumed_run_equals(case: Case) -> None:
    """Check that a run that is resumed after round 2 has the numbers of an uninterrupted one in round 3.

    Clients have a ``state-dir``, so that what they keep outlives the run.
    """
    federation = case.federation()
    _, whole = federation.run(rounds=3)
    with _folder() as folder:
        nodes = [{"state-dir": str(folder / "clients")}] * federation.clients
        kept: dict[str, Any] = {"grid": {"node_configs": nodes}, "checkpoint_dir": folder / "server"}
        federation.run(rounds=2, **kept)
        _, rest = federation.run(rounds=3, resume=True, **kept)
    equal("rounds after resuming", [r.server_round for r in rest.rounds], [3])
    same_numbers(
        "the resumed run has other numbers", numbers(rest), numbers(whole)[2:], "those of a whole run"
    )


def models_may_differ(case: Case) -> None:
    """Check that clients may have different models."""
    federation = case.federation()
    federation.models = ["mlp", "lenet", "mlp", "cnn"]
    _, result = federation.run()
    equal("participants of the last round", result.rounds[-1].participants, 4)


def another_model_is_refused(case: Case) -> None:
    """Check that a client with another model is refused before training, with a text that says why."""
    federation = case.federation()
    federation.models = ["mlp", "lenet", "mlp", "mlp"]
    expected = "a HandshakeError: 3 clients fit, 4 are needed; refused: node ... arrays missing"
    try:
        with quiet():
            federation.run()
    except HandshakeError as error:
        text = str(error)
        start = "3 clients fit, 4 are needed; refused: node "
        ensure(start in text and "arrays missing" in text.partition(start)[2], text, expected)
    else:
        ensure(False, "the run went on", expected)
