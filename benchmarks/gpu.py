"""Samples per second on a GPU: bare PyTorch loop, in-process and Ray; and stacked clients against a loop over them.

The clients train FedAvg on Fashion-MNIST, on random images of its shape where it is not on this machine; the output
says which. Nothing is downloaded. The bare loop makes the same steps, with its samples on the device. Rates of
whole rounds include the clients' own tests, the evaluation of the global model, and what Flower adds; round 1, in
which processes start and kernels are loaded, is left out.

Stacked clients make one SGD step of all clients at once, by torch.func.vmap over their stacked weights. The loop
makes the same step for one client after the other.

Each part runs in a process of its own with a time limit, so that one that is slow or fails costs no other.

Usage: python benchmarks/gpu.py [--quick] [--device NAME] [--parts NAME,...] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from flwr_kd import registry
from flwr_kd.data._images import DEBIAN_FASHION_MNIST
from flwr_kd.experiments.data import client_splits, training_on_device
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.learning.determinism import deterministic
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.loop import make_optimizer
from flwr_kd.models import build_model
from flwr_kd.results.provenance import versions

PARTS = [
    *(f"{backend}-{model}" for model in ("cnn", "resnet18") for backend in ("bare", "inline", "ray")),
    *(f"stacked-{clients}" for clients in (10, 100, 1000)),
]
SHAPE, CLASSES = (1, 28, 28), 10
BATCH_SIZE, EPOCHS, ROUNDS, CLIENTS, TEST = 64, 2, 4, 20, 2000
SAMPLES = {"cnn": 20_000, "resnet18": 8_000}
STACKED = {"model": "cnn", "batch_size": 32, "steps": 20}
STACKED_QUICK = {"model": "lenet", "batch_size": 2, "steps": 1}
NO_TIME = {"error": "no time was left"}
TOTAL_SECONDS, PART_SECONDS, ENDING_SECONDS = 440.0, 100.0, 15.0


def main() -> None:
    arguments = _arguments()
    if arguments.part:
        print(json.dumps(measure(arguments.part, arguments)))
        return
    result: dict[str, Any] = {
        **machine(resolve_device(arguments.device)),
        "quick": arguments.quick,
        "versions": versions(),
        "parts": {},
    }
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder, result["data"] = data_folder(arguments, Path(temporary))
        for part in arguments.parts.split(","):
            left = arguments.seconds - (time.monotonic() - begun)
            limit = min(arguments.part_seconds, left)
            result["parts"][part] = run_part(part, arguments, folder, limit) if limit > 5 else NO_TIME
            print(f"{part}: {json.dumps(result['parts'][part])}", file=sys.stderr, flush=True)
    result["seconds"] = round(time.monotonic() - begun, 1)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--quick", action="store_true", help="few samples, steps and clients, for any machine"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="of: %(default)s")
    parser.add_argument("--workers", type=int, default=4, help="Ray's processes (default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, help="folder of Fashion-MNIST's idx files")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="limit of the whole (%(default)s)"
    )
    parser.add_argument("--part-seconds", type=float, default=PART_SECONDS, help="of a part (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in [arguments.part] if arguments.part else arguments.parts.split(","):
        if name not in PARTS:
            parser.error(f"unknown part {name!r}; there are {', '.join(PARTS)}")
    return arguments


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"device": str(device), "gpu": name, "cpus": os.cpu_count()}


def data_folder(arguments: argparse.Namespace, temporary: Path) -> tuple[Path, str]:
    """Return a folder with the data set's files, and what is in them."""
    if arguments.data_dir is not None:
        return arguments.data_dir, "fashion-mnist"
    if DEBIAN_FASHION_MNIST.is_dir():
        return DEBIAN_FASHION_MNIST, "fashion-mnist"
    rng = np.random.default_rng(0)
    for name, count in (("train", max(SAMPLES.values())), ("t10k", TEST)):
        images = rng.integers(0, 256, (count, *SHAPE[1:]), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, count, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = np.array([0x0800 + array.ndim, *array.shape], dtype=">u4").tobytes()
            path = temporary / f"{name}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + array.tobytes(), compresslevel=0))
    return temporary, "random images of fashion-mnist's shape, which is not on this machine"


# -------------------------------------------------------------------- one part, in a process of its own


def run_part(part: str, arguments: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a part with a time limit, and watch the GPU meanwhile."""
    command = [
        sys.executable, __file__, "--part", part, "--device", arguments.device, "--data-dir", str(folder),
        "--workers", str(arguments.workers), *(["--quick"] if arguments.quick else []),
    ]  # fmt: skip
    with Utilisation() as utilisation:
        # A session of its own, so that Ray's processes end with it as well.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {seconds:.0f} s"}
        finally:
            _end(process)
    if process.returncode:
        return {"error": (errors.strip().splitlines() or ["no output"])[-1]}
    return {**json.loads(out.splitlines()[-1]), "gpu_utilisation": utilisation.mean()}


def _end(process: subprocess.Popen[str]) -> None:
    """End a part that still runs: by Ctrl-C, after which Ray's processes end as well, else at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=ENDING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Utilisation:
    """Asks nvidia-smi for the GPU's utilisation in percent, twice a second; the mean is None without it."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Utilisation:
        if shutil.which("nvidia-smi") is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def mean(self) -> float | None:
        return round(statistics.mean(self.values), 1) if self.values else None

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.5):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
            if done.returncode == 0 and done.stdout.strip():
                self.values.append(float(done.stdout.split()[0]))


def measure(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    kind, _, what = part.partition("-")
    device = resolve_device(arguments.device)
    with deterministic(device):
        if kind == "stacked":
            return stacked(int(what), device, quick=arguments.quick)
        shared = experiment(what, arguments, "ray" if kind == "ray" else "inline")
        return bare(shared) if kind == "bare" else rounds(shared)


def experiment(model: str, arguments: argparse.Namespace, backend: str) -> Experiment:
    return Experiment(
        dataset="fashion-mnist",
        data_dir=str(arguments.data_dir),
        partition="iid",
        model=model,
        limit=64 if arguments.quick else SAMPLES[model],
        test_limit=64 if arguments.quick else TEST,
        clients=2 if arguments.quick else CLIENTS,
        rounds=2 if arguments.quick else ROUNDS,
        backend=backend,
        # Threads would share one GPU's queue.
        workers=1 if backend == "inline" else min(arguments.workers, 2 if arguments.quick else 64),
        device=arguments.device,
    )


CONFIG = registry.get("fedavg").config([f"local-epochs={EPOCHS}", f"batch-size={BATCH_SIZE}"])


def rounds(shared: Experiment) -> dict[str, Any]:
    """Return the rate of whole rounds."""
    result = run(registry.get("fedavg"), shared, CONFIG)
    seconds = [each.seconds for each in result.rounds[1:]]
    samples = EPOCHS * sum(len(train) for train, _ in client_splits(shared))
    return {
        "samples_per_second": round(samples / statistics.median(seconds)),
        "workers": shared.workers,
        "seconds_per_round": [round(each, 3) for each in seconds],
    }


def bare(shared: Experiment) -> dict[str, Any]:
    """Return the rate of a plain loop: the clients' steps, one client after the other, and nothing else."""
    device, data = resolve_device(shared.device), training_on_device(shared)
    model = shared.build_model().to(device).train()
    parts = [data.subset(train).tensors for train, _ in client_splits(shared)]
    seconds = []
    for _ in range(shared.rounds):
        begun = time.perf_counter()
        for x, y in parts:
            optimizer = make_optimizer(model, CONFIG, CONFIG.learning_rate)
            losses = []
            for _ in range(EPOCHS):
                for chunk in torch.split(torch.randperm(len(y)).to(device), BATCH_SIZE):
                    loss = F.cross_entropy(model(x[chunk]), y[chunk])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    losses.append(loss.detach())
            # Waits until all steps are done.
            torch.stack(losses).tolist()
        seconds.append(time.perf_counter() - begun)
    samples = EPOCHS * sum(len(y) for _, y in parts)
    return {
        "samples_per_second": round(samples / statistics.median(seconds[1:])),
        "seconds_per_round": [round(each, 3) for each in seconds[1:]],
    }


# -------------------------------------------------------------------- stacked clients


def stacked(clients: int, device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Return the rates of SGD steps of all clients: stacked, and one client after the other."""
    how: dict[str, Any] = STACKED_QUICK if quick else STACKED
    name, size, steps = how["model"], how["batch_size"], how["steps"]
    models = [
        build_model(name, input_shape=SHAPE, num_classes=CLASSES, seed=seed).to(device)
        for seed in range(clients)
    ]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(clients, size, *SHAPE, generator=generator).to(device)
    y = torch.randint(CLASSES, (clients, size), generator=generator).to(device)
    weights, _ = stack_module_state(models)
    weights = {key: value.detach() for key, value in weights.items()}
    gradients = vmap(grad(functools.partial(_loss, models[0])))

    def stacked_step() -> None:
        for key, gradient in gradients(weights, x, y).items():
            weights[key].sub_(gradient, alpha=0.1)

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def loop_step() -> None:
        for model, optimizer, inputs, labels in zip(models, optimizers, x, y, strict=True):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    at_once, in_turn = _seconds(stacked_step, steps, device), _seconds(loop_step, steps, device)
    # Both made the same steps: the weights show it.
    last = {key: torch.stack([dict(m.named_parameters())[key].detach() for m in models]) for key in weights}
    difference = max(float((weights[key] - last[key]).abs().max()) for key in weights)
    return {
        "model": name,
        "clients": clients,
        "batch_size": size,
        "stacked_samples_per_second": round(clients * size / at_once),
        "loop_samples_per_second": round(clients * size / in_turn),
        "speedup": round(in_turn / at_once, 2),
        "largest_difference_of_weights": difference,
    }


def _loss(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, weights, (x,)), y)


def _seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the seconds of a step: their mean over some, after a first one."""
    step()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - begun) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
