"""What FedHKD's bound ζ cuts off: the share of the representations' elements beyond it, by how an extractor ends.

Section 4.3 of FedHKD's paper bounds an element by 3, since a BatchNorm ends the extractor. 10 clients, digits, no
noise.

Usage: python benchmarks/clipping.py [--out FILE]     (two minutes of one core)
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_kd import registry
from flwr_kd.catalogue import FEATURE_LAYERS
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.results.provenance import versions
from flwr_kd.strategies.fedhkd import FedHKDConfig, client

CLIENTS, ROUNDS, SEEDS = 10, 20, (0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of the result, JSON")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = [measured(layer, seed) for layer in FEATURE_LAYERS for seed in SEEDS]
    text = json.dumps({"versions": versions(), "clip": FedHKDConfig().clip, "rows": rows}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def measured(layer: str, seed: int) -> dict[str, Any]:
    """Return, by round, the mean share over clients, and the last round's global accuracy."""
    method = registry.get("fedhkd")
    experiment = Experiment(
        partition="inner-dirichlet:0.1",
        clients=CLIENTS,
        rounds=ROUNDS,
        backend="inline",
        workers=1,
        device="cpu",
        seed=seed,
        feature_layer=layer,
    )
    with noted() as shares:
        result = run(method, experiment, method.config(["noise=none"]))
    by_round = [shares[start : start + CLIENTS] for start in range(0, len(shares), CLIENTS)]
    assert len(by_round) == ROUNDS
    return {
        "feature-layer": layer,
        "seed": seed,
        "share": [statistics.fmean(each) for each in by_round],
        "global_accuracy": result.rounds[-1].global_accuracy,
    }


@contextmanager
def noted() -> Iterator[list[float]]:
    """Note the share of elements beyond ζ whenever a client computes its knowledge; all run in this process."""
    shares: list[float] = []
    plain, bound = client.local_knowledge, FedHKDConfig().clip

    def noting(features: Tensor, *args: Any, **options: Any) -> Any:
        shares.append(float((features.abs() > bound).double().mean()))
        return plain(features, *args, **options)

    client.local_knowledge = noting
    try:
        yield shares
    finally:
        client.local_knowledge = plain


if __name__ == "__main__":
    main()
