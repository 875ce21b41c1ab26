"""What the methods of a comparison share: data, partitions, models, rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from flwr_kd import registry
from flwr_kd.checks import ConfigError, number, share, whole_number
from flwr_kd.data import (
    DataSpec,
    augmentation,
    public_name,
)
from flwr_kd.experiments.attacks import ATTACKS, draw_attackers, parse_attack
from flwr_kd.experiments.data import bundle_of
from flwr_kd.learning.device import resolve_device
from flwr_kd.models import MODELS, build_model
from flwr_kd.seeding import derive_seed
from flwr_kd.text import unknown_name

__all__ = ["BACKENDS", "Experiment", "attacker_ids"]

BACKENDS = ("ray", "inline")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What the methods of a comparison share: data, partitions, models, rounds.

    Two methods with the same experiment get the same partitions, the same initial weights and the same
    order of batches; what differs is the method.

    Parameters
    ----------
    dataset : str
        See :func:`flwr_kd.data.load`.
    partition : str
        See :func:`flwr_kd.data.partition`.
    clients, rounds : int
        At least 1.
    model : str, optional
        A name of :data:`flwr_kd.models.MODELS`, or several separated by commas, which are given to the
        clients in turn; for methods that allow different models. The method's own if None.
    feature_dim : int, optional
        D; each model's own if None.
    seed : int
        At least 0.
    fraction_train : float
        Share of the clients drawn per round.
    backend : str
        ``"ray"`` or ``"inline"``.
    workers : int
        Clients at the same time.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"``.
    data_dir : str, optional
        Where data files are.
    limit : int, optional
        Use so many training samples only.
    imbalance : float, optional
        Cut what is left to a long tail with this factor, before it is divided among the clients; see
        :func:`flwr_kd.data.long_tail`. Test set and public data keep their class mix.
    validation : bool
        Measure the global model on a fifth of the training samples, which no client then has, in place of the test
        set: for the choice of hyper-parameters. Taken before ``imbalance``.
    image_size : int, optional
        Pad images to this side.
    public : str, optional
        Public data of methods that need some, see :func:`flwr_kd.data.load_public`; the data set's default if
        None. The data set's own name holds a fifth of its training part back from the clients, whatever the method.
    public_limit : int
        Use so many public samples at most; 5,000 is FedHEAD's number.
    augment : str
        What is done to training batches; see :func:`flwr_kd.data.augmentation`.
    attack : str, optional
        What malicious clients do; see :mod:`flwr_kd.attacks`.
    attackers : int
        How many there are, 0 to ``clients``: none without an attack, at least one with it.
    own : DataSpec, optional
        The clients have data of their own, of this form, in place of ``dataset`` and ``partition``. For Flower
        Apps: see :func:`flwr_kd.experiments.run_config.client_data`.

    Raises
    ------
    ConfigError
        If a value is not allowed. Data sets and partitions are checked when they are loaded.
    """

    dataset: str = "digits"
    partition: str = "inner-dirichlet:0.1"
    clients: int = 10
    rounds: int = 10
    model: str | None = None
    feature_dim: int | None = None
    seed: int = 0
    fraction_train: float = 1.0
    backend: str = "ray"
    workers: int = 2
    device: str = "auto"
    data_dir: str | None = None
    limit: int | None = None
    imbalance: float | None = None
    validation: bool = False
    image_size: int | None = None
    public: str | None = None
    public_limit: int = 5000
    augment: str = "none"
    attack: str | None = None
    attackers: int = 0
    own: DataSpec | None = None

    def __post_init__(self) -> None:
        whole = {"clients": 1, "rounds": 1, "workers": 1, "seed": 0, "public_limit": 1, "attackers": 0}
        for name, least in whole.items():
            whole_number(name, getattr(self, name), least)
        if self.backend not in BACKENDS:
            raise ConfigError(unknown_name("backend", self.backend, BACKENDS))
        for name in self.models:
            if name not in MODELS:
                raise ConfigError(unknown_name("model", name, MODELS))
        if self.feature_dim is not None:
            whole_number("feature-dim", self.feature_dim, 1)
        share("fraction-train", self.fraction_train, open_low=True)
        if self.imbalance is not None:
            number("imbalance", self.imbalance, 1)
        resolve_device(self.device)
        augmentation(self.augment)
        if self.attack is not None:
            parse_attack(self.attack)
            if not self.attackers:
                raise ConfigError(f"attack {self.attack!r} needs attackers from 1, got 0")
        elif self.attackers:
            raise ConfigError(
                f"attackers={self.attackers} needs an attack, one of {', '.join(ATTACKS)}; got none"
            )
        if self.attackers > self.clients:
            raise ConfigError(f"attackers must be at most clients={self.clients}, got {self.attackers}")

    @property
    def models(self) -> list[str]:
        """The models' names, given to the clients in turn; ``mlp`` where neither was chosen, nor a method."""
        return [name.strip() for name in (self.model or "mlp").split(",")]

    def of(self, method: registry.Method) -> Experiment:
        """Return the experiment with the method's own models where it names none.

        Raises
        ------
        ConfigError
            If there are several models, and the method needs the same at all clients.
        """
        found = self if self.model is not None else replace(self, model=method.model)
        if len(set(found.models)) > 1 and not method.heterogeneous:
            raise ConfigError(f"{method.name} needs one model for all clients, got --model {found.model}")
        return found

    def shared(self) -> dict[str, Any]:
        """Return everything but the seed, for a result's ``config``; the public data's name even if not given."""
        values = {name: value for name, value in asdict(self).items() if name not in ("seed", "own")}
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
        try:
            return build_model(
                name,
                input_shape=bundle.input_shape,
                num_classes=bundle.num_classes,
                seed=derive_seed(self.seed, "model", name),
                feature_dim=self.feature_dim,
                vocabulary=bundle.vocabulary,
            )
        except ValueError as error:
            raise ConfigError(f"model {name} does not fit {bundle.name}: {error}") from None


def attacker_ids(experiment: Experiment) -> frozenset[int]:
    """Return the partitions of the malicious clients; the same for all methods of a comparison."""
    return draw_attackers(experiment.clients, experiment.attackers, experiment.seed)
