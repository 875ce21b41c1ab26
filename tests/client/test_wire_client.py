"""The form in which Flower calls a client: what Flower's own wrapper does, without its copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.common import EvaluateIns, FitIns, GetParametersIns, GetPropertiesIns, ndarrays_to_parameters

from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.testing.federation import blobs, small_model
from flwr_kd.transport.payload import PayloadError

CONFIG: dict[str, Any] = {
    **FedAvg(local_epochs=1, batch_size=8).config.to_wire(),
    "server-round": 1,
    "seed": 3,
}


def client() -> FedAvgClient:
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    return FedAvgClient(small_model(), blobs(16, 0), blobs(8, 1), context=context, device="cpu")


def test_the_results_are_those_of_flowers_wrapper() -> None:
    arrays = [value.numpy() for value in small_model().state_dict().values()]
    ours, theirs = client().to_client(), NumPyClient.to_client(client())
    for ins in (FitIns, EvaluateIns):
        name = "fit" if ins is FitIns else "evaluate"
        parameters = ndarrays_to_parameters(arrays)
        assert getattr(ours, name)(ins(parameters, CONFIG)) == getattr(theirs, name)(ins(parameters, CONFIG))
    config = GetPropertiesIns({"wire-version": 2})
    assert ours.get_properties(config) == theirs.get_properties(config)
    assert ours.get_parameters(GetParametersIns({})).parameters.tensors == []


def test_arrays_come_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    inner = client()
    monkeypatch.setattr(inner, "fit", lambda arrays, config: given.extend(arrays) or ([], 1, {}))
    parameters = ndarrays_to_parameters([np.arange(1000.0)])
    inner.to_client().fit(FitIns(parameters, {}))
    assert np.shares_memory(given[0], np.frombuffer(parameters.tensors[0], np.uint8))
    assert not given[0].flags.writeable


def test_bytes_that_are_no_array() -> None:
    parameters = ndarrays_to_parameters([np.arange(3.0)])
    parameters.tensors[0] = b"\x93NUMPY garbage"
    with pytest.raises(PayloadError, match="array '0' is not a numpy array"):
        client().to_client().fit(FitIns(parameters, CONFIG))
