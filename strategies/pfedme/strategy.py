"""pFedMe's server half: a step from the global model towards the clients' mean, or beyond it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flwr.app import ArrayRecord

from flwr_kd.server.records import Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import Payload

from .config import PFedMeConfig
from .functional import mixed


class PFedMe(KDStrategy[PFedMeConfig]):
    """pFedMe (T. Dinh, Tran, Nguyen, NeurIPS 2020).

    The local accuracy is that of the clients' personal models, which stay with them. For parameters, see
    :class:`flwr_kd.KDStrategy`.
    """

    config_class = PFedMeConfig
    averages = False

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[Payload]], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Return (1 - β) w + β · mean(w_i), and of buffers the mean."""
        mean, named_buffers = self.new_mean(), Counter[tuple[str, ...]]()
        for reply in replies:
            mean.add(reply.arrays, reply.num_examples if self.config.weighting == "samples" else 1)
            named_buffers[reply.node.template.buffers] += 1
            del reply
        assert arrays is not None
        template, names = self.template, self.template.names
        old = template.finite([arrays[name].numpy() for name in names])
        # As most clients name them.
        buffers = frozenset(named_buffers.most_common(1)[0][0])
        new = mixed(
            dict(zip(names, old, strict=True)),
            dict(zip(names, template.finite(mean.result()), strict=True)),
            self.config.beta,
            buffers=buffers,
        )
        return template.record([new[name] for name in names])
