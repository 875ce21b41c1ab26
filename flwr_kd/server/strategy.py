"""The server half of every method: the hooks that a method overrides, and Flower's interface.

A method derives from :class:`KDStrategy`, names its phases and overrides a few hooks; no method has a loop of
its own. The class is a Flower ``Strategy``: ``start(...)`` has Flower's signature and returns a ``Result``.
:class:`flwr_kd.server.run.Run` is the loop that calls the hooks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_kd.checks import ConfigError, number, share, whole_number
from flwr_kd.config import ConfigT, MethodConfig
from flwr_kd.learning.cores import available_cores
from flwr_kd.measured_rounds import MeasuredRounds
from flwr_kd.server.averaging import Averaging
from flwr_kd.server.callbacks import Callback, Callbacks
from flwr_kd.server.flower_loop import FlowerLoop
from flwr_kd.server.flower_options import check_options, check_whole_numbers, take_renamed
from flwr_kd.server.nodes import draw
from flwr_kd.server.parameters import in_model
from flwr_kd.server.records import KDResult, NDArray, Node, Outgoing, Reply, RoundStats
from flwr_kd.server.run import Run
from flwr_kd.server.stated_privacy import check_privacy
from flwr_kd.transport.payload import MAX_PAYLOAD_BYTES, Payload, PayloadT
from flwr_kd.transport.template import ArrayTemplate, GivenNames
from flwr_kd.wording import assignment, begin_run

__all__ = ["KDStrategy"]

T = TypeVar("T")


class KDStrategy(Averaging, FlowerLoop, Generic[ConfigT, PayloadT]):
    """Base of all methods' server halves.

    Parameters
    ----------
    config : MethodConfig, optional
        The method's hyper-parameters. They travel to the clients, which have none of their own.
    fraction_train : float
        Share of the available clients that is drawn per round, in (0, 1]; at least ``min_train_nodes``.
    min_train_nodes : int
        Minimum number of clients per round. A round waits up to ``timeout`` for that many. With fewer usable
        replies to its first phase the round is void: the server's state does not change.
    min_available_nodes : int
        Number of fitting clients for which the run waits before round 1.
    fraction_evaluate : float
        Share of the clients that also evaluate the global model on their own test data, in [0, 1]. 0, the
        default, leaves out the evaluation phase, which costs as much time as training on a real SuperLink.
    min_evaluate_nodes : int
        Minimum number of clients that evaluate, as far as there are that many; none if ``fraction_evaluate`` is 0.
    measure : str
        After which rounds clients that have a ``common_test_set`` also measure their models on it, and all measure
        the global model on their own test data: ``never``, ``last``, or ``every:N`` (every Nth round and the last).
        The global model costs a message to each client, which counts in no bytes.
    seed : int
        Seed of every random choice on both sides.
    max_payload_bytes : int
        Largest payload that is sent or accepted. A client's payload is also limited to what its model, classes
        and samples can need.
    max_void_rounds : int
        Number of void rounds in a row that ends the run with :class:`VoidRoundsError`.
    max_examples : int, optional
        Largest sample count with which a client is weighted. If None, it is 10 times the median of what the clients
        said in the handshake. A client never counts for more than it said in the handshake. Nothing proves these
        counts: choose the largest that a client of yours can have.
    aggregation : str
        How models are averaged wherever the method averages them: ``mean``, ``median``, ``trimmed-mean:SHARE``,
        ``krum:F``, ``multi-krum:F:M``, ``geometric-median`` or ``norm-bound:FACTOR``; see
        :mod:`flwr_kd.server.aggregation.rules`. A rule that needs a number of clients raises ``min_train_nodes``.
    knowledge_aggregation : str
        How knowledge of clients is averaged: ``mean``, ``median`` or ``trimmed-mean:SHARE`` of each coordinate of
        prototypes, soft predictions and the outputs of an ensemble. FedGKT and FedDKC, which average none, leave
        rows out that are far from the others'.
    checkpoint_dir : path, optional
        Folder to which arrays and the method's state are written after every round that is not void.
    resume : bool
        Go on after the round of the checkpoint, if there is one. Clients go on with their personal models if these
        outlived the run, which needs a ``state-dir`` in their node configs.
    checkpoint_seconds : float
        Minimum number of seconds between two checkpoints, for rounds that are shorter than the writing of one: at
        most a twentieth of the time is spent on it. The last complete round is also written where the run ends by
        an error or an interrupt. With 0 there is one after every round, before the round is evaluated.
    cores : int, optional
        Number of cores on which the server distils or predicts, in the methods that do so, at least 1; all that the
        process may use if None. The numbers do not depend on it.
    on_round : callable, optional
        Called with the :class:`RoundStats` after every round, before the callbacks. Its error ends the run.
    callbacks : iterable of Callback
        Told of the run's beginning, phases, rounds and end. Their errors are logged; see
        :class:`~flwr_kd.server.callbacks.Callback`.
    **hyperparameters
        Instead of ``config``: its fields by name, for example ``FedHKD(gamma=0.1)``. Options of Flower's strategies
        that have another name here, such as ``fraction_fit``, are taken as well.

    Attributes
    ----------
    template : ArrayTemplate
        Names and shapes of ``initial_arrays``; empty before a run and where no weights are exchanged.
    stats : RoundStats
        The current round.
    current_run : Run
        The current or the last run: its clients, messages and counters.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    phases: tuple[str, ...] = ("train",)
    """Phases of a round, in order. A client's method ``phase_<name>`` answers each. A strategy whose phases depend
    on its hyper-parameters sets its own when it is made."""
    sends_weights: ClassVar[bool] = True
    """Whether there is a global model, which every client's model must match."""
    uses_initial_arrays: ClassVar[bool] = False
    """Whether ``initial_arrays`` are sent though there is no global model."""
    reply_arrays: ClassVar[frozenset[str]] = frozenset({"train"})
    """Phases whose replies hold the model's arrays; none where a class sets ``sends_weights = False``."""
    averages: ClassVar[bool] = True
    """Whether the global model is a mean of the clients' models, for which Flower's wrappers for differential
    privacy compute their noise."""
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {}
    """By phase, the payload that a reply must have."""
    reply_metrics: ClassVar[frozenset[str]] = frozenset()
    """The method's own metrics in its clients' replies. Their means go into the round's train metrics."""
    independent_phases: ClassVar[frozenset[str]] = frozenset()
    """Phases that do not build on the round's first one, and so take place in void rounds as well."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "sends_weights" in vars(cls) and "reply_arrays" not in vars(cls):
            cls.reply_arrays = frozenset({"train"} if cls.sends_weights else ())
        if "reply_arrays" in vars(cls) and "averages_models" not in vars(cls):
            cls.averages_models = bool(cls.reply_arrays)

    def __init__(
        self,
        config: ConfigT | None = None,
        *,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 2,
        fraction_evaluate: float = 0.0,
        min_evaluate_nodes: int = 1,
        measure: str = "never",
        seed: int = 0,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        max_void_rounds: int = 3,
        max_examples: int | None = None,
        aggregation: str = "mean",
        knowledge_aggregation: str = "mean",
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        checkpoint_seconds: float = 0.0,
        cores: int | None = None,
        on_round: Callable[[RoundStats], None] | None = None,
        callbacks: Iterable[Callback] = (),
        **hyperparameters: Any,
    ) -> None:
        renamed = take_renamed(hyperparameters, self.config_class.field_types())
        fraction_train = renamed.get("fraction_train", fraction_train)
        min_train_nodes = renamed.get("min_train_nodes", min_train_nodes)
        min_evaluate_nodes = renamed.get("min_evaluate_nodes", min_evaluate_nodes)
        min_available_nodes = renamed.get("min_available_nodes", min_available_nodes)
        check_options(type(self), hyperparameters, self.config_class.field_types())
        if config is not None and hyperparameters:
            raise ConfigError(f"either config or hyper-parameters, got config and {list(hyperparameters)}")
        if config is not None and not isinstance(config, self.config_class):
            raise ConfigError(f"config must be a {self.config_class.__name__}, got {type(config).__name__}")
        # A class variable cannot be of a type variable; the class statement names the same class twice.
        kind: type[Any] = self.config_class
        self.config: ConfigT = config if config is not None else kind.from_mapping(hyperparameters)
        if self.config.personalizes and not self.sends_weights:
            raise ConfigError(
                f"{assignment('personalize_epochs', 0)} expected: {type(self).__name__} has no global model that "
                f"clients could fine-tune, got {self.config.personalize_epochs}"
            )
        check_privacy(type(self).__name__, self.config, self.reply_arrays)
        check_whole_numbers(
            min_train_nodes=min_train_nodes, min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes, max_void_rounds=max_void_rounds,
            max_payload_bytes=max_payload_bytes, max_examples=max_examples,
        )  # fmt: skip
        share("fraction_train", fraction_train, open_low=True)
        share("fraction_evaluate", fraction_evaluate)
        number("checkpoint_seconds", checkpoint_seconds, 0)
        self.choose_rules(aggregation, knowledge_aggregation, min_available_nodes)
        min_train_nodes = max(min_train_nodes, self.rule.least)
        self.cores = available_cores() if cores is None else whole_number("cores", cores, 1, 2**31)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume=True needs checkpoint_dir")
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        if min_evaluate_nodes > 1 and not fraction_evaluate:
            log(WARNING, "min_evaluate_nodes=%d has no effect without fraction_evaluate", min_evaluate_nodes)
        self.min_train_nodes, self.min_available_nodes = min_train_nodes, min_available_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.measure, self.measured_rounds = measure, MeasuredRounds.parse(measure)
        self.seed, self.max_payload_bytes = seed, max_payload_bytes
        self.max_void_rounds, self.given_max_examples = max_void_rounds, max_examples
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.resume, self.on_round, self.checkpoint_seconds = resume, on_round, checkpoint_seconds
        self.callbacks = callbacks if isinstance(callbacks, Callbacks) else Callbacks(callbacks)
        self.template = ArrayTemplate()
        self.stats, self.num_rounds = RoundStats(0), 0
        self.current_run = Run(self)

    # ------------------------------------------------------------------ hooks, as a run and its rounds call them

    def reset(self) -> None:
        """Forget what earlier runs taught the method: every run begins with this. Nothing by default."""

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Take :meth:`state_arrays` back, when a run is resumed. An empty state is that of :meth:`reset`.

        Raises
        ------
        ValueError
            If the state is not this method's.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state of its own, got {sorted(state)}")

    def accept_node(self, node: Node) -> str | None:
        """Say in the handshake why a client cannot take part; None if it can.

        Where weights are exchanged, the base checks that the client's model has the names and shapes of
        ``initial_arrays``. :meth:`common` and :meth:`unlike` help methods whose clients must be alike.
        """
        if self.sends_weights and self.template.names:
            return self.template.difference(node.template)
        return None

    def begin(self, nodes: list[Node]) -> None:
        """Prepare a run, or what is left of one that is resumed; nothing by default.

        Called once, before the first round, with the connected clients; :attr:`template` is known.

        Raises
        ------
        ConfigError
            If an option does not go with the clients or the model.
        """

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        """Return the nodes that take part in a phase.

        The base draws ``fraction_train`` of the nodes for the first phase, and then keeps to those that
        replied in the previous phase.

        Parameters
        ----------
        phase : str
            One of :attr:`phases`.
        server_round : int
            From 1.
        nodes : list of Node
            All connected nodes, in the order of partition ids.
        answered : list of Node
            Those that replied in the previous phase; empty in the first.
        """
        if phase != self.phases[0]:
            return answered
        return draw(nodes, self.fraction_train, self.min_train_nodes, self.seed, "sample", server_round)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Return what each node is sent; the base sends everyone the global arrays."""
        return [Outgoing(node, arrays) for node in nodes]

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return names and shapes of the arrays that a client sends: :attr:`template`, the global model's.

        Methods whose clients have different models, or that have no global model, override this.
        """
        return self.template

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return the sizes that a node's payload must have, by the letters of its fields' shapes."""
        return {"C": node.num_classes, "D": node.feature_dim}

    def payload_limit(self, phase: str, node: Node) -> int:
        """Return the largest number of bytes that a node's payload can have. More is refused before it is decoded.

        The base computes it from :meth:`payload_dims`; an axis that is not in it has at most C entries.
        """
        kind = self.reply_payloads[phase]
        needed = kind.max_nbytes(self.payload_dims(phase, node), others=node.num_classes)
        return self.max_payload_bytes if needed is None else min(needed, self.max_payload_bytes)

    def check_reply(self, phase: str, reply: Reply[PayloadT]) -> None:
        """Raise :class:`PayloadError` if a reply breaks a rule of the method's own."""

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[PayloadT]], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Use the replies, in the order of partition ids; return new global arrays, or None to keep the old.

        Not called without any usable reply. The base returns the mean weighted by sample counts.

        Parameters
        ----------
        phase, server_round
            See :meth:`select`.
        replies : iterable of Reply
            To be gone through once, to its end, before anything of the strategy is changed: where there are too
            few, it ends in an exception, and the round is void. Each reply is fetched and checked when it is asked
            for, so that a method that only sums holds one at a time. One that needs all takes ``list(replies)``.
        arrays : ArrayRecord or None
            The global arrays.
        """
        if phase not in self.reply_arrays:
            return None
        mean = self.new_mean()
        for reply in replies:
            mean.add(reply.arrays, reply.num_examples)
            # Drop the reference, so that only one reply is in memory.
            del reply
        return self.template.record(mean.result())

    def finish_round(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """End a round that was not void; return new global arrays, or None to keep them.

        For a method whose phases leave something to be done together. Nothing by default.
        """
        return None

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Return what nodes that did not take part in the last round are sent, to measure their models.

        The base sends the global arrays where there is a global model, else nothing: a client measures its own
        model. A method whose server keeps models of clients or of groups overrides this. Nothing may change.
        """
        return [Outgoing(node, arrays if self.sends_weights else None) for node in nodes]

    def held_parameters(self) -> int:
        """Return how many parameters the server keeps between rounds: by default the global model's, if any.

        A method with further models or modules at the server adds them. Knowledge that is no model, such as class
        prototypes, does not count.
        """
        if not self.sends_weights:
            return 0
        return in_model(self, self.template)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the method's own state as named arrays, for a checkpoint; none by default.

        Callable at any time, also before a run and in the middle of a round. Empty until a run has changed
        anything. The caller may keep the arrays: later rounds do not change them.
        """
        return {}

    # ------------------------------------------------------------------ help for hooks

    def common(
        self,
        kind: Callable[[Node], T],
        node: Node,
        *,
        among: Callable[[Node], bool] = lambda _: True,
        shown: Callable[[T], str] = str,
    ) -> T:
        """Return what most clients have, for a method whose clients must be alike in it.

        See :meth:`flwr_kd.server.nodes.Roster.common`.
        """
        return self.current_run.roster.common(kind, node, among, shown)

    def unlike(self, node: Node) -> str | None:
        """Say how a client's numbers of classes and features differ from those of most clients; None if not."""
        return self.current_run.roster.unlike(node)

    # ------------------------------------------------------------------ Flower's interface

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> KDResult:
        """Run all rounds.

        Parameters
        ----------
        grid : Grid
            Flower's, or an :class:`~flwr_kd.InlineGrid`.
        initial_arrays : ArrayRecord
            ``ArrayRecord(model.state_dict())``; empty for a method that exchanges no weights.
        num_rounds : int
            At least 1. With ``resume``, the number of the last round.
        timeout : float
            Seconds that a phase waits for replies. The messages live 200 seconds longer, and two for each client,
            in which replies are fetched.
        train_config, evaluate_config : ConfigRecord, optional
            Further scalars for the clients. Not changed.
        evaluate_fn : callable, optional
            Called with the round (0: before the first) and the global arrays. A metric named ``accuracy`` becomes
            the round's global accuracy, ``top5`` its top-5 accuracy. Never called where there is no global model,
            unless ``global-model=average`` has the mean of the clients' models measured.

        Returns
        -------
        KDResult
            Flower's ``Result``, and ``rounds``. Its ``arrays`` are empty where there is no global model.

        Raises
        ------
        HandshakeError
            If clients do not fit the method and too few remain.
        TimeoutError
            If fewer than ``min_available_nodes`` clients come within ``timeout``.
        ConfigError
            If ``num_rounds`` or ``timeout`` is out of range, ``initial_arrays`` are missing, ``checkpoint_dir``
            cannot be written to, or its checkpoint is another method's, another model's or unreadable.
        VoidRoundsError
            If ``max_void_rounds`` rounds in a row, or all, had fewer than ``min_train_nodes`` usable replies.
        """
        whole_number("num_rounds", num_rounds, 1, 2**31)
        number("timeout", timeout, 0, float("inf"), open_low=True)
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        for line in self.config.doubts():
            log(WARNING, "%s", line)
        given = {"train_config": train_config, "evaluate_config": evaluate_config}
        self.warn_of_unused(given, evaluate_fn, initial_arrays)
        self.num_rounds = num_rounds
        run = self.prepare(initial_arrays, timeout)
        names = GivenNames(initial_arrays)
        last_round, arrays = run.resume(names.plain(initial_arrays))
        result = run.execute(
            grid,
            arrays,
            first_round=last_round + 1,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=None if evaluate_fn is None else names.for_caller(evaluate_fn),
        )
        result.arrays = names.given(result.arrays)
        for line in io.StringIO(str(result)):
            log(INFO, "\t%s", line.rstrip("\n"))
        return result

    def prepare(self, initial_arrays: ArrayRecord, timeout: float = 3600.0) -> Run:
        """Begin a run, up to the handshakes, and return it: the first step of :meth:`start`."""
        begin_run()
        self.template = ArrayTemplate.of(initial_arrays)
        if self.sends_weights and not self.template.names:
            raise ConfigError(f"{type(self).__name__} needs initial_arrays: ArrayRecord(model.state_dict())")
        self.stats = RoundStats(0)
        self.current_run = Run(self, timeout)
        self.current_run.begin()
        return self.current_run

    def summary(self) -> None:
        """Log hyper-parameters, phases and sampling."""
        values = ", ".join(f"{name}={value}" for name, value in self.config.to_wire().items())
        log(INFO, "\t├──> Hyper-parameters: %s", values)
        log(INFO, "\t├──> Phases: %s", ", ".join(self.phases))
        fractions = (self.fraction_train, self.fraction_evaluate)
        log(INFO, "\t└──> Fraction: train (%.2f) | evaluate (%.2f)", *fractions)
