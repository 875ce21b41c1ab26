"""What a user chooses of an experiment: one list for Python and for the command line.

This module needs neither PyTorch nor Flower, so that a program can show the options without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self, TypeVar

__all__ = ["BACKENDS", "DataOptions", "ExperimentOptions", "option"]

T = TypeVar("T")
BACKENDS = ("auto", "processes", "inline", "ray")
"""Names of ``--backend``: where clients run."""


def option(default: T, help: str, *, flag: str | None = None) -> T:
    """Declare an option of a frozen dataclass, from which a command line can be made.

    Parameters
    ----------
    default : object
        The value where none is given.
    help : str
        One line for the command line's help.
    flag : str, optional
        The option's name on the command line, with its dashes; the field's name in kebab-case if None.
    """
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which samples there are, before they are divided among the clients.

    Parameters
    ----------
    dataset : str
        See :func:`flwr_kd.data.load`.
    data_dir : str, optional
        Folder of data files.
    classes : str, optional
        Classes that are used, by their numbers in the data set: ``"10"`` for the first ten, ``"0,3,5"`` or
        ``"10-19"``; all if None. See :class:`flwr_kd.data.Selection`, also for the next two and ``hold_back``.
    class_limit : int, optional
        Largest number of training samples of each class; all if None.
    merge_test : bool
        Divide the common test set among the clients as well. It is then empty, and no global accuracy is measured.
    limit : int, optional
        Number of training samples, drawn at random; all if None. The common test set stays whole.
    test_limit : int, optional
        Number of samples of the common test set, drawn at random; all if None. Without effect on ``validation``.
    imbalance : float, optional
        Cut the training samples to a long tail with this factor, before they are divided among the clients; see
        :func:`flwr_kd.data.long_tail`. Test set and public data keep their class mix.
    validation : bool
        Measure the global model on a fifth of the training samples, which no client then has, in place of the test
        set: for the choice of hyper-parameters. Taken before ``imbalance``.
    image_size : int, optional
        Pad images to this side.
    public : str, optional
        Public data of methods that need some, see :func:`flwr_kd.data.load_public`; the data set's default if
        None. The data set's own name holds a fifth of its training part back from the clients, whatever the method.
    hold_back : int, optional
        Number of samples that are held back in place of this fifth, where some are.
    public_limit : int
        Maximum number of public samples; 5,000 is FedHEAD's number.
    """

    dataset: str = option(
        "digits",
        "a name of `flwr-kd datasets`, csv:PATH, hf:NAME-or-PATH, or your own package.module:function",
    )
    data_dir: str | None = option(None, "folder of data files")
    classes: str | None = option(
        None, "classes to use, by number: 10 for the first ten, or 0,3,5 or 10-19; all if not set"
    )
    class_limit: int | None = option(None, "largest number of training samples of each class; all if not set")
    merge_test: bool = option(
        False, "divide the common test set among the clients as well; no global accuracy is then measured"
    )
    limit: int | None = option(None, "number of training samples; all if not set; the test set stays whole")
    test_limit: int | None = option(None, "number of samples of the common test set; all if not set")
    imbalance: float | None = option(
        None,
        "cut the training samples to a long tail: largest class over smallest; FedHyb's are 10, 20, 50, 100",
    )
    validation: bool = option(False, "measure on a fifth of the training samples, not on the test set")
    image_size: int | None = option(None, "pad images to this side")
    public: str | None = option(
        None,
        "public data of methods that need some: a name of `flwr-kd datasets`; the data set's default if not set; "
        "its own name holds a fifth of its training part back",
    )
    hold_back: int | None = option(
        None, "number of samples that are held back as public data, in place of this fifth"
    )
    public_limit: int = option(5000, "maximum number of public samples")

    @classmethod
    def part_of(cls, options: DataOptions) -> Self:
        """Return these options alone, taken from larger ones; the key under which data is kept in memory.

        >>> DataOptions.part_of(ExperimentOptions(limit=150, rounds=3)) == DataOptions(limit=150)
        True
        """
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions(DataOptions):
    """What the methods of a comparison share, for all of its seeds; and the parameters of :class:`DataOptions`.

    Values are checked where they become an :class:`~flwr_kd.Experiment`.

    Parameters
    ----------
    partition : str
        See :func:`flwr_kd.data.partition`.
    clients, rounds : int
        At least 1.
    client_samples : int, optional
        Number of samples that a client trains on, beside its own test split: sets ``limit``. Clients have exactly
        this number if the partition makes parts of equal size, otherwise on average.
    model : str, optional
        A name of :data:`flwr_kd.models.MODELS`, ``torchvision:NAME``, ``timm:NAME`` or a function of your own,
        ``package.module:function`` (see :mod:`flwr_kd.models.named`), or several separated by commas, which are
        given to the clients in turn; for methods that allow heterogeneous models. The method's own if None.
    feature_dim : int, optional
        D; each model's own if None.
    feature_layer : str, optional
        How the models' extractors end, see :func:`flwr_kd.models.build_model`; each model's own if None.
    test_fraction : float
        Share of each client's samples that is its test split, in [0, 1). With 0 a client trains on all of them:
        there is no local accuracy, and the common one says how good its model is.
    fraction_train : float
        Share of the clients drawn per round.
    measure : str
        After which rounds clients also measure their models on the common test set, and the aggregated model on
        their own test splits: ``"never"``, ``"last"``, or ``"every:N"``, every Nth round and the last.
    target : str, optional
        An accuracy in percent, ``"85"`` of the local one or ``"global:85"``, to which rounds, bytes and seconds are
        counted: see :class:`flwr_kd.results.measures.Target`.
    backend : str
        ``"processes"``: clients run in processes of this machine, forked where that is safe. ``"inline"``: in this
        process. ``"ray"``: in Flower's Ray simulation. ``"auto"``: see
        :func:`flwr_kd.experiments.backends.chosen_backend`. The numbers are the same.
    ray_address : str, optional
        A Ray cluster that is running, for backend ``"ray"`` or ``"auto"``: ``HOST:PORT``, or ``"auto"`` for the one
        that ``RAY_ADDRESS`` names or that was started last on this machine. Without it Ray is started for the run.
    workers : int
        Number of clients that run at the same time.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"``.
    precision : str
        ``"float32"`` or ``"bfloat16"`` (``"bf16"``), in which the clients' training is computed; see
        :class:`flwr_kd.KDClient`.
    channels_last : bool
        Keep the clients' images and convolutions in the order of memory that their kernels are faster in; see
        :class:`flwr_kd.KDClient`.
    nondeterministic : bool
        Let CUDA choose the fastest algorithms, whose last digits vary from run to run; without effect on a CPU. See
        :func:`flwr_kd.learning.determinism.be_deterministic` for what is set otherwise.
    distances : bool
        Measure each round's distance of the global model to the last one; see
        :mod:`flwr_kd.experiments.distances`.
    augment : str
        Augmentation of training batches; see :func:`flwr_kd.data.augmentation`.
    aggregation : str
        How the server averages clients' models; see :mod:`flwr_kd.server.aggregation.rules`. Methods that average
        none refuse all but ``mean``.
    knowledge_aggregation : str
        How the server averages clients' knowledge: ``mean``, ``median`` or ``trimmed-mean:SHARE``; see
        :class:`flwr_kd.KDStrategy`. Methods that average none refuse all but ``mean``.
    attack : str, optional
        What malicious clients do; see :mod:`flwr_kd.experiments.attacks`.
    attackers : int
        Number of malicious clients, 0 to ``clients``: none without an attack, at least one with it.
    """

    partition: str = option(
        "inner-dirichlet:0.1",
        "how the data is divided among the clients: a form of `flwr-kd partitions`",
    )
    clients: int = option(10, "number of clients")
    client_samples: int | None = option(
        None,
        "number of samples that a client trains on, beside its test split (on average, where sizes differ); "
        "sets --limit",
    )
    rounds: int = option(10, "number of rounds")
    model: str | None = option(
        None,
        "a name of `flwr-kd models`, torchvision:NAME, timm:NAME, or your own package.module:function; or several "
        "separated by commas, given to the clients in turn; the method's own if not set",
    )
    feature_dim: int | None = option(None, "size of the representation; the model's own if not set")
    feature_layer: str | None = option(
        None,
        "how the extractor ends: relu, linear or batchnorm; the last two give features of both signs; the "
        "model's own if not set",
    )
    test_fraction: float = option(
        0.25,
        "share of a client's samples that is its test split; with 0 it trains on all, and local accuracy is not "
        "measured",
    )
    fraction_train: float = option(1.0, "share of the clients drawn per round")
    measure: str = option(
        "last",
        "after which rounds clients also measure their models on the common test set, and the global model on "
        "their own: never, last or every:N",
    )
    target: str | None = option(
        None,
        "accuracy in percent to which rounds, bytes and seconds are counted: 85 (of the local accuracy), "
        "global:85, common:60",
    )
    backend: str = option(
        "auto",
        "where clients run: auto, processes, inline or ray; auto is inline for one worker, ray for "
        "GPUs that workers share and with an address, else processes",
    )
    ray_address: str | None = option(
        None, "run on a Ray cluster that is running: HOST:PORT, or auto for the one on this machine"
    )
    workers: int = option(2, "number of clients that run at the same time")
    device: str = option("auto", "auto, cpu or cuda")
    precision: str = option("float32", "float32 or bfloat16 (bf16), in which clients train (autocast)")
    channels_last: bool = option(
        False, "keep images in channels-last memory, in which convolutions are faster"
    )
    nondeterministic: bool = option(False, "let CUDA choose the fastest algorithms; last digits then vary")
    distances: bool = option(
        False,
        "measure how far each round's global model is from the last one, for `flwr-kd plot optimum`; the models "
        "are on the disk while the run lasts",
    )
    augment: str = option("none", "none, crop or crop-flip, on training batches")
    aggregation: str = option(
        "mean",
        "how clients' models are averaged: mean, median, trimmed-mean:SHARE, krum:F, multi-krum:F:M, "
        "geometric-median or norm-bound:FACTOR",
    )
    knowledge_aggregation: str = option(
        "mean",
        "how clients' prototypes, soft predictions and an ensemble's outputs are averaged: mean, median or "
        "trimmed-mean:SHARE",
    )
    attack: str | None = option(
        None,
        "what malicious clients do: label-flip[:TARGET], label-flip:permute, gaussian:SIGMA, sign-flip[:SCALE], "
        "scale:SCALE, alie[:Z], ipm[:EPSILON], nan, payload[:KIND], prototype-swap, lma, cpa, count:N "
        "or imitate:SHARE",
    )
    attackers: int = option(0, "number of malicious clients, drawn by the seed")
