"""An experiment: what the methods of a comparison share, checked, for one seed."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import nn

from flwr_kd import registry
from flwr_kd.catalogue import FEATURE_LAYERS
from flwr_kd.checks import ConfigError, checked, number, share, whole_number
from flwr_kd.data import (
    DataSpec,
    augmentation,
    check_data_dir,
    public_name,
)
from flwr_kd.experiments.attacks import ATTACKS, draw_attackers, parse_attack
from flwr_kd.experiments.backends import chosen_backend
from flwr_kd.experiments.data import bundle_of, samples_before_split, selection_of
from flwr_kd.experiments.options import BACKENDS, DataOptions, ExperimentOptions
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.precision import named_precision
from flwr_kd.measured_rounds import MeasuredRounds
from flwr_kd.models import MODELS, build_model
from flwr_kd.models.named import FORMS, build_named, check_named, is_named
from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import ACCURACIES, Target
from flwr_kd.seeding import derive_seed
from flwr_kd.server.aggregation import Rule, knowledge_rule
from flwr_kd.text import shown, unknown_name
from flwr_kd.wording import option

__all__ = ["Experiment", "attacker_ids"]

_NOT_SHARED = ("seed", "own", "ray_address")
"""Fields that a result's ``config`` lacks: each run has its own seed, and no number depends on an address."""
_OF_DATA_SET = ("classes", "class_limit", "merge_test", "hold_back", "client_samples")
"""Fields that select samples of a data set, and have no meaning for clients with data of their own."""
_ADDRESS = re.compile(r"(auto|[^\s:/]+:\d{1,5}|\[[\da-fA-F:]+\]:\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class Experiment(ExperimentOptions):
    """What the methods of a comparison share: data, partitions, models, rounds; with one seed.

    Two methods with the same experiment get the same partitions, the same initial weights and the same
    order of batches; what differs is the method.

    Parameters
    ----------
    seed : int
        At least 0.
    own : DataSpec, optional
        The clients have data of their own, of this form, in place of ``dataset`` and ``partition``. For Flower
        Apps: see :func:`flwr_kd.experiments.run_config.client_data`.
    **options
        The parameters of :class:`~flwr_kd.experiments.options.ExperimentOptions`, which a comparison's seeds share.

    Raises
    ------
    ConfigError
        If a value is not allowed. Data sets and partitions are checked when they are loaded.

    Examples
    --------
    >>> Experiment(partition="iid", clients=5, seed=1).models
    ['mlp']
    """

    seed: int = 0
    own: DataSpec | None = None

    def __post_init__(self) -> None:
        whole = {"clients": 1, "rounds": 1, "workers": 1, "seed": 0, "public_limit": 1, "attackers": 0}
        for name, least in whole.items():
            whole_number(name.replace("_", "-"), getattr(self, name), least)
        for name in ("limit", "test_limit"):
            if getattr(self, name) is not None:
                whole_number(name.replace("_", "-"), getattr(self, name), 1)
        self._check_selection()
        if self.backend not in BACKENDS:
            raise ConfigError(unknown_name("backend", self.backend, BACKENDS))
        if self.ray_address is not None:
            _check_address(self.ray_address, self.backend)
        for name in self.models:
            if is_named(name):
                self._check_own_layers(name)
                check_named(name)
            elif name not in MODELS:
                raise ConfigError(unknown_name("model", name, [*MODELS, *FORMS]))
        if self.feature_dim is not None:
            whole_number("feature-dim", self.feature_dim, 1)
        if self.feature_layer is not None and self.feature_layer not in FEATURE_LAYERS:
            raise ConfigError(unknown_name("feature layer", self.feature_layer, FEATURE_LAYERS))
        _check_measured(self)
        share("fraction-train", self.fraction_train, open_low=True)
        if self.imbalance is not None:
            number("imbalance", self.imbalance, 1)
        if self.own is None:
            check_data_dir(self.data_dir, self.dataset)
        resolve_device(self.device)
        # A result names the precision in full.
        object.__setattr__(self, "precision", named_precision(self.precision))
        for name in ("channels_last", "nondeterministic", "distances"):
            checked(name.replace("_", "-"), getattr(self, name), bool, {})
        augmentation(self.augment)
        # A result names the rule in one form.
        object.__setattr__(self, "aggregation", str(Rule.parse(self.aggregation)))
        object.__setattr__(self, "knowledge_aggregation", str(knowledge_rule(self.knowledge_aggregation)))
        if self.attackers > self.clients:
            raise ConfigError(f"attackers must be at most clients={self.clients}, got {self.attackers}")
        if self.attack is not None:
            attack = parse_attack(self.attack)
            if not self.attackers:
                raise ConfigError(f"attack {self.attack!r} needs attackers from 1, got 0")
            attack.check_crowd(self.clients, self.attackers)
        elif self.attackers:
            raise ConfigError(
                f"attackers={self.attackers} needs an attack, one of {', '.join(ATTACKS)}; got none"
            )

    def _check_selection(self) -> None:
        number("test-fraction", self.test_fraction, 0, 1, open_high=True)
        selection_of(self)
        given = [name for name in _OF_DATA_SET if getattr(self, name) not in (None, False)]
        if self.own is not None and given:
            raise ConfigError(
                f"{given[0].replace('_', '-')} selects samples of a data set, but the clients have data of their "
                "own"
            )
        if self.client_samples is None:
            return
        whole_number("client-samples", self.client_samples, 1)
        limit = self.clients * samples_before_split(self.client_samples, self.test_fraction)
        if self.limit not in (None, limit):
            raise ConfigError(
                f"client-samples={self.client_samples} makes limit {limit} for clients={self.clients}: leave limit "
                f"out, got {self.limit}"
            )
        object.__setattr__(self, "limit", limit)

    def _check_own_layers(self, name: str) -> None:
        for field in ("feature_dim", "feature_layer"):
            if getattr(self, field) is not None:
                raise ConfigError(
                    f"{field.replace('_', '-')} is for flwr-kd's own models, got model {name}: its features are "
                    "the inputs of its last Linear"
                )

    @property
    def models(self) -> list[str]:
        """The models' names, given to the clients in turn; ``mlp`` if the experiment names none."""
        return [name.strip() for name in (self.model or "mlp").split(",")]

    @classmethod
    def from_options(cls, options: ExperimentOptions, seed: int) -> Experiment:
        """Return the experiment with one of a comparison's seeds.

        >>> from flwr_kd.experiments.options import ExperimentOptions
        >>> Experiment.from_options(ExperimentOptions(rounds=3), seed=2) == Experiment(rounds=3, seed=2)
        True
        """
        return cls(
            **{each.name: getattr(options, each.name) for each in fields(ExperimentOptions)}, seed=seed
        )

    def of(self, method: registry.Method) -> Experiment:
        """Return the experiment with the method's own models where it names none.

        Raises
        ------
        ConfigError
            If there are several models, and the method needs the same at all clients.
        """
        chosen = self if self.model is not None else replace(self, model=method.model)
        if len(set(chosen.models)) > 1 and not method.heterogeneous:
            raise ConfigError(f"{method.name} needs one model for all clients, got --model {chosen.model}")
        return chosen

    def shared(self) -> dict[str, Any]:
        """Return what a result's ``config`` has; ``public`` is never None.

        ``backend`` is the one that is used, also where the experiment leaves it open.
        """
        values = {name: value for name, value in asdict(self).items() if name not in _NOT_SHARED}
        values["backend"] = chosen_backend(self)
        if self.own is not None:
            return {**values, "dataset": "own", "partition": None, **asdict(self.own)}
        return {
            **values,
            "public": public_name(self.public, dataset=self.dataset, data_dir=self.data_dir),
        }

    def build_model(self, index: int = 0) -> nn.Module:
        """Return the initial model of a client; the same for all clients with the same architecture.

        Raises
        ------
        ConfigError
            If the model does not take the data set's inputs.
        """
        bundle = bundle_of(self)
        name = self.models[index % len(self.models)]
        seed = derive_seed(self.seed, "model", name)
        if is_named(name):
            shape, classes = bundle.input_shape, bundle.num_classes
            return build_named(
                name, input_shape=shape, num_classes=classes, seed=seed, vocabulary=bundle.vocabulary
            )
        try:
            return build_model(
                name,
                input_shape=bundle.input_shape,
                num_classes=bundle.num_classes,
                seed=seed,
                feature_dim=self.feature_dim,
                feature_layer=self.feature_layer,
                vocabulary=bundle.vocabulary,
            )
        except ValueError as error:
            raise ConfigError(f"model {name} does not fit {bundle.name}: {error}") from None

    def model_key(self, index: int = 0) -> Hashable:
        """Return everything that :meth:`build_model` depends on."""
        data = DataOptions.part_of(self)
        features = self.feature_dim, self.feature_layer
        return self.models[index % len(self.models)], features, self.seed, self.own, data


def _check_measured(options: ExperimentOptions) -> None:
    """Check after which rounds is measured what, that there is something, and that a target can be reached.

    Raises
    ------
    ConfigError
        If ``measure`` or ``target`` cannot be read, no sample is left for measuring, or the target's accuracy is
        not measured after each round.
    """
    measured = MeasuredRounds.parse(options.measure)
    if options.merge_test and not options.validation and options.test_fraction == 0:
        raise ConfigError(
            "a test-fraction of 0 with merge-test leaves no sample for measuring: the clients train on the common "
            "test set too; take a test-fraction above 0, or leave merge-test out"
        )
    if options.target is None:
        return
    try:
        target = Target.parse(options.target)
    except ResultError as error:
        raise ConfigError(str(error)) from None
    accuracy = ACCURACIES[target.metric]
    every = option("measure", "every:1")
    if options.test_fraction == 0 and accuracy.on_own_splits:
        raise ConfigError(
            f"target {options.target!r} needs the clients' own test splits, which a test-fraction of 0 leaves "
            f"empty: take global accuracy, or common accuracy with {every}"
        )
    if accuracy.scheduled and measured.every != 1:
        raise ConfigError(
            f"target {options.target!r} needs the {accuracy.title} of each round, but measure is "
            f"{options.measure!r}: set {every}, or take local or global accuracy"
        )


def _check_address(address: str, backend: str) -> None:
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise ConfigError(f"ray-address must be auto or HOST:PORT, got {shown(address)}")
    if backend not in ("auto", "ray"):
        raise ConfigError(
            f"ray-address={address} needs {option('backend', 'ray')} or auto, got {backend}: leave one of them out"
        )


def attacker_ids(experiment: Experiment) -> frozenset[int]:
    """Return the partitions of the malicious clients; the same for all methods of a comparison."""
    return draw_attackers(experiment.clients, experiment.attackers, experiment.seed)
