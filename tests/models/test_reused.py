"""Models that are built once and lent again: nothing that a borrower does reaches the next one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flwr_kd.models import make_slimmable
from flwr_kd.models.reused import ModelPool, Pristine
from flwr_kd.testing.federation import small_model

X = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class Borrower:
    """Something that can be referenced weakly."""


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    model(X).sum().backward()
    optimizer.step()


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def doubled_gradient(gradient: Tensor) -> Tensor:
    return gradient * 2


def cleared(tensor: Tensor) -> None:
    tensor.grad = None


def replaced(model: Any) -> None:
    model.extractor = nn.Flatten()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "trained": trained,
    "slimmable": make_slimmable,
    "frozen": lambda model: model.requires_grad_(False),
    "eval": lambda model: model.eval(),
    "hook": lambda model: model.register_forward_hook(doubled),
    "gradient": lambda model: next(model.parameters()).register_hook(doubled_gradient),
    "after gradient": lambda model: next(model.parameters()).register_post_accumulate_grad_hook(cleared),
    "attribute of a tensor": lambda model: setattr(next(model.parameters()), "width", 3),
    "attribute": lambda model: setattr(model, "width", 3),
    "buffer": lambda model: model.register_buffer("more", torch.ones(2)),
    "layer": replaced,
    "double": lambda model: model.double(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "new data": lambda model: setattr(next(model.parameters()), "data", torch.zeros(3)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_undone(change: Callable[[Any], Any]) -> None:
    model = small_model("resnet8")
    kinds = [type(module) for module in model.modules()]
    state, attributes = copy.deepcopy(model.state_dict()), vars(model).keys() | set()
    other = copy.deepcopy(model).eval()
    expected = other(X)
    gradients = torch.autograd.grad(expected.sum(), list(other.parameters()))
    pristine = Pristine(model)
    change(model)
    pristine.restore()
    assert [type(module) for module in model.modules()] == kinds
    assert vars(model).keys() == attributes
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    restored = model.state_dict()
    assert restored.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(restored[name], value)
        assert restored[name].dtype == value.dtype
        assert restored[name].stride() == value.stride()
    assert torch.equal(model.eval()(X), expected)
    model(X).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
    assert not vars(next(model.parameters()))


def test_one_borrower_at_a_time() -> None:
    pool, built = ModelPool(), []

    def build() -> nn.Module:
        built.append(nn.Linear(2, 3))
        return built[-1]

    first, second = Borrower(), Borrower()
    one, two = pool.lend("key", build, first), pool.lend("key", build, second)
    assert one is not two
    nn.init.zeros_(one.weight)  # type: ignore[arg-type]
    del first
    assert pool.size == 1
    third = Borrower()
    assert pool.lend("key", build, third) is one
    assert bool(one.weight.any())
    assert pool.lend("other", build, third) is not two
    assert len(built) == 3


def test_a_model_whose_build_fails_is_not_lent() -> None:
    pool, borrower = ModelPool(), Borrower()
    with pytest.raises(ZeroDivisionError):
        pool.lend("key", lambda: 1 // 0, borrower)  # type: ignore[arg-type, return-value]
    del borrower
    gc.collect()
    assert pool.size == 0


def test_only_some_kinds_of_models_are_kept() -> None:
    pool = ModelPool()
    for key in range(40):
        pool.lend(key, lambda: nn.Linear(1, 1), Borrower())
    assert pool.size == 16
    pool.clear()
    assert pool.size == 0
