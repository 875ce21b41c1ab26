"""A client in the form in which Flower calls it: messages' arrays as bytes."""

from __future__ import annotations

from flwr.client import Client, NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    NDArrays,
    Parameters,
    Status,
    ndarrays_to_parameters,
)

from flwr_kd.transport.npy import npy_bytes, read_npy

__all__ = ["WireClient"]

_DONE = Status(code=Code.OK, message="Success")


class WireClient(Client):
    """Calls a ``NumPyClient`` as Flower's own wrapper does, which would copy each array twice on each way.

    The arrays that the client is given cannot be written to.

    Parameters
    ----------
    client : NumPyClient
        It has ``get_properties``, ``fit`` and ``evaluate``.
    """

    def __init__(self, client: NumPyClient) -> None:
        self.numpy_client = client

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """Answer the handshake."""
        return GetPropertiesRes(_DONE, self.numpy_client.get_properties(config=ins.config))

    def get_parameters(self, ins: GetParametersIns) -> GetParametersRes:
        """Return the client's parameters; no method of this package asks for them."""
        return GetParametersRes(_DONE, ndarrays_to_parameters(self.numpy_client.get_parameters(ins.config)))

    def fit(self, ins: FitIns) -> FitRes:
        """Answer one phase of a round."""
        arrays, num_examples, metrics = self.numpy_client.fit(_arrays(ins.parameters), ins.config)
        parameters = Parameters([npy_bytes(array) for array in arrays], "numpy.ndarray")
        return FitRes(_DONE, parameters, num_examples, metrics)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        """Evaluate a model."""
        loss, num_examples, metrics = self.numpy_client.evaluate(_arrays(ins.parameters), ins.config)
        return EvaluateRes(_DONE, loss, num_examples, metrics)


def _arrays(parameters: Parameters) -> NDArrays:
    return [read_npy(str(position), data) for position, data in enumerate(parameters.tensors)]
