"""What travels in FedGKT and FedDKC."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.transport.payload import LIMIT, Payload, PayloadError, array, check_magnitude

from .functional import check_index


@dataclass(frozen=True, eq=False)
class ClientFeatures(
    Payload,
    schema="fedgkt.client-features",
    version=1,
    hint="feature-dtype=float16, an extractor with smaller features, or fewer samples",
):
    """What a client sends: one row per training sample and, on request, per test sample.

    Attributes
    ----------
    index : ndarray
        ``[N]``, the sample of each row: 0..N-1, each once, in any order.
    features : ndarray
        ``[N, D]``, float32 or float16, flattened.
    logits : ndarray
        ``[N, C]``.
    labels : ndarray
        ``[N]``, 0..C-1.
    test_features, test_labels : ndarray
        ``[M, D]`` and ``[M]``; M = 0 unless ``send-test-features``.
    """

    index: npt.NDArray[np.int64] = array("int64", "N")
    features: npt.NDArray[Any] = array("float16|float32", "N D")
    logits: npt.NDArray[np.float32] = array("float32", "N C")
    labels: npt.NDArray[np.int64] = array("int64", "N")
    test_features: npt.NDArray[Any] = array("float16|float32", "M D")
    test_labels: npt.NDArray[np.int64] = array("int64", "M")

    def check(self) -> None:
        """Refuse missing or repeated samples, unknown labels, and features beyond float16's range."""
        check_index(self.index, f"{self.schema}: field 'index'")
        for name in ("labels", "test_labels"):
            labels, classes = getattr(self, name), self.logits.shape[1]
            if labels.size and not (labels.min() >= 0 and labels.max() < classes):
                raise PayloadError(
                    f"{self.schema}: field {name!r} must be in 0..{classes - 1}, got {labels.min()}..{labels.max()}"
                )
        for name in ("features", "test_features"):
            check_magnitude(f"{self.schema}: field {name!r}", getattr(self, name))


@dataclass(frozen=True, eq=False)
class ServerLogits(Payload, schema="fedgkt.server-logits", version=2, hint="fewer samples or classes"):
    """The server's logits for a client's own training samples.

    Attributes
    ----------
    logits : ndarray
        ``[N, C]``, row i of sample i.
    """

    logits: npt.NDArray[np.float32] = array("float32", "N C")


def pack(
    features: Tensor,
    logits: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    dtype: str,
) -> ClientFeatures:
    """Return the message of a client's samples, in their order.

    Parameters
    ----------
    features, logits, labels : Tensor
        ``[N, ...]``, ``[N, C]`` and ``[N]``.
    test_features, test_labels : Tensor
        ``[M, ...]`` and ``[M]``.
    dtype : str
        Of the features in the message; see :func:`pack_features`.
    """
    return ClientFeatures(
        index=np.arange(len(labels), dtype=np.int64),
        features=pack_features(features.float().numpy(), dtype),
        logits=logits.float().numpy(),
        labels=labels.numpy(),
        test_features=pack_features(test_features.float().numpy(), dtype),
        test_labels=test_labels.numpy(),
    )


def pack_features(features: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return features ``[N, ...]`` as ``[N, D]`` in the message's dtype; float16 is clipped to its range."""
    flat = features.reshape(len(features), int(np.prod(features.shape[1:])))
    return flat if dtype == "float32" else np.clip(flat, -LIMIT, LIMIT).astype(np.float16)


def unpack_logits(message: ClientFeatures | ServerLogits) -> Tensor:
    """Return a message's logits ``[N, C]``."""
    return torch.from_numpy(message.logits.copy())


def features_size(samples: int, test_samples: int, *, feature_dim: int, num_classes: int, dtype: str) -> int:
    """Return the bytes of a client's features, logits, labels and positions, without the message's header."""
    row = feature_dim * np.dtype(dtype).itemsize
    return samples * (row + 4 * num_classes + 16) + test_samples * (row + 8)
