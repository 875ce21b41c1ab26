"""Results and knowledge to draw."""

from __future__ import annotations

import numpy as np

from flwr_kd.results.schema import Comparison, RoundResult, RunResult

CONFIG = {"dataset": "digits", "partition": "inner-dirichlet:0.1", "clients": 10}


def a_run(method, seed, local, overall=None):
    overall = overall or [None] * len(local)
    rounds = tuple(
        RoundResult(number, own, shared, None, 1, 1, 1.0, 2, 0)
        for number, (own, shared) in enumerate(zip(local, overall, strict=True), start=1)
    )
    return RunResult(method, seed, rounds)


def a_comparison(*runs, config=None):
    return Comparison(CONFIG if config is None else config, {}, "", runs)


def a_map(classes=(0, 3, 4), size=5):
    labels = np.repeat(classes, size)
    return np.random.default_rng(0).normal(size=(len(labels), 2)), labels


def titles(drawn):
    return [axes.get_title().strip() for axes in drawn.axes if axes.get_visible()]


def two_groups(clients, inside=1.5, diagonal=0.3):
    """Return a matrix whose rows sum to 1, and in which the first half of the clients is one group."""
    group = np.arange(clients) < clients // 2
    matrix = np.where(group[:, None] == group, inside, 1.0)
    np.fill_diagonal(matrix, 0)
    matrix *= (1 - diagonal) / np.maximum(matrix.sum(axis=1, keepdims=True), 1e-9)
    np.fill_diagonal(matrix, diagonal)
    return matrix
