"""What distilling an ensemble costs: teachers that run once per sample, against a loop that asks all in each step.

Both distil K = 20 CNNs into one over 1,000 samples of 1×28×28 in 5 epochs with batches of 128.
The loop holds K modules and asks all of them in each step, as research code does.

Usage: python benchmarks/distill.py [--out FILE]     (a few minutes on one core)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import peak_memory
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.data import ArrayDataset
from flwr_kd.distillation.config import DistillationConfig
from flwr_kd.distillation.student import Distillation, distil_ensemble
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.device import one_thread
from flwr_kd.learning.weights import get_weights, load_weights
from flwr_kd.models import build_model
from flwr_kd.results.provenance import versions

TEACHERS, SAMPLES, EPOCHS, BATCH = 20, 1000, 5, 128
SHAPE, CLASSES, REPEATS = (1, 28, 28), 10, 3


@one_thread()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--memory", choices=("once", "loop"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(held(options.memory)))
        return
    document: dict[str, Any] = {"versions": versions()}
    document["threads"] = torch.get_num_threads()
    document |= {
        "teachers": TEACHERS,
        "samples": SAMPLES,
        "epochs": EPOCHS,
        "batch": BATCH,
        "repeats": REPEATS,
    }
    document |= speed()
    document["memory"] = {
        kind: peak_memory.of_program([__file__, "--memory", kind]) for kind in ("once", "loop")
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    assert document["passes_once"] == TEACHERS * SAMPLES, document["passes_once"]
    assert document["passes_loop"] == TEACHERS * SAMPLES * EPOCHS, document["passes_loop"]


def cnn(seed: int) -> nn.Module:
    return build_model("cnn", input_shape=SHAPE, num_classes=CLASSES, seed=seed)


def samples() -> ArrayDataset:
    draw = torch.Generator().manual_seed(0)
    return ArrayDataset(torch.randn(SAMPLES, *SHAPE, generator=draw), torch.arange(SAMPLES) % CLASSES)


class Counter:
    """Counts the samples that pass a module without gradient: those of a teacher, and those of validation."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not torch.is_grad_enabled():
            self.rows += len(args[0])


def once(teachers: list[dict[str, Any]], student: dict[str, Any], counter: Counter) -> None:
    """Distil as the strategies do; nothing is held out, so that both ways run the same steps."""
    model = cnn(0)
    model.register_forward_pre_hook(counter)
    distil_ensemble(
        model,
        student,
        teachers,
        [1.0] * TEACHERS,
        Batches(samples(), num_classes=CLASSES),
        Distillation(
            DistillationConfig(batch_size=BATCH, validation_share=0.0),
            epochs=EPOCHS,
            learning_rate=1e-3,
            seed=0,
        ),
        torch.device("cpu"),
    )


def loop(teachers: list[dict[str, Any]], student: dict[str, Any], counter: Counter) -> None:
    """Run all teachers in every step, each a module of its own."""
    modules = []
    for k, weights in enumerate(teachers):
        module = cnn(k)
        load_weights(module, weights)
        module.eval()
        module.register_forward_pre_hook(counter)
        modules.append(module)
    model = cnn(0)
    load_weights(model, student)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    draw, data = torch.Generator().manual_seed(0), samples()
    for _ in range(EPOCHS):
        for rows in torch.randperm(SAMPLES, generator=draw).split(BATCH):
            x = data.x[rows]
            with torch.no_grad():
                target = torch.stack([F.softmax(module(x), dim=1) for module in modules]).mean(dim=0)
            model.train()
            loss = -(target * F.log_softmax(model(x), dim=1)).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


WAYS = {"once": once, "loop": loop}


def speed() -> dict[str, Any]:
    """Time both, in turn, so that they share the machine's load; the ratio is the median of the pairs'."""
    teachers, student = [get_weights(cnn(k)) for k in range(1, TEACHERS + 1)], get_weights(cnn(0))
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    passes = {}
    for _ in range(REPEATS):
        for name, way in WAYS.items():
            counter, begun = Counter(), time.perf_counter()
            way(teachers, student, counter)
            seconds[name].append(time.perf_counter() - begun)
            passes[f"passes_{name}"] = counter.rows
    ratio = statistics.median(b / a for a, b in zip(seconds["once"], seconds["loop"], strict=True))
    return {**{f"seconds_{n}": statistics.median(v) for n, v in seconds.items()}, "ratio": ratio, **passes}


def held(kind: str) -> dict[str, float]:
    """Return the bytes of the teachers' arrays, which both are given, and the process's peak above them."""
    teachers, student = [get_weights(cnn(k)) for k in range(1, TEACHERS + 1)], get_weights(cnn(0))
    arrays = sum(value.nbytes for weights in teachers for value in weights.values())
    one = sum(value.nbytes for value in student.values())
    start = peak_memory.begin()
    WAYS[kind](teachers, student, Counter())
    return {"teachers": arrays, "one_model": one, "peak_above_start": peak_memory.peak() - start}


if __name__ == "__main__":
    main()
