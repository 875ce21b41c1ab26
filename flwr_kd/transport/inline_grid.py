"""An in-process ``Grid``: each node's ClientApp is called in threads of this process, in turn or several at a time.

For debugging (a breakpoint in a client works), for tests (faults can be injected), and for small runs that
need no Ray. With the same seed and number of torch threads the numbers are those of the Ray simulation.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any

from flwr.app import (
    Context,
    Error,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from flwr_kd.transport.local_grid import Fault, LocalGrid, answer, failed
from flwr_kd.transport.node_threads import Job, NodeThreads
from flwr_kd.transport.records import copied

__all__ = ["Fault", "InlineGrid"]


class InlineGrid(LocalGrid):
    """Runs a ClientApp for a number of nodes inside this process.

    A node's ClientApp runs when its reply is pulled, so that the replies of a round are not all in memory at once;
    with several ``workers`` a few run ahead. One that does not reply in time is given up, and costs its own replies
    until it ends. Python cannot end its thread; the end of the process does not wait for it.

    Parameters
    ----------
    client_app : ClientApp
        As for Flower's simulation.
    num_nodes : int
        Number of nodes; node ids are not 0..N-1, as in Flower.
    workers : int
        Number of nodes that work at the same time, each in a thread; 1 runs them in turn. Threads share torch's
        global generator: the numbers are the same as in turn if ``client_fn`` draws nothing from it, for example to
        initialise a model.
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
        By node id, each node's ``Context``, whose state outlives the messages as in Flower. If a call raises, its
        changes to the state are undone, as in Flower's simulation.
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
        super().__init__(
            client_app,
            num_nodes,
            workers=workers,
            node_configs=node_configs,
            faults=faults,
            run_config=run_config,
            seed=seed,
            work_seconds=work_seconds,
        )
        self._threads = NodeThreads(workers)
        self._stuck: dict[int, Job] = {}
        self._waiting: dict[str, tuple[Message, int]] = {}
        self._deadlines: dict[str, tuple[float, Message]] = {}
        self._worked = 0.0
        self._replies: dict[str, tuple[int, Message]] = {}
        self._pending: dict[str, tuple[Job, Message]] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, self._threads.close)

    # ------------------------------------------------------------------ Grid

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take the messages; a ClientApp runs when its reply is pulled."""
        self._pushes += 1
        ids = []
        # Forget messages that expired without a reply.
        for gone in [i for i, (deadline, _) in self._deadlines.items() if self._now() > deadline]:
            del self._deadlines[gone]
        for message in messages:
            message_id = self._number(message)
            ids.append(message_id)
            self._waiting[message_id] = (message, self._pushes)
            self._deadlines[message_id] = (self._now() + message.metadata.ttl, message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the ClientApp for messages that it has not seen yet, and return the replies that are there.

        A message whose time to live is over gives an error, with or without a reply, as at a SuperLink; not with
        several workers.
        """
        wanted = list(message_ids)
        if self._workers == 1:
            self._expire(wanted)
        for message_id in wanted:
            self._submit(message_id)
            if self._workers > 1:
                self._run_ahead()
            self._wait(message_id)
        replies = []
        for message_id in wanted:
            with self._lock:
                reply = self._replies.get(message_id)
                if reply is not None and reply[0] <= self._pushes:
                    replies.append(self._replies.pop(message_id)[1])
                    self._deadlines.pop(message_id, None)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and wait, as Flower's own loop does; a node that never replies costs no waiting here."""
        # A list, so that the replies come in this order, whatever the seed of hashes.
        waiting = list(self.push_messages(list(messages)))
        self.bound(math.inf if timeout is None else timeout)
        for message_id in waiting if self._workers > 1 else ():
            self._submit(message_id)
        return self.pull_messages(waiting)

    def close(self) -> None:
        """End the threads. Those of nodes that still work are only asked to end."""
        self._threads.close()

    # ------------------------------------------------------------------ nodes

    def _now(self) -> float:
        """Return a clock that stops while nodes work: here they work in turn, elsewhere at the same time."""
        return time.monotonic() - self._worked

    def _expire(self, message_ids: Sequence[str]) -> None:
        """Reply with an error to messages whose time to live is over."""
        for message_id in message_ids:
            deadline, message = self._deadlines.get(message_id, (math.inf, None))
            if message is not None and self._now() > deadline:
                self._waiting.pop(message_id, None)
                expired = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "expired"), reply_to=message)
                self._replies[message_id] = (0, expired)

    def _submit(self, message_id: str) -> None:
        """Let a thread handle a message, unless its node still works on one that was given up."""
        if message_id not in self._waiting:
            return
        message, push = self._waiting.pop(message_id)
        stuck = self._stuck.get(self._context(message).node_id)
        if stuck is not None and not stuck.done:
            reason = "it still works on an earlier message, to which it did not reply in time"
            self._replies[message_id] = (0, Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message))
            return
        self._pending[message_id] = (
            self._threads.submit(lambda job: self._handle(message, push, job)),
            message,
        )

    def _run_ahead(self) -> None:
        ahead = 2 * self._workers - len(self._pending) - len(self._replies)
        for message_id in list(itertools.islice(self._waiting, max(ahead, 0))):
            self._submit(message_id)

    def _wait(self, message_id: str) -> None:
        """Wait for the end of a message's handling. Whatever takes too long meanwhile is given up."""
        if message_id not in self._pending:
            return
        job, begun = self._pending[message_id][0], time.monotonic()
        try:
            while message_id in self._pending and not job.done:
                for other, (theirs, _) in list(self._pending.items()):
                    if theirs.left(self._seconds) <= 0 and not theirs.done:
                        self._give_up(other)
                working = [theirs for theirs, _ in self._pending.values() if not theirs.done]
                job.wait(min((theirs.left(self._seconds) for theirs in working), default=0.0))
        except BaseException:
            # An interrupt: nobody waits for the others either.
            self._pending.clear()
            self.close()
            raise
        self._worked += time.monotonic() - begun
        self._pending.pop(message_id, None)
        if job.error is not None:
            raise job.error

    def _give_up(self, message_id: str) -> None:
        job, message = self._pending.pop(message_id)
        with self._lock:
            self._threads.abandon(job)
        node_id = message.metadata.dst_node_id
        self._stuck[node_id] = job
        log(
            WARNING,
            "client %s still works after %g s and is given up; its thread goes on, since Python cannot end it",
            self.contexts[node_id].node_config["partition-id"],
            self._seconds,
        )

    def _handle(self, message: Message, push: int, job: Job) -> None:
        context, fault = self._context(message), self._fault(message)
        if fault is not None and fault.kind == "silent":
            return
        reply, state = self._call(message, context, fault)
        with self._lock:
            if job.abandoned:
                return
            context.state = state
            visible = push + 1 if fault is not None and fault.kind == "late" else push
            self._replies[message.metadata.message_id] = (visible, reply)

    def _call(self, message: Message, context: Context, fault: Fault | None) -> tuple[Message, RecordDict]:
        """Return the ClientApp's reply, and the node's state after it."""
        if fault is not None and fault.kind == "raise":
            return failed(message, RuntimeError("injected fault")), context.state
        reply, state = answer(self._app, message, copied(message.content), context)
        if fault is not None and fault.kind == "garbage" and reply.has_content():
            fault.mutilate(reply.content, int(message.metadata.message_id.rpartition("-")[2]))
        return reply, state
