"""Clients of any method that raise, end their process or wait in the rounds that the run config names."""

import os
import time
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd import client_app, registry
from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.experiments.run_config import ClientData, client_data

PATIENCE = 3600.0
"""Seconds for which a client waits at most. It ends with its SuperNode in any case."""
BALLAST = 75_000_000
"""Count of float32 numbers that make 300 MB."""


def faulty(kind: type[KDClient], partition: int, faults: str, echo: bool) -> type[KDClient]:
    class Faulty(kind):  # type: ignore[misc, valid-type]
        def phase_train(self, task: Task) -> Answer:
            if echo:
                return Answer(task.arrays, num_examples=1)
            answer = super().phase_train(task)
            for fault in faults.split():
                where, when, what = fault.split("@")
                if (int(where), int(when)) == (partition, task.server_round):
                    fail(what)
            return answer

    return Faulty


def fail(kind: str) -> None:
    if kind == "raise":
        raise ValueError("no room on the device\nand a second line")
    if kind == "exit":
        os._exit(1)
    end, parent = time.monotonic() + PATIENCE, os.getppid()
    while not Path(kind).exists() and time.monotonic() < end and os.getppid() == parent:
        time.sleep(0.1)


def kept_data(context: Context) -> ClientData:
    """Return the client's model and data, which its SuperNode keeps in a file after the first message.

    Each message has a process of its own. Without the file each would divide the data set, which takes as long as
    the import of PyTorch.
    """
    file = Path(os.environ["FLWR_HOME"]) / f"data-{context.node_config['partition-id']}.pt"
    if not file.exists():
        new = file.with_name(f"{file.name}-{os.getpid()}")
        torch.save(client_data(context), new)
        new.replace(file)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def client_fn(context: Context) -> Client:
    partition = int(context.node_config["partition-id"])
    method = registry.get(str(context.run_config["method"]))
    model, train_set, test_set = kept_data(context)
    if partition == context.run_config["large"]:
        model.register_buffer("ballast", torch.zeros(BALLAST))
    kind = faulty(
        method.client, partition, str(context.run_config["faults"]), bool(context.run_config["echo"])
    )
    return kind(model, train_set, test_set, context=context).to_client()


class EitherApp(ClientApp):
    """Serves the partitions that the run config names by Flower's Message API, the others as a ``NumPyClient``."""

    def __call__(self, message: Message, context: Context) -> Message:
        by_messages = str(context.run_config["by-messages"]).split()
        if str(context.node_config["partition-id"]) in by_messages:
            return BY_MESSAGES(message, context)
        return super().__call__(message, context)


BY_MESSAGES = client_app(client_fn)
app = EitherApp(client_fn=client_fn)
