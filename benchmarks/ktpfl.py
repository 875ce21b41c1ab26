"""What KT-pFL's server does in a round: targets for all clients and a step of the coefficient matrix.

3,000 public samples of 10 classes, for 20, 100 and 1,000 clients; for 20 and 100 beside two loops over pairs of
clients: one with the gradient in closed form, one that leaves it to autograd, as research code does. A pair is one
operation on 30,000 numbers there. Each number of clients runs in a process of its own, for its peak memory.

Usage: python benchmarks/ktpfl.py [--out FILE]     (a few minutes on one core)
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_kd.learning.device import one_thread
from flwr_kd.results.provenance import versions
from flwr_kd.strategies.ktpfl.functional import coefficient_gradient, extend, personal_targets, step

SAMPLES, CLASSES, CLIENTS, LOOPED = 3000, 10, (20, 100, 1000), (20, 100)
REPEATS = 5
# So small that no row ends at a corner of the simplex, where all ways would agree.
RATE, RHO = 1e-4, 0.6


@one_thread()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(measure(options.clients)))
        return
    document: dict[str, Any] = {"versions": versions()}
    document |= {"threads": 1, "samples": SAMPLES, "classes": CLASSES, "repeats": REPEATS}
    document["steps"] = [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "--clients", str(clients)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for clients in CLIENTS
    ]
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def measure(clients: int) -> dict[str, Any]:
    """Time the step, and the loop in turn with it, so that both see the same machine."""
    draw = torch.Generator().manual_seed(0)
    predictions = torch.softmax(torch.randn(clients, SAMPLES, CLASSES, generator=draw), dim=2)
    weights = extend(torch.zeros(0, 0, dtype=torch.float64), clients)
    shares = torch.full((clients,), 1 / clients, dtype=torch.float64)
    products(weights, predictions, shares)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ways = {"products": products, "loop": loop, "autograd": autograd}
    if clients not in LOOPED:
        ways = {"products": products}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            start = time.perf_counter()
            way(weights, predictions, shares)
            times[name].append(time.perf_counter() - start)
    document: dict[str, Any] = {
        "clients": clients,
        "seconds": statistics.median(times["products"]),
        "peak_rss_mb": round(peak / 1024, 1),
        "predictions_mb": predictions.numel() * predictions.element_size() / 10**6,
    }
    made = products(weights, predictions, shares)
    for name in list(ways)[1:]:
        ratios = [b / a for a, b in zip(times["products"], times[name], strict=True)]
        difference = (made - ways[name](weights, predictions, shares)).abs().max()
        document[name] = {
            "seconds": statistics.median(times[name]),
            "products_are_times_as_fast": round(statistics.median(ratios), 1),
            "largest_difference": float(difference),
        }
    return document


def products(weights: Tensor, predictions: Tensor, shares: Tensor) -> Tensor:
    """Do what the strategy does; returns the new matrix."""
    targets = personal_targets(weights, predictions)
    gradient = coefficient_gradient(weights, predictions, shares, rho=RHO, targets=targets)
    return step(weights, gradient, RATE, "simplex")


def loop(weights: Tensor, predictions: Tensor, shares: Tensor) -> Tensor:
    """Go over all pairs of clients, once for the targets and once for the gradient."""
    clients = range(len(weights))
    gradient = torch.empty_like(weights)
    for n in clients:
        target = torch.zeros_like(predictions[n])
        for m in clients:
            target += weights[n, m].float() * predictions[m]
        logs = target.log() - predictions[n].log() + 1
        for m in clients:
            pulled = shares[n] * (predictions[m] * logs).sum(dtype=torch.float64)
            gradient[n, m] = pulled + 2 * RHO * (weights[n, m] - 1 / len(weights))
    return step(weights, gradient, RATE, "simplex")


def autograd(weights: Tensor, predictions: Tensor, shares: Tensor) -> Tensor:
    """Go over all pairs of clients for the targets, and let autograd find the gradient."""
    learnt = weights.clone().requires_grad_()
    clients = range(len(weights))
    for n in clients:
        target = torch.zeros_like(predictions[n])
        for m in clients:
            target = target + learnt[n, m].float() * predictions[m]
        divergence = (target * (target.log() - predictions[n].log())).sum()
        loss = shares[n] * divergence + RHO * (learnt[n] - 1 / len(weights)).square().sum()
        loss.backward()
    assert learnt.grad is not None
    return step(weights, learnt.grad, RATE, "simplex")


if __name__ == "__main__":
    main()
