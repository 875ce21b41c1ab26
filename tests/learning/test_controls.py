"""Controls have the shape of knowledge, and nothing of what it says."""

from __future__ import annotations

import pytest
import torch

from flwr_kd.config import KNOWLEDGE
from flwr_kd.learning.controls import controlled, cyclic_order


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows() -> torch.Tensor:
    return torch.softmax(torch.randn(12, 4, generator=generator(5)), dim=1)


def test_knowledge_itself_is_not_touched() -> None:
    knowledge = rows()
    assert controlled(knowledge, "own", generator(), uniform=0.25) is knowledge


def test_uniform_rows_say_nothing() -> None:
    assert torch.equal(controlled(rows(), "uniform", generator(), uniform=0.25), torch.full((12, 4), 0.25))


def test_permuted_rows_are_the_same_rows_of_other_samples() -> None:
    knowledge = rows()
    permuted = controlled(knowledge, "permuted", generator(), uniform=0.25)
    assert not (permuted == knowledge).all(dim=1).any()
    assert sorted(permuted.tolist()) == sorted(knowledge.tolist())
    assert torch.equal(permuted, controlled(knowledge, "permuted", generator(), uniform=0.25))
    assert not torch.equal(permuted, controlled(knowledge, "permuted", generator(1), uniform=0.25))


def test_only_a_permutation_draws() -> None:
    draw = generator()
    before = draw.get_state()
    for kind in ("own", "uniform"):
        controlled(rows(), kind, draw, uniform=0.25)
    assert torch.equal(draw.get_state(), before)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_an_order_has_all_numbers_and_none_in_its_place(count: int) -> None:
    for seed in range(20):
        order = cyclic_order(count, generator(seed))
        assert sorted(order.tolist()) == list(range(count))
        assert count < 2 or not (order == torch.arange(count)).any()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=f"kind must be one of {', '.join(KNOWLEDGE)}, got 'none'"):
        controlled(rows(), "none", generator(), uniform=0.25)
