"""What a robust rule leaves out of the server's training: rows far from the others, and logits against labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import WARNING

import numpy as np
import torch
from flwr.common.logger import log
from torch import Tensor

from flwr_kd.server.aggregation import outlying_rows
from flwr_kd.server.records import Reply

from .functional import contradicts
from .messages import ClientFeatures, unpack_logits

__all__ = ["LeftOut"]


class LeftOut:
    """What of a round's replies the predictor is not trained on.

    A row is left out if its features or its logits are far from the other clients', see
    :func:`flwr_kd.server.aggregation.outlying_rows`. The logits of another row are left out, while its features and
    its label stay, if they contradict the label, see :func:`contradicts`.

    Parameters
    ----------
    replies : sequence of Reply
        Of all clients of the round; none to leave out nothing.
    server_round : int
        For the warnings.
    """

    def __init__(self, replies: Sequence[Reply[ClientFeatures]], server_round: int) -> None:
        self._rows: Mapping[int, Tensor] = {}
        self._logits: Mapping[int, Tensor] = {}
        if not replies:
            return
        logits = [unpack_logits(reply.payload) for reply in replies]
        far_features = outlying_rows(
            [torch.from_numpy(reply.payload.features.astype(np.float32)) for reply in replies]
        )
        far_logits = outlying_rows(logits)
        self._rows = {
            reply.node.key: one | other
            for reply, one, other in zip(replies, far_features, far_logits, strict=True)
        }
        self._logits = {
            reply.node.key: contradicts(own, torch.from_numpy(reply.payload.labels))
            for reply, own in zip(replies, logits, strict=True)
        }
        for reply in replies:
            far, against = self._rows[reply.node.key], self._logits[reply.node.key]
            line = f"round {server_round}: %d of {len(far)} rows of {reply.node} %s"
            if bool(far.any()):
                log(WARNING, line, int(far.sum()), "are far from the other clients', and are left out")
            # Some rows contradict their labels at honest clients too, above all before they have learned much.
            if 2 * int(against.sum()) > len(against):
                log(WARNING, line, int(against.sum()), "have logits against their labels, which are left out")

    def of(self, reply: Reply[ClientFeatures]) -> Reply[ClientFeatures] | None:
        """Return a reply without the rows that are left out; None if there are no others."""
        far = self._rows.get(reply.node.key)
        if far is None or not bool(far.any()):
            return reply
        keep, message = ~far.numpy(), reply.payload
        if not keep.any():
            return None
        rows = {name: getattr(message, name)[keep] for name in ("features", "logits", "labels")}
        # A message numbers the samples that it has from 0; the predictor's training uses no numbers.
        rows["index"] = message.index[keep].argsort().argsort()
        return replace(reply, payload=replace(message, **rows))

    def without_contradictions(self, targets: Tensor, reply: Reply[ClientFeatures]) -> Tensor:
        """Return a reply's targets ``[N, C]``, with zeros in the rows whose logits are left out.

        Targets of zeros have no loss, so that only the label teaches there. The reply is what :meth:`of` returned.
        """
        against = self._logits.get(reply.node.key)
        if against is None:
            return targets
        kept = against[~self._rows[reply.node.key]]
        return targets.masked_fill(kept[:, None], 0.0)
