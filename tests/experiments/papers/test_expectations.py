"""Verdicts on claims, from numbers that are known."""

from __future__ import annotations

from typing import Any

import pytest

from flwr_kd.experiments.papers.expectations import GridCell, Verdict, verdict
from flwr_kd.experiments.papers.schema import Expectation

A, B, C = "fedhkd", "fedavg", "fedprox"


def claim(kind: str, **values: Any) -> Expectation:
    return Expectation(claim="c", kind=kind, source="stated", **values)


def cell(name: str, keys: dict[str, Any] | None = None, **rows: list[float]) -> GridCell:
    return GridCell(name, keys or {}, {"m": {row: dict(enumerate(each)) for row, each in rows.items()}})


ABOVE = claim("above", left=(A,), right=(B,))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([60, 61, 62], [50, 51.5, 52], Verdict.HOLDS),
        ([50, 51.5, 52], [60, 61, 62], Verdict.FAILS),
        # t is 4.3 with three seeds: 4 ± 4.3 · 4.36 / √3 reaches 0.
        ([60, 61, 62], [57, 60, 53], Verdict.UNDECIDED),
        ([60], [10], Verdict.UNDECIDED),
        ([], [10], Verdict.NOT_RUN),
    ],
)
def test_above(ours: list[float], theirs: list[float], expected: Verdict) -> None:
    found = verdict(ABOVE, [cell("a", **{A: ours, B: theirs})], "m")
    assert found.verdict is expected


def test_seeds_are_paired() -> None:
    """The spread over seeds is large, that of the differences small."""
    found = verdict(ABOVE, [cell("a", **{A: [20.0, 50.0, 80.5], B: [19.0, 49.2, 79.4]})], "m")
    assert found.verdict is Verdict.HOLDS
    assert found.pooled is not None
    assert found.pooled.mean == pytest.approx(0.9667, abs=1e-3)


def test_many_cells_decide_together() -> None:
    """No cell alone is decided; the mean over cells is, and all are in order."""
    noise = [(1.0, -0.4, 3.0), (-0.5, 3.2, 1.0), (3.1, 1.0, -0.6), (1.1, 1.0, 0.7)]
    cells = [cell(str(i), **{A: [50 + d for d in each], B: [50.0] * 3}) for i, each in enumerate(noise)]
    found = verdict(ABOVE, cells, "m")
    assert [found.count(each) for each in (Verdict.HOLDS, Verdict.UNDECIDED)] == [1, 3]
    assert found.in_order == 4
    assert found.verdict is Verdict.HOLDS


def test_one_cell_that_contradicts_is_enough_unless_the_papers_own_numbers_do_so_too() -> None:
    good = [cell(str(i), **{A: [60, 61, 62], B: [50, 51, 52.5]}) for i in range(3)]
    bad = cell("bad", **{A: [40, 41, 42], B: [50, 51, 52.5]})
    assert verdict(ABOVE, [*good, bad], "m").verdict is Verdict.FAILS
    assert verdict(ABOVE, [*good, bad], "m", share=0.75).verdict is Verdict.HOLDS


def test_best_is_the_best_of_several_against_all_others() -> None:
    rows = {A: [60.0, 61, 62], B: [50.0, 51, 52.2], C: [58.0, 59, 60.1]}
    assert verdict(claim("best", methods=(A,)), [cell("a", **rows)], "m").verdict is Verdict.HOLDS
    assert verdict(claim("best", methods=(B, C)), [cell("a", **rows)], "m").verdict is Verdict.FAILS
    among = claim("best", methods=(C,), among=(B, C))
    assert verdict(among, [cell("a", **rows)], "m").verdict is Verdict.HOLDS
    least = claim("best", methods=(B,), lower_is_better=True)
    assert verdict(least, [cell("a", **rows)], "m").verdict is Verdict.HOLDS


def test_gain_and_near_are_ranges() -> None:
    numbers = [cell("a", **{A: [60.0, 60.2, 60.1], B: [50.0, 50.1, 50.2]})]
    assert (
        verdict(claim("gain", left=(A,), right=(B,), low=9, high=11), numbers, "m").verdict is Verdict.HOLDS
    )
    assert verdict(claim("gain", left=(A,), right=(B,), low=2, high=3), numbers, "m").verdict is Verdict.FAILS
    assert verdict(claim("near", left=(A,), right=(B,), within=1.0), numbers, "m").verdict is Verdict.FAILS
    assert verdict(claim("near", left=(B,), right=(A,), within=11.0), numbers, "m").verdict is Verdict.HOLDS


def along(*values: list[float]) -> list[GridCell]:
    # The order of the cells does not count, that of the setting does.
    named = zip((0.1, 1, 10), values, strict=True)
    return [
        cell(str(p), {"partition": f"dirichlet:{p}", "d": 1}, **{A: each}) for p, each in reversed([*named])
    ]


def test_rises_goes_along_the_values_of_a_setting() -> None:
    rising = along([10.0, 10.3, 10.1], [20.0, 20.2, 20.3], [30.0, 30.1, 30.5])
    assert verdict(claim("rises", methods=(A,), along="partition"), rising, "m").verdict is Verdict.HOLDS
    assert verdict(claim("falls", methods=(A,), along="partition"), rising, "m").verdict is Verdict.FAILS
    bent = along([10.0, 10.3, 10.1], [20.0, 20.2, 20.3], [19.9, 20.4, 20.3])
    assert verdict(claim("rises", methods=(A,), along="partition"), bent, "m").verdict is Verdict.UNDECIDED


def test_only_cells_that_differ_in_that_setting_alone_are_a_row() -> None:
    first = cell("a", {"rho": 0.1, "dataset": "x"}, **{A: [10.0, 10.3]})
    other = cell("b", {"rho": 0.7, "dataset": "y"}, **{A: [20.0, 20.4]})
    found = verdict(claim("rises", methods=(A,), along="rho"), [first, other], "m")
    assert (found.verdict, found.checks, found.missing) == (Verdict.NOT_RUN, (), 0)
    pair = claim("pairs", methods=(A,), key="rho", better=0.7, worse=0.1)
    assert verdict(pair, [first, other], "m").verdict is Verdict.NOT_RUN
    same = cell("c", {"rho": 0.7, "dataset": "x"}, **{A: [30.0, 30.4]})
    assert verdict(pair, [first, other, same], "m").verdict is Verdict.HOLDS


def test_spread_is_over_all_cells_that_count() -> None:
    flat = [cell(str(i), {"d": "x"}, **{A: [50.0 + i / 10, 51 + i / 11, 52 + i / 9]}) for i in range(3)]
    far = cell("far", {"d": "y"}, **{A: [90.0, 91.0, 92.0]})
    spread = claim("spread-at-most", methods=(A,), within=1.0, where={"d": "x"})
    assert verdict(spread, [*flat, far], "m").verdict is Verdict.HOLDS
    everywhere = claim("spread-at-most", methods=(A,), within=1.0)
    assert verdict(everywhere, [*flat, far], "m").verdict is Verdict.FAILS


def test_a_text_is_judged_by_its_reader() -> None:
    assert verdict(claim("text"), [], "m").verdict is Verdict.READING
