"""What the grids of one machine have in common: nodes, faults, numbers of messages, and the call of a ClientApp."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from flwr.app import (
    Context,
    Error,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flwr_kd.checks import ConfigError
from flwr_kd.seeding import derive_seed
from flwr_kd.transport.records import copied

__all__ = ["Fault", "LocalGrid", "answer", "answers_locally", "failed", "identify_process"]

_answering: ContextVar[bool] = ContextVar("answering", default=False)


class Fault(Protocol):
    """What goes wrong at one node; :mod:`flwr_kd.testing.faults` has some."""

    @property
    def kind(self) -> str:
        """``"raise"``, ``"silent"``, ``"late"`` or ``"garbage"``."""

    def applies(self, message: Message) -> bool:
        """Say whether it happens for this message."""

    def mutilate(self, content: RecordDict, number: int) -> None:
        """Change a reply's content in place; ``number`` counts the messages."""


class LocalGrid(Grid):
    """Base of the grids whose nodes are on this machine.

    Parameters
    ----------
    client_app : ClientApp
        As for Flower's simulation.
    num_nodes : int
        Number of nodes; node ids are not 0..N-1, as in Flower.
    workers : int
        Number of nodes that work at the same time.
    node_configs : sequence of mapping, optional
        Further entries of each node's config, beside ``partition-id`` and ``num-partitions``.
    faults : mapping of int to Fault or sequence of Fault, optional
        By partition id.
    run_config : mapping, optional
        What ``context.run_config`` holds.
    seed : int
        Seed of the node ids.
    work_seconds : float
        A node may work at least that long on each message, whatever the strategy's timeout. Tests of what does not
        arrive in time have short timeouts, and must not depend on how fast the machine is.

    Attributes
    ----------
    contexts : dict
        By node id, each node's ``Context``.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        workers: int = 1,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        faults: Mapping[int, Fault | Sequence[Fault]] | None = None,
        run_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        work_seconds: float = 0.0,
    ) -> None:
        if num_nodes < 1 or workers < 1:
            raise ConfigError(f"num_nodes and workers must be at least 1, got {num_nodes} and {workers}")
        if node_configs is not None and len(node_configs) != num_nodes:
            raise ConfigError(f"node_configs must have {num_nodes} entries, got {len(node_configs)}")
        self._app, self._workers = client_app, workers
        self._seconds, self._work_seconds = math.inf, work_seconds
        self._faults = {
            partition: tuple(fault) if isinstance(fault, Sequence) else (fault,)
            for partition, fault in (faults or {}).items()
        }
        self._counter = itertools.count(1)
        self._pushes = 0
        identify_process()
        self.contexts: dict[int, Context] = {}
        for partition in range(num_nodes):
            node_id = derive_seed(seed, "node", partition)
            extra = dict(node_configs[partition]) if node_configs is not None else {}
            self.contexts[node_id] = Context(
                run_id=TaskIdentity.run_id,
                node_id=node_id,
                node_config={"partition-id": partition, "num-partitions": num_nodes, **extra},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )

    # ------------------------------------------------------------------ Grid

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Run:
        """The one run, with an id and nothing else: Flower's older ``server_fn`` asks for its id."""
        return Run.create_empty(TaskIdentity.run_id)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message; deprecated in Flower in favour of ``Message(...)``."""
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, ttl=ttl, group_id=group_id
        )

    @property
    def complete(self) -> bool:
        """Whether all nodes are connected, so that there are no others to wait for."""
        return len(list(self.get_node_ids())) == len(self.contexts)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def bound(self, seconds: float) -> None:
        """Set how long a node may work on each message, from the moment when it begins."""
        self._seconds = max(seconds, self._work_seconds)

    # ------------------------------------------------------------------ nodes

    def _number(self, message: Message) -> str:
        """Give a message its id, and return that."""
        message_id = f"message-{next(self._counter)}"
        message.metadata.__dict__["_message_id"] = message_id
        return message_id

    def _context(self, message: Message) -> Context:
        node_id = message.metadata.dst_node_id
        if node_id not in self.contexts:
            raise KeyError(f"no node {node_id}")
        return self.contexts[node_id]

    def _fault(self, message: Message) -> Fault | None:
        """Return what goes wrong with this message, if anything does."""
        faults = self._faults.get(int(self._context(message).node_config["partition-id"]), ())
        return next((fault for fault in faults if fault.applies(message)), None)


def answer(
    app: ClientApp, message: Message, content: RecordDict, context: Context
) -> tuple[Message, RecordDict]:
    """Return a ClientApp's reply, and the node's state after it; the state as it was if the call raises.

    Parameters
    ----------
    app : ClientApp
        The nodes'.
    message : Message
        Its metadata counts.
    content : RecordDict
        What the client gets, which it may change.
    context : Context
        The node's, which does not change.
    """
    delivered = Message(content, dst_node_id=0, message_type="train")
    delivered.__dict__["_metadata"] = message.metadata
    # A copy, so that a call that raises leaves no trace, as in Flower's simulation.
    worked_on = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=dict(context.node_config),
        state=copied(context.state),
        run_config=dict(context.run_config),
    )
    token = _answering.set(True)
    try:
        return app(delivered, worked_on), worked_on.state
    except KeyboardInterrupt:
        raise
    # Not Exception alone: a library that gives up by sys.exit() must not cost the other nodes their run.
    except BaseException as error:
        return failed(message, error), context.state
    finally:
        _answering.reset(token)


def answers_locally() -> bool:
    """Return whether a grid of this machine is calling a ClientApp, and not a SuperNode."""
    return _answering.get()


def failed(message: Message, error: BaseException) -> Message:
    """Return the reply to a message whose ClientApp has raised an error."""
    reason = f"{type(error)}:<'{error}'>"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def identify_process() -> None:
    """Give this process the identity that Flower's runtimes set and ``Message(...)`` asks for."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id = 1
    if TaskIdentity._node_id is None:
        TaskIdentity.node_id = 1
    if TaskIdentity._task_id is None:
        TaskIdentity.task_id = 1
