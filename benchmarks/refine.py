"""How fast KKR and SKR are, beside a loop over rows and a server epoch, and what features cost in memory.

Usage: python benchmarks/refine.py [--out FILE]     (about two minutes on 2 cores)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import peak_memory
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from scipy.optimize import brentq

from flwr_kd.client.task import Answer, Task
from flwr_kd.models import SplitModel, build_predictor
from flwr_kd.results.provenance import versions
from flwr_kd.server.records import Node, Reply
from flwr_kd.strategies.feddkc import refine_entropy, refine_peak
from flwr_kd.strategies.fedgkt import ClientFeatures, FedGKT, FedGKTClient
from flwr_kd.transport.inline_grid import InlineGrid

SHAPES = ((100_000, 10, 0.7, 0.8), (10_000, 100, 0.7, 0.8))
REPEATS, LOOP_ROWS = 7, 1000
CLIENTS, SAMPLES, MAPS, CLASSES = 20, 3000, (16, 16, 16), 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--memory", choices=("float32", "float16"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(held(options.memory)))
        return
    document: dict[str, Any] = {"versions": versions()}
    document["threads"] = torch.get_num_threads()
    document["speed"] = [speed(*shape) for shape in SHAPES]
    document["epoch"] = epoch()
    document["memory"] = {
        kind: peak_memory.of_program([__file__, "--memory", kind]) for kind in ("float32", "float16")
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    for kind, numbers in document["memory"].items():
        beside = numbers["peak_above_start"] - numbers["features"]
        assert beside < 300e6, f"{beside / 1e6:.0f} MB beside one copy of all features in {kind}"


def speed(rows: int, classes: int, peak: float, entropy: float) -> dict[str, Any]:
    """Time whole matrices, and per row the loop that they replace; in turn, so that all share the load."""
    logits = 4 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))
    some = logits[:LOOP_ROWS].double().numpy()
    kkr, skr, loop = [], [], []
    for _ in range(REPEATS):
        kkr.append(seconds(lambda: refine_peak(logits, peak)) / rows)
        skr.append(seconds(lambda: refine_entropy(logits, entropy)) / rows)
        loop.append(seconds(lambda: [entropy_by_brentq(row, entropy) for row in some]) / LOOP_ROWS)
    return {
        "rows": rows,
        "classes": classes,
        "kkr_rows_per_second": round(1 / statistics.median(kkr)),
        "skr_rows_per_second": round(1 / statistics.median(skr)),
        "loop_rows_per_second": round(1 / statistics.median(loop)),
        "skr_over_loop": round(statistics.median(b / a for a, b in zip(skr, loop, strict=True))),
    }


def entropy_by_brentq(logits: npt.NDArray[np.float64], entropy: float) -> npt.NDArray[np.float64]:
    """Refine one row as a direct reading of the paper would; to the same tolerance."""
    below = logits - logits.max()

    def softmax(log_theta: float) -> npt.NDArray[np.float64]:
        weights = np.exp(below / math.exp(log_theta))
        return weights / weights.sum()

    def excess(log_theta: float) -> float:
        p = softmax(log_theta)
        p = p[p > 0]
        return float(-(p * np.log2(p)).sum() - entropy)

    # θ is then within 5e-4 of the root, relatively, and the entropy within about as many bits.
    return softmax(float(brentq(excess, math.log(1e-3), math.log(1e3), xtol=5e-4)))


def epoch() -> dict[str, float]:
    """Time a server epoch on the rows of one client of 3,000 samples, and the refinement of these."""
    message = features_of(0, np.dtype(np.float32))
    reply = Reply(Node(2, 0, SAMPLES, CLASSES, MAPS), [], SAMPLES, {}, message)
    strategy = FedGKT(server_model=build_predictor(MAPS, num_classes=CLASSES, seed=0), device="cpu")
    logits = torch.from_numpy(message.logits)
    predictor = strategy.predictor_for(reply.node)
    generator = torch.Generator().manual_seed(0)
    train = seconds(lambda: strategy.train_predictor([reply], predictor, 1, generator))
    kkr, skr = (
        statistics.median(seconds(call) for _ in range(REPEATS))
        for call in (lambda: refine_peak(logits, 0.7), lambda: refine_entropy(logits, 0.8))
    )
    return {"server_epoch_s": train, "kkr_percent": 100 * kkr / train, "skr_percent": 100 * skr / train}


def held(kind: str) -> dict[str, int]:
    """Run three rounds of 20 clients in this process, and read its peak.

    The clients send random features of the stated size; everything from the message on is the real way.
    """

    class Sender(FedGKTClient):
        def phase_train(self, task: Task) -> Answer:
            number = int(self.context.node_config["partition-id"])
            return Answer(payload=features_of(number, np.dtype(kind)), num_examples=SAMPLES)

    def client_fn(context: Context) -> Client:
        model = SplitModel(torch.nn.Identity(), head(), feature_shape=MAPS)
        data = torch.utils.data.TensorDataset(
            torch.empty(SAMPLES, 1), torch.zeros(SAMPLES, dtype=torch.int64)
        )
        return Sender(model, data, context=context, device="cpu").to_client()

    strategy = FedGKT(server_model=head(), feature_dtype=kind, min_available_nodes=CLIENTS, device="cpu")
    grid = InlineGrid(ClientApp(client_fn=client_fn), CLIENTS)
    start = peak_memory.begin()
    strategy.start(grid, ArrayRecord(), num_rounds=3)
    features = CLIENTS * SAMPLES * math.prod(MAPS) * np.dtype(kind).itemsize
    assert len(strategy.logits) == CLIENTS
    return {"features": features, "peak_above_start": peak_memory.peak() - start}


def head() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(MAPS), CLASSES))


def features_of(number: int, dtype: np.dtype[Any]) -> ClientFeatures:
    draw = np.random.default_rng(number)
    features = draw.random((SAMPLES, math.prod(MAPS)), dtype=np.float32).astype(dtype, copy=False)
    return ClientFeatures(
        index=np.arange(SAMPLES),
        features=features,
        logits=4 * draw.standard_normal((SAMPLES, CLASSES), dtype=np.float32),
        labels=draw.integers(0, CLASSES, SAMPLES),
        test_features=features[:0],
        test_labels=np.zeros(0, np.int64),
    )


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
