"""Models and data of FedDF's and pFedDF's tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, RecordDict
from torch import Tensor, nn

CLASSES, SHAPE, FEATURES = 3, (1, 2, 4), 8
RATE, N_L, N_G = 0.3, 3, 5
REFERENCE = 17


def data(index: int, size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(index)
    y = torch.randint(CLASSES, (size,), generator=draw)
    return torch.randn(size, *SHAPE, generator=draw) + y[:, None, None, None], y


def reference() -> Tensor:
    return data(1000, REFERENCE)[0]


def descend(model: nn.Module, x: Tensor, targets: Tensor, epochs: int) -> None:
    """Take full-batch gradient steps in float64, by hand."""
    for _ in range(epochs):
        loss = -(targets * torch.log_softmax(model(x), dim=1)).sum(dim=1).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= RATE * grad


def full(value: float) -> Callable[[RecordDict], None]:
    def garble(content: RecordDict) -> None:
        for record in content.array_records.values():
            for name in [name for name in record if name != "_empty"]:
                array = record[name].numpy()
                if array.dtype.kind == "f":
                    record[name] = Array(np.full_like(array, value))

    return garble


def p_net(kind: str, seed: int = 0, classes: int = CLASSES) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body: dict[str, list[nn.Module]] = {
            "linear": [nn.Linear(FEATURES, classes)],
            "hidden": [nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, classes)],
            "norm": [nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, classes)],
            "soft": [nn.Softsign(), nn.Linear(FEATURES, classes)],
            "drop": [
                *(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4)),
                nn.Linear(8, classes),
            ],
        }
        return nn.Sequential(nn.Flatten(), *body[kind])


def double(kind: str, state: dict[str, Tensor]) -> nn.Sequential:
    model = p_net(kind).double()
    model.load_state_dict({n: v.double() if v.is_floating_point() else v for n, v in state.items()})
    return model.train()
