"""A method's clients as a ``ClientApp`` of Flower's Message API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from flwr_kd.checks import ConfigError
from flwr_kd.client.flower_mods import CLIPPING, name_of
from flwr_kd.transport import flower_records
from flwr_kd.transport.client_records import (
    evaluate_reply,
    properties_reply,
    read_instruction,
    read_question,
    train_reply,
)

__all__ = ["MessageApp", "Served", "client_app"]

NDArray = npt.NDArray[Any]
Scalars = dict[str, Any]


@runtime_checkable
class Served(Protocol):
    """What is called for a message: a :class:`~flwr_kd.KDClient`, or what wraps one."""

    def get_properties(self, config: Any) -> Scalars:
        """Answer the handshake."""

    def fit(self, parameters: Any, config: Any) -> tuple[list[NDArray], int, Scalars]:
        """Answer one phase of a round."""

    def evaluate(self, parameters: Any, config: Any) -> tuple[float, int, Scalars]:
        """Evaluate a model."""


class MessageApp(ClientApp):
    """See :func:`client_app`. Unlike Flower's own, it can be pickled, if ``build`` and the mods can."""

    def __init__(
        self, build: Callable[[Context], Any], mods: Sequence[Mod] = (), train_mods: Sequence[Mod] = ()
    ) -> None:
        super().__init__(mods=list(mods))
        self._made_of = build, tuple(mods), tuple(train_mods)
        self.train(mods=list(train_mods))(self._train)
        self.evaluate()(self._evaluate)
        self.query()(self._query)

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageApp, self._made_of

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message.

        The handshake is a query. As long as there are also clients of the other kind, its message has the type that
        they know, which a ``ClientApp`` of the Message API does not route.
        """
        asked = message.metadata.message_type
        if asked != flower_records.GET_PROPERTIES:
            return super().__call__(message, context)
        message.metadata.message_type = flower_records.QUERY
        try:
            reply = super().__call__(message, context)
        finally:
            message.metadata.message_type = asked
        reply.metadata.message_type = asked
        return reply

    def _served(self, context: Context) -> Served:
        built = self._made_of[0](context)
        # What `to_client()` returned has the client itself.
        client = getattr(built, "numpy_client", built)
        if not isinstance(client, Served):
            raise ConfigError(
                f"build must return a client of a method, such as FedHKDClient(...), got {type(built).__name__}"
            )
        return client

    def _query(self, message: Message, context: Context) -> Message:
        question = read_question(message)
        return properties_reply(message, self._served(context).get_properties(question))

    def _train(self, message: Message, context: Context) -> Message:
        arrays, config = read_instruction(message)
        return train_reply(message, *self._served(context).fit(arrays, config))

    def _evaluate(self, message: Message, context: Context) -> Message:
        arrays, config = read_instruction(message)
        return evaluate_reply(message, *self._served(context).evaluate(arrays, config))


def client_app(
    build: Callable[[Context], Any], *, mods: Sequence[Mod] = (), train_mods: Sequence[Mod] = ()
) -> ClientApp:
    """Return a ``ClientApp`` of Flower's Message API that serves a method's clients.

    It takes the place of ``ClientApp(client_fn=...)``, and the numbers are the same. Arrays travel by name, so that
    the mods of ``flwr.clientapp.mod`` can work on them. A strategy recognises either kind of client, also several
    kinds in one federation.

    Parameters
    ----------
    build : callable
        ``build(context)`` returns the client, for each message anew: what a ``client_fn`` returns, with or without
        ``.to_client()``.
    mods : sequence of callable
        Mods around all messages, such as ``message_size_mod``.
    train_mods : sequence of callable
        Mods around train messages alone: ``fixedclipping_mod``, ``adaptiveclipping_mod`` and ``LocalDpMod`` among
        them.

    Returns
    -------
    ClientApp
        Further functions can be registered with it, for example ``@app.query("ping")``.

    Raises
    ------
    ConfigError
        If ``build`` cannot be called, a mod of ``flwr.client.mod`` reads messages of a ``NumPyClient`` only, or one
        among ``mods`` works on train messages only.

    Examples
    --------
    >>> from flwr.app import ArrayRecord
    >>> from flwr_kd import InlineGrid
    >>> from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
    >>> from flwr_kd.testing.federation import blobs, small_model
    >>> def build(context):
    ...     return FedAvgClient(small_model(), blobs(24, 0), blobs(8, 1), context=context, device="cpu")
    >>> grid = InlineGrid(client_app(build), num_nodes=2)
    >>> strategy = FedAvg(min_available_nodes=2, local_epochs=1)
    >>> result = strategy.start(grid, ArrayRecord(small_model().state_dict()), num_rounds=1)
    >>> result.rounds[0].participants
    2
    """
    if not callable(build):
        raise ConfigError(
            f"build must be a function from Flower's context to a client, got {type(build).__name__}"
        )
    for option, given in (("mods", mods), ("train_mods", train_mods)):
        for mod in given:
            _check_mod(option, mod)
    return MessageApp(build, mods, train_mods)


def _check_mod(option: str, mod: Mod) -> None:
    name, module = name_of(mod)
    if module.startswith("flwr.client.mod."):
        raise ConfigError(
            f"{option}: {name} of flwr.client.mod reads the messages of a NumPyClient only: use the one of this "
            "name in flwr.clientapp.mod, if there is one"
        )
    if option == "mods" and name in CLIPPING:
        raise ConfigError(f"mods: {name} works on train messages only: move it to train_mods")
