"""FedHEAD with failing clients and leaders, and its resumption."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensemble_rounds import reference
from ensembles import close
from flwr.app import Array, Message, RecordDict
from sector_rounds import SECTORS, SIZES, Call, Run, net
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.fedhead import (
    FedHEAD,
    FedHEADPlus,
)
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.transport.inline_grid import InlineGrid


@dataclass(frozen=True)
class InPhase(Fault):
    """A fault in some phases only."""

    phases: tuple[str, ...] = ("distill",)

    def applies(self, message: Message) -> bool:
        records = message.content.config_records.values()
        phase = next((record["phase"] for record in records if "phase" in record), None)
        return super().applies(message) and phase in self.phases


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
        assert any(
            "no leader distilled in sector east; the mean of its models is used" in line
            for line in flower_log
        )

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
        assert any("no leader distilled in sector south" in line for line in flower_log)

    @pytest.mark.parametrize("plus", [False, True])
    @pytest.mark.parametrize("kind", ["raise", "silent"])
    def test_a_sector_without_answers_is_left_out(self, plus: bool, kind: str, flower_log: list[str]) -> None:
        run = Run(FedHEADPlus if plus else FedHEAD)
        faults = {k: RUINED[kind](("train",)) for k in (1, 5)}
        result = run.start(1, faults=faults, timeout=0.3)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 2)
        run.check(1, sectors={"east": [0, 2, 4], "south": [3]}, plus=plus)
        assert run.strategy.round_trips == 4
        assert any("round 1: sector west has no replies and is left out" in line for line in flower_log)

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
        # A number out of range makes the reply unusable.
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
        actual = []
        for seed in range(6):
            run = Run(named=None, options={"seed": seed}, local_epochs=1, sector_epochs=1)
            run.start(1)
            actual.append(json.dumps(run.strategy.sectors, sort_keys=True))
        assert len(set(actual)) > 2

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
