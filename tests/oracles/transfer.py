"""KT-pFL's, FedMD's and KT-pFL's homogeneous rounds a second time: clients in float64, plain SGD, the equations.

Written from the paper's algorithm 1, its equations 2, 5, 6, 9 and 10 (in brackets) and the issue's text, never from
the code under test; the server's arithmetic is :mod:`coefficients`. The nets are those of the run, as float64
copies; no loss, optimiser or loop is the library's. What a run decides by chance (who takes part, which public
samples, in which order) comes from outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import coefficients
import numpy as np
import torch
from torch import Tensor, nn

Array = coefficients.Array


def batches(count: int, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield one epoch's positions: a random order in pieces, of which the last is not a single one.

    >>> [len(each) for each in batches(9, 4, torch.Generator())], [len(e) for e in batches(1, 4, torch.Generator())]
    ([4, 5], [1])
    >>> [len(each) for each in batches(10, 4, torch.Generator())]
    [4, 4, 2]
    """
    positions = torch.randperm(count, generator=order).tolist()
    start = 0
    while start < count:
        stop = min(start + size, count)
        if count - stop == 1:
            stop = count
        yield torch.tensor(positions[start:stop])
        start = stop


def softmax(z: Tensor, temperature: float = 1.0) -> Tensor:
    """s(w, x), definition 3.1.

    >>> softmax(torch.tensor([[np.log(9.0), 0.0]], dtype=torch.float64), 2.0).tolist()
    [[0.75, 0.25]]
    """
    e = torch.exp((z - z.amax(dim=1, keepdim=True)) / temperature)
    return e / e.sum(dim=1, keepdim=True)


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """[1], the mean of a batch.

    >>> round(float(cross_entropy(torch.tensor([[np.log(3.0), 0.0], [0.0, 0.0]]), torch.tensor([1, 0]))), 6)
    1.039721

    which is (log 4 + log 2)/2.
    """
    s = softmax(z)
    return -torch.stack([torch.log(s[i, int(label)]) for i, label in enumerate(y)]).mean()


def divergence(targets: Tensor, z: Tensor, temperature: float) -> Tensor:
    """Sum over samples of KL(target ‖ s(w, x)) [2, 6].

    >>> z = torch.tensor([[np.log(9.0), 0.0]] * 2, dtype=torch.float64)
    >>> round(float(divergence(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), z, 2.0)), 6)
    1.530135

    which is log 2/√3 and log 4.
    """
    s, total = softmax(z, temperature), torch.zeros((), dtype=z.dtype)
    for i in range(len(s)):
        for c in range(s.shape[1]):
            t = targets[i, c]
            if t > 0:
                total = total + t * (torch.log(t) - torch.log(s[i, c]))
    return total


class Mirror:
    """A client a second time."""

    def __init__(self, model: nn.Module, train: Any, test: Any) -> None:
        self.model = copy.deepcopy(model).double()
        self.x, self.y = train.tensors[0].double(), train.tensors[1]
        self.test_x, self.test_y = test.tensors[0].double(), test.tensors[1]

    def weights(self) -> dict[str, Array]:
        return {name: value.numpy().copy() for name, value in self.model.state_dict().items()}

    def take(self, weights: dict[str, Any]) -> None:
        self.model.load_state_dict({name: torch.as_tensor(np.array(v)) for name, v in weights.items()})

    def descend(
        self, losses: Iterable[Tensor], rate: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        """One step for each loss, which is made when the step before is done; the velocity begins anew."""
        parameters = list(self.model.parameters())
        velocity = [torch.zeros_like(p) for p in parameters]
        for loss in losses:
            slopes = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, v, slope in zip(parameters, velocity, slopes, strict=True):
                    v.mul_(momentum).add_(slope + weight_decay * p)
                    p.sub_(rate * v)

    def train(
        self, x: Tensor, y: Tensor, size: int, epochs: int, order: torch.Generator, **sgd: float
    ) -> None:
        """[5, 9], on any labelled samples."""

        def losses() -> Iterator[Tensor]:
            for _ in range(epochs):
                for chunk in batches(len(x), size, order):
                    yield cross_entropy(self.model.train()(x[chunk]), y[chunk])

        self.descend(losses(), **sgd)

    @torch.no_grad()
    def predict(self, x: Tensor, temperature: float) -> Array:
        return softmax(self.model.eval()(x), temperature).numpy()

    def distil(
        self,
        x: Tensor,
        targets: Any,
        size: int,
        epochs: int,
        order: torch.Generator,
        *,
        temperature: float,
        weight: float,
        reduction: str,
        **sgd: float,
    ) -> None:
        """[6], in eval mode: R passes over the public samples."""
        goal = torch.as_tensor(np.array(targets), dtype=torch.float64)

        def losses() -> Iterator[Tensor]:
            for _ in range(epochs):
                for chunk in batches(len(x), size, order):
                    loss = weight * divergence(goal[chunk], self.model.eval()(x[chunk]), temperature)
                    yield loss / (len(chunk) if reduction == "mean" else 1)

        self.descend(losses(), **sgd)

    @torch.no_grad()
    def accuracy(self) -> float:
        hits = [int(row.argmax()) == int(y) for row, y in zip(self.model.eval()(self.test_x), self.test_y)]  # noqa: B905
        return sum(hits) / len(hits)


class Matrix:
    """The knowledge coefficients by client, and what a server does with them."""

    def __init__(self, clients: Sequence[int]) -> None:
        self.clients = sorted(clients)
        self.c: Array = np.full((len(clients), len(clients)), 1 / max(len(clients), 1))

    def admit(self, clients: Iterable[int]) -> None:
        """Put newcomers in their place: by the clients' numbers.

        >>> m = Matrix([2, 7])
        >>> m.c = np.array([[1.0, 0.0], [0.25, 0.75]])
        >>> m.admit([3, 2, 5])
        >>> m.clients, m.c[[0, 3]].round(12).tolist()
        ([2, 3, 5, 7], [[0.5, 0.25, 0.25, 0.0], [0.125, 0.25, 0.25, 0.375]])
        """
        new = sorted(set(clients) - set(self.clients))
        joined = self.clients + new
        c = coefficients.extend(self.c, len(new))
        place = [joined.index(client) for client in sorted(joined)]
        self.clients, self.c = sorted(joined), c[np.ix_(place, place)]

    def rows(self, clients: Sequence[int]) -> list[int]:
        return [self.clients.index(client) for client in clients]

    def learn(self, clients: Sequence[int], s: Array, counts: Sequence[int], config: Any) -> Array:
        """Return the targets [2], and move the matrix [7]; Sim-pFL and TopK-pFL make it from the predictions."""
        self.admit(clients)
        rows = self.rows(clients)
        if config.coefficients != "learned":
            k = config.top_k if config.coefficients == "top-k" else None
            weights = coefficients.cosine_coefficients(s, k)
            self.c[rows] = 0
            self.c[np.ix_(rows, rows)] = weights
            return coefficients.personal_targets(weights, s)
        weights = coefficients.of_participants(self.c, rows)
        targets = coefficients.personal_targets(weights, s)
        shares = [count / sum(counts) for count in counts]
        slope = coefficients.coefficient_gradient(
            weights, s, shares, config.distill_weight, config.rho, config.reduction
        )
        moved = coefficients.step(weights, slope, config.coefficient_learning_rate, config.normalize)
        self.c = coefficients.with_participants(self.c, rows, moved)
        if config.normalize == "none":
            targets = np.array([[_distribution(row) for row in target] for target in targets])
        return targets

    def learn_models(
        self, clients: Sequence[int], models: coefficients.Models, counts: Sequence[int], config: Any
    ) -> list[list[Any]]:
        """Return the personal global models [10], and move the matrix [11]."""
        self.admit(clients)
        rows = self.rows(clients)
        weights = coefficients.of_participants(self.c, rows)
        made = coefficients.personal_models(weights, models)
        size = len(coefficients.flat(models[0]))
        slope = coefficients.distance_gradient(
            weights, models, [count / sum(counts) for count in counts], config.distill_weight, config.rho,
            1.0 if config.reduction == "sum" else 1 / size,
        )  # fmt: skip
        moved = coefficients.step(weights, slope, config.coefficient_learning_rate, config.normalize)
        self.c = coefficients.with_participants(self.c, rows, moved)
        return made


def _distribution(row: Array) -> Array:
    kept = np.maximum(row, 0)
    return kept / kept.sum() if kept.sum() > 1e-7 else np.full(len(row), 1 / len(row))


def consensus(s: Array) -> Array:
    """FedMD: everyone's target is the plain mean.

    >>> consensus(np.array([[[1.0, 0.0]], [[0.5, 0.5]]])).tolist()
    [[[0.75, 0.25]], [[0.75, 0.25]]]
    """
    total = np.zeros_like(s[0])
    for each in s:
        total = total + each / len(s)
    return np.stack([total] * len(s))


Draw = Callable[[str, int, int, str], torch.Generator]
"""Seeds of a client's batches: phase, round, partition, purpose."""
Server = Callable[[int, list[int], Array, list[int]], Array]
"""Targets ``[N, K, C]`` of a round, of clients, from their predictions and their sample counts."""


def replay(
    party: Any, draw: Draw, server: Server, precision: str = "float32", warmup: int = 0
) -> list[Mirror]:
    """Go through a run on public data once more; at each step what was sent and kept must be the same.

    Where predictions travel rounded, the next step starts from what travelled, so that errors do not add up.
    """
    config, grid = party.strategy.config, party.grid
    mirrors = [Mirror(*part) for part in zip(party.models, party.train, party.test, strict=True)]
    sgd = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    warm: set[int] = set()
    for r, stats in enumerate(party.strategy_rounds, start=1):
        trained, distilled = grid.of(r, "train"), grid.of(r, "distill")
        keys, decay = sorted(trained), config.lr_decay ** ((r - 1) // config.lr_decay_every)
        public_x, public_y = party.public(0).tensors
        rows = torch.from_numpy(trained[keys[0]].sent()["rows"].copy())
        x, predictions = public_x[rows].double(), []
        before: dict[int, dict[str, float]] = {}
        for n in keys:
            mirror, rate = mirrors[n], config.learning_rate * decay
            if warmup and n not in warm:
                warm.add(n)
                order = draw("train", r, n, "warm-up")
                mirror.train(public_x.double(), public_y, config.batch_size, warmup, order, rate=rate, **sgd)
            order = draw("train", r, n, "order")
            mirror.train(mirror.x, mirror.y, config.batch_size, config.local_epochs, order, rate=rate, **sgd)
            _same_weights(trained[n].kept, mirror.weights())
            before[n] = {"trained-accuracy": mirror.accuracy()}
            exact, came = mirror.predict(x, config.temperature), trained[n].came()["predictions"]
            predictions.append(_arrived(exact, came, precision))
        counts = [len(mirrors[n].x) for n in keys]
        targets = server(r, keys, np.stack(predictions), counts)
        assert sorted(distilled) == keys
        for n, goal in zip(keys, targets, strict=True):
            mirror = mirrors[n]
            mirror.distil(
                x, _arrived(goal, distilled[n].sent()["targets"], precision), config.public_batch_size,
                config.distill_epochs, draw("distill", r, n, "public-order"), temperature=config.temperature,
                weight=config.distill_weight, reduction=config.reduction,
                rate=config.distill_learning_rate * decay, **sgd,
            )  # fmt: skip
            _same_weights(distilled[n].kept, mirror.weights())
            assert distilled[n].metrics == {"local-accuracy": mirror.accuracy()}
        if r == len(party.strategy_rounds):
            # After the last round all are measured, those that never trained with their models as built.
            keys = list(range(len(mirrors)))
        assert stats.clients == {
            n: {"local-accuracy": mirrors[n].accuracy(), **before.get(n, {})} for n in keys
        }
        np.testing.assert_allclose(stats.local_accuracy, np.mean([mirrors[n].accuracy() for n in keys]))
    return mirrors


def _arrived(exact: Array, packed: Any, precision: str) -> Array:
    """Return what a receiver works with; it is no further off than the precision allows."""
    assert packed.dtype.name == precision
    actual = coefficients.unpacked(packed)
    bound = coefficients.error_bound(exact, precision) + 1e-6
    assert (np.abs(actual - exact) <= bound).all(), np.abs(actual - exact).max()
    return np.asarray(exact) if precision == "float32" else actual


def _same_weights(kept: dict[str, Any], expected: dict[str, Array], atol: float = 2e-6) -> None:
    assert kept.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(kept[name], value, rtol=1e-5, atol=atol, err_msg=name)
