"""The benchmark of attacks and defences: what it runs, what it keeps, and what its tables say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import registry

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("robustness")


@pytest.fixture
def tables(program: Any) -> Any:
    return importlib.import_module("robustness_tables")


def test_every_method_meets_no_attack_and_one_with_each_of_its_defences(program: Any) -> None:
    for method in registry.methods().values():
        cases = list(program.cases(program.Study(method)))
        attacks = {attack for attack, _ in cases}
        assert "none" in attacks
        assert len(attacks) > 1
        for attack in attacks:
            assert [d for a, d in cases if a == attack] == [d for a, d in cases if a == "none"]
        kinds = method.strategy.averages_models, method.strategy.averages_knowledge
        expected = {(True, False): 4, (False, True): 2, (True, True): 6, (False, False): 1}[kinds]
        if method.strategy.bounds_updates:
            expected = 2
        assert len(cases) == len(attacks) * expected
    assert {attack for attack, _ in program.cases(program.Study(registry.get("fedmd")))} == {"none", "lma"}
    assert {attack for attack, _ in program.cases(program.Study(registry.get("fedavg")))} == {
        "none",
        *program.ON_MODELS,
    }


def test_further_attacks_are_those_that_change_something(program: Any) -> None:
    assert program.further_of(registry.get("fedavg")) == [
        "label-flip:permute",
        "scale:10",
        "ipm",
        "nan",
        "count:100000",
    ]
    assert program.further_of(registry.get("fedmd")) == [
        "label-flip:permute",
        "payload",
        "cpa",
        "count:100000",
    ]
    # Krum needs 2F + 3 clients.
    assert [defence.models for defence in program.defences(4)] == [
        "mean",
        "median",
        "trimmed-mean:0.4",
        "mean",
        "median",
    ]


def test_what_is_done_is_not_run_again(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "ROUNDS", 1)
    words = ["robustness.py", "--out", str(tmp_path), "--methods", "fedproto", "--seeds"]
    monkeypatch.setattr("sys.argv", [*words, "3"])
    program.main()
    path = tmp_path / "fedproto-2.json"
    runs = json.loads(path.read_text())["runs"]
    assert [(run["attack"], run["knowledge"], run["seed"]) for run in runs] == [
        ("none", "mean", 3), ("none", "median", 3), ("prototype-swap", "mean", 3), ("prototype-swap", "median", 3),
    ]  # fmt: skip
    assert all(run["global_accuracy"] is None and 0 <= run["honest_accuracy"] <= 1 for run in runs)
    assert all(run["participants"] == 10 for run in runs)
    path.write_text(json.dumps({"runs": [*runs[:2], {**runs[2], "honest_accuracy": 7}]}))
    program.main()
    again = json.loads(path.read_text())["runs"]
    assert [run["honest_accuracy"] for run in again] == [
        *(run["honest_accuracy"] for run in runs[:2]), 7, runs[3]["honest_accuracy"],
    ]  # fmt: skip


MEAN, MEDIAN, KRUM = ("mean", "mean"), ("median", "mean"), ("multi-krum:2:8", "mean")
Values = list[float]


def rows(
    defence: tuple[str, str],
    none: Values,
    alie: Values,
    flip: Values = (),
    noise: Values = (),  # type: ignore[assignment]
) -> list[dict[str, Any]]:
    attacks = {"none": none, "alie:1.5": alie, "sign-flip:20": flip or none, "gaussian:10": noise or none}
    return [
        {
            "attack": attack, "models": defence[0], "knowledge": defence[1], "seed": seed, "global_accuracy": value,
            "honest_accuracy": 0.5,
        }
        for attack, values in attacks.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip


def test_the_best_defence_is_the_one_whose_worst_attack_leaves_most(tables: Any, tmp_path: Path) -> None:
    runs = [
        *rows(MEAN, none=[0.8, 0.9], alie=[0.7, 0.7], flip=[0.1, 0.2]),
        *rows(MEDIAN, none=[0.8, 0.8], alie=[0.6, 0.6]),
        *rows(KRUM, none=[0.8, 0.8], alie=[0.79, 0.81], flip=[0.9, 0.9], noise=[0.9, 0.9]),
        # An attack that not all methods meet is in the method's own table only.
        *({**row, "attack": "ipm", "global_accuracy": 0.0} for row in rows(KRUM, [0.8], [0.8])[:1]),
    ]
    (tmp_path / "fedavg-2.json").write_text(json.dumps({"runs": runs}))
    header, (row,) = tables.summary(tmp_path, 2)
    assert len(header) == len(row)
    assert row == [
        "`fedavg`", "global", "85.0 ± 7.1", "15.0 (`sign-flip:20`)", "`multi-krum:2:8`", "80.0 (`alie:1.5`)",
        "−5.0",
    ]  # fmt: skip
    ((name, head, lines),) = tables.details(tmp_path, 2)
    assert (name, head) == ("fedavg", ["attack", "mean", "`median`", "`multi-krum:2:8`"])
    assert lines[0] == ["none", "85.0 ± 7.1", "80.0 ± 0.0", "80.0 ± 0.0"]
    assert lines[-1] == ["`ipm`", "–", "–", "0.0"]
    assert tables.summary(tmp_path, 2, "fashion-mnist")[1] == []


def test_a_defence_with_fewer_seeds_is_not_the_best_yet(tables: Any, tmp_path: Path) -> None:
    runs = [*rows(MEAN, none=[0.8, 0.9], alie=[0.7, 0.7]), *rows(MEDIAN, none=[0.9], alie=[0.9])]
    (tmp_path / "fedavg-2.json").write_text(json.dumps({"runs": runs}))
    ((*_, best, _, _),) = tables.summary(tmp_path, 2)[1]
    assert best == "mean"
    runs += [{**row, "seed": 1} for row in rows(MEDIAN, none=[0.9], alie=[0.9])]
    (tmp_path / "fedavg-2.json").write_text(json.dumps({"runs": runs}))
    ((*_, best, _, _),) = tables.summary(tmp_path, 2)[1]
    assert best == "`median`"


def test_a_goal_that_is_missed_is_said(tables: Any, tmp_path: Path) -> None:
    runs = rows(MEAN, none=[0.8], alie=[0.7])
    (tmp_path / "fedavg-2.json").write_text(json.dumps({"runs": runs}))
    assert tables.summary(tmp_path, 2)[1][0][-2] == "more than 5 points behind: 70.0 (`alie:1.5`)"
    # What is not whole is not summed up; nobody measured is nothing.
    (tmp_path / "fedavg-2.json").write_text(json.dumps({"runs": [*runs, *rows(MEDIAN, [0.8], [0.8])[:1]]}))
    assert tables.summary(tmp_path, 2)[1] == []
    assert tables.summary(tmp_path, 4)[1] == []


def test_a_run_without_a_usable_round_counts_as_nothing(tables: Any, tmp_path: Path) -> None:
    runs = rows(MEAN, none=[0.8], alie=[0.7])
    runs[3] = {"attack": "gaussian:10", "models": "mean", "knowledge": "mean", "seed": 0, "error": "no reply"}
    (tmp_path / "fedavg-2.json").write_text(json.dumps({"runs": runs}))
    assert tables.summary(tmp_path, 2)[1][0][3] == "0.0 (`gaussian:10`)"


def test_an_imitations_cost_is_that_of_its_victim_too(tables: Any, tmp_path: Path) -> None:
    runs = [
        {
            "attack": attack, "models": "mean", "knowledge": knowledge, "honest_accuracy": value,
            "victim_accuracy": own,
        }
        for knowledge in ("mean", "median")
        for attack, value, own in (("none", 0.9, 0.8), ("none", 0.7, 0.6), ("imitate:0.5", 0.6, 0.2))
    ]  # fmt: skip
    (tmp_path / "ktpfl-2-imitate.json").write_text(json.dumps({"runs": runs[:5]}))
    header, rows = tables.imitation(tmp_path, 2)
    assert header[2:] == [
        "honest, no attack",
        "honest, imitate:0.5",
        "victim, no attack",
        "victim, imitate:0.5",
    ]
    assert rows == [
        ["`ktpfl`", "mean", "80.0 ± 14.1", "60.0", "70.0 ± 14.1", "20.0"],
        ["`ktpfl`", "knowledge `median`", "80.0 ± 14.1", "–", "70.0 ± 14.1", "–"],
    ]
    assert tables.imitation(tmp_path, 4)[1] == []


def test_imitation_and_few_defences(program: Any) -> None:
    def named(name: str, attackers: int = 2, **kind: bool) -> list[tuple[str, str, str]]:
        study = program.Study(registry.get(name), attackers=attackers, few=True, **kind)
        return [(attack, *defence) for attack, defence in program.cases(study)]

    assert named("fedamp", imitate=True) == [("none", "mean", "mean"), ("imitate:0.5", "mean", "mean")]
    assert [case[1:] for case in named("feddf") if case[0] == "none"] == [
        ("mean", "mean"), ("multi-krum:2:8", "mean"), ("mean", "median"), ("median", "median"),
    ]  # fmt: skip
    assert [case[1:] for case in named("fedavg", 4) if case[0] == "none"] == [
        ("mean", "mean"),
        ("median", "mean"),
    ]
    assert program.Study(registry.get("ktpfl"), imitate=True).file_name == "ktpfl-2-imitate.json"


def test_the_victim_is_the_first_honest_client(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ROUNDS", 1)
    told: list[Any] = []
    real = program.run

    def noting(*args: Any) -> Any:
        result = real(*args)
        told.append(result.rounds[-1].clients)
        return result

    monkeypatch.setattr(program, "run", noting)
    row = program.measured(program.Study(registry.get("fedproto")), "none", program.Defence(), 0)
    liars = program.attacker_ids(program.Experiment(clients=10, seed=0, attack="nan", attackers=2))
    first = min(set(range(10)) - liars)
    assert row["victim_accuracy"] == told[0][str(first)]["local_accuracy"]
