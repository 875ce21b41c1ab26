"""The table: the numbers of the last round, in 80 columns."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from flwr_kd.results.errors import ResultError
from flwr_kd.results.table import difference_table, fitting
from tests.results.examples import a_comparison, a_round, a_run, rendered


def test_table():
    runs = [
        a_run(seed=seed, rounds=(a_round(local_accuracy=value, global_accuracy=value / 2, seconds=12.34),))
        for seed, value in enumerate([0.4, 0.6])
    ]
    text = rendered(a_comparison(*runs, *(a_run("ktpfl[x]", seed) for seed in (0, 1))))
    assert "MB = 10^6 bytes" in text
    assert "over 2 seeds" in text
    row = next(line for line in text.splitlines() if "fedavg" in line)
    assert row.split() == ["fedavg", "50.00", "±", "14.14", "25.00", "±", "7.07", "1.00", "3.00", "12.3"]
    row = next(line for line in text.splitlines() if "ktpfl[x]" in line)
    assert row.split() == ["ktpfl[x]", "50.00", "±", "0.00", "–", "1.00", "3.00", "2.00"]


def test_the_columns_that_are_named_are_shown():
    rounds = (a_round(common_accuracy=0.25, global_on_clients=0.125),)
    comparison = a_comparison(a_run(rounds=rounds))
    (shown,) = fitting(comparison, 80, ["common-accuracy", "bytes_up", "common-top5"])
    assert [str(column.header).split() for column in shown.columns] == [
        ["method"], ["common", "accuracy", "%"], ["MB", "up", "/round"], ["common", "top-5", "%"],
    ]  # fmt: skip
    assert [next(iter(column.cells)) for column in shown.columns[1:]] == ["25.00", "1.00", "–"]
    (shown,) = fitting(comparison, 200, ["global-on-clients", "all"])
    cells = {str(column.header): next(iter(column.cells)) for column in shown.columns[1:]}
    assert list(cells)[:2] == ["global on\nclients %", "local\naccuracy %"]
    assert list(cells.values()) == ["12.50", "50.00", "25.00", "1.00", "3.00", "2.00"]
    with pytest.raises(ResultError, match=r"unknown column 'local'.*valid: all, local-accuracy, "):
        fitting(comparison, 80, ["local"])


def test_a_target_has_columns_and_a_line():
    runs = [
        a_run(seed=seed, rounds=(a_round(1, local_accuracy=low), a_round(2, local_accuracy=high)))
        for seed, (low, high) in enumerate([(0.5, 0.9), (0.1, 0.2)])
    ]
    comparison = dataclasses.replace(a_comparison(*runs), config={"target": "local:85"})
    first, *others = fitting(comparison, 80)
    assert others
    assert all("to target" not in str(column.header) for column in first.columns)
    cells = {str(column.header): next(iter(column.cells)) for table in others for column in table.columns[1:]}
    assert cells["rounds\nto target"] == "2.00\n1 of 2 seeds"
    assert cells["MB\nto target"] == "8.00\n1 of 2 seeds"
    assert cells["s\nto target"] == "4.00\n1 of 2 seeds"
    text = rendered(comparison, width=200)
    assert "target: local accuracy 85 %; a mean over the seeds that reach it" in text
    # Named columns have the line only if one of them is about the target.
    assert "target" not in rendered(comparison, columns=["seconds"])
    for named in (["rounds-to-target"], ["all"]):
        assert "target: local accuracy 85 %" in " ".join(rendered(comparison, columns=named).split())
    # Without a run that reaches it there are no columns, but the line says which target it was.
    missed = dataclasses.replace(comparison, config={"target": "global:99"})
    assert "to target" not in rendered(missed, width=200)
    assert "target: global accuracy 99 %; no run reaches it" in rendered(missed, width=200)


def test_common_accuracy_is_shown_where_there_is_no_local_one():
    rounds = (a_round(local_accuracy=None, common_accuracy=0.25, global_accuracy=0.5),)
    comparison = a_comparison(*(a_run(m, s, rounds=rounds) for m in ("fedavg", "fedprox") for s in (0, 1)))
    first, second = fitting(comparison, 80)
    assert [str(column.header).split()[0] for column in first.columns] == [
        "method", "common", "global", "MB", "MB", "s",
    ]  # fmt: skip
    assert [str(column.header).split()[0] for column in second.columns] == ["method", "common", "global"]


def test_differences_are_of_the_accuracies_among_the_columns():
    runs = [
        a_run(method, seed, rounds=(a_round(common_accuracy=(seed + offset) / 10),))
        for method, offset in (("fedavg", 1), ("feddkc", 3))
        for seed in (0, 1)
    ]
    shown = difference_table(a_comparison(*runs), ["common-accuracy", "seconds"])
    assert shown is not None
    assert [str(column.header).splitlines()[0] for column in shown.columns] == ["method", "common accuracy"]
    assert [*shown.columns[1].cells] == ["+20.00 [+20.00, +20.00]"]


def test_a_server_s_own_model_has_a_column_where_there_is_one():
    assert "server" not in rendered(a_comparison(a_run()))
    rounds = (a_round(local_accuracy=0.5, global_accuracy=None, server_accuracy=0.25),)
    run = a_run("fedgkt", rounds=rounds)
    text = rendered(a_comparison(a_run(rounds=(a_round(global_accuracy=0.5),)), run))
    assert "server" in text
    row = next(line for line in text.splitlines() if "fedgkt" in line)
    assert row.split() == ["fedgkt", "50.00", "–", "25.00", "1.00", "3.00", "2.00"]
    row = next(line for line in rendered(a_comparison(run)).splitlines() if "fedgkt" in line)
    assert row.split() == ["fedgkt", "50.00", "25.00", "1.00", "3.00", "2.00"]


def test_table_says_how_many_seeds_have_a_value():
    missing = a_run(seed=1, rounds=(a_round(local_accuracy=None),))
    assert "1 of 2 seeds" in rendered(a_comparison(a_run(), missing))
    one = rendered(a_comparison(a_run()))
    assert "±" not in one
    assert "over 1 seed;" in one


def test_table_says_whose_local_accuracy_it_is():
    def run(method, seed=0, **last):
        clients = {str(key): {"local_accuracy": 0.5} for key in range(last.pop("measured", 0))}
        return a_run(method, seed, rounds=(a_round(local_accuracy=0.5, clients=clients, **last),))

    whole = run("fedavg", participants=6, available=6)
    assert "local accuracy:" not in rendered(a_comparison(whole))
    drawn = {"participants": 2, "available": 6, "measured": 6}
    first = run("fedproto", 0, **drawn, stored=("2",), received=("3", "4", "5"))
    second = run("fedproto", 1, **drawn, stored=("2", "3"), received=("4", "5"))
    text = " ".join(rendered(a_comparison(whole, first, second)).split())
    assert (
        "local accuracy of fedproto: all 6 clients; 2 took part in the last round, the others were measured after "
        "it, 1 to 2 with the personal model that they keep and 2 to 3 with the model that they would receive"
    ) in text
    some = run("fedavg", participants=2, available=6, measured=4, received=("2", "3"))
    assert "local accuracy: 4 of 6 clients; 2 took part" in " ".join(rendered(a_comparison(some)).split())
    # Results of earlier versions.
    old = a_comparison(run("fedavg", participants=1))
    assert "the 1 of 2 clients that took part in the last round" in " ".join(rendered(old).split())


def test_table_fits_80_columns():
    rounds = (
        a_round(local_accuracy=0.1, global_accuracy=1.0, bytes_up=10**9, bytes_down=10**9, seconds=1e3),
    )
    other = (a_round(local_accuracy=1.0, global_accuracy=0.1, bytes_up=10**9, bytes_down=10**9, seconds=1e3),)
    text = rendered(
        a_comparison(a_run("feddkc-long", 0, rounds=rounds), a_run("feddkc-long", 1, rounds=other))
    )
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_narrow_terminal_has_several_tables_with_whole_names():
    rounds = (a_round(local_accuracy=0.5, global_accuracy=0.25, server_accuracy=0.125),)
    comparison = a_comparison(*(a_run("ktpfl-weights", seed, rounds=rounds) for seed in (0, 1)))
    assert [len(part.columns) for part in fitting(comparison, 100)] == [7]
    parts = fitting(comparison, 60)
    assert len(parts) > 1
    assert difference_table(comparison) is None
    console = Console(file=io.StringIO(), width=60)
    console.print(*parts)
    lines = console.file.getvalue().splitlines()
    assert sum("ktpfl-weights" in line for line in lines) == len(parts)
    assert sum("last round" in line for line in lines) == 1
    # All columns but the repeated one of the methods.
    assert sum(len(part.columns) - 1 for part in parts) == 6


def differing(method: str, *pairs: tuple[float | None, float | None], server: float | None = None):
    return [
        a_run(
            method,
            seed,
            rounds=(a_round(local_accuracy=local, global_accuracy=whole, server_accuracy=server),),
        )
        for seed, (local, whole) in enumerate(pairs)
    ]


def printed(comparison, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(*fitting(comparison, width))
    return console.file.getvalue()


def test_several_seeds_show_the_difference_to_the_first_method():
    comparison = a_comparison(
        *differing("fedavg", (0.5, 0.25), (0.75, 0.5)),
        *differing("fedproto", (0.625, None), (1.0, None)),
        *differing("ktpfl[x]", (0.5, 0.25), (None, 0.25)),
    )
    text = printed(comparison)
    title = "difference to fedavg in points"
    lines = text[text.index(title) :].splitlines()
    assert lines[2].split() == ["local", "accuracy", "global", "accuracy"]
    assert lines[3].split() == ["method", *["mean", "[95", "%", "interval]"] * 2]
    first, second = (line.split() for line in lines if "fedproto" in line or "ktpfl[x]" in line)
    # Differences 12.5 and 25 points: the mean and 12.7062 · 8.8388 / √2 on both sides of it.
    assert first == ["fedproto", "+18.75", "[-60.66,", "+98.16]", "–"]
    # Local accuracy has one seed in common, which has no spread.
    assert second == ["ktpfl[x]", "+0.00", "-12.50", "[-171.33,", "+146.33]"]
    assert "1 of 2 seeds" in text
    assert all(len(line) <= 80 for line in lines)


def test_one_seed_or_one_method_has_no_table_of_differences():
    assert difference_table(a_comparison()) is None
    assert difference_table(a_comparison(*differing("fedavg", (0.5, 0.5), (0.5, 0.5)))) is None
    one = a_comparison(*differing("fedavg", (0.5, 0.5)), *differing("fedproto", (0.75, None)))
    assert difference_table(one) is None
    other_seeds = (a_run("fedproto", seed) for seed in (5, 6))
    assert difference_table(a_comparison(*differing("fedavg", (0.5, 0.5), (0.5, 0.5)), *other_seeds)) is None


def test_a_server_s_own_model_is_compared_where_the_first_method_has_one():
    pairs = ((0.5, None), (0.75, None))
    both = a_comparison(
        *differing("fedgkt", *pairs, server=0.25), *differing("feddkc-kkr", *pairs, server=0.5)
    )
    text = printed(both)
    row = [line for line in text.splitlines() if "feddkc-kkr" in line][-1]
    assert row.split() == ["feddkc-kkr", *["+0.00", "[+0.00,", "+0.00]"], *["+25.00", "[+25.00,", "+25.00]"]]


@pytest.mark.parametrize(
    ("bytes_up", "shown"),
    [
        (0, "0"),
        (1, "0.000001"),
        (31_234, "0.0312"),
        (312_000, "0.312"),
        (45_678_901, "45.7"),
        (10**9, "1000"),
    ],
)
def test_megabytes_keep_three_digits(bytes_up, shown):
    row = next(
        line
        for line in rendered(a_comparison(a_run(rounds=(a_round(bytes_up=bytes_up),)))).splitlines()
        if "fedavg" in line
    )
    assert row.split()[3] == shown
