"""How far KT-pFL's targets are from the plain mean that FedMD teaches.

Fashion-MNIST in case 1 with 90 and 30 images per class, LeNet and the MLP in turn, 500 public digits, seed 0.
In total variation (half the sum of differences), a mean over clients and public samples. Beside it: how far the
clients' own predictions are from that mean.

Usage: python benchmarks/ktpfl_targets.py [--out FILE]     (some three minutes on one core)
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_kd import registry
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.results.provenance import versions
from flwr_kd.server.records import Reply
from flwr_kd.strategies.ktpfl import KTpFL

SETTINGS = ("local-epochs=5", "batch-size=32", "public-samples=500")
EXPERIMENT = Experiment(
    dataset="fashion-mnist",
    partition="ktpfl-1:90",
    model="lenet,mlp",
    backend="inline",
    workers=1,
    public_limit=1000,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    document: dict[str, Any] = {"versions": versions(), "settings": SETTINGS}
    document["rounds"] = {name: distances(name) for name in ("ktpfl", "topk-pfl")}
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def distances(name: str) -> list[dict[str, float]]:
    seen: list[dict[str, float]] = []
    method, plain = registry.get(name), KTpFL.targets

    def watched(self: KTpFL, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        targets = plain(self, server_round, replies, predictions)
        mean = predictions.mean(dim=0)
        parts = {"targets": targets, "own_predictions": predictions}
        seen.append({k: round(float((v - mean).abs().sum(dim=2).mean() / 2), 4) for k, v in parts.items()})
        return targets

    KTpFL.targets = watched  # type: ignore[method-assign]
    try:
        run(method, EXPERIMENT, method.config(SETTINGS))
    finally:
        KTpFL.targets = plain  # type: ignore[method-assign]
    return seen


if __name__ == "__main__":
    main()
