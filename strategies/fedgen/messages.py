"""What travels in FedGen besides weights: the generator down, label counts up."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import Payload, PayloadError, array

from .functional import FeatureGenerator

LARGEST_COUNT = 2**40
"""Largest number of samples of a class in a message, so that sums over clients cannot overflow."""
_PER_UNIT = ("hidden.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")


@dataclass(frozen=True, eq=False)
class SharedGenerator(Payload, schema="fedgen.generator", version=1, hint="a smaller generator-hidden"):
    """The generator, from server to clients.

    Attributes
    ----------
    hidden : ndarray
        ``[H, I]``, with I = D + C inputs.
    units : ndarray
        ``[5, H]``: bias; weight, bias, mean and variance of the BatchNorm.
    output, output_bias : ndarray
        ``[D, H]`` and ``[D]``.
    labels : ndarray
        ``[K]``, the classes of which any client has samples, ascending.
    """

    hidden: npt.NDArray[np.float32] = array("float32", "H I")
    units: npt.NDArray[np.float32] = array("float32", "5 H")
    output: npt.NDArray[np.float32] = array("float32", "D H")
    output_bias: npt.NDArray[np.float32] = array("float32", "D")
    labels: npt.NDArray[np.int64] = array("int64", "K", positions=True)

    def check(self) -> None:
        """Refuse a generator without classes, with others than its inputs have, or with negative variances."""
        classes = self.hidden.shape[1] - len(self.output_bias)
        if not len(self.labels) or self.labels[-1] >= classes:
            raise PayloadError(f"{self.schema}: field 'labels' must be in 0..{classes - 1}, at least one")
        if (self.units[-1] < 0).any():
            raise PayloadError(
                f"{self.schema}: field 'units' has variances in its last row, which must be at least 0"
            )


@dataclass(frozen=True, eq=False)
class LabelCounts(Payload, schema="fedgen.label-counts", version=1):
    """How many samples of each class a client has, from clients to the server.

    Attributes
    ----------
    counts : ndarray
        ``[C]``, at least 0.
    """

    counts: npt.NDArray[np.int64] = array("int64", "C")

    def check(self) -> None:
        """Refuse counts outside 0..2^40."""
        if self.counts.size and not 0 <= self.counts.min() <= self.counts.max() <= LARGEST_COUNT:
            raise PayloadError(
                f"{self.schema}: field 'counts' must be in 0..2^40, got {self.counts.min()}..{self.counts.max()}"
            )


def pack(generator: FeatureGenerator, labels: Tensor) -> SharedGenerator:
    """Return the message of a generator, and of the classes ``[C]``, bool, that any client has."""
    state = {name: value.detach().cpu().numpy().copy() for name, value in generator.state_dict().items()}
    return SharedGenerator(
        hidden=state["hidden.weight"],
        units=np.stack([state[name] for name in _PER_UNIT]),
        output=state["output.weight"],
        output_bias=state["output.bias"],
        labels=torch.nonzero(labels).flatten().numpy(),
    )


def unpack(message: SharedGenerator, feature_shape: tuple[int, ...]) -> tuple[FeatureGenerator, Tensor]:
    """Return a message's generator, frozen and in eval mode, on the CPU; and its labels ``[K]``."""
    hidden, inputs = message.hidden.shape
    classes = inputs - len(message.output_bias)
    with torch.device("meta"):
        generator = FeatureGenerator(feature_shape, num_classes=classes, hidden=hidden)
    state = {name: torch.tensor(row) for name, row in zip(_PER_UNIT, message.units, strict=True)}
    state |= {"hidden.weight": torch.tensor(message.hidden), "output.weight": torch.tensor(message.output)}
    state |= {"output.bias": torch.tensor(message.output_bias), "norm.num_batches_tracked": torch.tensor(0)}
    generator.load_state_dict(state, assign=True)
    return generator.eval().requires_grad_(False), torch.tensor(message.labels)


def sizes(situation: Situation) -> dict[str, int]:
    """Return H; K are the classes of any client."""
    return {"H": int(situation.number("generator_hidden"))}
