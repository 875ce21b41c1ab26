"""pFedDF's rounds against the oracle, fine-tuning, failures, resumption, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
import watched
from ensemble_rounds import CLASSES, FEATURES, N_G, N_L, RATE, data, descend, double, full, p_net, reference
from ensembles import close
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.personal_state import PersonalState
from flwr_kd.learning.batches import DatasetError
from flwr_kd.server.records import HandshakeError, KDResult, Node, RoundStats
from flwr_kd.strategies.feddf import FedDF, FedDFClient, FedDFConfig, PFedDF, PFedDFClient, PFedDFConfig
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import WORK_SECONDS
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.template import ArrayTemplate

KINDS = ("linear", "hidden", "norm")
WHO = ("linear", "hidden", "norm", "hidden", "norm", "linear")
P_SIZES = (5, 9, 14, 7, 11, 6)
TUNING = 4
FULL: dict[str, Any] = {"local_epochs": N_L, "batch_size": 64, "optimizer": "sgd", "learning_rate": RATE}
FULL |= {"weight_decay": 0.0, "validation_share": 0.0, "server_epochs": N_G, "finetune_epochs": TUNING}
FULL |= {"average": "probabilities"}
# Settings that use small batches, dropout and early stopping.
SMALL: dict[str, Any] = {"batch_size": 4, "validation_share": 0.3, "patience": 2, "optimizer": "adam"}
SMALL |= {"learning_rate": 0.01}
Prototypes = dict[str, dict[str, Tensor]]


def p_data(index: int) -> tuple[Tensor, Tensor]:
    return data(index, P_SIZES[index])


class PRun:
    """Clients of several architectures; the prototypes are kept, round by round."""

    def __init__(
        self,
        who: Sequence[str] = WHO,
        kinds: Sequence[str] | None = None,
        *,
        options: dict[str, Any] | None = None,
        classes: dict[int, int] | None = None,
        **config: Any,
    ) -> None:
        self.who, self.classes = who, classes or {}
        kinds = list(dict.fromkeys(who)) if kinds is None else kinds
        given: dict[str, Any] = {"models": [p_net(kind) for kind in kinds]}
        given |= {"public_set": TensorDataset(reference()), "device": "cpu"}
        given |= {"min_available_nodes": len(who), "on_round": self.keep} | (options or {})
        self.strategy = PFedDF(PFedDFConfig(**(FULL | config)), **given)
        self.states: list[dict[str, np.ndarray]] = [self.strategy.state_arrays()]
        self.calls: list[tuple[str, int, int]] = []

    def keep(self, stats: RoundStats) -> None:
        self.states.append({name: value.copy() for name, value in self.strategy.state_arrays().items()})

    def app(self) -> ClientApp:
        run = self

        class Noted(PFedDFClient):
            def fit(self, parameters: Any, config: Any) -> Any:
                run.calls.append(
                    (config["phase"], config["server-round"], self.context.node_config["partition-id"])
                )
                return super().fit(parameters, config)

        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            model = p_net(run.who[index], seed=50 + index, classes=run.classes.get(index, CLASSES))
            train, test = TensorDataset(*p_data(index)), TensorDataset(*data(100 + index, 8))
            return Noted(model, train, test, context=context, device="cpu").to_client()

        return ClientApp(client_fn=client_fn)

    def start(self, rounds: int = 1, **grid: Any) -> KDResult:
        self.grid = InlineGrid(self.app(), len(self.who), work_seconds=WORK_SECONDS, **grid)
        return self.strategy.start(self.grid, ArrayRecord(), rounds, timeout=0.3)

    def prototype(self, group: int, after: int = -1) -> dict[str, np.ndarray]:
        start = f"prototypes/{group}/"
        state = self.states[after]
        return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}

    def personal(self, index: int) -> dict[str, Tensor] | None:
        contexts = {c.node_config["partition-id"]: c for c in self.grid.contexts.values()}
        return PersonalState(contexts[index]).load()

    def asked(self, phase: str, server_round: int) -> list[int]:
        return sorted(index for name, number, index in self.calls if (name, number) == (phase, server_round))


def initial_prototypes(kinds: Sequence[str] = KINDS) -> Prototypes:
    return {kind: dict(p_net(kind).double().state_dict()) for kind in kinds}


def trained_by_hand(prototypes: Prototypes, index: int, epochs: int = N_L) -> nn.Sequential:
    model, (x, y) = double(WHO[index], prototypes[WHO[index]]), p_data(index)
    descend(model, x.double(), nn.functional.one_hot(y, CLASSES).double(), epochs)
    return model


def mean_by_hand(models: Sequence[nn.Module], sizes: Sequence[int]) -> dict[str, Tensor]:
    states = [model.state_dict() for model in models]
    actual = {}
    for name, value in states[0].items():
        mean = sum(n / sum(sizes) * s[name].double() for n, s in zip(sizes, states, strict=True))
        assert isinstance(mean, Tensor)
        actual[name] = mean if value.is_floating_point() else mean.round().long()
    return actual


def round_by_hand(
    prototypes: Prototypes, present: Sequence[int], average: str, distilled: Sequence[str] = KINDS
) -> Prototypes:
    """Run one round of FedDF with groups, in float64.

    A teacher's share is its samples' share of all samples for probabilities, and the same for all for logits.
    """
    x = reference().double()
    local = {k: trained_by_hand(prototypes, k) for k in present}
    counts = {k: 1 if average == "logits" else P_SIZES[k] for k in present}
    with torch.no_grad():
        outputs = {k: model.eval()(x) for k, model in local.items()}
        if average == "probabilities":
            outputs = {k: u.softmax(dim=1) for k, u in outputs.items()}
        targets = sum(counts[k] / sum(counts.values()) * u for k, u in outputs.items())
        assert isinstance(targets, Tensor)
        targets = targets.softmax(dim=1) if average == "logits" else targets
    new = dict(prototypes)
    for kind in prototypes:
        members = [k for k in present if WHO[k] == kind]
        if not members:
            continue
        student = double(kind, mean_by_hand([local[k] for k in members], [P_SIZES[k] for k in members]))
        if kind in distilled:
            descend(student, x, targets, N_G)
        new[kind] = dict(student.state_dict())
    return new


def same(found: dict[str, np.ndarray], expected: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=atol, err_msg=name)
        assert found[name].dtype == (np.float32 if value.is_floating_point() else np.int64)
        assert found[name].shape == tuple(value.shape)


def accuracy(model: nn.Module, index: int) -> float:
    x, y = data(100 + index, 8)
    with torch.no_grad():
        return float((model.eval()(x.double()).argmax(dim=1) == y).double().mean())


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_rounds_of_heterogeneous_models_equal_the_oracle(average: str) -> None:
    """Among them are models with running statistics: means of the clients', then moved by the public data."""
    run = PRun(average=average)
    result = run.start(2)
    expected = initial_prototypes()
    for number in (1, 2):
        before, expected = expected, round_by_hand(expected, range(6), average)
        for group, kind in enumerate(KINDS):
            same(run.prototype(group, number), expected[kind])
            moved = (expected[kind]["1.weight"] - before[kind]["1.weight"]).abs().max()
            assert moved > 1e-3
    assert int(expected["norm"]["2.num_batches_tracked"]) == 2 * (N_L + N_G)
    tuned = [trained_by_hand(expected, k, TUNING) for k in range(6)]
    for k, model in enumerate(tuned):
        personal = run.personal(k)
        assert personal is not None
        same({name: value.numpy() for name, value in personal.items()}, dict(model.state_dict()))
    local = [trained_by_hand(initial_prototypes(), k) for k in range(6)]
    first, last = ([accuracy(model, k) for k, model in enumerate(models)] for models in (local, tuned))
    assert [result.rounds[i].local_accuracy for i in (0, 1)] == pytest.approx([np.mean(first), np.mean(last)])
    assert [(r.participants, r.failures) for r in result.rounds] == [(6, 0)] * 2


def test_the_groups_learn_from_each_other() -> None:
    """Its own group alone would teach a prototype something else: the oracle above is no accident."""
    all_of_them = round_by_hand(initial_prototypes(), range(6), "probabilities")
    alone = round_by_hand(initial_prototypes(), [1, 3], "probabilities")
    assert (all_of_them["hidden"]["3.weight"] - alone["hidden"]["3.weight"]).abs().max() > 1e-3


def test_what_heterogeneous_models_cost() -> None:
    run = PRun()
    result = run.start(2)
    size = {
        kind: sum(len(value.data) for value in ArrayRecord(p_net(kind).state_dict()).values())
        for kind in KINDS
    }
    train, last = ({k: size[kind] * times for k, kind in enumerate(WHO)} for times in (1, 2))
    assert result.rounds[0].bytes_by_partition == {k: (train[k], train[k]) for k in range(6)}
    # The fine-tuned models stay where they are.
    assert result.rounds[1].bytes_by_partition == {k: (last[k], train[k]) for k in range(6)}


def hostile(who: Sequence[int], value: float, rounds: Sequence[int] = (1,)) -> dict[int, Fault]:
    return {k: Fault("garbage", frozenset(rounds), garble=full(value)) for k in who}


@pytest.mark.parametrize("kind", ["hidden", "drop"])
@pytest.mark.parametrize("bad", [[], [2], [0, 1, 2, 3, 4, 5]], ids=["all honest", "one bad", "all bad"])
@pytest.mark.parametrize("options", [{}, {"fraction_train": 0.5}])
def test_one_group_is_feddf_to_the_last_bit(kind: str, bad: list[int], options: dict[str, Any]) -> None:
    faults = hostile(bad, 1e38, rounds=(2,))
    run = PRun([kind] * 6, options=options, **SMALL)
    grouped = run.start(3, faults=faults)
    config = {name: value for name, value in (FULL | SMALL).items() if name != "finetune_epochs"}
    given: dict[str, Any] = {"public_set": TensorDataset(reference()), "min_available_nodes": 6}
    plain = FedDF(FedDFConfig(**config), model=p_net(kind, seed=3), device="cpu", **given, **options)

    def client_fn(context: Context) -> Any:
        index = int(context.node_config["partition-id"])
        train, test = TensorDataset(*p_data(index)), TensorDataset(*data(100 + index, 8))
        return FedDFClient(p_net(kind), train, test, context=context, device="cpu").to_client()

    models: list[dict[str, np.ndarray]] = []
    result = plain.start(
        InlineGrid(ClientApp(client_fn=client_fn), 6, faults=faults),
        ArrayRecord(p_net(kind).state_dict()),
        3,
        evaluate_fn=lambda _, arrays: models.append({n: a.numpy() for n, a in arrays.items()}),
    )
    for number in (1, 2, 3):
        actual = run.prototype(0, number)
        assert actual.keys() == models[number].keys()
        for name, value in actual.items():
            np.testing.assert_array_equal(value, models[number][name], err_msg=name)
    for one, other in list(zip(grouped.rounds, result.rounds, strict=True))[:2]:
        for name in ("local_accuracy", "train_loss", "bytes_by_partition", "participants", "failures"):
            assert getattr(one, name) == getattr(other, name)
    assert grouped.rounds[2].train_loss == result.rounds[2].train_loss


def test_models_with_the_same_arrays_are_one_group() -> None:
    given = [p_net("hidden", seed=4), p_net("linear"), p_net("hidden", seed=5), p_net("linear", seed=6)]
    run = PRun(options={"models": given}, who=["linear", "hidden"])
    assert len(run.strategy.prototypes) == 2
    for group in (0, 1):
        for name, value in given[group].state_dict().items():
            np.testing.assert_array_equal(run.strategy.prototypes[group][name], value.numpy())


def test_a_group_without_answers_keeps_its_prototype(flower_log: list[str]) -> None:
    run = PRun()
    result = run.start(2, faults={k: Fault("raise", frozenset({1})) for k in (1, 3)})
    assert [(r.participants, r.failures) for r in result.rounds] == [(4, 2), (6, 0)]
    first = round_by_hand(initial_prototypes(), [0, 2, 4, 5], "probabilities")
    second = round_by_hand(first, range(6), "probabilities")
    for name, value in p_net("hidden").state_dict().items():
        np.testing.assert_array_equal(run.prototype(1, 1)[name], value.numpy())
    for group, kind in enumerate(KINDS):
        same(run.prototype(group, 1), first[kind])
        same(run.prototype(group, 2), second[kind])
    lines = [line for line in flower_log if "its prototype does not change" in line]
    assert lines == ["round 1: no usable model arrived for models[1]; its prototype does not change"]


def test_a_model_that_no_client_has(flower_log: list[str]) -> None:
    run = PRun(["linear", "linear"], ["hidden", "linear"])
    run.start(2)
    for name, value in p_net("hidden").state_dict().items():
        np.testing.assert_array_equal(run.prototype(0)[name], value.numpy())
    assert not any("its prototype does not change" in line for line in flower_log)


def test_a_teacher_of_a_group_without_finite_outputs(flower_log: list[str]) -> None:
    """It is left out of the ensemble and of its group's mean, as if it had not replied."""
    poisoned, without = PRun(), PRun()
    poisoned.start(1, faults=hostile([3], 1e38))
    without.start(1, faults={3: Fault("raise", frozenset({1}))})
    assert any(
        "(partition 3) has outputs that are not finite, and is left out" in line for line in flower_log
    )
    for name, value in without.states[1].items():
        np.testing.assert_array_equal(poisoned.states[1][name], value, err_msg=name)


def test_a_group_of_nothing_but_such_teachers(flower_log: list[str]) -> None:
    poisoned, without = PRun(), PRun()
    result = poisoned.start(2, faults=hostile([1, 3], 1e38))
    without.start(2, faults={k: Fault("raise", frozenset({1})) for k in (1, 3)})
    assert [(r.participants, r.failures) for r in result.rounds] == [(6, 0)] * 2
    for after in (1, 2):
        for name, value in without.states[after].items():
            np.testing.assert_array_equal(poisoned.states[after][name], value, err_msg=name)
    for partition in (1, 3):
        assert any(f"(partition {partition}) has outputs that are not finite" in line for line in flower_log)


@pytest.mark.parametrize("value", [1e30, -3e38])
@pytest.mark.parametrize("who", [[0], [1, 3], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_huge_weights_in_groups(who: list[int], value: float, average: str) -> None:
    run = PRun(average=average)
    result = run.start(2, faults=hostile(who, value))
    # Negative running variances are refused before anything is made of them.
    dropped = sum(WHO[k] == "norm" for k in who) if value < 0 else 0
    assert (result.rounds[0].participants, result.rounds[0].failures) == (6 - dropped, dropped)
    for state in run.states:
        for name, array in state.items():
            assert np.isfinite(array).all(), name


def test_a_distillation_that_is_not_finite_costs_only_its_own_group(flower_log: list[str]) -> None:
    """Public data of 1e20 are too much for a linear model's steps, and nothing special for a bounded one."""
    public = 1e20 * reference().sign()
    who = ["linear", "soft", "linear", "soft"]
    run = PRun(who, options={"public_set": TensorDataset(public)})
    run.start(1)
    local = []
    for k, kind in enumerate(who):
        model, (x, y) = p_net(kind).double(), p_data(k)
        descend(model, x.double(), nn.functional.one_hot(y, CLASSES).double(), N_L)
        local.append(model)
    same(run.prototype(0), mean_by_hand([local[0], local[2]], [P_SIZES[0], P_SIZES[2]]))
    with torch.no_grad():
        shares = [n / sum(P_SIZES[:4]) for n in P_SIZES[:4]]
        targets = sum(p * m(public.double()).softmax(dim=1) for p, m in zip(shares, local, strict=True))
        assert isinstance(targets, Tensor)
    student = p_net("soft").double()
    student.load_state_dict(mean_by_hand([local[1], local[3]], [P_SIZES[1], P_SIZES[3]]))
    descend(student, public.double(), targets, N_G)
    same(run.prototype(1), dict(student.state_dict()))
    assert any("round 1: the server's distillation of models[0] is left out" in line for line in flower_log)
    assert not any("of models[1]" in line for line in flower_log)


def test_a_client_that_sends_another_groups_model_is_dropped(flower_log: list[str]) -> None:
    def other(content: RecordDict) -> None:
        for record in content.array_records.values():
            record.clear()
            record.update(
                {str(i): Array(v.numpy()) for i, v in enumerate(p_net("hidden").state_dict().values())}
            )

    run = PRun()
    result = run.start(1, faults={0: Fault("garbage", frozenset({1}), garble=other)})
    # An attack also hits the fine-tuning phase, although no models come back from it.
    assert (result.rounds[0].participants, result.rounds[0].failures) == (5, 2)
    expected = round_by_hand(initial_prototypes(), range(1, 6), "probabilities")
    for group, kind in enumerate(KINDS):
        same(run.prototype(group), expected[kind])
    assert any("4 arrays came back, expected 2" in line for line in flower_log)


@pytest.mark.parametrize("attack", ["nan", "sign-flip:3", "gaussian:1", "label-flip"])
def test_an_attacker_goes_through_both_phases(federation: Any, attack: str) -> None:
    fed = federation("pfeddf", attack=attack, attackers=[1])
    fed.models = ["mlp", "lenet", "mlp", "lenet"]
    strategy, result = fed.run(rounds=2)
    lost = int(attack == "nan")
    assert [(r.participants, r.failures) for r in result.rounds] == [(4 - lost, lost)] * 2
    assert all(np.isfinite(value).all() for value in strategy.state_arrays().values())
    assert result.rounds[-1].clients.keys() == {0, 1, 2, 3}


def test_all_clients_fine_tune_after_the_last_round_and_only_then() -> None:
    run = PRun(options={"fraction_train": 0.5, "seed": 1})
    result = run.start(3)
    for number in (1, 2, 3):
        assert len(run.asked("train", number)) == 3
    assert [run.asked("finetune", number) for number in (1, 2, 3)] == [[], [], list(range(6))]
    assert [r.participants for r in result.rounds] == [3, 3, 3]
    assert [sorted(r.clients) for r in result.rounds[:2]] == [run.asked("train", n) for n in (1, 2)]
    assert sorted(result.rounds[2].clients) == list(range(6))
    assert "finetune-loss" not in result.train_metrics_clientapp[2]
    assert 0 < result.train_metrics_clientapp[3]["finetune-loss"] < 1.5
    # A round's loss is that of its training.
    run.calls.clear()
    longer = PRun(options={"fraction_train": 0.5, "seed": 1}).start(4)
    assert result.rounds[2].train_loss == longer.rounds[2].train_loss


def test_a_last_round_without_answers_is_followed_by_fine_tuning() -> None:
    """The prototypes of the round before are there."""
    run = PRun()
    faults = {k: Fault("raise", frozenset({2})) for k in range(5)}

    def fails_in_training(content: RecordDict) -> None:
        if (
            len(content.array_records["fitres.parameters"])
            and "0" in content.array_records["fitres.parameters"]
        ):
            GARBAGE["arrays-of-nan"](content)

    faults[5] = Fault("garbage", frozenset({2}), garble=fails_in_training)
    result = run.start(2, faults=faults)
    assert (result.rounds[1].participants, result.rounds[1].failures) == (0, 5 + 5 + 1)
    assert run.states[1].keys() == run.states[2].keys()
    assert all(np.array_equal(run.states[1][name], value) for name, value in run.states[2].items())
    assert [k for k in range(6) if run.personal(k) is not None] == [5]
    assert sorted(result.rounds[1].clients) == [5]


def test_nothing_is_fine_tuned_before_anything_was_learnt() -> None:
    run = PRun()
    result = watched.void(lambda: run.start(2, faults={k: Fault("raise") for k in range(6)}))
    assert [(r.participants, r.failures) for r in result.rounds] == [(0, 6)] * 2
    assert run.strategy.state_arrays() == {}
    assert run.personal(0) is None


def test_a_client_that_fails_to_fine_tune_has_the_accuracy_of_its_training() -> None:
    def fails(content: RecordDict) -> None:
        if "0" not in content.array_records["fitres.parameters"]:
            GARBAGE["metrics-of-nan"](content)

    run, whole = PRun(), PRun()
    result = run.start(1, faults={2: Fault("garbage", garble=fails)})
    other = whole.start(1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (6, 1)
    trained = accuracy(trained_by_hand(initial_prototypes(), 2), 2)
    assert result.rounds[0].clients == other.rounds[0].clients | {2: {"local-accuracy": trained}}


def test_without_fine_tuning_the_prototypes_are_measured() -> None:
    run = PRun(finetune_epochs=0)
    result = run.start(2)
    expected = round_by_hand(
        round_by_hand(initial_prototypes(), range(6), "probabilities"), range(6), "probabilities"
    )
    actual = [accuracy(double(WHO[k], expected[WHO[k]]), k) for k in range(6)]
    assert result.rounds[1].local_accuracy == pytest.approx(np.mean(actual))
    assert "finetune-loss" not in result.train_metrics_clientapp[2]
    for k, kind in enumerate(WHO):
        personal, prototype = run.personal(k), run.prototype(KINDS.index(kind))
        assert personal is not None
        assert all(np.array_equal(personal[name].numpy(), value) for name, value in prototype.items())


def test_the_learning_rate_of_the_last_round_is_that_of_fine_tuning() -> None:
    run = PRun(lr_decay=0.5, lr_decay_every=1, server_epochs=1, local_epochs=1)
    run.start(2)
    prototype, personal = run.prototype(0), run.personal(0)
    assert personal is not None
    start = oracle.linear(prototype["1.weight"], prototype["1.bias"])
    own = oracle.samples(*(part.numpy() for part in p_data(0)))
    expected = oracle.train(start, own, RATE / 2, TUNING)
    close(oracle.linear(personal["1.weight"].numpy(), personal["1.bias"].numpy()), expected)


def test_pfeddfs_defaults() -> None:
    config = PFedDFConfig()
    assert config.finetune_epochs == 20
    assert config.to_wire() == FedDFConfig().to_wire() | {"finetune-epochs": 20, "average": "logits"}
    with pytest.raises(ConfigError, match=r"finetune-epochs must be >= 0, got -1"):
        PFedDFConfig(finetune_epochs=-1)


def test_a_resumed_run_of_groups_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Dropout, what is held out, and running statistics included."""
    who = ["linear", "drop", "norm", "drop"]
    whole = PRun(who, **SMALL)
    expected = whole.start(3)
    PRun(who, options={"checkpoint_dir": tmp_path}, **SMALL).start(2)
    rest = PRun(who, options={"checkpoint_dir": tmp_path, "resume": True}, **SMALL)
    result = rest.start(3)
    assert [r.server_round for r in result.rounds] == [3]
    assert rest.states[-1].keys() == whole.states[-1].keys()
    for name, value in whole.states[-1].items():
        np.testing.assert_array_equal(rest.states[-1][name], value, err_msg=name)
    assert result.rounds[0].clients == expected.rounds[2].clients
    assert result.rounds[0].train_loss == expected.rounds[2].train_loss
    for k in range(4):
        mine, theirs = rest.personal(k), whole.personal(k)
        assert mine is not None
        assert theirs is not None
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_a_resumed_run_whose_last_round_has_no_answers(tmp_path: Path) -> None:
    """The prototypes of before the resumption are fine-tuned and kept."""
    PRun(options={"checkpoint_dir": tmp_path}).start(2)
    rest = PRun(options={"checkpoint_dir": tmp_path, "resume": True})
    result = rest.start(3, faults={k: Fault("raise", frozenset({3})) for k in range(6)})
    assert (result.rounds[0].participants, result.rounds[0].failures) == (0, 12)
    whole = PRun()
    whole.start(2)
    assert rest.states[-1].keys() == whole.states[-1].keys()
    assert all(np.array_equal(rest.states[-1][name], value) for name, value in whole.states[-1].items())


def test_a_checkpoint_of_other_models_is_refused(tmp_path: Path) -> None:
    who = ["linear", "hidden"]
    PRun(who, options={"checkpoint_dir": tmp_path}).start(1)
    again = {"checkpoint_dir": tmp_path, "resume": True}
    with pytest.raises(
        ConfigError, match=r"the checkpoint's prototype 0 is not of models\[0\]: arrays missing"
    ):
        PRun(who, ["hidden", "linear"], options=again).start(2)
    with pytest.raises(ValueError, match=r"PFedDF has prototypes of 1 groups as state, got 'prototypes/1/1"):
        PRun(["linear"], options=again).start(2)
    with pytest.raises(ValueError, match=r"of 2 groups as state, got 'matrix'"):
        PRun(who).strategy.load_state_arrays({"matrix": np.zeros(2)})
    three = PRun(["linear", "hidden", "norm"], options=again)
    with pytest.raises(ConfigError, match=r"the checkpoint's prototype 2 is not of models\[2\]"):
        three.start(2)
    # The refused checkpoint has not changed the strategy.
    assert three.strategy.state_arrays() == {}


def test_what_the_state_holds_is_not_changed_by_the_next_round() -> None:
    run = PRun()
    run.start(1)
    state = run.strategy.state_arrays()
    kept = {name: value.copy() for name, value in state.items()}
    run.strategy.load_state_arrays(state)
    run.start(1)
    for name, value in kept.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
        np.testing.assert_array_equal(run.states[1][name], value, err_msg=name)  # and began anew


def test_heterogeneous_models_are_refused_before_training() -> None:
    run = PRun(["linear", "hidden", "norm"], ["linear", "norm"])
    text = (
        r"2 clients fit, 3 are needed; refused: node \d+: its model is none of models, the nearest is models\[0\]: "
        r"arrays missing \[\], not expected \['3\.bias', '3\.weight'\]"
    )
    with pytest.raises(HandshakeError, match=text):
        run.start(1)
    assert run.calls == []


def test_the_nearest_model_is_named() -> None:
    wider = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))
    run = PRun(["linear", "hidden"], options={"models": [p_net("linear"), p_net("norm"), wider]})
    with pytest.raises(
        HandshakeError,
        match=r"nearest is models\[2\]: array '1\.weight' has shape \[6, 8\], expected \[7, 8\]",
    ):
        run.start(1)


def test_the_nearest_of_models_with_the_same_names() -> None:
    def deep(one: int, other: int) -> nn.Sequential:
        layers = [nn.Linear(FEATURES, one), nn.Tanh(), nn.Linear(one, other), nn.Tanh()]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(other, CLASSES))

    run = PRun(["linear"], options={"models": [deep(5, 6), deep(4, 5), deep(4, 6)]})
    node = Node(7, num_classes=CLASSES, template=ArrayTemplate.of(ArrayRecord(deep(4, 7).state_dict())))
    refusal = run.strategy.accept_node(node)
    # The second and the third model differ in the same number of arrays, the first one in more.
    assert refusal == (
        "its model is none of models, the nearest is models[1]: "
        "array '3.weight' has shape [7, 4], expected [5, 4]"
    )


def test_another_number_of_classes_is_refused() -> None:
    run = PRun(["linear", "hidden"], classes={1: 5})
    with pytest.raises(HandshakeError, match=r"1 clients fit, 2 are needed; .*: 5 classes, expected 3"):
        run.start(1)
    assert run.calls == []


class Unnamed(nn.Module):
    """Has features and classes, and nothing that could be learnt."""

    feature_dim, num_classes = FEATURES, CLASSES

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def classify(self, h: Tensor) -> Tensor:
        return h[:, :CLASSES]

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"models": []}, ConfigError, "models must be a list with a model per architecture, got none"),
        ({"models": p_net("linear")}, ConfigError, "a model per architecture, got Sequential"),
        ({"models": [p_net("linear"), "mlp"]}, ConfigError, r"models\[1\] cannot be used: .* got str"),
        (
            {"models": [p_net("linear"), p_net("hidden", classes=5)]},
            ConfigError,
            r"one number of classes, got 3 \(models\[0\]\) and 5 \(models\[1\]\)",
        ),
        (
            {"models": [p_net("linear"), nn.Sequential(nn.Flatten(), nn.Linear(9, CLASSES))]},
            ConfigError,
            r"models\[1\] does not take public_set of shape \[1, 2, 4\]",
        ),
        (
            {"models": [p_net("linear"), p_net("hidden").bfloat16()]},
            ConfigError,
            r"models\[1\] cannot be used: model must be kept in float32 or float64, got torch.bfloat16",
        ),
        ({"models": [Unnamed()]}, ConfigError, r"models\[0\] has no weights"),
        ({"public_set": TensorDataset(reference()[:0])}, DatasetError, "public_set is empty"),
        ({"device": "tpu"}, ConfigError, "device must be"),
    ],
)
def test_what_cannot_be_distilled_into_is_refused(options: dict[str, Any], kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        PRun(options=options)


def test_a_pair_is_a_model() -> None:
    pair = (nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 4), nn.ReLU()), nn.Linear(4, CLASSES))
    run = PRun(options={"models": [pair, p_net("linear")]}, who=["linear", "linear"])
    assert list(run.strategy.prototypes[0]) == [
        *("extractor.1.weight", "extractor.1.bias", "head.weight", "head.bias")
    ]


def test_the_given_models_are_only_looked_at() -> None:
    given = [p_net(kind).train() for kind in KINDS]
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in given]
    PRun(options={"models": given}).start(2)
    for model, kept in zip(given, before, strict=True):
        assert model.training
        assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())


def test_a_strategy_of_groups_can_be_started_again() -> None:
    run = PRun(**SMALL)
    first = [run.start(2), run.states[-1]]
    for prototype in run.strategy.prototypes:
        for value in prototype.values():
            value[...] = 0
    run.strategy.load_state_arrays({})
    for prototype in run.strategy.prototypes:
        for value in prototype.values():
            value[...] = 0
    again = [run.start(2), run.states[-1]]
    assert first[0].rounds[1].clients == again[0].rounds[1].clients
    for name, value in first[1].items():
        np.testing.assert_array_equal(again[1][name], value, err_msg=name)
