"""Federations with malicious clients: every method survives every attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, MetricRecord, RecordDict
from flwr.client import NumPyClient

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments import data, runner
from flwr_kd.experiments.attacks import (
    Attack,
    InnerProduct,
    MaliciousClient,
    SignFlip,
    draw_attackers,
    parse_attack,
)
from flwr_kd.experiments.errors import AttackError
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.experiments.runner import run
from flwr_kd.server.records import KDResult
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.strategies.fedhkd import HyperKnowledge
from flwr_kd.strategies.fedproto.messages import Prototypes
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import Payload

pytestmark = pytest.mark.long

METHODS = list(registry.methods())


SPECS = [
    "label-flip", "label-flip:permute", "gaussian:2.0", "sign-flip:10", "nan", "payload", "payload:predictions",
    "payload:prototypes", "payload:counts",
]  # fmt: skip


FURTHER = ["scale:10", "alie:1", "ipm", "prototype-swap", "lma", "cpa", "count:100000", "imitate:0.5"]
"""Attacks of which the slow tier has most methods."""
SIMPLE = ("fedavg", "fedproto", "fedhkd", "fedmd", "fedgkt")
"""The methods that meet them sooner."""


UNTOUCHED = ("fedavg", "fedmd")
"""A method without knowledge and one without models: of the others, the slow tier has what no attack can change."""


def grouped(name: str, *values: Any, further: bool = False) -> Any:
    """Return parameters of a test; one worker has all tests of a method, which share their runs."""
    marks = [pytest.mark.xdist_group(f"attacks on {name}"), pytest.mark.first_variant]
    if further:
        marks.append(pytest.mark.slow)
    return pytest.param(name, *values, marks=marks)


every = pytest.mark.parametrize("name", [grouped(name) for name in METHODS])


def concerned(name: str, spec: str) -> bool:
    return parse_attack(spec).concerns(registry.get(name).strategy)


def methods_and_attacks(*, concern: bool) -> list[Any]:
    """Return each method with the attacks that change something that its clients send, or nothing."""
    kept = METHODS if concern else UNTOUCHED
    return [
        grouped(name, spec, further=name not in (SIMPLE if spec in FURTHER and concern else kept))
        for name in METHODS
        for spec in (*SPECS, *FURTHER)
        if concerned(name, spec) == concern
    ]


SMALL: dict[str, Any] = {
    "clients": 3, "rounds": 1, "limit": 150, "backend": "inline", "device": "cpu"
}  # fmt: skip


Run = tuple[KDStrategy, KDResult]


_runs: dict[tuple[str, str | None], Run] = {}


def two_rounds(federation: Any, name: str, spec: str | None, **grid: Any) -> Run:
    """Run a method with client 2 as the attacker, and with few steps of training at the server."""
    fed = federation(name, attack=spec, attackers={2})
    short = {"server-epochs": 2, "sector-epochs": 2, "generator-steps": 2, "synthetic-samples": 32}
    known = fed.method.config().to_wire()
    strategy = fed.strategy(*(f"{key}={value}" for key, value in short.items() if key in known))
    inline = InlineGrid(fed.app(), fed.clients, **grid)
    try:
        return strategy, strategy.start(fed.between(inline), fed.initial(), num_rounds=2, timeout=30)
    finally:
        inline.close()


@pytest.fixture
def attacked(federation: Any) -> Callable[[str, str | None], Run]:
    """Return a function that runs each method and attack once for all tests."""

    def get(name: str, spec: str | None) -> Run:
        if (name, spec) not in _runs:
            _runs[name, spec] = two_rounds(federation, name, spec)
        return _runs[name, spec]

    return get


def globals_of(ran: Run) -> dict[str, np.ndarray]:
    strategy, result = ran
    arrays = {**strategy.state_arrays(), **{name: array.numpy() for name, array in result.arrays.items()}}
    if not strategy.sends_weights and not strategy.state_arrays():
        # FedMD's server keeps nothing; the effect of its targets shows in the next round's losses.
        arrays["train-loss"] = np.array([stats.train_loss for stats in result.rounds])
    return arrays


def same(a: Run, b: Run) -> bool:
    left, right = globals_of(a), globals_of(b)
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(("name", "spec"), methods_and_attacks(concern=True))
def test_every_method_survives_every_attack(name: str, spec: str, attacked: Any) -> None:
    strategy, result = ran = attacked(name, spec)
    assert [r.server_round for r in result.rounds] == [1, 2]
    assert all(np.isfinite(value).all() for value in globals_of(ran).values())
    for stats in result.rounds:
        assert stats.participants >= 3
        assert stats.local_accuracy is not None
    fields = {name for kind in strategy.reply_payloads.values() for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    # A message that has an entry per sample says how many there are.
    dropped = (spec == "nan" and bool(strategy.reply_arrays)) or (
        spec.startswith("count:") and "index" in fields
    )
    assert (result.rounds[0].participants, result.rounds[0].failures) == ((3, 1) if dropped else (4, 0))


@pytest.mark.parametrize(("name", "spec"), methods_and_attacks(concern=False))
def test_an_attack_on_what_is_not_sent_changes_nothing(name: str, spec: str, attacked: Any) -> None:
    assert same(attacked(name, spec), attacked(name, None))


@pytest.mark.parametrize("kind", [Prototypes, HyperKnowledge])
def test_replies_with_counts_beyond_the_handshake_are_left_out(kind: type[Payload], federation: Any) -> None:
    def garble(content: RecordDict) -> None:
        # The measurement of those that were left out has none.
        if (metrics := content.config_records.get("fitres.metrics")) is not None:
            told = kind.from_bytes(metrics["payload"])
            metrics["payload"] = replace(told, counts=np.full_like(told.counts, 2**40)).to_bytes()
            content["fitres.num_examples"] = MetricRecord({"num_examples": 2**50})

    name = "fedproto" if kind is Prototypes else "fedhkd"
    faults = {index: Fault("garbage", garble=garble) for index in (1, 2)}
    _, result = federation(name).run(grid={"faults": faults}, rounds=3)
    assert [(stats.participants, stats.failures) for stats in result.rounds] == [(2, 2)] * 3


@pytest.mark.parametrize("name", [grouped(name) for name in METHODS if concerned(name, "nan")])
def test_clients_that_send_nan_are_left_out(name: str, attacked: Any, federation: Any) -> None:
    strategy, result = ran = attacked(name, "nan")
    assert strategy.reply_arrays
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (3, 1)]
    assert same(ran, two_rounds(federation, name, None, faults={2: Fault("raise")}))


@every
def test_an_attack_is_felt_where_its_target_is_sent(name: str, attacked: Any) -> None:
    strategy, _ = honest = attacked(name, None)
    fields = {f for kind in strategy.reply_payloads.values() for f in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    felt = {
        "label-flip": True,
        "gaussian:2.0": bool(strategy.reply_arrays),
        "sign-flip:10": bool(strategy.reply_arrays),
        "payload:predictions": bool(fields & {"predictions", "logits"}),
        "payload:prototypes": bool(fields & {"prototypes", "representations", "features"}),
    }
    if name in SIMPLE:
        felt["alie:1"] = felt["ipm"] = felt["scale:10"] = felt["sign-flip:10"]
        felt["lma"] = felt["cpa"] = felt["payload:predictions"]
        felt["imitate:0.5"] = bool(strategy.reply_arrays) or "predictions" in fields
        felt["prototype-swap"] = bool(fields & {"prototypes", "representations"})
    for spec, expected in felt.items():
        assert concerned(name, spec) is expected
        if expected:
            assert not same(attacked(name, spec), honest), spec


@every
def test_same_seed_same_numbers(name: str, attacked: Any, federation: Any, numbers: Any) -> None:
    spec = "gaussian:2.0" if registry.get(name).strategy.reply_arrays else "label-flip:permute"
    again = two_rounds(federation, name, spec, workers=3, seed=3)
    assert numbers(attacked(name, spec)[1]) == numbers(again[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedhkd"])
def test_attackers_see_the_same_on_all_backends(name: str) -> None:
    experiment = Experiment(**SMALL, attack="ipm", attackers=1)
    method = registry.get(name)
    inline, processes, honest = (
        run(method, one).rounds
        for one in (experiment, replace(experiment, backend="processes", workers=2), Experiment(**SMALL))
    )
    told = [
        [(r.local_accuracy, r.train_loss, r.global_accuracy) for r in rounds]
        for rounds in (inline, processes)
    ]
    assert told[0] == told[1]
    assert inline[-1].global_accuracy != honest[-1].global_accuracy


@pytest.mark.parametrize(("spec", "kind"), [("sign-flip", SignFlip), ("ipm", InnerProduct)])
def test_an_attack_that_fails_in_the_last_round_ends_the_run(
    spec: str, kind: type[Attack], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = Experiment(**{**SMALL, "rounds": 2}, attack=spec, attackers=1)
    method, folder = registry.get("fedavg"), tmp_path / "run"
    whole = run(method, experiment)
    attack, calls = kind.models, []

    def fail_second(self: Attack, *args: Any, **options: Any) -> Any:
        calls.append(self)
        if len(calls) >= 2:
            raise ZeroDivisionError("no update")
        return attack(self, *args, **options)

    rounds: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(kind, "models", fail_second)
        with pytest.raises(AttackError, match=r"^fedavg: the attack failed: no update$"):
            run(
                method,
                experiment,
                checkpoint_dir=folder,
                on_round=lambda stats: rounds.append(stats.server_round),
            )
    assert rounds == [1]
    # The round is repeated, with what it would have given.
    again = run(method, experiment, checkpoint_dir=folder, resume=True)
    told = [
        [(r.local_accuracy, r.train_loss, r.participants) for r in result.rounds] for result in (whole, again)
    ]
    assert told[0] == told[1]


def test_attackers_are_drawn_by_the_seed() -> None:
    drawn = [draw_attackers(10, 4, seed) for seed in range(50)]
    assert all(len(each) == 4 and each <= set(range(10)) for each in drawn)
    assert frozenset().union(*drawn) == set(range(10))
    assert draw_attackers(10, 4, 0) == draw_attackers(10, 4, 0)
    assert [len(draw_attackers(3, number, 0)) for number in range(4)] == [0, 1, 2, 3]
    for wrong in (-1, 4):
        with pytest.raises(ConfigError, match=f"attackers must be a whole number from 0 to 3, got {wrong}"):
            draw_attackers(3, wrong, 0)


def test_the_same_clients_attack_in_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[int]] = {}

    class Spy(MaliciousClient):
        def __init__(self, client: NumPyClient, attack: Attack, *, partition: int) -> None:
            super().__init__(client, attack, partition=partition)
            seen.setdefault(type(client).__name__, set()).add(partition)

    monkeypatch.setattr(runner, "MaliciousClient", Spy)
    experiment = Experiment(**SMALL, seed=4, attack="gaussian:0.1", attackers=2)
    results = [run(registry.get(name), experiment) for name in ("fedavg", "fedproto")]
    assert seen == dict.fromkeys(("FedAvgClient", "FedProtoClient"), attacker_ids(experiment))
    assert len(attacker_ids(experiment)) == 2
    assert attacker_ids(Experiment(**SMALL)) == frozenset()
    assert results[0].histogram == results[1].histogram == run(
        registry.get("fedavg"), Experiment(**SMALL, seed=4)
    ).histogram  # fmt: skip
    assert (experiment.shared()["attack"], experiment.shared()["attackers"]) == ("gaussian:0.1", 2)


def test_a_label_flipper_is_measured_on_honest_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(**SMALL, attack="label-flip:3", attackers=1)
    (index,) = attacker_ids(experiment)
    labels = data.bundle_of(experiment).train.y
    seen: dict[int, tuple[list[int], list[int]]] = {}
    method = registry.get("fedavg")

    class Spy(FedAvgClient):
        def __init__(
            self, model: Any, train_set: Any, test_set: Any, *, context: Context, **options: Any
        ) -> None:
            super().__init__(model, train_set, test_set, context=context, **options)
            seen[int(context.node_config["partition-id"])] = (train_set.y.tolist(), test_set.y.tolist())

    monkeypatch.setattr(registry.Method, "client", property(lambda method: Spy))
    run(method, experiment)
    for client, (train, test) in enumerate(data.client_splits(experiment)):
        expected = [3] * len(train) if client == index else labels[train].tolist()
        assert seen[client] == (expected, labels[test].tolist())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attack": "nan"}, "attack 'nan' needs attackers from 1, got 0"),
        ({"attackers": 2}, r"attackers=2 needs an attack, one of label-flip\[:TARGET\], .*; got none"),
        ({"attack": "nan", "attackers": 4}, "attackers must be at most clients=3, got 4"),
        ({"attack": "nan", "attackers": -1}, "attackers must be a whole number from 0, got -1"),
        ({"attack": "nan", "attackers": 1.0}, "attackers must be a whole number from 0, got 1.0"),
        ({"attack": "none", "attackers": 1}, "unknown attack 'none'; valid: label-flip"),
        ({"attack": "gaussian:-1", "attackers": 1}, "SIGMA must be a finite number above 0, got '-1'"),
    ],
)
def test_what_is_not_allowed_is_refused_at_construction(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Experiment(**SMALL, **options)


def test_a_target_that_is_no_class_is_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_inline", lambda *a, **k: pytest.fail("it ran"))
    experiment, method = Experiment(**SMALL, attack="label-flip:10", attackers=1), registry.get("fedavg")
    for refuse in (
        lambda: run(method, experiment),
        lambda: runner.check(experiment, method.config(), method),
    ):
        with pytest.raises(ConfigError, match=r"TARGET must be in 0..9, the classes, got 10"):
            refuse()
