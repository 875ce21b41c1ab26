"""FedHEAD and FedHEAD+ at work: whole rounds against the oracle, sectors, leaders, and what goes wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hierarchy import Linear, Samples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Answer, Task
from flwr_kd.server.records import HandshakeError, KDResult
from flwr_kd.strategies.fedhead import (
    FedHEAD,
    FedHEADClient,
    FedHEADConfig,
    FedHEADPlus,
    SectorEnsemble,
    assign_sectors,
    communication_cost,
    draw_leader,
)
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError

CLASSES, SHAPE = 3, (1, 2, 4)
FEATURES = 8
SIZES = (5, 9, 14, 7, 11, 4)
SECTORS = ("east", "west", "east", "south", "east", "west")
RATE, N_L, N_S, N_G = 0.3, 3, 4, 5
REFERENCE = 17
repeatable = settings(max_examples=80, deadline=None, derandomize=True)


def data(index: int, size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(index)
    y = torch.randint(CLASSES, (size,), generator=draw)
    return torch.randn(size, *SHAPE, generator=draw) + y[:, None, None, None], y


def reference() -> Tensor:
    return data(1000, REFERENCE)[0]


def oracle_data(sizes: Sequence[int] = SIZES) -> dict[int, Samples]:
    return {i: oracle.samples(x.numpy(), y.numpy()) for i, (x, y) in enumerate(map(data, range(99), sizes))}


def net(classes: int = CLASSES, hidden: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, hidden), nn.ReLU()] if hidden else []
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden or FEATURES, classes))


def linear(arrays: ArrayRecord | Mapping[str, Any]) -> Linear:
    values = {name: value.numpy() for name, value in arrays.items()}
    return oracle.linear(values["1.weight"], values["1.bias"])


def close(a: Linear, b: Linear, atol: float = 3e-6) -> None:
    np.testing.assert_allclose(a.W, b.W, rtol=0, atol=atol)
    np.testing.assert_allclose(a.b, b.b, rtol=0, atol=atol)


def differ(a: Linear, b: Linear, least: float = 1e-4) -> bool:
    return bool(np.abs(a.W - b.W).max() > least)


@dataclass(frozen=True)
class InPhase(Fault):
    """A fault in some phases only."""

    phases: tuple[str, ...] = ("distill",)

    def applies(self, message: Message) -> bool:
        records = message.content.config_records.values()
        phase = next((record["phase"] for record in records if "phase" in record), None)
        return super().applies(message) and phase in self.phases


@dataclass
class Call:
    """What a client was asked."""

    server_round: int
    phase: str
    partition: int
    names: tuple[str, ...]
    arrays: list[np.ndarray]
    payload: bytes | None


class Run:
    """A federation of linear models on the inline grid, and all that its clients were asked."""

    def __init__(
        self,
        kind: type[FedHEAD] = FedHEAD,
        *,
        sizes: Sequence[int] = SIZES,
        named: Sequence[str | int] | None = SECTORS,
        options: dict[str, Any] | None = None,
        hidden: int = 0,
        **config: Any,
    ) -> None:
        self.sizes, self.hidden = sizes, hidden
        self.node_configs = None if named is None else [{"sector": sector} for sector in named]
        values = {"local_epochs": N_L, "batch_size": 64, "optimizer": "sgd", "learning_rate": RATE}
        values |= {"weight_decay": 0.0, "validation_share": 0.0, "sector_epochs": N_S, "server_epochs": N_G}
        values |= {"assignment": "random" if named is None else "client"} | config
        given: dict[str, Any] = {"min_available_nodes": len(sizes)}
        if kind is FedHEADPlus:
            public = TensorDataset(reference())
            given |= {"model": net(hidden=hidden), "public_set": public, "device": "cpu"}
        self.calls: list[Call] = []
        self.leaders: list[dict[Any, int]] = []
        self.models: list[Linear] = []
        self.strategy = kind(FedHEADConfig(**values), **given | (options or {}))
        self.strategy.on_round = self._note

    def _note(self, _: Any) -> None:
        self.leaders.append({sector: node.key for sector, node in self.strategy.leaders.items()})

    def app(self) -> ClientApp:
        run = self

        class Watched(FedHEADClient):
            def phase_train(self, task: Task) -> Answer:
                run.note(self, task)
                return super().phase_train(task)

            def phase_distill(self, task: Task) -> Answer:
                run.note(self, task)
                return super().phase_distill(task)

        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            train = TensorDataset(*data(index, self.sizes[index]))
            return Watched(net(hidden=self.hidden), train, context=context, device="cpu").to_client()

        return ClientApp(client_fn=client_fn)

    def note(self, client: FedHEADClient, task: Task) -> None:
        partition = int(client.context.node_config["partition-id"])
        arrays = [array.copy() for array in task.arrays]
        self.calls.append(Call(task.server_round, task.phase, partition, task.names, arrays, task.payload))

    def grid(self, **options: Any) -> InlineGrid:
        return InlineGrid(self.app(), len(self.sizes), node_configs=self.node_configs, **options)

    def start(
        self, rounds: int = 1, *, grid: InlineGrid | None = None, timeout: float = 20.0, **options: Any
    ) -> KDResult:
        initial = ArrayRecord(net(hidden=self.hidden).state_dict())

        def keep(server_round: int, arrays: ArrayRecord) -> None:
            if not self.hidden:
                self.models.append(linear(arrays))

        grid = grid or self.grid(**options)
        return self.strategy.start(grid, initial, rounds, timeout, evaluate_fn=keep)

    @property
    def sectors(self) -> dict[Any, list[int]]:
        members: dict[Any, list[int]] = {}
        for key, sector in sorted(self.strategy.sectors.items()):
            members.setdefault(sector, []).append(key)
        return members

    def asked(self, phase: str, server_round: int = 1) -> list[int]:
        return [c.partition for c in self.calls if (c.phase, c.server_round) == (phase, server_round)]

    def check(
        self,
        server_round: int,
        *,
        leaders: Mapping[Any, int | None] | None = None,
        sectors: Mapping[Any, Sequence[int]] | None = None,
        plus: bool = False,
    ) -> oracle.Round:
        """Compare one round's global model with the oracle's, which begins where the round began."""
        done = oracle.fedhead(
            self.models[server_round - 1],
            oracle_data(self.sizes),
            sectors or self.sectors,
            leaders or self.leaders[server_round - 1],
            rate=RATE,
            n_l=N_L,
            n_s=N_S,
        )
        expected = done.model
        if plus:
            rows = oracle.samples(reference().numpy(), np.zeros(REFERENCE)).x
            expected = oracle.fedhead_plus(done, rows, rate=RATE, n_g=N_G, average="probabilities")
        close(self.models[server_round], expected)
        return done


# ---------------------------------------------------------------------- sectors, leaders, cost


class TestSectors:
    @repeatable
    @given(st.data(), st.sets(st.integers(0, 2**63), min_size=1, max_size=30), st.integers(0, 2**31))
    def test_as_even_as_can_be(self, draw: st.DataObject, keys: set[int], seed: int) -> None:
        sectors = draw.draw(st.integers(1, len(keys)))
        found = assign_sectors(keys, sectors, np.random.default_rng(seed))
        assert found.keys() == keys
        sizes = np.bincount(list(found.values()), minlength=sectors)
        assert len(sizes) == sectors
        assert sizes.min() >= 1
        assert sizes.max() - sizes.min() <= 1
        turned = draw.draw(st.permutations(sorted(keys)))
        assert assign_sectors(turned, sectors, np.random.default_rng(seed)) == found

    @repeatable
    @given(
        st.dictionaries(st.integers(0, 40), st.integers(0, 3), min_size=4, max_size=12),
        st.sets(st.integers(0, 60), max_size=20),
        st.integers(0, 2**31),
    )
    def test_the_known_stay_and_newcomers_even_out(
        self, known: dict[int, int], keys: set[int], seed: int
    ) -> None:
        before = dict(known)
        found = assign_sectors(keys, 4, np.random.default_rng(seed), known)
        assert known == before
        assert found.keys() == known.keys() | keys
        assert all(found[key] == sector for key, sector in known.items())
        # Who is not there any more does not count.
        sizes = np.bincount([found[key] for key in keys], minlength=4)
        old = np.bincount([known[key] for key in keys & known.keys()], minlength=4)
        # No newcomer went to a sector that ended up larger by two than another.
        assert all(sizes[m] == old[m] or sizes[m] - sizes.min() <= 1 for m in range(4))

    def test_it_is_random(self) -> None:
        found = [assign_sectors(range(6), 2, np.random.default_rng(seed)) for seed in range(400)]
        together = sum(sectors[0] == sectors[1] for sectors in found)
        # 2 of the 5 others share client 0's sector: 160 expected, with a standard deviation of 10
        assert 120 < together < 200

    @pytest.mark.parametrize(("clients", "sectors"), [(0, 1), (1, 2), (4, 5)])
    def test_more_sectors_than_clients(self, clients: int, sectors: int) -> None:
        with pytest.raises(ConfigError, match=f"got {sectors} sectors for {clients} clients"):
            assign_sectors(range(clients), sectors, np.random.default_rng(0))
        assert assign_sectors(range(sectors), sectors, np.random.default_rng(0)).keys() == set(range(sectors))


class TestLeaders:
    @pytest.mark.parametrize("counts", [[1, 2, 3, 4], [100, 1, 50], [7], [3, 0, 1], [0, 0, 0]])
    def test_the_probability_is_p_km_over_p_m(self, counts: list[int]) -> None:
        draws = 4000
        rng = np.random.default_rng(0)
        drawn = Counter(draw_leader(counts, rng) for _ in range(draws))
        weights = counts if any(counts) else [1] * len(counts)
        expected = {k: draws * p for k, p in enumerate(oracle.normalised(weights)) if p > 0}
        assert drawn.keys() <= expected.keys()
        if len(expected) > 1:
            assert chisquare([drawn[k] for k in expected], list(expected.values())).pvalue > 0.01

    @pytest.mark.parametrize(
        ("counts", "expected"), [([1, 5, 3], 1), ([4, 4], 0), ([0, 0], 0), ([1, 2, 2], 1)]
    )
    def test_the_largest(self, counts: list[int], expected: int) -> None:
        assert {draw_leader(counts, np.random.default_rng(s), leader="largest") for s in range(9)} == {
            expected
        }

    @pytest.mark.parametrize("leader", ["random", "largest"])
    @pytest.mark.parametrize("counts", [[], [1, -1]])
    def test_refused(self, counts: list[int], leader: str) -> None:
        with pytest.raises(ValueError, match="weights must be finite"):
            draw_leader(counts, np.random.default_rng(0), leader=leader)


class TestCost:
    @pytest.mark.parametrize("method", ["fedavg", "feddf", "fedhead", "fedhead-plus"])
    @pytest.mark.parametrize(("sectors", "clients", "rounds"), [(2, 20, 50), (1, 1, 1), (3, 7, 0)])
    def test_table_1(self, method: str, sectors: int, clients: int, rounds: int) -> None:
        sizes = {"sectors": sectors, "clients": clients, "rounds": rounds}
        assert communication_cost(method, **sizes) == oracle.round_trips(method, **sizes)

    def test_another_method(self) -> None:
        with pytest.raises(ValueError, match="method must be one of fedavg, feddf"):
            communication_cost("fedprox", sectors=1, clients=2, rounds=3)

    @pytest.mark.parametrize(("kind", "name"), [(FedHEAD, "fedhead"), (FedHEADPlus, "fedhead-plus")])
    def test_of_real_runs(self, kind: type[FedHEAD], name: str) -> None:
        run = Run(kind)
        run.start(3)
        assert run.strategy.round_trips == oracle.round_trips(name, sectors=3, clients=6, rounds=3)
        run.start(1)  # it is counted anew
        assert run.strategy.round_trips == oracle.round_trips(name, sectors=3, clients=6, rounds=1)


class TestMessage:
    @pytest.mark.parametrize(
        "weights", [[], [0.5, 0.6], [1.5, -0.5], [0.2, 0.3], [[1.0]], [float("nan"), 1.0]]
    )
    def test_what_is_no_share_is_refused(self, weights: list[Any]) -> None:
        with pytest.raises(PayloadError, match="'weights'"):
            SectorEnsemble(weights=np.array(weights, dtype=np.float64))

    def test_round_trip(self) -> None:
        message = SectorEnsemble(weights=np.array([0.25, 0.75, 0.0]))
        assert SectorEnsemble.from_bytes(message.to_bytes()) == message

    @pytest.mark.parametrize(
        ("models", "weights", "text"),
        [
            (3, [0.5, 0.25, 0.25], "6 arrays came, expected 4 models of 2"),
            (3, [1.0], "6 arrays came, expected 2 models of 2"),
            (2, None, "a leader needs its sector's weights, none came"),
        ],
    )
    def test_a_leader_checks_what_it_gets(self, models: int, weights: list[float] | None, text: str) -> None:
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        client = FedHEADClient(net(), TensorDataset(*data(0, 5)), context=context, device="cpu")
        arrays = [value.numpy() for value in net().state_dict().values()] * models
        payload = None if weights is None else SectorEnsemble(weights=np.array(weights)).to_bytes()
        for answer in (client.phase_distill, client.phase_distill_again):
            with pytest.raises(PayloadError, match=text):
                answer(Task(1, "distill", 0, (), arrays, payload, FedHEADConfig()))


# ---------------------------------------------------------------------- whole rounds


class TestRounds:
    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("leader", ["random", "largest"])
    def test_equal_the_oracle(self, kind: type[FedHEAD], seed: int, leader: str) -> None:
        run = Run(kind, options={"seed": seed}, leader=leader)
        result = run.start(2)
        assert run.sectors == {"east": [0, 2, 4], "west": [1, 5], "south": [3]}
        for server_round in (1, 2):
            leaders = run.leaders[server_round - 1]
            assert all(leaders[sector] in members for sector, members in run.sectors.items())
            done = run.check(server_round, plus=kind is FedHEADPlus)
            assert differ(done.model, done.z)
            assert run.asked("train", server_round) == list(range(6))
            assert sorted(run.asked("distill", server_round)) == sorted(leaders.values())
            assert run.asked("distill-again", server_round) == []
        assert [(r.participants, r.failures) for r in result.rounds] == [(6, 0)] * 2
        close(run.models[2], linear(result.arrays), atol=0)

    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    @pytest.mark.parametrize("sectors", [1, 2, 4, 6])
    def test_random_sectors_equal_the_oracle(self, kind: type[FedHEAD], sectors: int) -> None:
        run = Run(kind, named=None, options={"seed": 4}, sectors=sectors)
        run.start(1)
        sizes = [len(members) for members in run.sectors.values()]
        assert sorted(run.sectors) == list(range(sectors))
        assert max(sizes) - min(sizes) <= 1
        run.check(1, plus=kind is FedHEADPlus)

    def test_one_client_alone(self) -> None:
        run = Run(sizes=(9,), named=["only"])
        run.start(1)
        done = run.check(1)
        # It is its own teacher: what it learnt locally is the result.
        close(run.models[1], done.local[0])

    def test_early_stopping_and_held_out_samples_at_the_leaders(self) -> None:
        """One epoch of patience: fewer epochs than n_s, and another model than without holding out."""
        run = Run(named=None, sizes=(40, 44), validation_share=0.25, patience=1, sector_epochs=50)
        result = run.start(1)
        epochs = result.train_metrics_clientapp[1]["distill-epochs"]
        assert 1 <= epochs <= 50  # type: ignore[operator]
        other = Run(named=None, sizes=(40, 44), sector_epochs=50)
        assert other.start(1).train_metrics_clientapp[1]["distill-epochs"] == 50
        assert differ(run.models[1], other.models[1])

    def test_metrics_are_means_over_the_leaders(self) -> None:
        run = Run()
        metrics = run.start(1).train_metrics_clientapp[1]
        assert metrics["distill-epochs"] == N_S
        clients = oracle_data()
        done = run.check(1)
        losses, trained = [], []
        for sector, leader in run.leaders[0].items():
            x, members = clients[leader].x, run.sectors[sector]
            teachers, sizes = [done.local[k] for k in members], [SIZES[k] for k in members]
            targets = oracle.ensemble(x, teachers, sizes, "probabilities")
            student = oracle.descend(done.z, x, targets, RATE, N_S - 1)
            losses.append(oracle.cross_entropy(x, targets, student))
        assert metrics["distill-loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        for k, (x, y) in clients.items():
            targets = oracle.one_hot(y, CLASSES)
            start = oracle.descend(run.models[0], x, targets, RATE, N_L - 1)
            trained.append(oracle.cross_entropy(x, targets, start) * SIZES[k])
        # Local training's alone: what leaders report of their distillation has no part in it.
        assert metrics["train-loss"] == pytest.approx(sum(trained) / sum(SIZES), abs=1e-5)

    def test_the_learning_rate_of_a_round_is_that_of_its_distillations(self) -> None:
        run = Run(FedHEADPlus, lr_decay=0.5, lr_decay_every=1)
        run.start(2)
        done = oracle.fedhead(
            run.models[1], oracle_data(), run.sectors, run.leaders[1], rate=RATE / 2, n_l=N_L, n_s=N_S
        )
        rows = oracle.samples(reference().numpy(), np.zeros(REFERENCE)).x
        expected = oracle.fedhead_plus(done, rows, rate=RATE / 2, n_g=N_G, average="probabilities")
        close(run.models[2], expected)

    def test_leaders_change_with_rounds_and_seeds(self) -> None:
        first, same, other = Run(), Run(), Run(options={"seed": 5})
        for run in (first, same, other):
            run.start(6)
        assert first.leaders == same.leaders != other.leaders
        assert len({leaders["east"] for leaders in first.leaders}) > 1

    def test_leaders_are_drawn_by_their_samples(self) -> None:
        """Over many rounds; the draw itself is tested above."""
        run = Run(sizes=(1, 1, 18), named=["a", "a", "a"], local_epochs=1, sector_epochs=1)
        run.start(40)
        drawn = Counter(leaders["a"] for leaders in run.leaders)
        assert drawn[2] > 28

    def test_the_largest_leads(self) -> None:
        run = Run(leader="largest")
        run.start(3)
        assert run.leaders == [{"east": 2, "west": 1, "south": 3}] * 3

    def test_a_share_of_the_clients(self) -> None:
        run = Run(options={"fraction_train": 0.5})
        run.start(4)
        for server_round in range(1, 5):
            drawn = run.asked("train", server_round)
            assert len(drawn) == 3
            members = {m: [k for k in keys if k in drawn] for m, keys in run.sectors.items()}
            members = {m: keys for m, keys in members.items() if keys}
            assert run.leaders[server_round - 1].keys() == members.keys()
            run.check(server_round, sectors=members)


class TestTraffic:
    def test_bytes_are_the_real_ones(self) -> None:
        run = Run()
        result = run.start(2)
        copy = sum(len(value.data) for value in ArrayRecord(net().state_dict()).values())
        for stats, leaders in zip(result.rounds, run.leaders, strict=True):
            for client in range(6):
                down, up = copy, copy
                for sector, leader in leaders.items():
                    if leader == client:
                        members = run.sectors[sector]
                        weights = np.array(oracle.normalised([SIZES[k] for k in members]))
                        down += (len(members) + 1) * copy + SectorEnsemble(weights=weights).nbytes
                        up += copy
                assert stats.bytes_by_partition[client] == (down, up)
            assert stats.bytes_up == (6 + 3) * copy
            assert stats.bytes_down == sum(down for down, _ in stats.bytes_by_partition.values())

    def test_what_a_leader_gets(self) -> None:
        run = Run()
        run.start(2)
        seen = 0
        for call in run.calls:
            names = ("1.weight", "1.bias")
            assert call.names == names
            if call.phase == "train":
                assert call.payload is None
                close(oracle.linear(*call.arrays), run.models[call.server_round - 1], atol=0)
                continue
            seen += 1
            done = run.check(call.server_round)
            (members,) = (keys for keys in run.sectors.values() if call.partition in keys)
            models = [oracle.linear(*call.arrays[i : i + 2]) for i in range(0, len(call.arrays), 2)]
            assert len(models) == 1 + len(members)
            close(models[0], done.z)
            for k, model in zip(members, models[1:], strict=True):
                close(model, done.local[k])
            assert call.payload is not None
            weights = SectorEnsemble.from_bytes(call.payload, dims={"K": len(members)}).weights
            assert weights.sum() == pytest.approx(1, abs=1e-12)
            np.testing.assert_allclose(weights, oracle.normalised([SIZES[k] for k in members]), atol=1e-12)
        assert seen == 6


# ---------------------------------------------------------------------- what goes wrong


RUINED = {
    "raise": lambda phases: InPhase("raise", phases=phases),
    "silent": lambda phases: InPhase("silent", phases=phases),
    "late": lambda phases: InPhase("late", phases=phases),
    "nan": lambda phases: InPhase("garbage", garble=GARBAGE["arrays-of-nan"], phases=phases),
    "shape": lambda phases: InPhase("garbage", garble=GARBAGE["arrays-of-other-shape"], phases=phases),
    "fewer": lambda phases: InPhase("garbage", garble=GARBAGE["fewer-arrays"], phases=phases),
    "nothing": lambda phases: InPhase("garbage", garble=GARBAGE["no-records"], phases=phases),
}
BOTH = ("distill", "distill-again")


class TestFaults:
    def first_leaders(self) -> dict[Any, int]:
        run = Run()
        run.start(1)
        return run.leaders[0]

    @pytest.mark.parametrize("kind", RUINED)
    def test_another_leads_where_one_fails(self, kind: str, flower_log: list[str]) -> None:
        first = self.first_leaders()["east"]
        run = Run()
        result = run.start(1, faults={first: RUINED[kind](BOTH)}, timeout=0.3)
        second = run.leaders[0]["east"]
        assert second in {0, 2, 4} - {first}
        assert run.asked("distill-again") == [second]
        assert (result.rounds[0].participants, result.rounds[0].failures) == (6, 1)
        run.check(1)
        assert run.strategy.round_trips == 6
        assert any(
            line.startswith("sector east: node")
            and f"(partition {second}) leads in place of" in line
            and line.endswith(f"(partition {first})")
            for line in flower_log
        )

    @pytest.mark.parametrize("kind", ["raise", "silent", "nan"])
    def test_the_mean_stands_in_where_both_fail(self, kind: str, flower_log: list[str]) -> None:
        run = Run()
        faults = {k: RUINED[kind](BOTH) for k in (0, 2, 4)}
        result = run.start(1, faults=faults, timeout=0.3)
        assert len(run.asked("distill-again")) <= 1
        assert result.rounds[0].failures == 2
        assert run.leaders[0].keys() == {"west", "south"}
        run.check(1, leaders=run.leaders[0] | {"east": None})
        assert run.strategy.round_trips == 5
        assert any("nobody distilled in sector east, its mean stands in" in line for line in flower_log)

    def test_a_leader_is_replaced_once(self) -> None:
        run = Run(sizes=(5, 6, 7, 8), named=["a"] * 4)
        result = run.start(1, faults={k: RUINED["nan"](BOTH) for k in range(4)})
        assert len(run.asked("distill")) == len(run.asked("distill-again")) == 1
        assert run.asked("distill") != run.asked("distill-again")
        assert result.rounds[0].failures == 2

    @pytest.mark.parametrize("plus", [False, True])
    def test_a_sector_of_one_whose_leader_fails(self, plus: bool, flower_log: list[str]) -> None:
        run = Run(FedHEADPlus if plus else FedHEAD)
        run.start(1, faults={3: RUINED["raise"](BOTH)})
        assert run.asked("distill-again") == []
        run.check(1, leaders=run.leaders[0] | {"south": None}, plus=plus)
        assert any("nobody distilled in sector south" in line for line in flower_log)

    @pytest.mark.parametrize("plus", [False, True])
    @pytest.mark.parametrize("kind", ["raise", "silent"])
    def test_a_sector_without_answers_is_left_out(self, plus: bool, kind: str, flower_log: list[str]) -> None:
        run = Run(FedHEADPlus if plus else FedHEAD)
        faults = {k: RUINED[kind](("train",)) for k in (1, 5)}
        result = run.start(1, faults=faults, timeout=0.3)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 2)
        run.check(1, sectors={"east": [0, 2, 4], "south": [3]}, plus=plus)
        assert run.strategy.round_trips == 4
        assert any("round 1: sector west has no answers and is left out" in line for line in flower_log)

    def test_who_did_not_train_neither_teaches_nor_leads(self) -> None:
        for lost in (0, 2, 4):
            run = Run()
            run.start(1, faults={lost: RUINED["raise"](("train",))})
            assert lost not in run.leaders[0].values()
            members = [k for k in (0, 2, 4) if k != lost]
            run.check(1, sectors={"east": members, "west": [1, 5], "south": [3]})

    @pytest.mark.parametrize("plus", [False, True])
    def test_nobody_distils_at_all(self, plus: bool) -> None:
        run = Run(FedHEADPlus if plus else FedHEAD)
        result = run.start(2, faults={k: RUINED["raise"](BOTH) for k in range(6)})
        assert result.rounds[0].failures == 3 + 2
        assert run.leaders == [{}, {}]
        nobody: dict[Any, None] = dict.fromkeys(run.sectors)
        done = run.check(1, leaders=nobody, plus=plus)
        run.check(2, leaders=nobody, plus=plus)
        if not plus:  # plain federated averaging
            local = list(done.local.items())
            close(run.models[1], oracle.mean([w for _, w in local], [SIZES[k] for k, _ in local]))
        assert run.strategy.round_trips == 6

    def test_the_round_after_is_whole_again(self) -> None:
        run = Run()
        faults = {k: InPhase("raise", frozenset({1}), phases=BOTH) for k in range(6)}
        run.start(2, faults=faults)
        run.check(1, leaders=dict.fromkeys(run.sectors))
        assert run.leaders[1].keys() == run.sectors.keys()
        run.check(2)

    def test_a_round_without_answers_keeps_the_model(self) -> None:
        run = Run(FedHEADPlus)
        faults = {k: InPhase("raise", frozenset({1}), phases=("train",)) for k in range(6)}
        run.start(2, faults=faults)
        close(run.models[1], run.models[0], atol=0)
        assert run.leaders[0] == {}
        run.check(2, plus=True)

    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    def test_more_sectors_than_clients(self, kind: type[FedHEAD]) -> None:
        text = "min_available_nodes must be at least the number of sectors, got 6 clients for 7 sectors"
        with pytest.raises(ConfigError, match=text):
            Run(kind, named=None, sectors=7).start(1)

    @pytest.mark.parametrize("missing", [{}, {"sector": ""}])
    def test_a_client_that_names_no_sector_is_refused(self, missing: dict[str, Any]) -> None:
        run = Run()
        assert run.node_configs is not None
        run.node_configs[2] = missing
        with pytest.raises(
            HandshakeError, match=r"5 clients fit, 6 are needed; refused: .*its node config names no sector"
        ):
            run.start(1)
        assert run.calls == []

    @pytest.mark.parametrize("sector", [b"", True, 0.5, "two\nlines", "x" * 101])
    def test_what_names_no_sector(self, sector: Any) -> None:
        run = Run()
        assert run.node_configs is not None
        run.node_configs[2] = {"sector": sector}
        with pytest.raises(HandshakeError, match=r"refused: .*property 'sector' must be a text"):
            run.start(1)

    @pytest.mark.parametrize("value", [1.0, 1e300])
    def test_what_a_leader_claims_counts_for_itself_alone(self, value: float) -> None:
        def lie(content: RecordDict) -> None:
            content.config_records["fitres.metrics"].update(
                {"local-accuracy": 1.0, "train-loss": 1e9, "distill-epochs": value}
            )

        honest, run = Run(), Run()
        plain = honest.start(1).rounds[0]
        faults = {k: InPhase("garbage", garble=lie) for k in range(6)}
        stats = run.start(1, faults=faults).rounds[0]
        assert stats.train_loss == plain.train_loss
        assert len(stats.clients) == len(run.leaders[0]) * (value < 1e15)
        assert plain.participants == stats.participants == 6
        # Beyond all sense it is no answer.
        assert bool(stats.failures) == (value > 1e15)

    def test_sectors_named_by_numbers(self) -> None:
        run = Run(named=[0, 1, 0, 2, 0, 1])
        run.start(1)
        assert run.sectors == {"0": [0, 2, 4], "1": [1, 5], "2": [3]}
        run.check(1)

    @pytest.mark.parametrize(
        ("model", "public", "text"),
        [
            (net(classes=4), reference(), r"model is not what initial_arrays are of: array '1\.weight'"),
            (net(hidden=5), reference(), "model is not what initial_arrays are of: arrays missing"),
            (net(), torch.zeros(5, 1, 3, 3), r"model does not take public_set of shape \[1, 3, 3\]"),
        ],
    )
    def test_a_server_that_does_not_fit_its_clients(
        self, model: nn.Module, public: Tensor, text: str
    ) -> None:
        calls: list[Call] = []

        def begin() -> None:
            run = Run(FedHEADPlus, options={"model": model, "public_set": TensorDataset(public)})
            run.calls = calls
            run.start(1)

        with pytest.raises(ConfigError, match=text):
            begin()
        assert calls == []

    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    @pytest.mark.parametrize("hidden", [0, 6])
    @pytest.mark.parametrize("phases", [("train",), BOTH])
    @pytest.mark.parametrize("value", [1e30, -3e38])
    def test_huge_weights(
        self, kind: type[FedHEAD], hidden: int, phases: tuple[str, ...], value: float
    ) -> None:
        def garble(content: RecordDict) -> None:
            for record in content.array_records.values():
                for name in list(record):
                    record[name] = Array(np.full_like(record[name].numpy(), value))

        run = Run(kind, hidden=hidden)
        fault = InPhase("garbage", frozenset({1}), garble=garble, phases=phases)
        result = run.start(2, faults={0: fault, 3: fault})
        assert result.rounds[0].participants == 6
        assert len(result.rounds) == 2
        for name, array in result.arrays.items():
            assert np.isfinite(array.numpy()).all(), name


# ---------------------------------------------------------------------- between rounds and runs


class Growing(InlineGrid):
    """A grid whose last nodes come after the first round."""

    there = 4

    def get_node_ids(self) -> Iterable[int]:
        return list(super().get_node_ids())[: self.there]


class TestState:
    def test_who_comes_late_gets_a_sector(self) -> None:
        run = Run(named=None, options={"min_available_nodes": 4})
        grid = Growing(run.app(), 6)
        before: list[dict[Any, Any]] = []

        def grow(stats: Any) -> None:
            run._note(stats)
            before.append(dict(run.strategy.sectors))
            grid.there = 6

        run.strategy.on_round = grow
        result = run.start(2, grid=grid)
        assert [r.participants for r in result.rounds] == [4, 6]
        assert sorted(before[0]) == [0, 1, 2, 3]
        assert sorted(before[1]) == list(range(6))
        assert before[1].items() >= before[0].items()
        assert sorted(Counter(before[1].values()).values()) == [3, 3]
        run.check(2)

    def test_who_comes_late_may_bring_a_sector(self) -> None:
        run = Run(options={"min_available_nodes": 4}, named=["a", "a", "b", "b", "c", "a"])
        grid = Growing(run.app(), 6, node_configs=run.node_configs)

        def grow(stats: Any) -> None:
            run._note(stats)
            grid.there = 6

        run.strategy.on_round = grow
        run.start(2, grid=grid)
        assert run.sectors == {"a": [0, 1, 5], "b": [2, 3], "c": [4]}
        run.check(1, sectors={"a": [0, 1], "b": [2, 3]})
        run.check(2)

    def test_who_leaves_keeps_its_sector(self) -> None:
        run = Run(named=None)
        grid = Growing(run.app(), 6)
        grid.there = 6
        kept: list[dict[Any, Any]] = []

        def change(stats: Any) -> None:
            run._note(stats)
            kept.append(dict(run.strategy.sectors))
            grid.there = {1: 3, 2: 6}.get(stats.server_round, 6)

        run.strategy.on_round = change
        result = run.start(3, grid=grid)
        assert [r.participants for r in result.rounds] == [6, 3, 6]
        assert kept[0] == kept[1] == kept[2]

    def test_sectors_do_not_depend_on_the_node_ids(self) -> None:
        runs = [Run(named=None), Run(named=None)]
        for seed, run in enumerate(runs):
            run.start(1, grid=run.grid(seed=seed))
        assert runs[0].strategy.sectors == runs[1].strategy.sectors
        assert runs[0].leaders == runs[1].leaders

    def test_seeds_decide_the_sectors(self) -> None:
        found = []
        for seed in range(6):
            run = Run(named=None, options={"seed": seed}, local_epochs=1, sector_epochs=1)
            run.start(1)
            found.append(json.dumps(run.strategy.sectors, sort_keys=True))
        assert len(set(found)) > 2

    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    @pytest.mark.parametrize("named", [None, SECTORS])
    def test_resumption(self, kind: type[FedHEAD], named: Any, tmp_path: Path) -> None:
        whole = Run(kind, named=named)
        whole.start(3)
        first = Run(kind, named=named, options={"checkpoint_dir": tmp_path})
        first.start(2)
        rest = Run(kind, named=named, options={"checkpoint_dir": tmp_path, "resume": True})
        rest.start(3)
        assert rest.strategy.sectors == first.strategy.sectors == whole.strategy.sectors
        assert rest.leaders == whole.leaders[2:]
        close(rest.models[-1], whole.models[-1], atol=0)
        # The state is the sectors' where the server drew them, and does not grow with the models.
        assert set(first.strategy.state_arrays()) == ({"clients", "sectors"} if named is None else set())

    def test_a_late_client_keeps_its_sector_after_resumption(self, tmp_path: Path) -> None:
        """Drawn anew among all six, the sectors would be others for some seed."""
        for seed in range(4):
            options = {"min_available_nodes": 4, "checkpoint_dir": tmp_path / str(seed), "seed": seed}
            run = Run(named=None, options=options, local_epochs=1, sector_epochs=1)
            grid = Growing(run.app(), 6)
            run.strategy.on_round = lambda stats, grid=grid: setattr(grid, "there", 6)
            run.start(2, grid=grid)
            rest = Run(named=None, options={**options, "resume": True}, local_epochs=1, sector_epochs=1)
            rest.start(3)
            assert rest.strategy.sectors == run.strategy.sectors

    def test_another_state_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"FedHEAD has clients and sectors as state, got \['a'\]"):
            FedHEAD().load_state_arrays({"a": np.zeros(1)})

    def test_node_ids_as_keys_survive(self, tmp_path: Path) -> None:
        """Without partition ids, clients go by node ids of up to 64 bits."""
        strategy = FedHEAD()
        strategy.sectors, strategy.trained = {2**64 - 1: 1, 2**63 + 1: 0}, True
        other = FedHEAD()
        other.load_state_arrays(strategy.state_arrays())
        assert other.sectors == strategy.sectors

    def test_threads(self) -> None:
        runs = [Run(FedHEADPlus), Run(FedHEADPlus)]
        for workers, run in zip((1, 3), runs, strict=True):
            grid = run.grid(workers=workers)
            run.start(2, grid=grid)
            grid.close()
        close(runs[0].models[-1], runs[1].models[-1], atol=0)


# ---------------------------------------------------------------------- data of the leaders


class TestLeadersData:
    def test_no_augmentation_and_no_labels(self) -> None:
        """A leader distils on `knowledge_set`; its labels change nothing, nor does the augmentation."""

        def distilled(labels: Callable[[Tensor], Tensor], augment: Any) -> list[np.ndarray]:
            x, y = data(0, 9)
            context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
            client = FedHEADClient(
                net(),
                TensorDataset(torch.zeros(4, *SHAPE), torch.zeros(4, dtype=torch.int64)),
                context=context,
                device="cpu",
                knowledge_set=TensorDataset(x, labels(y)),
                augment=augment,
            )
            state = [value.numpy() for value in net().state_dict().values()]
            teacher = [value + 1 + np.arange(value.shape[-1], dtype=np.float32) for value in state]
            payload = SectorEnsemble(weights=np.ones(1)).to_bytes()
            config = FedHEADConfig(
                optimizer="sgd", weight_decay=0.0, validation_share=0.0, learning_rate=RATE
            )
            answer = client.phase_distill(Task(1, "distill", 0, (), [*state, *teacher], payload, config))
            assert answer.num_examples == 9
            start, goal = oracle.linear(*state), oracle.linear(*teacher)
            rows = oracle.samples(x.numpy(), y.numpy()).x
            targets = oracle.ensemble(rows, [goal], [1], "probabilities")
            close(oracle.linear(*answer.arrays), oracle.descend(start, rows, targets, RATE, 20), atol=1e-5)
            return answer.arrays

        plain = distilled(lambda y: y, None)
        other = distilled(torch.zeros_like, lambda x, _: torch.zeros_like(x))
        assert all(np.array_equal(a, b) for a, b in zip(plain, other, strict=True))

    def test_the_paper_s_values_are_the_defaults(self) -> None:
        """H.1."""
        config = FedHEADConfig()
        assert (config.sectors, config.local_epochs, config.sector_epochs, config.server_epochs) == (
            2,
            20,
            20,
            20,
        )
        assert (config.optimizer, config.learning_rate, config.weight_decay) == ("adam", 1e-3, 1e-4)
        assert (config.batch_size, config.patience, config.leader) == (128, 5, "random")
        assert config.learning_rate_at(50) == 1e-3

    def test_it_is_registered(self) -> None:
        assert registry.get("fedhead").strategy is FedHEAD
        assert registry.get("fedhead-plus").strategy is FedHEADPlus
        assert registry.get("fedhead-plus").public_at == "server"
