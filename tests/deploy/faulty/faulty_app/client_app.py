"""Clients of any method that raise, end their process, or wait, in the rounds that the run config names."""

import os
import time
from pathlib import Path

import torch
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.experiments.run_config import client_data

PATIENCE = 300.0
BALLAST = 75_000_000
"""Numbers of float32: 300 MB."""


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


def client_fn(context: Context) -> Client:
    partition = int(context.node_config["partition-id"])
    method = registry.get(str(context.run_config["method"]))
    model, train_set, test_set = client_data(context)
    if partition == context.run_config["large"]:
        model.register_buffer("ballast", torch.zeros(BALLAST))
    kind = faulty(
        method.client, partition, str(context.run_config["faults"]), bool(context.run_config["echo"])
    )
    return kind(model, train_set, test_set, context=context).to_client()


app = ClientApp(client_fn=client_fn)
