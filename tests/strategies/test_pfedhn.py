"""pFedHN's server: rounds against the oracle, embeddings, new clients, resumption, and what is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypernet as oracle
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from watched import Watched

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.learning.weights import by_prefix, get_weights
from flwr_kd.models import build_model
from flwr_kd.server.records import HandshakeError, KDResult, Node, Reply, RoundStats
from flwr_kd.strategies.pfedhn import HyperNetwork, PFedHN, PFedHNPCClient, embedding_size
from flwr_kd.testing import federation as small
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, numbers
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.template import ArrayTemplate

State = dict[str, Any]
SMALL = ("hidden-size=12", "hidden-layers=2")
STEPS = ("reply", "reply-as-sent", "round")
SGD = ("optimizer=sgd", "learning-rate=0.05")


class Run:
    """A run that is watched, with the server's state after each round."""

    def __init__(self, *settings: str, name: str = "pfedhn", rounds: int = 3, **options: Any) -> None:
        grid = options.pop("grid", {})
        self.states: list[State] = []
        fed = Federation(name)
        self.strategy: Any = fed.strategy(*SMALL, *SGD, *settings, on_round=self.note, **options)
        self.grid = Watched(fed.app(), 4, **grid)
        self.result: KDResult = self.strategy.start(self.grid, ArrayRecord(), num_rounds=rounds, timeout=30.0)

    def note(self, stats: RoundStats) -> None:
        self.states.append(self.strategy.state_arrays())

    @property
    def embeddings(self) -> list[dict[str, Any]]:
        """The embeddings after each round."""
        return [part(state, "module/embeddings.") for state in self.states]

    def check(self) -> None:
        """All that was sent, and what the server has after each round, against the oracle."""
        config, target = self.strategy.config, self.strategy.target
        clients = self.strategy.hypernetwork.module.clients
        size = config.embedding_size or embedding_size(4)
        first = HyperNetwork(
            target.shapes, embedding=size, hidden=config.hidden_size, layers=config.hidden_layers, seed=0
        )
        first.add(clients)
        mirror = oracle.HyperNet(get_weights(first), target.shapes)
        options = {
            "rate": config.server_learning_rate,
            "momentum": config.server_momentum,
            "decay": config.server_weight_decay,
            "clip": config.server_clip_norm,
        }
        for number, state in enumerate(self.states, start=1):
            passed = self.grid.of(number, "train")
            changes = {key: passed[key].up_arrays for key in sorted(passed)}
            for key, call in passed.items():
                for actual, expected in zip(call.down_arrays, mirror.produced(key), strict=True):
                    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
            # What the clients trained; Δ is taken to what is produced when it is their turn.
            goals = {
                key: [theta - delta for theta, delta in zip(mirror.produced(key), values, strict=True)]
                for key, values in changes.items()
            }
            together = [list(changes)] if config.server_steps == "round" else [[key] for key in changes]
            self.norms = []
            for keys in together:
                if config.server_steps == "reply":
                    (key,) = keys
                    now = zip(mirror.produced(key), goals[key], strict=True)
                    changes[key] = [theta - goal for theta, goal in now]
                self.norms.append(mirror.step({key: changes[key] for key in keys}, **options))
            for name, value in part(state, "module/").items():
                np.testing.assert_allclose(value, mirror.arrays[name], rtol=1e-4, atol=1e-4, err_msg=name)


def part(state: State, prefix: str) -> State:
    """Return the arrays of the hypernetwork's state whose names begin so."""
    values = by_prefix(state).get("hypernetwork", {})
    return {name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)}


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


class TestRounds:
    @pytest.mark.parametrize(
        "settings",
        [
            (),
            ("server-steps=round",),
            ("server-steps=reply-as-sent",),
            ("server-steps=reply-as-sent", "server-clip-norm=0.1", "server-weight-decay=0.1"),
            ("server-learning-rate=0.05", "server-momentum=0.0"),
            ("server-weight-decay=0.5",),
            ("server-clip-norm=0.1", "server-steps=round"),
            ("server-clip-norm=0.1",),
            ("embedding-size=5", "hidden-layers=0"),
        ],
        ids=lambda settings: ",".join(settings) or "defaults",
    )
    def test_they_are_the_oracles(self, settings: tuple[str, ...]) -> None:
        run = Run(*settings)
        run.check()
        if "server-clip-norm=0.1" in settings:
            assert min(run.norms) > 0.1

    @pytest.mark.parametrize("steps", STEPS)
    def test_with_half_of_the_clients(self, steps: str) -> None:
        Run(f"server-steps={steps}", fraction_train=0.5).check()

    @pytest.mark.parametrize(("one", "other"), list(itertools.combinations(STEPS, 2)))
    def test_the_kinds_of_steps_differ(self, one: str, other: str) -> None:
        first, second = (
            part(Run(f"server-steps={steps}", rounds=1).states[0], "module/") for steps in (one, other)
        )
        moved = [np.abs(value - second[name]).max() for name, value in first.items()]
        assert max(moved) > 1e-3

    def test_one_client_a_round_is_the_same_in_all(self) -> None:
        """As in the paper, where nothing has moved between what was sent and the step."""
        states = [
            part(Run(f"server-steps={steps}", rounds=3, fraction_train=0.25).states[-1], "module/")
            for steps in STEPS
        ]
        for name, value in states[0].items():
            for other in states[1:]:
                np.testing.assert_allclose(other[name], value, atol=1e-6)

    def test_many_replies_do_not_overshoot(self) -> None:
        """20 replies to one model: steps by Δ as it was sent go beyond what all clients trained."""
        distance = {}
        for steps in STEPS[:2]:
            strategy: Any = PFedHN(
                hidden_size=12, hidden_layers=2, embedding_size=2, server_steps=steps, server_weight_decay=0.0
            )
            strategy.prepare(ArrayRecord())
            target = ArrayTemplate.of_ndarrays({"w": np.zeros(30, np.float32)})
            nodes = [Node(key, key, template=target) for key in range(20)]
            strategy.begin(nodes)
            goal = np.linspace(1, 2, 30, dtype=np.float32)
            for number in range(1, 31):
                sent = list(strategy.configure_phase("train", number, nodes, None))
                replies = [Reply(out.node, [out.arrays["w"].numpy() - goal], 1, {}) for out in sent]
                strategy.aggregate_phase("train", number, replies, None)
            last = list(strategy.configure_phase("train", 31, nodes, None))
            distance[steps] = max(float(np.abs(out.arrays["w"].numpy() - goal).max()) for out in last)
        assert distance["reply"] < 0.05
        assert distance["reply-as-sent"] > 0.5

    def test_the_embedding_has_the_papers_size(self) -> None:
        assert {value.shape for value in Run(rounds=1).embeddings[0].values()} == {(int(1 + 4 / 4),)}

    def test_the_produced_model_is_measured_before_training(self) -> None:
        run = Run(rounds=2)
        metrics = run.result.train_metrics_clientapp
        assert all(0 <= metrics[number]["produced-accuracy"] <= 1 for number in (1, 2))  # type: ignore[operator]
        assert metrics[2]["produced-accuracy"] != metrics[2]["local-accuracy"]


class TestEmbeddings:
    @pytest.mark.parametrize("steps", STEPS)
    def test_steps_momentum_and_decay_touch_those_of_the_round_only(self, steps: str) -> None:
        """Public code steps all rows of one embedding matrix: decay and momentum move those of absent clients."""
        run = Run(f"server-steps={steps}", "server-weight-decay=0.5", fraction_train=0.25, rounds=6, seed=1)
        drawn = [{int(key) for key in run.grid.of(number, "train")} for number in range(1, 7)]
        assert len(set().union(*drawn)) > 1
        last = {key: value for key, value in run.embeddings[0].items() if int(key) not in drawn[0]}
        first = HyperNetwork([(1,)], embedding=2, seed=1)
        first.add([int(key) for key in last])
        for key, value in last.items():
            np.testing.assert_array_equal(value, get_weights(first)[f"embeddings.{key}"])
        for number in range(1, 6):
            before, after = run.states[number - 1], run.states[number]
            for key in run.embeddings[number]:
                unchanged = np.array_equal(run.embeddings[number - 1][key], run.embeddings[number][key])
                assert unchanged == (int(key) not in drawn[number])
            # The optimiser's too: there is none before a client's first step.
            slots, later = part(before, "optimizer/"), part(after, "optimizer/")
            network = part(after, "module/")
            names = list(self.ordered(run))
            for name, value in later.items():
                own = names[int(name.partition("/")[0])]
                if own.startswith("embeddings."):
                    mine = int(own.removeprefix("embeddings.")) in drawn[number]
                    assert mine or np.array_equal(value, slots[name])
            assert len(later) == len(network) - (4 - len(set().union(*drawn[: number + 1])))

    @staticmethod
    def ordered(run: Run) -> list[str]:
        return [name for name, _ in run.strategy.hypernetwork.module.named_parameters()]

    def test_all_clients_that_there_will_be_decide_the_size(self) -> None:
        """The data set's number of parts, where clients name it, and not how many are there at the start."""
        fed = Federation("pfedhn")
        strategy: Any = fed.strategy(min_available_nodes=2)
        grid = InlineGrid(fed.app(), 4)
        for context in grid.contexts.values():
            context.node_config["num-partitions"] = 40
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        assert strategy.hypernetwork.module.embeddings["0"].shape == (11,)

    def test_a_client_that_comes_later_gets_one(self) -> None:
        """Its embedding is drawn by its key, of the size that the run began with; nothing else changes by it."""

        def arrive(grid: Watched, number: int) -> None:
            grid.away = {1} if number <= 2 else set()

        late = Run("embedding-size=2", rounds=5, grid={"arrive": arrive}, min_available_nodes=3)
        whole = Run("embedding-size=2", rounds=5)
        taken = [set(late.grid.of(number, "train")) for number in range(1, 6)]
        came = next(number for number, keys in enumerate(taken) if 1 in keys)
        assert taken[0] == {0, 2, 3}
        assert 0 < came < 4
        clients = [state["clients"].tolist() for state in late.states]
        assert clients == [*[[0, 2, 3]] * came, *[[0, 2, 3, 1]] * (5 - came)]
        first = whole.grid.of(1, "train")[1].down_arrays
        # Before it came, the hypernetwork has moved: only the embedding is the one of a client of the first hour.
        assert not np.array_equal(first[0], late.grid.of(came + 1, "train")[1].down_arrays[0])
        late.check()

    def test_a_new_client_that_fails_changes_nothing(self) -> None:
        def arrive(grid: Watched, number: int) -> None:
            grid.away = {1} if number <= 1 else set()

        run = Run(rounds=4, grid={"arrive": arrive, "faults": {1: Fault("raise")}}, min_available_nodes=3)
        assert [stats.failures for stats in run.result.rounds][-1] == 1
        assert all(state["clients"].tolist() == [0, 2, 3] for state in run.states)

    def test_a_restarted_client_keeps_its_embedding(self) -> None:
        def arrive(grid: Watched, number: int) -> None:
            if number == 2:
                grid.restart(2)

        run, undisturbed = Run(rounds=3, grid={"arrive": arrive}), Run(rounds=3)
        assert same(run.states[-1], undisturbed.states[-1])


class TestMeasurements:
    def test_clients_that_were_not_drawn_are_measured_with_what_they_would_receive(self) -> None:
        run = Run(fraction_train=0.5, rounds=2)
        last = run.result.rounds[-1]
        drawn = set(run.grid.of(2, "train"))
        assert set(last.received) == {0, 1, 2, 3} - drawn
        assert not last.stored
        network, names = run.strategy.hypernetwork.module, run.strategy.target.names
        for key in last.received:
            model = small.small_model().eval()
            with torch.no_grad():
                model.load_state_dict(dict(zip(names, network(key), strict=True)))
                test = small.blobs(8, 100 + key)
                accuracy = float((model(test.x).argmax(dim=1) == test.y).double().mean())
            assert last.clients[key]["local-accuracy"] == accuracy
        assert same(run.states[-1], run.strategy.state_arrays())


def keeping(grid: InlineGrid, folder: Path) -> InlineGrid:
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(folder)
    return grid


class TestResumption:
    @pytest.mark.parametrize("model", ["mlp", "resnet8"])
    @pytest.mark.parametrize("name", ["pfedhn", "pfedhn-pc"])
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, name: str, model: str, optimizer: str, tmp_path: Path
    ) -> None:
        """Also with BatchNorm's statistics, and with classifiers and their optimiser, which are at the clients."""

        def run(rounds: int, folder: str, **options: Any) -> tuple[Any, KDResult]:
            fed = Federation(name)
            fed.models = [model] * 4
            settings = (*SMALL, f"optimizer={optimizer}", "local-epochs=1")
            strategy = fed.strategy(*settings, fraction_train=0.5, **options)
            grid = keeping(InlineGrid(fed.app(), 4, seed=options.get("resume", 0)), tmp_path / folder)
            return strategy, strategy.start(grid, ArrayRecord(), num_rounds=rounds)

        whole, expected = run(4, "whole")
        run(2, "parts", checkpoint_dir=tmp_path / "checkpoint")
        resumed, rest = run(4, "parts", checkpoint_dir=tmp_path / "checkpoint", resume=True)
        assert numbers(rest) == numbers(expected)[2:]
        assert rest.rounds[-1].clients == expected.rounds[-1].clients
        assert same(resumed.state_arrays(), whole.state_arrays())

    @pytest.mark.parametrize(
        "settings", [("hidden-size=13",), ("hidden-layers=1",)], ids=lambda settings: settings[0]
    )
    def test_another_hypernetworks_state_is_refused(self, settings: tuple[str, ...], tmp_path: Path) -> None:
        fed = Federation("pfedhn")
        fed.run(1, settings=SMALL, checkpoint_dir=tmp_path)
        with pytest.raises(ConfigError, match=r"other arrays|hypernetwork"):
            fed.run(2, settings=(*SMALL, *settings), checkpoint_dir=tmp_path, resume=True)

    @pytest.mark.parametrize(
        "change",
        [
            lambda state: state.pop("clients"),
            lambda state: state.pop("target"),
            lambda state: state.update({"else/x": np.zeros(1)}),
            lambda state: state.update(clients=state["clients"].astype(np.float32)),
            lambda state: state.update(clients=state["clients"][:2]),
            lambda state: state.update(target=np.zeros(3, np.uint8)),
            lambda state: state.pop("hypernetwork/rates"),
            lambda state: [state.pop(name) for name in list(state) if "embeddings" in name],
        ],
    )
    def test_a_broken_state_is_refused(self, change: Callable[[State], Any]) -> None:
        strategy, _ = Federation("pfedhn").run(1, settings=SMALL)
        state = strategy.state_arrays()
        change(state)
        with pytest.raises(ValueError, match=r"state|arrays"):
            strategy.load_state_arrays(state)

    def test_clients_that_train_other_arrays_than_the_checkpoints_are_refused(self, tmp_path: Path) -> None:
        Federation("pfedhn").run(1, settings=SMALL, checkpoint_dir=tmp_path)
        other = Federation("pfedhn")
        other.models = ["lenet"] * 4
        with pytest.raises(HandshakeError, match="arrays missing"):
            other.run(2, settings=SMALL, checkpoint_dir=tmp_path, resume=True)


def node(model: nn.Module, number: int = 1) -> Node:
    return Node(number, number, template=ArrayTemplate.of_ndarrays(get_weights(model)))


class TestRefusals:
    def test_a_target_too_large_with_the_number(self) -> None:
        model = build_model("resnet18", input_shape=(3, 32, 32), num_classes=10, seed=0)
        trained = {name: p.detach().numpy() for name, p in model.named_parameters()}
        count = sum(value.size for value in trained.values())
        strategy = PFedHN()
        strategy.prepare(ArrayRecord())
        expected = r"max_parameters=250000000 .* 1,1\d\d,\d{3},\d{3} parameters .* "
        with pytest.raises(ConfigError, match=expected + re.escape(f"for the {count:,} that clients train")):
            strategy.begin([Node(1, 1, template=ArrayTemplate.of_ndarrays(trained))])
        assert strategy.hypernetwork is None

    def test_the_bound_can_be_moved(self) -> None:
        with pytest.raises(ConfigError, match=r"max_parameters=1000 .*540,0"):
            Federation("pfedhn").run(1, settings=("max-parameters=1000",))
        Federation("pfedhn").run(1, settings=("max-parameters=540052",))
        with pytest.raises(ConfigError, match=r"540,052 parameters \(0\.0 GB"):
            Federation("pfedhn").run(1, settings=("max-parameters=540051",))

    def test_nothing_to_train_beside_the_classifier(self) -> None:
        strategy = PFedHN(min_available_nodes=1)
        assert strategy.accept_node(Node(1)) == (
            "its model has no trained parameters that a hypernetwork could produce"
        )

    def test_another_architecture_is_refused(self) -> None:
        strategy = PFedHN()
        strategy.prepare(ArrayRecord())
        strategy.begin([node(nn.Linear(3, 2))])
        assert strategy.accept_node(node(nn.Linear(3, 2), 2)) is None
        assert "has shape [2, 4], expected [2, 3]" in str(strategy.accept_node(node(nn.Linear(4, 2), 2)))

    def test_changes_beyond_all_measure_are_dropped(self, flower_log: list[str]) -> None:
        def garble(number: int, phase: str, partition: int, content: Any) -> None:
            if partition == 1:
                (record,) = content.array_records.values()
                name = next(iter(record))
                record[name] = type(record[name])(np.full_like(record[name].numpy(), 7e4))

        run = Run(rounds=1, grid={"after": garble})
        assert run.result.rounds[0].failures == 1
        (line,) = [line for line in flower_log if "dropped" in line]
        assert "must be within ±65504" in line
        assert all(np.isfinite(value).all() for value in run.states[0].values())

    def test_a_rate_that_is_too_large_ends_the_run(self) -> None:
        with pytest.raises(FloatingPointError, match="smaller server-learning-rate"):
            Federation("pfedhn").run(4, settings=("server-learning-rate=1e30", "server-weight-decay=1e10"))

    def test_fine_tuning_needs_a_global_model(self) -> None:
        with pytest.raises(ConfigError, match="personalize_epochs=0 expected"):
            PFedHN(personalize_epochs=1)


def test_the_classifier_is_not_sent() -> None:
    """pfedhn-pc: the classifier's arrays are in no message, and no part of what is produced."""
    runs = {name: Run(name=name, rounds=1) for name in ("pfedhn", "pfedhn-pc")}
    missing = set(runs["pfedhn"].strategy.target.names) - set(runs["pfedhn-pc"].strategy.target.names)
    model = small.small_model()
    assert {tuple(model.state_dict()[name].shape) for name in missing} == {(4, 8), (4,)}
    sent = [len(run.grid.of(1, "train")[0].down_arrays) for run in runs.values()]
    assert sent[0] == sent[1] + 2
    assert registry.get("pfedhn-pc").client is PFedHNPCClient
    runs["pfedhn-pc"].check()
