"""Clients that are better off with a method than alone."""

from __future__ import annotations

import pytest

from flwr_kd.results.clients import ALONE, ClientGains, client_gains
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RunResult
from tests.results.examples import a_comparison, a_round, rendered


def run(method: str, seed: int, metric: str = "local_accuracy", **shares: float | None) -> RunResult:
    clients = {name[1:]: {metric: share} for name, share in shares.items()}
    values = {"local_accuracy": None, "participants": len(clients), "clients": clients}
    return RunResult(method, seed, (a_round(1, **values),))


def test_each_client_is_held_against_itself_with_the_same_seed() -> None:
    ours = [run("fedavg", 0, c0=0.5, c1=0.25, c2=0.75), run("fedavg", 1, c0=1.0), run("fedavg", 2, c0=1.0)]
    theirs = [run("other", 0, c0=0.25, c1=0.5, c2=0.75, c3=1.0), run("other", 1, c0=0.5)]
    assert client_gains(ours, theirs) == ClientGains(better=2, worse=1, of=4)
    assert client_gains(ours, theirs).share == 0.5
    assert client_gains(ours, []).share is None
    # A client without a value on one side does not count.
    assert client_gains([run("a", 0, c0=None, c1=1.0)], [run("b", 0, c0=0.5, c1=0.5)]).of == 1


def test_the_metric_is_one_of_clients() -> None:
    for metric in ("global_accuracy", "accuracy"):
        with pytest.raises(ResultError, match=rf"metric must be one of local_accuracy, .*, got '{metric}'"):
            client_gains([], [], metric)


def test_a_row_of_clients_alone_gives_the_share_that_is_better_off() -> None:
    runs = [
        run("fedavg", 0, c0=0.5, c1=0.5),
        run("fedavg", 1, c0=0.5, c1=0.5),
        run(ALONE, 0, c0=0.25, c1=0.75),
        run(ALONE, 1, c0=0.25, c1=0.25),
    ]
    comparison = a_comparison(*runs)
    first, alone = comparison.summary()
    assert first["better_off"] == {"mean": 0.75, "std": pytest.approx(0.5**1.5), "n": 2}
    assert alone["better_off"]["n"] == 0
    assert "better off" in rendered(comparison, width=200)
    assert "75.00 ± 35.36" in rendered(comparison, width=200)
    without = a_comparison(*runs[:2])
    assert without.summary()[0]["better_off"]["n"] == 0
    assert "better off" not in rendered(without, width=200)


def test_common_accuracy_counts_where_there_is_no_local_one() -> None:
    runs = [run("fedavg", 0, "common_accuracy", c0=0.5), run(ALONE, 0, "common_accuracy", c0=0.25)]
    assert a_comparison(*runs).summary()[0]["better_off"]["mean"] == 1.0


def test_rows_of_a_grid_are_held_against_clients_alone_with_their_values() -> None:
    runs = [run(f"fedavg, rate={rate}", 0, c0=0.5, c1=0.5) for rate in (1, 2)] + [
        run("alone, rate=1", 0, c0=0.25, c1=0.75),
        run("alone, rate=2", 0, c0=0.25, c1=0.25),
        run("fedgkt", 0, c0=1),
    ]
    shares = {row["method"]: row["better_off"]["mean"] for row in a_comparison(*runs).summary()}
    assert shares == {
        "fedavg, rate=1": 0.5,
        "fedavg, rate=2": 1.0,
        "alone, rate=1": None,
        "alone, rate=2": None,
        "fedgkt": None,
    }
