"""A mean of the clients' models that is only measured, for methods whose clients exchange no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_kd.config import AVERAGE, MethodConfig
from flwr_kd.server.aggregation import RunningMean
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply, RoundStats
from flwr_kd.server.replies import checked_arrays
from flwr_kd.text import plain
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import Delivered, reason_of, receive
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.wording import assignment

if TYPE_CHECKING:
    from flwr_kd.server.run import Run

__all__ = ["averages_models", "difference_of_models", "mean_model", "measured_model"]

_PHASE = "model"


def averages_models(config: MethodConfig) -> bool:
    """Return whether ``global-model=average``: the mean of the clients' models is measured.

    Examples
    --------
    >>> from flwr_kd.strategies.fedproto import FedProtoConfig
    >>> averages_models(FedProtoConfig(global_model="average")), averages_models(MethodConfig())
    (True, False)
    """
    return getattr(config, "global_model", None) == AVERAGE


def difference_of_models(run: Run, node: Node) -> str | None:
    """Say how a client's model differs from that of most clients, where models are averaged; None if not."""
    if not averages_models(run.strategy.config):
        return None
    expected = run.roster.common(lambda other: other.template, node, shown=_described)
    difference = expected.difference(node.template)
    if difference is None:
        return None
    return f"{assignment('global_model', AVERAGE)} needs the same model at all clients: {difference}"


def measured_model(
    run: Run, grid: Grid, arrays: ArrayRecord, replies: Sequence[Reply[Any]], extra: Mapping[str, Any]
) -> ArrayRecord | None:
    """Return what ``evaluate_fn`` is given after a round: the global arrays, or a mean that is only measured.

    None where there is neither. For parameters see :func:`mean_model`.
    """
    if run.strategy.sends_weights:
        return arrays
    if run.strategy.stats.void or not averages_models(run.strategy.config):
        return None
    return mean_model(run, grid, replies, extra)


def mean_model(
    run: Run, grid: Grid, replies: Sequence[Reply[Any]], extra: Mapping[str, Any]
) -> ArrayRecord | None:
    """Ask the clients of a round for their models, and return the mean, weighted by sample counts.

    It is no part of the method: no client is sent the mean, bytes are not counted, and a client that fails costs
    only its own model.

    Parameters
    ----------
    run : Run
        After the phases of a round.
    grid : Grid
        Flower's.
    replies : sequence of Reply
        All used replies of the round.
    extra : mapping
        The user's ``train_config``.

    Returns
    -------
    ArrayRecord or None
        None if no model came.
    """
    members = {reply.node: reply.num_examples for reply in reversed(replies)}
    nodes = [node for node in members if node.node_id not in run.failed]
    if not nodes:
        return None
    template = run.roster.common(lambda node: node.template, nodes[0], shown=_described)
    messages = run.train_messages(
        _PHASE,
        run.strategy.stats.server_round,
        [Outgoing(node) for node in nodes],
        extra,
        stats=RoundStats(run.strategy.stats.server_round),
        names_of=lambda node: template.names,
    )
    mean, came = RunningMean(), 0
    for message, arrived in receive(grid, messages, run.timeout):
        node = run.roster.nodes[message.metadata.dst_node_id]
        try:
            model = _read(node, arrived, template)
        except PayloadError as error:
            log(WARNING, "the model of %s is left out of the mean: %s", node, plain(str(error)))
            continue
        mean.add(model, members[node])
        came += 1
        # Drop the reference, so that only one model is in memory.
        del model
    return template.record(mean.result()) if came else None


def _read(node: Node, arrived: Delivered, template: ArrayTemplate) -> list[NDArray]:
    if arrived is None:
        raise PayloadError("it did not reply in time")
    if isinstance(arrived, PayloadError):
        raise arrived
    if arrived.has_error():
        raise PayloadError(reason_of(arrived.error))
    raw = flower_records.read_train_reply(arrived, message_api=node.message_api)
    model = checked_arrays(template, raw)
    flower_records.forget(arrived)
    return model


def _described(template: ArrayTemplate) -> str:
    return f"{len(template.names)} arrays with {template.size():,} values"
