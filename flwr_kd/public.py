"""Knowledge exchange on public data: clients predict the same samples, and learn what the server makes of it.

A round has two phases. ``train``: the server draws public samples, a client trains on its own data and predicts
them. ``distill``: each client gets a target for each of the samples, and learns it. Models may differ, and stay at
the clients. A method says what the targets are: :meth:`PublicKnowledgeStrategy.targets`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .batches import Batches, DatasetError
from .client import Answer, KDClient, Task
from .config import ConfigError, MethodConfig, hyper
from .distillation import kl_divergence, soft_targets
from .ensemble import check_samples, read_samples, try_model
from .payload import Payload, PayloadError, array
from .seeding import numpy_generator
from .strategy import KDStrategy, NDArray, Node, Outgoing, Reply
from .training import fit, make_optimizer
from .weights import has_finite_weights

__all__ = [
    "PublicKnowledgeClient",
    "PublicKnowledgeConfig",
    "PublicKnowledgeStrategy",
    "PublicRows",
    "PublicRowsTargets",
    "PublicSamples",
    "PublicSamplesTargets",
    "SoftPredictions",
    "digest_of",
    "pack_predictions",
    "unpack_predictions",
]

PRECISIONS = ("float32", "float16", "uint8")
REDUCTIONS = ("sum", "mean")
_SUM_TOLERANCE = 0.02
_STATE_KEY = "flwr-kd.public"
_HINT = "a smaller public-samples, or precision=float16 or uint8"


@dataclass(frozen=True, kw_only=True)
class PublicKnowledgeConfig(MethodConfig):
    """Methods that exchange soft predictions on public data, with the values of KT-pFL's experiments (its B.2)."""

    local_epochs: int = hyper(20, "E, passes over the client's training data per round", ge=1)
    batch_size: int = hyper(128, "samples per batch of the client's own data", ge=1)
    optimizer: str = hyper("sgd", "optimiser of training and distillation", choices=("adam", "sgd"))
    learning_rate: float = hyper(0.01, "η₁, learning rate of local training in round 1", gt=0)
    lr_decay: float = hyper(1.0, "factor on η₁ and η₂ every lr-decay-every rounds", gt=0, le=1)
    public_data: str = hyper(
        "clients",
        "where the public data is: the same at every client, who is sent positions; or at the server, which sends "
        "the samples",
        choices=("clients", "server"),
    )
    public_samples: int = hyper(3000, "public samples drawn per round; all where there are fewer", ge=1)
    public_batch_size: int = hyper(256, "public samples per batch", ge=1)
    temperature: float = hyper(10.0, "T of the soft predictions", gt=0)
    distill_epochs: int = hyper(1, "R, passes over the round's public samples", ge=0)
    distill_learning_rate: float = hyper(0.01, "η₂, learning rate of the distillation in round 1", gt=0)
    distill_weight: float = hyper(1.0, "λ, weight of the divergence from the targets", ge=0)
    reduction: str = hyper(
        "sum", "whether the divergence is summed over public samples, or their mean", choices=REDUCTIONS
    )
    precision: str = hyper("float32", "how soft predictions travel", choices=PRECISIONS)


# ---------------------------------------------------------------------- what travels


@dataclass(frozen=True, eq=False)
class PublicRows(Payload, schema="public.rows", version=2, hint="a smaller public-samples"):
    """What a client is to predict: positions in the public data that it has itself.

    Attributes
    ----------
    rows : ndarray
        ``[K]``, ascending.
    digest : str
        Of the public data, see :func:`digest_of`.
    """

    rows: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    digest: str = ""


@dataclass(frozen=True, eq=False)
class PublicSamples(Payload, schema="public.samples", version=1, hint="a smaller public-samples"):
    """What a client is to predict: the samples themselves, ``[K, ...]``."""

    samples: NDArray = array("*", "K ...")


@dataclass(frozen=True, eq=False)
class SoftPredictions(Payload, schema="public.soft-predictions", version=1, hint=_HINT):
    """A client's soft predictions of the samples that it was sent, ``[K, C]``; see :func:`pack_predictions`."""

    predictions: NDArray = array("float32|float16|uint8", "K C")

    def check(self) -> None:
        """Refuse what are no distributions."""
        _check_distributions(self.predictions, f"{self.schema}: field 'predictions'")


@dataclass(frozen=True, eq=False)
class PublicRowsTargets(Payload, schema="public.rows-targets", version=2, hint=_HINT):
    """What a client is to learn: the positions of :class:`PublicRows` again, and a target ``[K, C]`` for each.

    Without a digest: the client has compared it in the round's first phase.
    """

    rows: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    targets: NDArray = array("float32|float16|uint8", "K C")


@dataclass(frozen=True, eq=False)
class PublicSamplesTargets(Payload, schema="public.samples-targets", version=1, hint=_HINT):
    """What a client is to learn, with samples: :class:`PublicSamples` and a target ``[K, C]`` for each."""

    samples: NDArray = array("*", "K ...")
    targets: NDArray = array("float32|float16|uint8", "K C")


def pack_predictions(probabilities: Tensor, precision: str) -> NDArray:
    """Return distributions ``[K, C]`` as they travel.

    ``uint8`` holds shares of each row's largest probability in 255 steps, so that flat distributions, as a high
    temperature makes them, keep their differences, too.

    Raises
    ------
    ValueError
        If the precision is unknown.

    Examples
    --------
    >>> pack_predictions(torch.tensor([[0.6, 0.3, 0.1]]), "uint8").tolist()
    [[255, 128, 42]]
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "uint8":
        largest = probabilities.amax(dim=1, keepdim=True).clamp_min(torch.finfo(probabilities.dtype).tiny)
        return (probabilities / largest * 255).round().to(torch.uint8).numpy()
    return probabilities.numpy().astype(precision)


def unpack_predictions(packed: NDArray) -> Tensor:
    """Return what :func:`pack_predictions` packed, float32 ``[K, C]``, each row divided by its sum.

    >>> unpack_predictions(np.uint8([[255, 0, 0], [255, 255, 0]])).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    found = torch.from_numpy(packed.astype(np.float32))
    return found / found.sum(dim=1, keepdim=True)


def _check_distributions(values: NDArray, where: str) -> None:
    if values.dtype == np.uint8:
        if not (values.max(axis=1, initial=0) == 255).all():
            raise PayloadError(f"{where}: each row's largest code must be 255, as uint8 shares of it are")
        return
    if values.size and not (values.min() >= 0 and values.max() <= 1 + _SUM_TOLERANCE):
        raise PayloadError(f"{where} must be in [0, 1], got {values.min():g}..{values.max():g}")
    sums = values.sum(axis=1, dtype=np.float64)
    if values.size and not np.abs(sums - 1).max() <= _SUM_TOLERANCE:
        raise PayloadError(
            f"{where}: rows must sum to 1 within {_SUM_TOLERANCE}, got {sums.min():g}..{sums.max():g}"
        )


def digest_of(samples: Batches, what: str = "public_set") -> str:
    """Return the SHA-256 of samples in their order: their dtype, shape and bytes, without labels.

    Parameters
    ----------
    samples : Batches
        At least one. All are read, once.
    what : str
        What errors call them.

    Raises
    ------
    DatasetError
        If they do not go into batches, have values that are not finite, or are of a type that numpy has not.

    Notes
    -----
    Only sets that are equal to the last bit have the same one: files, transforms, and what decodes them must be
    alike.
    """
    found = hashlib.sha256()
    for x in read_samples(samples, what):
        try:
            rows = x.detach().cpu().contiguous().numpy()
        except TypeError:
            raise DatasetError(f"{what} must have inputs of a dtype that numpy has, got {x.dtype}") from None
        for row in rows:
            found.update(f"{row.dtype} {list(row.shape)} ".encode())
            found.update(row.tobytes())
    return found.hexdigest()


# ---------------------------------------------------------------------- server


class PublicKnowledgeStrategy(KDStrategy):
    """Base of methods whose clients exchange soft predictions on public data.

    No weights are exchanged: ``initial_arrays`` may be empty and is not sent. There is no global model.

    Parameters
    ----------
    config : PublicKnowledgeConfig, optional
        The hyper-parameters.
    public_set : Dataset or DataLoader, optional
        The public data, map-style; labels are not looked at. Needed with ``public-data=server``. Else it lies at
        the clients: given here too, it decides which set that must be; not given, the set that most of them have.
    input_key : str, optional
        Key of the inputs in dict items, where it cannot be guessed.
    **options
        See :class:`flwr_kd.strategy.KDStrategy`.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    DatasetError
        If the public data is empty, has no order of its own, or does not go into batches.
    """

    config_class = PublicKnowledgeConfig
    phases = ("train", "distill")
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": SoftPredictions}
    reply_arrays = frozenset()
    sends_weights = False

    def __init__(
        self,
        config: PublicKnowledgeConfig | None = None,
        *,
        public_set: Dataset[Any] | DataLoader[Any] | None = None,
        input_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self._samples: Batches | None = None
        self._own = ("", 0)
        if public_set is not None:
            self._samples = Batches(public_set, num_classes=0, input_key=input_key, labelled=False)
            check_samples(self._samples, "public_set")
            self._own = (digest_of(self._samples), len(self._samples))
        elif self.public.public_data == "server":
            raise ConfigError("public-data=server needs public_set, got none")
        self._sample_bytes = 8
        if self._samples is not None and self.public.public_data == "server":
            first = self._samples.example()
            self._sample_bytes = first.numel() * first.element_size()
        self._round: dict[str, Any] = {}
        self._targets: dict[int, Tensor] = {}

    @property
    def public(self) -> PublicKnowledgeConfig:
        """The hyper-parameters."""
        return cast(PublicKnowledgeConfig, self.config)

    # ------------------------------------------------------------------ hooks for a method's author

    def targets(self, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        """Return what each client is to learn.

        Parameters
        ----------
        server_round : int
            From 1.
        replies : list of Reply
            In the order of partition ids; their payloads have been read.
        predictions : Tensor
            ``[N, K, C]``, float32: their soft predictions of the round's public samples.

        Returns
        -------
        Tensor
            ``[N, K, C]``, distributions.
        """
        raise NotImplementedError

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client with another number of classes or other public data."""
        classes = self.common(lambda each: each.num_classes, node)
        if node.num_classes != classes or classes < 2:
            return f"{node.num_classes} classes, expected {max(classes, 2)}"
        if self.public.public_data == "clients":
            if not node.num_public or not node.public_digest:
                return "it has no public data: give its client public_set, or set public-data=server"
            digest, count = self._public_set(node)
            if (node.public_digest, node.num_public) != (digest, count):
                return (
                    f"its public data is another: {node.num_public} samples with digest {node.public_digest[:12]}, "
                    f"expected {count} with {digest[:12]}; samples, order and transforms must be the same"
                )
        size = self._drawn(node) * (classes * np.dtype(self.public.precision).itemsize + self._sample_bytes)
        if size > self.max_payload_bytes:
            return (
                f"what it is sent has {size:,} bytes, max_payload_bytes is {self.max_payload_bytes:,}; "
                f"use {_HINT}"
            )
        return None

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send which public samples to predict, and in the second phase each client its own targets."""
        if phase == self.phases[0]:
            self._draw_samples(server_round, nodes[0])
            payload = (PublicRows if "rows" in self._round else PublicSamples)(**self._round)
            return [Outgoing(node, payload=payload) for node in nodes]
        kind = PublicRowsTargets if "rows" in self._round else PublicSamplesTargets
        shared = {name: value for name, value in self._round.items() if name != "digest"}
        return [
            Outgoing(
                node,
                payload=kind(
                    **shared, targets=pack_predictions(self._targets[node.key], self.public.precision)
                ),
            )
            for node in nodes
        ]

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return K, as many as were drawn, and C."""
        return {"K": len(next(iter(self._round.values()))), "C": node.num_classes}

    def check_reply(self, phase: str, reply: Reply) -> None:
        """Refuse another precision than the one asked for."""
        if reply.payload is None:
            return
        got = cast(SoftPredictions, reply.payload).predictions.dtype.name
        if got != self.public.precision:
            raise PayloadError(f"soft predictions came as {got}, asked for was {self.public.precision}")

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Make the targets of those who predicted."""
        if phase != self.phases[0]:
            self._targets = {}
            return None
        replies = list(replies)
        packed = (cast(SoftPredictions, reply.payload).predictions for reply in replies)
        predictions = torch.stack([unpack_predictions(each) for each in packed])
        found = self.targets(server_round, replies, predictions)
        self._targets = {reply.node.key: each for reply, each in zip(replies, found, strict=True)}
        return None

    # ------------------------------------------------------------------ the public data

    def _public_set(self, node: Node) -> tuple[str, int]:
        """Return digest and size of the public data that is used."""
        if self._samples is not None:
            return self._own
        return self.common(
            lambda each: (each.public_digest, each.num_public),
            node,
            among=lambda each: bool(each.public_digest and each.num_public),
        )

    def _drawn(self, node: Node) -> int:
        return min(self.public.public_samples, self._public_set(node)[1])

    def _draw_samples(self, server_round: int, node: Node) -> None:
        digest, count = self._public_set(node)
        rng = numpy_generator(self.seed, "public", server_round)
        rows = np.sort(rng.choice(count, size=self._drawn(node), replace=False)).astype(np.int64)
        if self.public.public_data == "clients":
            self._round = {"rows": rows, "digest": digest}
            return
        chosen = cast(Batches, self._samples).ordered(256, torch.from_numpy(rows))
        self._round = {"samples": torch.cat([x for x, _ in chosen]).numpy()}


# ---------------------------------------------------------------------- client


class PublicKnowledgeClient(KDClient):
    """Base of the clients of :class:`PublicKnowledgeStrategy`; complete as it is.

    The model stays at the client. For the other parameters see :class:`flwr_kd.client.KDClient`.

    Parameters
    ----------
    public_set : Dataset or DataLoader, optional
        The public data, map-style, the same in the same order at every client; labels are not looked at. Not
        needed with ``public-data=server``.
    public_input_key : str, optional
        Key of the inputs in its dict items, where it cannot be guessed; ``input_key`` if None.

    Raises
    ------
    DatasetError
        If a data set does not give what training needs.
    """

    config_class = PublicKnowledgeConfig
    personal = True

    def __init__(
        self,
        *args: Any,
        public_set: Dataset[Any] | DataLoader[Any] | None = None,
        public_input_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.public_input_key = public_input_key or self.train_batches.input_key
        self.public_batches: Batches | None = None
        if public_set is not None:
            self.public_batches = self._public(public_set)
            check_samples(self.public_batches, "public_set")

    def properties(self) -> dict[str, bool | int | float | str | bytes]:
        """Return size and digest of the public data."""
        if self.public_batches is None:
            return {}
        return {"num-public-examples": len(self.public_batches), "public-digest": self._digest()}

    def prepare(self, task: Task) -> None:
        """Do what comes before a client's first training in a run; nothing by default."""

    def phase_train(self, task: Task) -> Answer:
        """Train on the local data, and predict the public samples that the server names.

        Raises
        ------
        ConfigError
            If the model does not take them; before any training.
        """
        samples, rows, _ = self._asked(task, PublicRows, PublicSamples)
        try_model(self.model, samples, self.device, what="public data", called="model")
        if not self.load_own():
            self.prepare(task)
        metrics = {"train-loss": self.train(task, self.objective(task))}
        config = cast(PublicKnowledgeConfig, task.config)
        payload = SoftPredictions(pack_predictions(self.predict(samples, rows, config), config.precision))
        # Only now: a model without finite predictions must not be the next round's.
        self.keep()
        return Answer(payload=payload, num_examples=len(self.train_batches), metrics=metrics)

    def phase_distill(self, task: Task) -> Answer:
        """Learn the targets for the public samples, and measure.

        Raises
        ------
        StateError
            If the model of this round's training is not there.
        FloatingPointError
            If the distillation leads beyond all numbers. The model of before is kept.
        """
        samples, rows, message = self._asked(task, PublicRowsTargets, PublicSamplesTargets)
        self.load_trained()
        self.distil(task, samples, rows, unpack_predictions(message.targets))
        if not has_finite_weights(self.model):
            raise FloatingPointError("the weights are no longer finite: try a smaller distill-learning-rate")
        self.keep()
        return Answer(
            num_examples=len(self.train_batches), metrics=self.local_metrics(task.config.batch_size)
        )

    @torch.no_grad()
    def predict(self, samples: Batches, rows: Tensor, config: PublicKnowledgeConfig) -> Tensor:
        """Return soft predictions ``[K, C]`` at the config's temperature, in eval mode, on the CPU."""
        self.model.eval()
        batches = samples.ordered(config.public_batch_size, rows)
        found = [soft_targets(self.model(x.to(self.device)), config.temperature).cpu() for x, _ in batches]
        return torch.cat(found)

    def distil(self, task: Task, samples: Batches, rows: Tensor, targets: Tensor) -> None:
        """Minimise the divergence KL(target ‖ prediction) on public samples (KT-pFL, equation 6).

        In eval mode: BatchNorm's running statistics are those of the client's own data, and stay; a client whose
        target is its own prediction has nothing to learn.

        Parameters
        ----------
        task : Task
            Its config and generators.
        samples : Batches
            The public data.
        rows : Tensor
            ``[K]``, ascending positions in it.
        targets : Tensor
            ``[K, C]``, a distribution for each.
        """
        config = cast(PublicKnowledgeConfig, task.config)
        rate = config.distill_learning_rate * config.decay_at(task.server_round)
        optimizer = make_optimizer(self.model, config, rate)
        order = task.generator("public-order")

        def epoch() -> Iterator[tuple[Tensor, ...]]:
            for x, _, chunk in samples.indexed(config.public_batch_size, order, rows):
                yield x.to(self.device), targets[torch.searchsorted(rows, chunk)].to(self.device)

        def loss(x: Tensor, target: Tensor) -> Tensor:
            mean = kl_divergence(target, self.model(x), config.temperature)
            return config.distill_weight * mean * (len(x) if config.reduction == "sum" else 1)

        try:
            fit(self.model, optimizer, epoch, loss, epochs=config.distill_epochs, training=False)
        except FloatingPointError:
            raise FloatingPointError(
                "the distillation's loss is not finite: try a smaller distill-learning-rate"
            ) from None

    # ------------------------------------------------------------------ the public data

    def _public(self, source: Dataset[Any] | DataLoader[Any]) -> Batches:
        key = self.public_input_key
        return Batches(source, num_classes=self.num_classes, input_key=key, labelled=False)

    def _asked(
        self, task: Task, by_rows: type[Payload], by_samples: type[Payload]
    ) -> tuple[Batches, Tensor, Any]:
        """Return the samples that the server means, their rows, and the whole message.

        Raises
        ------
        PayloadError
            If there is no message, or the client's public data is not the server's.
        """
        server = cast(PublicKnowledgeConfig, task.config).public_data == "server"
        message: Any = task.read(by_samples if server else by_rows, C=self.num_classes)
        if message is None:
            raise PayloadError(f"phase {task.phase!r} came without its payload")
        if server:
            samples = self._public(TensorDataset(torch.from_numpy(message.samples.copy())))
            return samples, torch.arange(len(samples)), message
        if self.public_batches is None:
            raise PayloadError("the server names public samples, but this client has no public_set")
        if isinstance(message, PublicRows) and message.digest != self._digest():
            raise PayloadError(
                f"this client's public data is another: digest {self._digest()[:12]}, the server's is "
                f"{message.digest[:12]}"
            )
        rows, last = torch.from_numpy(message.rows.copy()), len(self.public_batches) - 1
        if len(rows) and int(rows[-1]) > last:
            raise PayloadError(f"rows must be within 0..{last}, got {int(rows[-1])}")
        return self.public_batches, rows, message

    def _digest(self) -> str:
        """Return the public data's digest, made once in a run: a client is built anew for every message."""
        known = self.context.state.config_records.get(_STATE_KEY)
        if known is None:
            digest = digest_of(cast(Batches, self.public_batches))
            self.context.state[_STATE_KEY] = ConfigRecord({"digest": digest})
            return digest
        return str(known["digest"])
