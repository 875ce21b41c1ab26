"""FedHEAD's sectors, leaders and communication cost."""

from __future__ import annotations

from collections import Counter

import hierarchy as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from sector_rounds import Run

from flwr_kd.checks import ConfigError
from flwr_kd.strategies.fedhead import (
    FedHEAD,
    FedHEADPlus,
    assign_sectors,
    communication_cost,
    draw_leader,
)

repeatable = settings(max_examples=80, deadline=None, derandomize=True)


class TestSectors:
    @repeatable
    @given(st.data(), st.sets(st.integers(0, 2**63), min_size=1, max_size=30), st.integers(0, 2**31))
    def test_as_even_as_can_be(self, draw: st.DataObject, keys: set[int], seed: int) -> None:
        sectors = draw.draw(st.integers(1, len(keys)))
        actual = assign_sectors(keys, sectors, np.random.default_rng(seed))
        assert actual.keys() == keys
        sizes = np.bincount(list(actual.values()), minlength=sectors)
        assert len(sizes) == sectors
        assert sizes.min() >= 1
        assert sizes.max() - sizes.min() <= 1
        turned = draw.draw(st.permutations(sorted(keys)))
        assert assign_sectors(turned, sectors, np.random.default_rng(seed)) == actual

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
        actual = assign_sectors(keys, 4, np.random.default_rng(seed), known)
        assert known == before
        assert actual.keys() == known.keys() | keys
        assert all(actual[key] == sector for key, sector in known.items())
        # Clients that are no longer connected do not count.
        sizes = np.bincount([actual[key] for key in keys], minlength=4)
        old = np.bincount([known[key] for key in keys & known.keys()], minlength=4)
        # No newcomer went to a sector that ended up larger by two than another.
        assert all(sizes[m] == old[m] or sizes[m] - sizes.min() <= 1 for m in range(4))

    def test_it_is_random(self) -> None:
        actual = [assign_sectors(range(6), 2, np.random.default_rng(seed)) for seed in range(400)]
        together = sum(sectors[0] == sectors[1] for sectors in actual)
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
