"""The JSON of a run: an exact round trip, and nothing invented."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_kd.results import schema
from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import Target
from flwr_kd.results.schema import Comparison, RoundResult, RunResult
from tests.results.examples import a_comparison, a_round, a_run, rendered

accuracies = st.none() | st.floats(0, 1)


finite = st.floats(allow_nan=False, allow_infinity=False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


mappings = st.dictionaries(st.text(max_size=8), json_values, max_size=3)


whole = st.integers(0, 2**60)


@st.composite
def runs_of(draw, method: str, seed: int) -> RunResult:
    numbers = sorted(draw(st.sets(st.integers(1, 50), max_size=4)))
    rounds = [
        RoundResult(
            number,
            draw(accuracies),
            draw(accuracies),
            draw(st.none() | finite),
            draw(whole),
            draw(whole),
            draw(st.floats(0, 1e6)),
            draw(whole),
            draw(whole),
        )
        for number in numbers
    ]
    width = draw(st.integers(0, 3))
    histogram = draw(st.lists(st.lists(whole, min_size=width, max_size=width), max_size=3))
    names = draw(st.one_of(st.just([]), st.lists(st.text(), min_size=width, max_size=width)))
    return RunResult(method, seed, tuple(rounds), draw(mappings), histogram, class_names=names)


@st.composite
def comparisons(draw) -> Comparison:
    keys = draw(st.lists(st.tuples(st.text(min_size=1, max_size=5), whole), max_size=3, unique=True))
    return Comparison(
        draw(mappings),
        draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
        draw(st.text()),
        tuple(draw(runs_of(method, seed)) for method, seed in keys),
    )


@settings(max_examples=30, deadline=None)
@given(comparisons())
def test_json_round_trip_is_exact(comparison):
    text = comparison.to_json()
    assert Comparison.from_json(text) == comparison
    assert Comparison.from_json(text.encode()).to_json() == text


@given(st.text())
def test_compact_rows_change_no_text(text):
    tricky = f"[\n  1,\n  2\n] {text}"
    comparison = Comparison({tricky: [tricky, [1, -2.5e-7]]}, {}, tricky, ())
    assert Comparison.from_json(comparison.to_json()).config == {tricky: [tricky, [1, -2.5e-7]]}


def test_the_file_says_what_a_reader_needs():
    comparison = a_comparison(a_run(seed=3))
    document = json.loads(comparison.to_json())
    assert document["schema_version"] == 1
    assert document["command"] == "flwr-kd compare"
    run = document["runs"][0]
    assert (run["method"], run["seed"], run["hyperparameters"]) == ("fedavg", 3, {"lr": 0.1})
    assert run["histogram"] == [[1, 2], [3, 4]]
    assert "[1, 2]" in comparison.to_json()
    assert run["rounds"][0] == {
        "round": 1,
        "local_accuracy": 0.5,
        "global_accuracy": None,
        "train_loss": 1.25,
        "bytes_up": 1_000_000,
        "bytes_down": 3_000_000,
        "seconds": 2.0,
        "participants": 4,
        "failures": 1,
        "local_top5": None,
        "server_accuracy": None,
        "clients": {},
    }
    measured = {"local_accuracy", "local_accuracy_last5"}
    assert measured < document["summary"][0].keys() < comparison.summary()[0].keys()
    assert all(comparison.summary()[0][name] == value for name, value in document["summary"][0].items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_becomes_null(value):
    run = RunResult("m", 0, (a_round(local_accuracy=value, train_loss=value),), {"weights": [1.0, value]}, [])
    text = Comparison({"x": value}, {}, "", (run,)).to_json()

    def refuse(name):
        raise AssertionError(name)

    document = json.loads(text, parse_constant=refuse)
    assert document["config"] == {"x": None}
    assert document["runs"][0]["hyperparameters"] == {"weights": [1.0, None]}
    assert document["runs"][0]["rounds"][0]["local_accuracy"] is None
    assert document["runs"][0]["rounds"][0]["train_loss"] is None


def test_numpy_values_paths_and_tuples_are_written_as_plain_json():
    values = {
        "a": np.int64(3),
        "b": np.array([[1, 2]]),
        "c": (1, 2),
        "d": Path("x") / "y",
        "e": np.bool_(True),
    }
    run = RunResult("m", 0, (a_round(np.int64(1), bytes_up=np.int32(7)),), values, np.array([[1, 2]]))
    assert run.hyperparameters == {"a": 3, "b": [[1, 2]], "c": [1, 2], "d": str(Path("x/y")), "e": True}
    assert run.histogram == [[1, 2]]
    comparison = a_comparison(run)
    assert Comparison.from_json(comparison.to_json()) == comparison


def test_a_result_does_not_change_with_the_caller_s_mapping():
    config = {"clients": [1]}
    comparison = Comparison(config, {}, "", ())
    config["clients"].append(2)
    assert comparison.config == {"clients": [1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round": 0}, "round must be a whole number from 1, got 0"),
        ({"local_accuracy": 51.0}, r"local_accuracy must be in \[0, 1\], got 51.0"),
        ({"global_accuracy": -0.1}, "global_accuracy must be in"),
        ({"global_accuracy": "0.5"}, "global_accuracy must be a finite number, got .0.5"),
        ({"train_loss": 10**400}, "train_loss must be a finite number, got a number of 1329 bits"),
        ({"bytes_up": -1}, "bytes_up must be a whole number from 0, got -1"),
        ({"bytes_down": 1.5}, "bytes_down must be a whole number"),
        ({"seconds": math.nan}, "seconds must be a finite number from 0, got nan"),
        ({"seconds": -1.0}, "seconds must be a finite number from 0"),
        ({"participants": True}, "participants must be a whole number"),
        ({"failures": None}, "failures must be a whole number"),
    ],
)
def test_a_round_is_checked(changes, message):
    with pytest.raises(ResultError, match=message):
        a_round(**changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RunResult("", 0, ()), "method must be a text"),
        (lambda: RunResult("m", -1, ()), "seed must be a whole number from 0, got -1"),
        (lambda: RunResult("m", 0, (a_round(2), a_round(2))), r"increasing order, got \[2, 2\]"),
        (lambda: RunResult("m", 0, (), {"f": object()}), r"hyperparameters\['f'\] is a object"),
        (lambda: RunResult("m", 0, (), {1: 2}), "has the key 1; keys must be text"),
        (lambda: RunResult("m", 0, (), {}, [1, 2]), "histogram must be a list of lists"),
        (lambda: RunResult("m", 0, (), {}, [[1], [1, 2]]), r"one width, got \[1, 2\]"),
        (lambda: RunResult("m", 0, (), {}, [[-1]]), "histogram must be a whole number from 0"),
        (lambda: RunResult("m", 0, (), class_names="ab"), "class_names must be a list of texts"),
        (lambda: RunResult("m", 0, (), class_names=[1]), "class_names must be a list of texts"),
        (lambda: RunResult("m", 0, (), {}, [[1, 2]], class_names=["a"]), "must name 2 classes, got 1 names"),
        (lambda: a_comparison(a_run(), a_run()), "fedavg with seed 0 twice"),
        (lambda: Comparison([], {}, "", ()), "config must be a mapping, got list"),
        (lambda: Comparison({}, {"flwr": 1}, "", ()), r"versions\['flwr'\] must be a text"),
        (lambda: Comparison({}, {}, None, ()), "command must be a text"),
    ],
)
def test_runs_and_comparisons_are_checked(build, message):
    with pytest.raises(ResultError, match=message):
        build()


def edited(edit) -> str:
    document = json.loads(a_comparison().to_json())
    edit(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be an object, got list"),
        ("{}", "schema_version must be 1, got None"),
        (edited(lambda d: d.update(schema_version=2)), "schema_version must be 1, got 2"),
        (edited(lambda d: d.update(schema_version=True)), "schema_version must be 1, got True"),
        (edited(lambda d: d.pop("config")), r"result: fields missing \['config'\]"),
        (edited(lambda d: d.update(runs={})), "runs must be a list, got dict"),
        (edited(lambda d: d["runs"].append(1)), r"runs\[1\] must be an object, got int"),
        (edited(lambda d: d["runs"].append(d["runs"][0])), "fedavg with seed 0 twice"),
        (edited(lambda d: d["runs"][0].update(seed="0")), r"runs\[0\]: seed must be"),
        (edited(lambda d: d["runs"][0]["rounds"][0].update(accuracy=1)), r"not expected \['accuracy'\]"),
        (
            edited(lambda d: d["runs"][0]["rounds"][0].pop("seconds")),
            r"rounds\[0\]: fields missing \['seconds'\]",
        ),
        (edited(lambda d: d["runs"][0]["rounds"][0].update(bytes_up=None)), r"rounds\[0\]: bytes_up must be"),
        (edited(lambda d: d["config"].update(x=math.nan)), "NaN is not allowed"),
    ],
)
def test_a_file_that_is_not_a_result_is_refused(text, message):
    with pytest.raises(ResultError, match=message):
        Comparison.from_json(text)


def test_last_is_the_last_round_not_the_best():
    accuracies = [0.9, 0.1, 0.2, 0.3, 0.4, 0.5]
    rounds = tuple(
        a_round(number, local_accuracy=value, bytes_up=number, seconds=seconds)
        for number, (value, seconds) in enumerate(zip(accuracies, [99, 1, 2, 3, 4, 5], strict=True), start=1)
    )
    last = a_run(rounds=rounds).last
    assert last["local_accuracy"] == 0.5
    assert last["local_accuracy_last5"] == pytest.approx(0.3)
    assert last["bytes_up"] == 3.5
    assert last["seconds"] == 3.5
    assert last["global_accuracy"] is last["global_accuracy_last5"] is None


def test_last_keeps_a_missing_last_round_missing():
    rounds = (a_round(1, global_accuracy=0.2), a_round(2, global_accuracy=0.4), a_round(3))
    last = a_run(rounds=rounds).last
    assert last["global_accuracy"] is None
    assert last["global_accuracy_last5"] == pytest.approx(0.3)


def test_a_run_without_rounds_has_no_numbers():
    run = RunResult("m", 0, ())
    assert set(run.last.values()) == {None}
    assert rendered(a_comparison(run)).count("–") >= 5


def test_summary_over_seeds():
    values = [0.2, 0.4, 0.9]
    runs = [
        a_run(seed=seed, rounds=(a_round(local_accuracy=value, global_accuracy=None if seed else 0.7),))
        for seed, value in enumerate(values)
    ]
    first, second = a_comparison(*runs, a_run("fedhkd")).summary()
    assert first["method"] == "fedavg"
    assert first["seeds"] == [0, 1, 2]
    assert first["local_accuracy"] == {
        "mean": pytest.approx(np.mean(values)),
        "std": pytest.approx(np.std(values, ddof=1)),
        "n": 3,
    }
    assert first["global_accuracy"] == {"mean": 0.7, "std": None, "n": 1}
    assert second["local_accuracy"] == {"mean": 0.5, "std": None, "n": 1}
    assert second["global_accuracy"] == {"mean": None, "std": None, "n": 0}


def test_a_result_without_the_newer_fields_can_be_read():
    document = json.loads(a_comparison(a_run()).to_json())
    for name in ("local_top5", "server_accuracy", "clients"):
        del document["runs"][0]["rounds"][0][name]
    (run,) = Comparison.from_json(json.dumps(document)).runs
    assert (run.rounds[0].local_top5, run.rounds[0].clients) == (None, {})


def test_common_and_global_accuracies_of_clients_are_kept():
    clients = {"0": {"local_accuracy": 0.5, "common_accuracy": 0.25, "global_on_clients": 0.75}, "1": {}}
    last = a_round(2, clients=clients, common_accuracy=0.25, global_on_clients=0.75, received=("0",))
    comparison = a_comparison(a_run(rounds=(a_round(1, common_accuracy=0.5), last)))
    assert Comparison.from_json(comparison.to_json()) == comparison
    assert comparison.summary()[0]["common_accuracy"]["mean"] == 0.25
    document = json.loads(comparison.to_json())
    assert document["summary"][0]["global_on_clients"] == {"mean": 0.75, "std": None, "n": 1}
    assert "common_top5" not in document["summary"][0]
    # A client that was measured after the last round is in no point of a curve; the global model is everybody's.
    assert last.of_participants("common_accuracy") is None
    assert last.of_participants("global_on_clients") == 0.75
    assert a_run(rounds=(a_round(1, common_accuracy=0.5), last)).rounds_to(0.4, "common_accuracy") == 1
    with pytest.raises(ResultError, match="common_accuracy must be in"):
        a_round(common_accuracy=1.5)


def test_rounds_bytes_and_seconds_to_a_target():
    def run(seed, *values):
        rounds = tuple(
            a_round(n, local_accuracy=v, global_accuracy=v / 2) for n, v in enumerate(values, start=1)
        )
        return a_run(seed=seed, rounds=rounds)

    runs = (run(0, 0.5, 0.9, 0.8), run(1, 0.85, 0.9), run(2, 0.1, 0.2))
    assert runs[0].to_target(Target(85)) == {
        "rounds_to_target": 2, "bytes_to_target": 8_000_000, "seconds_to_target": 4.0,
    }  # fmt: skip
    assert set(runs[2].to_target(Target(85)).values()) == {None}
    assert runs[0].to_target(Target(45, "global_accuracy"))["rounds_to_target"] == 2
    comparison = Comparison({"target": "85"}, {}, "", runs)
    assert Comparison.from_json(comparison.to_json()) == comparison
    (row,) = comparison.summary()
    assert row["rounds_to_target"] == {"mean": 1.5, "std": pytest.approx(0.5**0.5), "n": 2}
    assert row["bytes_to_target"]["mean"] == 6_000_000
    assert json.loads(comparison.to_json())["summary"][0]["seconds_to_target"]["mean"] == 3.0
    assert a_comparison(*runs).target is None
    assert a_comparison(*runs).summary()[0]["rounds_to_target"]["n"] == 0
    assert "rounds_to_target" not in json.loads(a_comparison(*runs).to_json())["summary"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.85", r"target \(in percent\) must be in \[1, 100\], got '0.85'"),
        ("101", "must be in"),
        ("x", "must be in"),
        ("", "must be in"),
        (":85", "target: there is no accuracy before the colon, got ':85'"),
        ("sum:85", "target: unknown accuracy .sum.; valid: local-accuracy, "),
    ],
)
def test_a_target_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ResultError, match=message):
        Comparison({"target": text}, {}, "", ())


def test_when_an_accuracy_was_reached_that_is_not_measured_each_round_is_not_known():
    """It may have been reached in a round before, which was not measured."""

    def reached(*values, metric="common_accuracy", void=()):
        rounds = [
            a_round(n, **{metric: v}, **({"participants": 0} if n in void else {}))
            for n, v in enumerate(values, start=1)
        ]
        return a_run(rounds=tuple(rounds)).rounds_to(0.5, metric)

    assert reached(None, None, 0.9) is None
    assert reached(None, 0.2, None, 0.9) is None
    assert reached(0.1, 0.2, 0.9) == 3
    assert reached(None, 0.2, 0.9) == 3
    assert reached(0.9) == 1
    assert reached(0.1, None, 0.9, void=(2,)) == 3
    assert reached(None, 0.9, void=(1,)) == 2
    assert reached(None, None, 0.9, void=(2,)) is None
    assert reached(None, 0.9, metric="global_on_clients") is None
    # These are measured after each round: where there is no value, there was no model.
    assert reached(None, 0.9, metric="global_accuracy") == 2


def test_parameters_and_round_trips_are_kept():
    rounds = (a_round(1, round_trips=4), a_round(2, round_trips=2))
    run = RunResult("fedprox", 0, rounds, parameters={"trained": 10, "held": 20.5, "server": 10})
    comparison = a_comparison(run, a_run())
    assert Comparison.from_json(comparison.to_json()) == comparison
    first, second = json.loads(comparison.to_json())["summary"]
    assert first["parameters_held"] == {"mean": 20.5, "std": None, "n": 1}
    assert first["round_trips"]["mean"] == 3
    assert "parameters_held" not in second
    with pytest.raises(ResultError, match="parameters may have trained, held, server, got 'sent'"):
        RunResult("fedprox", 0, (), parameters={"sent": 1})
    with pytest.raises(ResultError, match=r"parameters\['held'\] must be a finite number from 0"):
        RunResult("fedprox", 0, (), parameters={"held": -1})


def test_clients_numbers_are_checked_and_kept():
    kept = a_round(clients={"0": {"local_accuracy": 0.5, "local_top5": float("nan")}, "1": {}})
    assert kept.clients == {
        "0": {"local_accuracy": 0.5, "local_top5": None},
        "1": {"local_accuracy": None, "local_top5": None},
    }
    with pytest.raises(ResultError, match=r"clients\['0'\] must have local_accuracy and local_top5"):
        a_round(clients={"0": {"accuracy": 0.5}})
    with pytest.raises(ResultError, match=r"local_top5 must be in \[0, 1\], got 5"):
        a_round(clients={"0": {"local_top5": 5}})


def test_the_fields_are_the_schema():
    """A renamed field changes the file and needs a new schema version; an added one needs a default."""
    assert [field.name for field in dataclasses.fields(RoundResult)] == [
        "round",
        "local_accuracy",
        "global_accuracy",
        "train_loss",
        "bytes_up",
        "bytes_down",
        "seconds",
        "participants",
        "failures",
        "local_top5",
        "server_accuracy",
        "clients",
        "available",
        "stored",
        "received",
        "accuracy_before",
        "distance_to_last",
        "common_accuracy",
        "common_top5",
        "global_top5",
        "global_on_clients",
        "global_on_clients_top5",
        "trained_accuracy",
        "trained_top5",
        "local_auroc",
        "trained_auroc",
        "common_auroc",
        "global_auroc",
        "global_on_clients_auroc",
        "round_trips",
        "bytes_knowledge",
    ]
    assert schema.SCHEMA_VERSION == 1


def test_one_run_of_each_method():
    def run(method, seed):
        return RunResult(method, seed, ())

    comparison = Comparison({}, {}, "", (run("b", 2), run("a", 1), run("b", 1), run("c", 3)))
    assert {name: each.seed for name, each in comparison.one_each().items()} == {"b": 2, "a": 1, "c": 3}
    assert list(comparison.one_each()) == ["b", "a", "c"]
    assert {name: each.seed for name, each in comparison.one_each(1).items()} == {"b": 1, "a": 1}
    with pytest.raises(ResultError, match="seed must be one of 1, 2, 3, got 0"):
        comparison.one_each(0)
    with pytest.raises(ResultError, match="runs is empty"):
        Comparison({}, {}, "", ()).one_each()


def test_clients_that_were_measured_after_the_last_round_are_named():
    clients = {"0": {"local_accuracy": 1.0}, "1": {"local_accuracy": 0.5}, "2": {"local_accuracy": 0.0}}
    last = a_round(local_accuracy=0.5, clients=clients, available=3, stored=("1",), received=("2",))
    assert last.of_participants("local_accuracy") == 1.0
    run = a_run(rounds=(last,))
    assert (run.last["local_accuracy"], run.last["local_accuracy_last5"]) == (0.5, 1.0)
    comparison = a_comparison(run)
    assert Comparison.from_json(comparison.to_json()) == comparison
    with pytest.raises(ResultError, match=r"received must be keys of clients, got \('3',\)"):
        a_round(clients=clients, received=("3",))
    with pytest.raises(ResultError, match=r"available must be a whole number from 0"):
        a_round(available=-1)


def test_an_adapted_model_does_not_reach_a_target_of_trained_ones():
    """The same round counts the same, whether it is the last or not."""
    before = a_round(round=1, local_accuracy=0.5)
    adapted = a_round(round=2, local_accuracy=0.75, accuracy_before=0.25)
    run = a_run(rounds=(before, adapted))
    assert run.rounds_to(0.5, "local_accuracy") == 1
    assert run.rounds_to(0.75, "local_accuracy") is None
    assert (run.last["local_accuracy"], run.last["local_accuracy_last5"]) == (0.75, 0.5)
    clients = {"0": {"local_accuracy": 0.5}, "1": {"local_accuracy": 1.0}}
    partial = a_round(local_accuracy=0.75, clients=clients, available=2, received=("1",))
    assert a_run(rounds=(partial,)).rounds_to(0.75, "local_accuracy") is None
    assert a_run(rounds=(partial,)).rounds_to(0.5, "local_accuracy") == 1
