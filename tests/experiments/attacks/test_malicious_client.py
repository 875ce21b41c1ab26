"""A malicious client: its replies are corrupted, all else is honest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient

from flwr_kd.experiments.attacks import (
    Gaussian,
    MaliciousClient,
    SignFlip,
)
from flwr_kd.experiments.errors import AttackError
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.strategies.fedproto import FedProtoClient
from flwr_kd.transport import flower_records


def context(partition: int = 0) -> Context:
    return Context(1, 17 + partition, {"partition-id": partition}, RecordDict(), {})


def asked(phase: str = "train", server_round: int = 1, **more: Any) -> dict[str, Any]:
    return {
        flower_records.SEED: 3,
        flower_records.ROUND: server_round,
        flower_records.PHASE: phase,
        "local-epochs": 1,
        "batch-size": 8,
        **more,
    }


def test_everything_but_the_answer_is_honest(make_blobs: Any, make_model: Any) -> None:
    def client() -> FedAvgClient:
        return FedAvgClient(make_model(), make_blobs(16, 0), make_blobs(8, 1), context=context())

    honest, inner = client(), client()
    start = [array.copy() for array in honest.arrays(())]
    malicious = MaliciousClient(inner, "sign-flip")
    assert malicious.get_properties({}) == honest.get_properties({})
    assert malicious.get_parameters({}) == []
    arrays, count, metrics = honest.fit(start, asked())
    wrong, *rest = malicious.fit(start, asked())
    assert rest == [count, metrics]
    for before, trained, sent in zip(start, arrays, wrong, strict=True):
        assert np.allclose(sent, 2 * before - trained, atol=1e-6)
    # The attacker's own model is the honestly trained one.
    assert all(np.array_equal(a, b) for a, b in zip(inner.arrays(()), arrays, strict=True))
    assert malicious.evaluate(arrays, asked()) == honest.evaluate(arrays, asked())


def test_a_personal_model_stays_honest(make_blobs: Any, make_model: Any) -> None:
    clients = [
        FedProtoClient(make_model(), make_blobs(16, 0), make_blobs(8, 1), context=context()) for _ in range(2)
    ]
    malicious = MaliciousClient(clients[1], "payload")
    for server_round in (1, 2):
        honest, lie = (c.fit([], asked(server_round=server_round)) for c in (clients[0], malicious))
        assert lie[2]["payload"] != honest[2]["payload"]
        assert {**lie[2], "payload": 0} == {**honest[2], "payload": 0}
    kept = [client.state.load() for client in clients]
    assert kept[0] is not None
    assert kept[1] is not None
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


class Theirs(NumPyClient):
    """A user's own client, which changes the arrays that it is given, and knows none of our keys."""

    def fit(self, parameters: Any, config: Any) -> Any:
        parameters[0] += 1
        return parameters, 4, {"payload": "no bytes", "loss": 0.5}


def test_a_users_own_client_can_be_wrapped() -> None:
    arrays, count, metrics = MaliciousClient(Theirs(), SignFlip()).fit([np.array([1.0, 5.0])], {})
    assert [a.tolist() for a in arrays] == [[0.0, 4.0]]
    assert (count, metrics) == (4, {"payload": "no bytes", "loss": 0.5})


def test_an_attacks_error_is_told_from_the_clients_own() -> None:
    class Broken(SignFlip):
        def change(self, *args: Any) -> Any:
            raise ZeroDivisionError("no update")

        def claimed(self, num_examples: int) -> int:
            if num_examples == 5:
                raise KeyError("count")
            return num_examples

    class Client(Theirs):
        def get_properties(self, config: Any) -> Any:
            return {"num-examples": 5}

    client = MaliciousClient(Client(), Broken())
    with pytest.raises(AttackError, match="the attack failed: no update"):
        client.fit([np.ones(2)], {})
    with pytest.raises(AttackError, match="the attack failed: 'count'"):
        client.get_properties({})
    with pytest.raises(IndexError):
        client.fit([], {})


def test_noise_depends_on_seed_round_partition_and_phase() -> None:
    def noise(partition: int = 0, **config: Any) -> float:
        client = MaliciousClient(Theirs(), Gaussian(1.0), partition=partition)
        return float(client.fit([np.zeros(1)], asked(**config))[0][0][0])

    assert noise() == noise()
    values = [
        noise(),
        noise(1),
        noise(phase="distill"),
        noise(server_round=2),
        noise(**{flower_records.SEED: 4}),
    ]
    assert len(set(values)) == 5
