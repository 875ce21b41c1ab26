"""A small federation in this process: data that can be learnt, small models, and the clients of one method."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import nn

from flwr_kd import registry
from flwr_kd.client.message_app import client_app
from flwr_kd.client.own_model import LentModel
from flwr_kd.data import ArrayDataset
from flwr_kd.experiments.attacks import AttackedGrid, MaliciousClient, parse_attack
from flwr_kd.models import build_model
from flwr_kd.models.feature import FeatureModel
from flwr_kd.models.initialisation import DrawFrom
from flwr_kd.models.reused import ModelPool
from flwr_kd.server.records import KDResult
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing.synchronisations import DEVICE, CountingDevice
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.process_grid import ProcessGrid

__all__ = [
    "CLASSES",
    "FEATURES",
    "SHAPE",
    "WORK_SECONDS",
    "Federation",
    "blobs",
    "first_difference",
    "numbers",
    "quiet",
    "small_model",
]

CLASSES = 4
"""Number of classes of the small data."""
FEATURES = 8
"""Number of features of the small model."""
SHAPE = (1, 4, 4)
"""Shape of a sample of the small data."""
WORK_SECONDS = 300.0
"""A client may work that long on a message, also where a test has a short timeout."""
_POOL = ModelPool()
_NUMBERS = (
    "local_accuracy",
    "global_accuracy",
    "train_loss",
    "bytes_up",
    "bytes_down",
    "participants",
    "failures",
)
_OF_A_ROUND = operator.attrgetter(*_NUMBERS)
QUICK = ("local-epochs=1", "batch-size=8", "optimizer=adam", "learning-rate=0.005")


def blobs(size: int, seed: int, classes: int = CLASSES) -> ArrayDataset:
    """Return a data set that can be learnt: one noisy pattern per class.

    Parameters
    ----------
    size : int
        Number of samples of shape ``[1, 4, 4]``; the classes take turns.
    seed : int
        Seed of the noise; the patterns are always the same.
    classes : int
        Number of classes.
    """
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, *SHAPE, generator=generator)
    generator.manual_seed(seed)
    y = torch.arange(size) % classes
    return ArrayDataset(patterns[y] + 0.5 * torch.randn(size, *SHAPE, generator=generator), y)


def small_model(name: str = "mlp", seed: int = 0) -> torch.nn.Module:
    """Return a model for :func:`blobs` with 8 features.

    Parameters
    ----------
    name : str
        Of :data:`flwr_kd.models.MODELS`; or ``batch-norm``, a convolution with BatchNorm, which is much smaller
        than any of those with BatchNorm.
    seed : int
        Seed of the initial weights.
    """
    if name == "batch-norm":
        with DrawFrom(torch.Generator().manual_seed(seed)):
            block = (nn.Conv2d(SHAPE[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
            features = (nn.Flatten(), nn.Linear(4 * (SHAPE[1] // 2) * (SHAPE[2] // 2), FEATURES), nn.ReLU())
            return FeatureModel(nn.Sequential(*block, *features), nn.Linear(FEATURES, CLASSES))
    return build_model(name, input_shape=SHAPE, num_classes=CLASSES, seed=seed, feature_dim=FEATURES)


class Federation:
    """The clients of one method on the inline grid, some of them malicious.

    Client i has ``samples`` + i training samples and 8 test samples.

    Parameters
    ----------
    name : str
        The method.
    clients : int
        Number of clients.
    attack : str, optional
        What malicious clients do; see :mod:`flwr_kd.experiments.attacks`.
    attackers : collection of int
        Which clients are malicious.
    samples, public, common : int
        Number of training samples of the first client, of public samples, and of samples of the common test set; no
        such set if 0.
    counting : CountingDevice, optional
        Clients and server compute on this device, and their data is there; on the CPU if None.
    message_api : collection of int
        Which clients are served by :func:`flwr_kd.client_app`; the others are ``NumPyClient`` s.

    Attributes
    ----------
    models : list of str
        The clients' models, see :func:`small_model`.
    aggregation, knowledge_aggregation : str
        The rules by which strategies average models, and what clients know.
    pool : ModelPool or None
        Lends the clients their models, built once per process; None builds one for each message.

    Examples
    --------
    >>> strategy, result = Federation("fedavg").run(rounds=1)
    >>> result.rounds[0].participants
    4
    """

    def __init__(
        self,
        name: str,
        clients: int = 4,
        *,
        attack: str | None = None,
        attackers: Collection[int] = (),
        samples: int = 24,
        public: int = 32,
        common: int = 0,
        counting: CountingDevice | None = None,
        message_api: Collection[int] = (),
    ) -> None:
        self.method, self.clients = registry.get(name), clients
        self.attack, self.attackers = None if attack is None else parse_attack(attack), attackers
        self.models = ["mlp"] * clients
        self.samples, self.public, self.common, self.counting = samples, public, common, counting
        self.device = torch.device("cpu") if counting is None else DEVICE
        self.pool: ModelPool | None = _POOL
        self.aggregation = self.knowledge_aggregation = "mean"
        self.message_api = message_api

    def client_fn(self, context: Context) -> Any:
        """Return a client, as Flower's ``client_fn``."""
        index = int(context.node_config["partition-id"])
        context.node_config["reproducible-noise"] = True
        attack = self.attack if index in self.attackers else None
        train: Any = blobs(self.samples + index, index)
        if attack is not None:
            train = attack.poison(train, CLASSES, index)
        public: dict[str, Any] = {"public_set": self._public()} if self.method.public_at == "clients" else {}
        name = self.models[index]
        build = functools.partial(small_model, name)
        model: Any = build() if self.pool is None else LentModel(self.pool, (small_model, name), build)
        client: Any = self.method.client(
            model,
            train.to(self.device),
            blobs(8, 100 + index).to(self.device),
            context=context,
            common_test_set=blobs(self.common, 300).to(self.device) if self.common else None,
            device=self.device,
            **self.method.client_options,
            **public,
        )
        if attack is not None:
            client = MaliciousClient(client, attack, partition=index)
        return client.to_client()

    def app(self) -> ClientApp:
        """Return the clients' app."""

        def client_fn(context: Context) -> Any:
            return self.client_fn(context)

        counting, kinds = self.counting, (ClientApp(client_fn=client_fn), client_app(client_fn))
        if counting is None and not self.message_api:
            return kinds[0]

        def served(message: Message, context: Context) -> Message:
            app = kinds[int(context.node_config["partition-id"]) in self.message_api]
            # Clients have a thread of their own, and each thread enters the device.
            with counting or nullcontext():
                return app(message, context)

        return cast(ClientApp, served)

    def between(self, grid: Grid) -> Grid:
        """Return the grid as the server sees it, with attackers between."""
        return grid if self.attack is None else AttackedGrid(grid, self.attack)

    def strategy(self, *settings: str, **options: Any) -> KDStrategy[Any, Any]:
        """Return a strategy with hyper-parameters ``name=value``, and options of its constructor."""
        rules = {"aggregation": self.aggregation, "knowledge_aggregation": self.knowledge_aggregation}
        options = {"min_available_nodes": self.clients, **rules, **options}
        if self.method.public_at == "server":
            models: dict[str, Any] = {"model": small_model()}
            if self.method.heterogeneous:
                models = {"models": [small_model(name) for name in dict.fromkeys(self.models)]}
            options = {**models, "public_set": self._public(), "device": self.device, **options}
        if self.method.public_at == "synthetic":
            options = {"model": small_model(), "input_shape": SHAPE, "device": self.device, **options}
        if self.method.server_model:
            options = {"model": small_model(), **options}
        if self.method.server_device:
            options = {"device": self.device, **options}
        quick = [text for text in QUICK if text.partition("=")[0].replace("-", "_") not in self.method.fixed]
        return self.method.strategy(self.method.config([*quick, *self.method.quick, *settings]), **options)

    def _public(self) -> ArrayDataset:
        return blobs(self.public, 200).to(self.device)

    def initial(self) -> ArrayRecord:
        """Return the initial global arrays; empty for a method that does not use them."""
        kind = self.method.strategy
        uses = kind.sends_weights or kind.uses_initial_arrays
        return ArrayRecord(small_model().state_dict()) if uses else ArrayRecord()

    def run(
        self,
        rounds: int = 2,
        *,
        settings: Sequence[str] = (),
        kind: type[InlineGrid | ProcessGrid] = InlineGrid,
        grid: dict[str, Any] | None = None,
        timeout: float = 300.0,
        initial: ArrayRecord | None = None,
        **options: Any,
    ) -> tuple[KDStrategy[Any, Any], KDResult]:
        """Run some rounds on a ``kind`` of grid; ``grid`` are its options, others are of the strategy.

        ``settings`` are hyper-parameters as ``name=value``, ``initial`` arrays in place of :meth:`initial`.
        """
        initial = self.initial() if initial is None else initial
        with self.counting or nullcontext():
            strategy = self.strategy(*settings, **options)
            opened = kind(self.app(), self.clients, **{"work_seconds": WORK_SECONDS, **(grid or {})})
            try:
                seen = self.between(opened)
                return strategy, strategy.start(seen, initial, num_rounds=rounds, timeout=timeout)
            finally:
                opened.close()


def numbers(result: KDResult) -> list[tuple[Any, ...]]:
    """Return what must be the same in two equal runs: everything but the time."""
    arrays = [(name, value.data) for name, value in result.arrays.items()]
    return [*map(_OF_A_ROUND, result.rounds), *arrays]


def first_difference(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> str:
    """Return where the :func:`numbers` of two runs first differ.

    Examples
    --------
    >>> first_difference([(0.5, None, 1.25, 10, 20, 4, 0)], [(0.5, None, 1.5, 10, 20, 4, 0)])
    'train_loss of compared round 1 is 1.25, and not 1.5'
    """
    if len(found) != len(expected):
        return f"{len(found)} rounds and arrays, and not {len(expected)}"
    pairs = enumerate(zip(found, expected, strict=True), start=1)
    place, (mine, other) = next(each for each in pairs if operator.ne(*each[1]))
    if len(mine) != len(_NUMBERS):
        differs = "differs" if mine[0] == other[0] else f"is there, and not {other[0]!r}"
        return f"array {mine[0]!r} {differs}"
    # From the end: a failure explains all that comes before it in the row.
    rows = reversed(list(zip(_NUMBERS, mine, other, strict=True)))
    name, value, wanted = next(row for row in rows if row[1] != row[2])
    return f"{name} of compared round {place} is {value!r}, and not {wanted!r}"


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect Flower's warnings in a list instead of printing them."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield lines
    finally:
        logger.handlers, logger.propagate = before
