"""What a server holds while many clients answer with large models.

Each client answers with a ResNet18 of 45 MB; none trains. The peak is that of the whole process, above what it has
before the run. It also holds the clients and the grid, which in a deployment are processes of their own.

Usage: python benchmarks/load.py [--nodes N] [--out FILE]     (about five minutes on 2 cores)

``--nodes`` also measures a ServerApp on a SuperLink with that many SuperNodes, about 1 GB of memory each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peak_memory
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.data import ArrayDataset
from flwr_kd.models import build_model
from flwr_kd.results.provenance import versions
from flwr_kd.transport.inline_grid import InlineGrid

ROOT = Path(__file__).resolve().parents[1]
METHODS = tuple(name for name, method in registry.methods().items() if "load" in method.benchmarks)
CLIENTS = (10, 64, 100)
SHAPE, CLASSES = (3, 32, 32), 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--nodes", type=int, default=0, help="also measure a SuperLink with N SuperNodes")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(peak(options.one[0], int(options.one[1]))))
        return
    rows = [
        peak_memory.of_program([__file__, "--one", method, str(count)], OMP_NUM_THREADS="1")
        for method in METHODS
        for count in CLIENTS
    ]
    document: dict[str, Any] = {"versions": versions(), "rows": rows}
    if options.nodes:
        document["deployment"] = [deployed(count) for count in sorted({2, options.nodes})]
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    for row in rows:
        assert row["peak_above_start"] < 10 * row["model"], row


def peak(name: str, clients: int) -> dict[str, Any]:
    """Run one round of a method; return its peak in bytes."""
    method = registry.get(name)
    model = build_model("resnet18", input_shape=SHAPE, num_classes=CLASSES, seed=0)
    data = ArrayDataset(torch.zeros(CLASSES, *SHAPE), torch.arange(CLASSES))

    class Echo(method.client):  # type: ignore[misc, name-defined]
        def phase_train(self, task: Task) -> Answer:
            self.load(task)
            return Answer(self.arrays(task.names), self.knowledge(task), num_examples=len(data))

    def client_fn(context: Context) -> Client:
        client: KDClient = Echo(model, data, context=context, device="cpu", **method.client_options)
        return client.to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), clients)
    initial = ArrayRecord(model.state_dict())
    strategy = method.strategy(method.config([]), min_available_nodes=clients)
    before, begun = peak_memory.begin(), time.monotonic()
    result = strategy.start(grid, initial, num_rounds=1, timeout=3600.0)
    assert [stats.participants for stats in result.rounds] == [clients]
    return {
        "method": name,
        "clients": clients,
        "model": sum(len(array.data) for array in initial.values()),
        "peak_above_start": peak_memory.peak() - before,
        "seconds": round(time.monotonic() - begun, 1),
    }


def deployed(nodes: int) -> dict[str, Any]:
    """Run one round on SuperNodes; return the ServerApp's peak in bytes."""
    sys.path.insert(0, str(ROOT))
    from tests.superlink import Deployment, living

    settings = {
        "method": "fedavg",
        "model": "resnet18",
        "num-server-rounds": 1,
        "min-nodes": nodes,
        "echo": True,
    }
    highest: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="flwr-kd-load-") as folder,
        Deployment(Path(folder), nodes) as link,
    ):
        run = link.submit(ROOT / "tests" / "deploy" / "faulty", settings)
        while run.stream.returncode is None:
            for pid, _ in living():
                for kind, size in peaks(pid, folder):
                    highest[kind] = max(highest.get(kind, 0), size)
            time.sleep(0.2)
        (document,) = run.result().runs
    assert document.rounds[0].participants == nodes
    return {"nodes": nodes, "peaks": highest, "seconds": round(document.rounds[0].seconds, 1)}


def peaks(pid: int, folder: str) -> list[tuple[str, int]]:
    """Return the peak of one of this deployment's processes, by its program."""
    try:
        if f"={folder}".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
            return []
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return []
    names = [Path(word.decode()).name for word in words[:2]]
    programs = [name for name in names if name.startswith(("flwr-", "flower-"))]
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return [(programs[0], int(lines[0].split()[1]) * 1024)] if programs and lines else []


if __name__ == "__main__":
    main()
