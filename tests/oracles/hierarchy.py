"""FedHEAD, FedHEAD+ and FedDF a second time, for a linear softmax classifier that full-batch plain SGD trains.

Written from the paper's sections 1 to 3 and algorithm 1 (its lines in brackets), in float64, and never from the
code under test. A model is a pair (W, b) with logits x Wᵀ + b. Cross-entropy against probabilities q has the
gradient (p - q)ᵀ x / n, whatever q is, and KL divergence to q has the same. Every function carries a case worked
by hand; the cases run as doctests.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Linear(NamedTuple):
    """A linear classifier."""

    W: Array
    b: Array


class Samples(NamedTuple):
    """A client's data set D_km."""

    x: Array
    y: NDArray[np.int64]


def linear(weight: ArrayLike, bias: ArrayLike) -> Linear:
    return Linear(np.asarray(weight, dtype=np.float64), np.asarray(bias, dtype=np.float64))


def samples(x: ArrayLike, y: ArrayLike) -> Samples:
    rows = np.asarray(x, dtype=np.float64)
    return Samples(rows.reshape(len(rows), -1), np.asarray(y, dtype=np.int64))


# --- predictions ---


def softmax(logits: ArrayLike) -> Array:
    """Row by row.

    >>> softmax([[np.log(3), 0.0], [1000.0, 1000.0]]).round(12).tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    """
    u = np.asarray(logits, dtype=np.float64)
    e = np.exp(u - u.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def logits(x: Array, model: Linear) -> Array:
    return x @ model.W.T + model.b


def normalised(weights: Sequence[float]) -> list[float]:
    """p_km / p_m.

    >>> normalised([1, 3])
    [0.25, 0.75]
    """
    return [w / sum(weights) for w in weights]


def mean_of_probabilities(outputs: Sequence[ArrayLike], weights: Sequence[float]) -> Array:
    """f̄_m of the teachers' logits: Σ_k p_km/p_m softmax(...).

    A teacher with (3/4, 1/4) and weight 1, one with (1/4, 3/4) and weight 3: (3 + 3)/16 and (1 + 9)/16.

    >>> u = np.log(3)
    >>> mean_of_probabilities([[[u, 0.0]], [[0.0, u]]], [1, 3]).round(12).tolist()
    [[0.375, 0.625]]
    """
    return np.asarray(sum(p * softmax(u) for p, u in zip(normalised(weights), outputs, strict=True)))


def softmax_of_mean(outputs: Sequence[ArrayLike], weights: Sequence[float]) -> Array:
    """FedDF's teacher: the softmax of the averaged logits.

    (u, 0) with weight 1 and (0, u) with weight 3, u = log 9: (log 9/4, 3 log 9/4), so 1 : 9^(1/2) = 1 : 3.

    >>> u = np.log(9)
    >>> softmax_of_mean([[[u, 0.0]], [[0.0, u]]], [1, 3]).round(12).tolist()
    [[0.25, 0.75]]
    """
    pairs = zip(normalised(weights), outputs, strict=True)
    return softmax(sum(p * np.asarray(u, dtype=np.float64) for p, u in pairs))


AVERAGES = {"probabilities": mean_of_probabilities, "logits": softmax_of_mean}


def ensemble(x: Array, models: Sequence[Linear], weights: Sequence[float], average: str) -> Array:
    return AVERAGES[average]([logits(x, model) for model in models], weights)


# --- models ---


def mean(models: Sequence[Linear], weights: Sequence[float]) -> Linear:
    """Σ_k p_k w_k / Σ_k p_k.

    >>> mean([linear([[1.0]], [0.0]), linear([[5.0]], [4.0])], [1, 3])
    Linear(W=array([[4.]]), b=array([3.]))
    """
    p = normalised(weights)
    return Linear(
        np.asarray(sum(q * m.W for q, m in zip(p, models, strict=True))),
        np.asarray(sum(q * m.b for q, m in zip(p, models, strict=True))),
    )


def one_hot(y: NDArray[np.int64], classes: int) -> Array:
    return np.eye(classes)[y]


def cross_entropy(x: Array, targets: Array, model: Linear) -> float:
    """Mean over the rows of -Σ_c q_c log p_c.

    >>> x, even = np.ones((1, 1)), linear([[0.0], [0.0]], [0.0, 0.0])
    >>> round(cross_entropy(x, np.array([[0.5, 0.5]]), even) - np.log(2), 15).item()
    0.0
    """
    return float(-(targets * np.log(softmax(logits(x, model)))).sum(axis=1).mean())


def descend(model: Linear, x: Array, targets: Array, rate: float, epochs: int) -> Linear:
    """Full-batch gradient descent on cross-entropy: as many steps as epochs.

    At W = b = 0 two classes have probability 1/2 each; for x = 2, label 0 the gradient in W is -1/2 · 2
    and 1/2 · 2:

    >>> start = linear([[0.0], [0.0]], [0.0, 0.0])
    >>> end = descend(start, np.array([[2.0]]), np.array([[1.0, 0.0]]), 0.5, 1)
    >>> end.W.tolist(), end.b.tolist()
    ([[0.5], [-0.5]], [0.25, -0.25])

    The student that is its own teacher stays:

    >>> descend(end, np.array([[2.0]]), softmax(logits(np.array([[2.0]]), end)), 0.5, 3).W.tolist()
    [[0.5], [-0.5]]
    """
    w, b = model.W.copy(), model.b.copy()
    for _ in range(epochs):
        residual = (softmax(x @ w.T + b) - targets) / len(x)
        w, b = w - rate * residual.T @ x, b - rate * residual.sum(axis=0)
    return Linear(w, b)


def early_stopping(losses: Sequence[float], patience: int, start: float = np.inf) -> tuple[int, int]:
    """Return how many epochs run and after which one the loss was lowest (0: before the first).

    `losses` are those after each epoch, `start` the one before the first. It ends after `patience` epochs in a
    row without a loss below the lowest yet.

    >>> early_stopping([3, 2, 2, 2.5, 1, 5], 2)
    (4, 2)
    >>> early_stopping([3, 2, 2, 2.5, 1, 5], 3)
    (6, 5)
    >>> early_stopping([3, 4], 5)
    (2, 1)
    >>> early_stopping([3, 4], 5, start=3)
    (2, 0)
    """
    best, at = start, 0
    for epoch, loss in enumerate(losses, start=1):
        if loss < best:
            best, at = loss, epoch
        if epoch - at >= patience:
            return epoch, at
    return len(losses), at


# --- whole rounds ---


class Round(NamedTuple):
    """The models of one round of FedHEAD."""

    local: dict[Hashable, Linear]
    """w_km [7]"""
    z: Linear
    """z [13]"""
    distilled: dict[Hashable, Linear]
    """z_m [17], by sector"""
    shares: dict[Hashable, float]
    """p_m"""
    model: Linear
    """w [20]"""


def train(start: Linear, data: Samples, rate: float, epochs: int) -> Linear:
    """[7], equation (1)."""
    return descend(start, data.x, one_hot(data.y, len(start.b)), rate, epochs)


def fedhead(
    start: Linear,
    clients: Mapping[Hashable, Samples],
    sectors: Mapping[Hashable, Sequence[Hashable]],
    leaders: Mapping[Hashable, Hashable | None],
    *,
    rate: float,
    n_l: int,
    n_s: int,
    average: str = "probabilities",
) -> Round:
    """Algorithm 1, lines 7 to 20. A sector whose leader is None is not distilled: its own mean w_m stands in.

    One sector of one client, trained for no epoch, is its own teacher: nothing moves.

    >>> start = linear([[1.0], [0.0]], [0.0, 0.5])
    >>> data = {"a": samples([[1.0], [2.0]], [0, 1])}
    >>> fedhead(start, data, {0: ["a"]}, {0: "a"}, rate=1.0, n_l=0, n_s=3).model.W.round(12).tolist()
    [[1.0], [0.0]]

    Without distillation it is federated averaging:

    >>> data |= {"b": samples([[3.0]], [0]), "c": samples([[1.0], [0.0], [-1.0]], [0, 1, 1])}
    >>> sectors = {0: ["a", "b"], 1: ["c"]}
    >>> actual = fedhead(start, data, sectors, {0: "b", 1: "c"}, rate=1.0, n_l=2, n_s=0).model
    >>> plain = mean([train(start, data[k], 1.0, 2) for k in "abc"], [2, 1, 3])
    >>> np.allclose(actual.W, plain.W, rtol=1e-14), np.allclose(actual.b, plain.b, rtol=1e-14)
    (True, True)
    """
    local = {k: train(start, clients[k], rate, n_l) for members in sectors.values() for k in members}
    sizes = {k: len(clients[k].x) for k in local}
    total = sum(sizes.values())
    shares = {m: sum(sizes[k] for k in members) / total for m, members in sectors.items()}  # p_m

    def own(m: Hashable) -> tuple[list[Linear], list[float]]:
        return [local[k] for k in sectors[m]], [sizes[k] / total for k in sectors[m]]

    sector_means = {m: mean(*own(m)) for m in sectors}  # [10]
    z = mean([sector_means[m] for m in sectors], [shares[m] for m in sectors])  # [13]
    distilled = {}
    for m in sectors:
        leader = leaders[m]
        if leader is None:
            distilled[m] = sector_means[m]
            continue
        x = clients[leader].x
        distilled[m] = descend(z, x, ensemble(x, *own(m), average), rate, n_s)  # [16, 17]
    model = mean([distilled[m] for m in sectors], [shares[m] for m in sectors])  # [20]
    return Round(local, z, distilled, shares, model)


def fedhead_plus(done: Round, reference: Array, *, rate: float, n_g: int, average: str) -> Linear:
    """Section 3.3 on top of a round: the ensemble of the leaders' models with p_m, w the student."""
    order = list(done.distilled)
    teachers, weights = [done.distilled[m] for m in order], [done.shares[m] for m in order]
    return descend(done.model, reference, ensemble(reference, teachers, weights, average), rate, n_g)


def feddf(
    start: Linear,
    clients: Mapping[Hashable, Samples],
    reference: Array,
    *,
    rate: float,
    n_l: int,
    n_g: int,
    average: str = "probabilities",
) -> Linear:
    """One round: all clients' models are the ensemble, their mean is the student.

    FedDF's algorithm 1 has 1/|S| Σ_k f(x_k) of logits, FedHEAD's section 3.3 weights probabilities by samples.
    """
    local = [train(start, data, rate, n_l) for data in clients.values()]
    sizes = [len(data.x) for data in clients.values()]
    student, weights = mean(local, sizes), [1] * len(sizes) if average == "logits" else sizes
    return descend(student, reference, ensemble(reference, local, weights, average), rate, n_g)


def round_trips(algorithm: str, *, sectors: int, clients: int, rounds: int) -> int:
    """Table 1: between the sectors and the server.

    >>> [round_trips(a, sectors=2, clients=20, rounds=50) for a in ("fedavg", "feddf", "fedhead", "fedhead-plus")]
    [100, 1000, 200, 200]
    """
    per_round = {"fedavg": sectors, "feddf": clients, "fedhead": 2 * sectors, "fedhead-plus": 2 * sectors}
    return per_round[algorithm] * rounds
