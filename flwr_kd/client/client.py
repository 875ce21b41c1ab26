"""The client half of every method: unpack, train, measure, pack.

A method derives from :class:`KDClient` and overrides :meth:`~KDClient.objective` (its loss) and, where it
sends knowledge, :meth:`~KDClient.knowledge`; a further phase ``p`` is a method ``phase_p``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import numpy.typing as npt
import torch
from flwr.app import Context
from flwr.common.logger import log
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.adaptation import fine_tune
from flwr_kd.client.data_sets import DataSets
from flwr_kd.client.description import described
from flwr_kd.client.dp_sgd import private_steps
from flwr_kd.client.measuring import evaluation, measured_on
from flwr_kd.client.noise import reproducible_noise as noise_is_reproducible
from flwr_kd.client.numpy_client import NumPyClient
from flwr_kd.client.own_model import feature_shape, named_size, own_model
from flwr_kd.client.personal_state import PersonalState, StateError
from flwr_kd.client.private_update import RECEIVED, UpdateStart
from flwr_kd.client.reply import reply_of
from flwr_kd.client.task import Answer, Task, metrics_of
from flwr_kd.config import ConfigT, MethodConfig
from flwr_kd.learning.allocator import keep_freed_memory
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.fetched import Fetched
from flwr_kd.learning.loop import falling_rate, fit, make_optimizer
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.precision import computed_in, named_precision
from flwr_kd.learning.scores import Measured, label_loss
from flwr_kd.learning.weights import load_weights, size_of
from flwr_kd.models import as_feature_model, count_parameters
from flwr_kd.models.given import check_dtypes, check_outputs, floating_dtype
from flwr_kd.seeding import forked_global_rng, torch_generator
from flwr_kd.transport import flower_records
from flwr_kd.transport.payload import Payload, PayloadError
from flwr_kd.transport.template import ArrayTemplate

if TYPE_CHECKING:
    from flwr.client import Client

__all__ = ["KDClient", "Objective"]

NDArray = npt.NDArray[Any]
Objective = Callable[..., Tensor]
"""Loss on one batch: from inputs ``[B, ...]`` (or several by name), labels ``[B]`` and, where indexed, positions
``[B]`` to a scalar."""


class KDClient(NumPyClient, Generic[ConfigT]):
    """Base of all methods' client halves.

    Parameters
    ----------
    model : nn.Module or (extractor, head)
        Returns logits ``[B, C]``, of at least two classes. Any module that ends in a ``Linear`` will do; see
        :func:`flwr_kd.models.as_feature_model`. The client trains a copy, :attr:`model`: the given object does not
        change, and clients may be given the same one.
    train_set : Dataset or DataLoader
        Map-style, of pairs or dicts; see :class:`flwr_kd.Batches`. A loader's sampler decides which rows the data
        set has; one without fixed rows is for training only.
    test_set : Dataset or DataLoader, optional
        Without test data no local accuracy is reported.
    context : Context
        As ``client_fn``, or ``build`` of :func:`flwr_kd.client_app`, got it.
    device : str or torch.device
        ``"auto"``: CUDA, else MPS, else CPU.
    classes : sequence, optional
        Label values in the order of the model's outputs, where they are not 0..C-1.
    input_key : str or sequence of str, optional
        Key of the inputs in dict items, where it cannot be guessed; several for a model that takes several, by
        name. See :class:`flwr_kd.Batches`.
    label_key : str, optional
        Key of the label in dict items, where it cannot be guessed.
    knowledge_set : Dataset or DataLoader, optional
        The training samples without augmentation, for what is extracted from them; ``train_set`` if None.
    common_test_set : Dataset or DataLoader, optional
        Test samples that all clients share. The client's model is also measured on them after the rounds that the
        strategy's ``measure`` names.
    augment : callable, optional
        ``augment(x, generator) -> x`` on training batches; never applied in evaluation or extraction.
    precision : str
        ``"bfloat16"``: the forward pass of training runs under :class:`torch.autocast`; the model stays in its own
        dtype, and so does what is measured and sent. ``"float32"``: the model's own dtype. Short forms are
        ``"bf16"`` and ``"fp32"``.
    channels_last : bool
        Keep images ``[B, K, H, W]`` and the weights of convolutions in the memory format
        :obj:`torch.channels_last`, in which their kernels are faster. Last digits differ; what is sent does not
        change its form.
    reproducible_noise : bool, optional
        Draw noise that protects the client from the run's seed, which the server knows, and not secretly. If None,
        :func:`flwr_kd.client.noise.reproducible_noise` decides.
    multi_label : bool, optional
        Whether a sample has several labels, each with an output of the model: a tensor ``[C]`` of 0 and 1. The loss
        is then binary cross-entropy, and AUROC is measured as well; see :class:`flwr_kd.Measured`. If None, whether
        ``train_set`` is a :class:`flwr_kd.data.MultiLabelDataset`.

    Raises
    ------
    DatasetError
        If a data set does not give what training needs.
    ConfigError
        If ``device`` or ``precision`` is not allowed, the model cannot be copied and another client has it, or the
        method needs one class per sample.
    TypeError, ValueError
        If the model cannot be used: it is scripted or wrapped for several devices, computes per-sample gradients
        (Opacus), has one output, does not end in a ``Linear``, or is kept in float16 or bfloat16.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    personal: ClassVar[bool] = False
    """Whether the model stays at the client between rounds instead of coming from the server."""
    indexed: ClassVar[bool] = False
    """Whether the objective takes the samples' positions in the data set as third argument."""
    takes_multi_label: ClassVar[bool] = False
    """Whether samples may have several labels: then no loss and no knowledge needs one class per sample."""
    dp_sgd: ClassVar[bool] = False
    """Whether training by DP-SGD protects what is sent; see :mod:`flwr_kd.client.dp_sgd`."""
    update_from: ClassVar[str] = RECEIVED
    """Where the update begins that ``dp-clip`` bounds; see :mod:`flwr_kd.client.private_update`."""

    def __init__(
        self,
        model: nn.Module | tuple[nn.Module, nn.Module],
        train_set: Dataset[Any] | DataLoader[Any],
        test_set: Dataset[Any] | DataLoader[Any] | None = None,
        *,
        context: Context,
        device: str | torch.device = "auto",
        classes: Sequence[Any] | None = None,
        input_key: str | Sequence[str] | None = None,
        label_key: str | None = None,
        knowledge_set: Dataset[Any] | DataLoader[Any] | None = None,
        common_test_set: Dataset[Any] | DataLoader[Any] | None = None,
        augment: Callable[[Any, torch.Generator], Any] | None = None,
        precision: str = "float32",
        channels_last: bool = False,
        reproducible_noise: bool | None = None,
        multi_label: bool | None = None,
    ) -> None:
        if multi_label is None:
            multi_label = bool(getattr(train_set, "multi_label", False))
        if multi_label and not self.takes_multi_label:
            raise ConfigError(
                f"{type(self).__name__} needs one class per sample, and these have several labels; "
                "`flwr-kd methods NAME` says whether a method takes several"
            )
        keep_freed_memory()
        self.device = resolve_device(device)
        self.precision, self.channels_last = named_precision(precision), channels_last
        self.model: Any = self.wrap(own_model(model, context, self)).to(self.device)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        check_dtypes(self.model.state_dict())
        self.num_classes = named_size(self.model, "num_classes")
        check_outputs(self.num_classes)
        self.dtype = floating_dtype(self.model)
        options: dict[str, Any] = {
            "num_classes": self.num_classes,
            "classes": classes,
            "input_key": input_key,
            "label_key": label_key,
            "multi_label": multi_label,
            "dtype": self.dtype,
        }
        self.data_sets = DataSets(train_set, test_set, knowledge_set, common_test_set, **options)
        self.train_batches = self.data_sets.train
        self.knowledge_batches = self.data_sets.knowledge
        self.test_batches = self.data_sets.test
        self.common_test_batches = self.data_sets.common_test
        self.feature_shape = feature_shape(self.model, self.train_batches.example, self.device)
        self.feature_dim = math.prod(self.feature_shape)
        self.context = context
        self.augment = augment
        seeded = noise_is_reproducible(context) if reproducible_noise is None else reproducible_noise
        self.reproducible_noise, self.start = seeded, UpdateStart()
        self.state = PersonalState(context)
        self._trained_round, self._lost_state, self.has_own = 0, False, False
        self._common_asked = False
        self._seed = self.local_epoch = 0

    # ------------------------------------------------------------------ hooks for a method's author

    def wrap(self, model: nn.Module | tuple[nn.Module, nn.Module]) -> nn.Module:
        """Give the user's model ``features`` and ``classify``; the base's features are vectors ``[B, D]``."""
        return as_feature_model(model)

    def objective(self, task: Task[ConfigT]) -> Objective:
        """Return the loss on one batch; cross-entropy by default. It takes positions where ``indexed``."""
        return lambda x, y: label_loss(self.model(x), y)

    def penalty(self, task: Task[ConfigT]) -> Callable[[], Tensor] | None:
        """Return a term of the loss that no sample decides, which the objective leaves out in DP-SGD; or None."""
        return None

    def knowledge(self, task: Task[ConfigT]) -> Payload | None:
        """Return what is sent besides the model after training; nothing by default."""
        return None

    def trained(self) -> nn.Module:
        """Return what a training moves: the model; a method may have another module beside it."""
        return self.model  # type: ignore[no-any-return]

    def optimizer(self, task: Task[ConfigT]) -> torch.optim.Optimizer:
        """Return the fresh optimiser of a phase; by default the config's, with the round's learning rate."""
        return make_optimizer(self.trained(), task.config, task.config.learning_rate_at(task.server_round))

    def adapt(self, task: Task[ConfigT]) -> None:
        """Adapt the global model to this client, before it is measured; by default by fine-tuning."""
        fine_tune(self, task)

    def properties(self) -> dict[str, bool | int | float | str | bytes]:
        """Return further properties for the handshake; none by default."""
        return {}

    def held_parameters(self, config: Any) -> int:
        """Return how many parameters this client needs in memory while it trains; by default its model's.

        Each model or module counts whole, also one that is a constant, such as a copy of the received model.
        """
        return count_parameters(self.model)

    def phase_train(self, task: Task[ConfigT]) -> Answer:
        """Train on the local data, measure, and return the model and the knowledge."""
        self.load(task)
        metrics = {"train-loss": self.train(task, self.objective(task), rows=self.indexed)}
        metrics |= self.local_metrics(task.config.batch_size)
        self.keep()
        return Answer(
            arrays=[] if self.personal else self.arrays(task.names),
            payload=self.knowledge(task),
            num_examples=len(self.train_batches),
            metrics=metrics,
        )

    # ------------------------------------------------------------------ Flower's interface

    def get_properties(self, config: Mapping[str, Any]) -> dict[str, bool | int | float | str | bytes]:
        """Answer the handshake. A client that cannot take part says why in the property ``refusal``."""
        return described(self, config)

    def fit(
        self, parameters: list[NDArray], config: Mapping[str, Any]
    ) -> tuple[list[NDArray], int, dict[str, bool | int | float | str | bytes]]:
        """Answer one phase of a round."""
        task = self._task(parameters, config)
        self.check_state()
        handler: Callable[[Task[ConfigT]], Answer] | None = getattr(
            self, "phase_" + task.phase.replace("-", "_"), None
        )
        if handler is None:
            raise ConfigError(f"{type(self).__name__} does not know the phase {task.phase!r}")
        try:
            with forked_global_rng(task.seed, self.model, self.device):
                answer = handler(task)
        finally:
            self.close()
        return reply_of(self, task, answer, phases=self._phases(), lost_state=self._lost_state)

    def evaluate(
        self, parameters: list[NDArray], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, bool | int | float | str | bytes]]:
        """Evaluate a model on the client's test data; 0 examples where there are none.

        The model is the server's. In the phase ``measure`` it is the one with which the client would begin its next
        training, and the metrics are those of a training. In the phase ``personalize`` the client adapts a copy of
        the server's model, which it does not keep.
        """
        task = self._task(parameters, config)
        self.has_own = False
        self.load(task)
        try:
            return evaluation(self, task)
        finally:
            self.close()

    def to_client(self) -> Client:
        """Return the client in the form in which a ``client_fn`` hands it to Flower.

        :func:`flwr_kd.client_app` takes it in either form.
        """
        # Here, so that this package can be imported where Flower has no such clients.
        from flwr_kd.client.wire_client import WireClient

        return WireClient(self)

    def close(self) -> None:
        """End the workers that loaders with ``persistent_workers`` have kept; they start again when needed."""
        self.data_sets.close()

    # ------------------------------------------------------------------ building blocks

    def load(self, task: Task[ConfigT]) -> None:
        """Load the server's model, by name; a personal model is loaded from the client's own state.

        Raises
        ------
        PayloadError
            If number, names or shapes do not fit the client's model.
        """
        if self.personal:
            self.load_own()
            return
        load_weights(self.model, self.named(task, task.arrays))

    def load_own(self) -> bool:
        """Load the model that this client kept in this run; return whether there is one.

        Without one, the model stays as it was built; see :meth:`kept`.
        """
        kept = self.kept()
        self.has_own = kept is not None
        if kept is not None:
            self.model.load_state_dict(kept)
        return kept is not None

    def kept(self, name: str = "") -> dict[str, Tensor] | None:
        """Return a set of tensors that this client kept in this run; None if there is none.

        If the client has trained in this run before, what it kept is lost: it warns in its log, and reports it.
        """
        tensors = self.state.load(name)
        if tensors is None and self._trained_round:
            self._lost_state = True
            what = f"what it kept as {name!r}" if name else "the personal model"
            log(WARNING, "%s of round %d is no longer here: it begins anew", what, self._trained_round)
        return tensors

    def load_trained(self) -> None:
        """Load the model that this client kept after an earlier phase of the round.

        Raises
        ------
        StateError
            If there is none.
        """
        if not self.load_own():
            raise StateError("no model of this round's training is kept here: it was lost, or never trained")

    def named(self, task: Task[ConfigT], arrays: Sequence[NDArray]) -> dict[str, NDArray]:
        """Return one model's arrays by name, checked; they come in the server's order.

        Raises
        ------
        PayloadError
            If number, names or shapes do not fit the client's model.
        """
        mine = self.named_arrays()
        names = task.names or tuple(mine)
        if len(arrays) != len(names):
            raise PayloadError(f"{len(arrays)} arrays came, expected {len(names)}")
        received = dict(zip(names, arrays, strict=True))
        template = ArrayTemplate.of_ndarrays(mine)
        difference = template.difference_in_shapes({name: value.shape for name, value in received.items()})
        if difference is not None:
            raise PayloadError(f"the server's model does not fit this client's: {difference}")
        checked = template.check([received[name] for name in template.names])
        return dict(zip(template.names, checked, strict=True))

    def check_state(self) -> None:
        """Check that what the client keeps between rounds can be kept, before it trains.

        Raises
        ------
        StateError
            If it cannot; see :meth:`flwr_kd.PersonalState.check`.
        """
        if size := self.kept_bytes():
            self.state.check(size)

    def kept_bytes(self) -> int:
        """Return the size of all that the client keeps between rounds: a personal model, by default."""
        return size_of(self.model.state_dict()) if self.personal else 0

    def keep(self) -> None:
        """Keep a personal model until the next round."""
        if self.personal:
            self.state.save(self.model.state_dict())

    def arrays(self, names: Sequence[str]) -> list[NDArray]:
        """Return the model's arrays in the server's order."""
        mine = self.named_arrays()
        return [mine[name].copy() for name in (names or mine)]

    def train(
        self,
        task: Task[ConfigT],
        objective: Objective,
        *,
        epochs: int | None = None,
        rows: bool = False,
        among: Tensor | None = None,
    ) -> float:
        """Minimise an objective on the training data; the model ends in eval mode.

        The optimiser is fresh in every phase. With ``rows`` the objective takes the samples' positions in the data
        set, ``[B]``, as third argument. ``among`` has the positions ``[n]`` of those to train on; all if None.
        An objective that changes with the epoch finds it in :attr:`local_epoch`, from 0.

        Returns
        -------
        float
            Mean loss per sample over the last epoch, as it was during training.

        Raises
        ------
        FloatingPointError
            If the loss is no longer finite.
        """
        optimizer, config = self.optimizer(task), task.config
        order, views = task.generator("order"), task.generator("augment")
        self.local_epoch = -1

        def epoch() -> Iterator[tuple[Any, ...]]:
            self.local_epoch += 1
            source = self.train_batches.indexed if rows else self.train_batches.shuffled
            for x, *others in source(config.batch_size, order, among):
                x = self.to_device(x)
                if self.augment is not None:
                    x = self.augment(x, views)
                yield (x, *map(self.to_device, others))

        count, loss = config.local_epochs if epochs is None else epochs, self.in_precision(objective)
        falling = falling_rate(optimizer, config, task.steps_before)
        with private_steps(self, task, optimizer) as steps:
            return fit(self.trained(), steps, epoch, loss, epochs=count, after_step=falling)

    def to_device(self, batch: Any) -> Any:
        """Return a batch, of tensors or of named inputs, on the client's device, images in its memory format.

        From pinned memory, which a loader's ``pin_memory`` gives, the host does not wait for the copy to a GPU.
        """
        if not isinstance(batch, Tensor):
            return batch.map(self.to_device)
        images = self.channels_last and batch.ndim == 4
        memory_format = torch.channels_last if images else torch.preserve_format
        return batch.to(self.device, non_blocking=self.device.type == "cuda", memory_format=memory_format)

    def in_precision(self, objective: Objective) -> Objective:
        """Return an objective that is computed in the client's ``precision``."""
        return computed_in(self.precision, self.device, objective)

    def measure(self, batch_size: int) -> Measured | None:
        """Return loss and accuracy on the test data, in eval mode; None without test data."""
        return measured_on(self, self.test_batches, batch_size, torch_generator(self._seed, "test-items"))

    @property
    def measures_common(self) -> bool:
        """Whether the server asked for the common accuracy in this phase, and the client has that test set."""
        return self._common_asked and bool(self.common_test_batches)

    def measure_common(self, batch_size: int) -> Measured | None:
        """Return the same on the common test set; None unless :attr:`measures_common`."""
        batches = self.common_test_batches if self.measures_common else None
        return measured_on(self, batches, batch_size, torch_generator(self._seed, "common-items"))

    def local_metrics(self, batch_size: int) -> dict[str, float]:
        """Return the accuracies of the client's model, as a reply names them.

        These are ``local-accuracy`` with test data, ``common-accuracy`` where :attr:`measures_common`, and with
        more than 5 classes ``local-top5`` and ``common-top5``.
        """
        return metrics_of(local=self.measure(batch_size), common=self.measure_common(batch_size))

    @torch.no_grad()
    def extract(self, batch_size: int, batches: Batches | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[N, D]``, logits ``[N, C]`` and labels ``[N]`` of samples, on the CPU.

        The samples are all training samples, or those of other ``batches``, in the data set's order and without
        augmentation; the model is in eval mode. Features of a :class:`~flwr_kd.models.SplitModel` have its feature
        shape, ``[N, ...]``.
        """
        self.model.eval()
        rows, generator = Fetched(), torch_generator(self._seed, "knowledge-items")
        batches = self.knowledge_batches if batches is None else batches
        for x, y in batches.ordered(pass_size(self.device, batch_size), generator=generator):
            features = self.model.features(self.to_device(x))
            rows.add(features, self.model.classify(features), y)
        features, logits, labels = rows.tensors()
        return features, logits, labels

    def _task(self, parameters: list[NDArray], config: Mapping[str, Any]) -> Task[ConfigT]:
        key: Any = self.context.node_config.get("partition-id", self.context.node_id)
        task: Task[ConfigT] = Task.of_message(self.read_config, parameters, config, client=key)
        self.state.at(
            str(config.get(flower_records.RUN, "")),
            task.server_round,
            known=int(config.get(flower_records.KNOWN, task.server_round)),
            saved=int(config.get(flower_records.SAVED, task.server_round - 1)),
            whole=int(config.get(flower_records.WHOLE, 0)),
        )
        self._trained_round, self._lost_state = int(config.get(flower_records.TRAINED, 0)), False
        self._seed = task.seed
        self.start.before(self, task)
        self._common_asked = bool(config.get(flower_records.MEASURE_COMMON, False))
        return task

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ConfigT:
        """Return the method's hyper-parameters from a message's config."""
        # A class variable cannot be of a type variable; the class statement names the same class twice.
        kind: type[Any] = cls.config_class
        read: ConfigT = kind.from_wire(config)
        return read

    @classmethod
    def _phases(cls) -> list[str]:
        return sorted(name.removeprefix("phase_") for name in dir(cls) if name.startswith("phase_"))

    def named_arrays(self) -> dict[str, NDArray]:
        """Return the model's arrays; on the CPU these are views of its weights where those are contiguous."""
        tensors = self.model.state_dict()
        return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
