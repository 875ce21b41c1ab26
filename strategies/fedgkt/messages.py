"""What travels in FedGKT and FedDKC."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_kd.transport.payload import LIMIT, Payload, PayloadError, array, check_magnitude

from .functional import check_index


@dataclass(frozen=True, eq=False)
class ClientFeatures(
    Payload,
    schema="fedgkt.client-features",
    version=1,
    hint="feature-dtype=float16, an extractor with smaller features, or fewer samples",
):
    """What a client sends: a row per training sample, and, if asked for, per test sample.

    Attributes
    ----------
    index : ndarray
        ``[N]``, the sample that each row is of: 0..N-1, each once, in any order.
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
        """Refuse samples that are missing or given twice, unknown labels, and features beyond float16."""
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
    """What a client is sent: the server's logits for its own training samples.

    Attributes
    ----------
    logits : ndarray
        ``[N, C]``, row i of sample i.
    """

    logits: npt.NDArray[np.float32] = array("float32", "N C")


def pack_features(features: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return features ``[N, ...]`` as they travel, ``[N, D]``; float16 keeps to its range."""
    flat = features.reshape(len(features), int(np.prod(features.shape[1:])))
    return flat if dtype == "float32" else np.clip(flat, -LIMIT, LIMIT).astype(np.float16)
