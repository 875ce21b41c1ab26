"""Data sets of Hugging Face's library ``datasets`` by name: from the hub, or from local files in its formats.

Nothing of a data set is run as code: from version 4 on the library reads data files only.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, require
from flwr_kd.data._files import check_regular
from flwr_kd.data._hub_columns import Form, form_of, inputs_of, labelled, labels_of, scalars_of
from flwr_kd.data._images import ImageSpec, encode_images
from flwr_kd.data._source import Origin, Part, Source
from flwr_kd.data._tables import table_encoder
from flwr_kd.data.own import read_shape
from flwr_kd.text import first_line, unknown_name

__all__ = ["EXTRA", "PREFIX", "HubName", "HubSource", "loaded", "quiet"]

PREFIX = "hf:"
EXTRA = "hf"
_KEYS = ("input", "drop", "label", "shape", "config", "train", "test")
_OPTION = re.compile(r"\s*([A-Za-z_-]+)\s*=(.*)", re.DOTALL)
_BUILDERS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}
_TESTS = ("test", "validation", "valid", "val", "dev")
"""Names of splits that are test data, the first of which is taken that has labels."""


@dataclass(frozen=True)
class HubName:
    """What ``hf:NAME-or-PATH,KEY=VALUE,...`` says.

    Attributes
    ----------
    path : str
        A name on the hub, or a folder or file.
    input, drop : tuple of str
        Columns of the inputs, and columns that are none; as found if empty.
    label : str
        Column of the labels; as found if empty.
    shape : tuple of int, optional
        The shape to which images are resized.
    config, train, test : str
        Configuration and splits of the data set; as found if empty.
    """

    path: str
    input: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    label: str = ""
    shape: tuple[int, int, int] | None = None
    config: str = ""
    train: str = ""
    test: str = ""

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Read a name.

        Raises
        ------
        DataError
            If it has no path, or an option that is not known, is given twice, or has a value that is not allowed.

        Examples
        --------
        >>> HubName.parse("hf:data/faces,label=person,shape=3x32x32").shape
        (3, 32, 32)
        >>> HubName.parse("hf:faces,lable=person")
        Traceback (most recent call last):
        flwr_kd.DataError: data set 'hf:faces,lable=person': unknown option 'lable' (did you mean 'label'?); ...
        """
        path, *parts = name.removeprefix(PREFIX).split(",")
        given: dict[str, str] = {}
        for part in parts:
            match = _OPTION.fullmatch(part)
            if match is None:
                if given:
                    raise DataError(
                        f"data set {name!r}: {part!r} must be KEY=VALUE, KEY one of {', '.join(_KEYS)}"
                    )
                path = f"{path},{part}"
                continue
            key, value = match[1], match[2].strip()
            if key not in _KEYS:
                raise DataError(f"data set {name!r}: {unknown_name('option', key, _KEYS)}")
            if key in given or not value:
                raise DataError(f"data set {name!r}: {key} must be given once, with a value")
            given[key] = value
        if not path.strip():
            raise DataError(f"data set {name!r} has no name or path: hf:NAME-or-PATH is expected")
        shape = read_shape(f"shape in data set {name!r}", given["shape"]) if "shape" in given else None
        if shape is not None and len(shape) != 3:
            raise DataError(
                f"shape in data set {name!r} must be CHANNELSxHEIGHTxWIDTH, to which images are resized"
            )
        columns = {key: tuple(given[key].split("+")) for key in ("input", "drop") if key in given}
        texts = {key: given[key] for key in ("label", "config", "train", "test") if key in given}
        return cls(path.strip(), **columns, **texts, shape=shape)  # type: ignore[arg-type]

    def local(self, data_dir: str | None) -> Path | None:
        """Return the folder or file, searched in the working directory first; None if there is none."""
        path = Path(self.path).expanduser()
        places = [path] if data_dir is None else [path, Path(data_dir).expanduser() / path]
        return next((place for place in places if place.exists()), None)


@dataclass(frozen=True)
class HubSource:
    """A data set that was read, and how its inputs become tensors.

    Attributes
    ----------
    kind : str
        ``images``, ``tables``, or ``own``: tensors that are used as they are.
    source : Source
        Inputs are images that are not decoded yet, rows of numbers, or tensors.
    spec : ImageSpec, optional
        Of images.
    vocabulary : int
        Number of token ids; 0 if inputs are none.
    """

    kind: str
    source: Source
    spec: ImageSpec | None
    vocabulary: int

    def encoder(self, rows: AnyArray) -> Callable[[AnyArray], Tensor]:
        """Return what turns inputs into tensors; of tables fitted on ``rows``."""
        if self.kind == "tables":
            return table_encoder(rows)
        if self.spec is None:
            return torch.from_numpy
        spec = self.spec
        return lambda inputs: encode_images(inputs, spec)


# For a data set and public data, each of which is asked for several times.
@functools.lru_cache(maxsize=2)
def loaded(name: str, data_dir: str | None = None) -> HubSource:
    """Return a data set by name.

    Parameters
    ----------
    name : str
        ``hf:NAME-or-PATH``, with options; see :class:`HubName`.
    data_dir : str, optional
        Folder in which a relative path is also searched, and to which a download goes.

    Raises
    ------
    DataError
        If it cannot be found or read, or its columns do not say what are inputs and labels.
    """
    asked, origin = HubName.parse(name), Origin(name)
    splits = _splits(asked, name, data_dir)
    train = _train_split(asked, name, splits)
    form = form_of(splits[train].features, origin, input=asked.input, drop=asked.drop, label=asked.label)
    test = _test_split(asked, name, splits, train, form)
    parts = [splits[split] for split in (train, test) if split]
    labels, names = labels_of(parts, form, origin)
    inputs = [inputs_of(part, form, origin, labels=own) for part, own in zip(parts, labels, strict=True)]
    pool = Part(inputs[0], labels[0], scalars_of(parts[0], form))
    held = Part(inputs[1], labels[1]) if test else None
    spec = _image_spec(origin, inputs[0], len(names), asked.shape) if form.kind == "images" else None
    vocabulary = 0
    if form.tokens:
        vocabulary = 1 + max(int(part.max()) for part in inputs if part.size)
    columns = form.inputs if form.kind == "tables" else ()
    source = Source(pool, held, len(names), names, columns)
    return HubSource(form.kind, source, spec, vocabulary)


def _image_spec(
    origin: Origin, images: AnyArray, classes: int, shape: tuple[int, int, int] | None
) -> ImageSpec:
    given = shape is not None
    if shape is None:
        if not len(images):
            raise DataError(f"{origin} has no rows")
        first = images[0].decoded().shape
        shape = (first[0], first[1], first[2])
    # As of clients' own images: constants map [0, 1] to [-1, 1].
    half = (0.5,) * shape[0]
    return ImageSpec(shape, classes, half, half, pad=False, unresized=None if given else origin)


# ---------------------------------------------------------------------- splits


def _splits(asked: HubName, name: str, data_dir: str | None) -> Mapping[str, Any]:
    """Return the splits by name, without reading their rows."""
    datasets = require("datasets", EXTRA)
    where = asked.local(data_dir)
    cache = None if data_dir is None or where is not None else str(Path(data_dir).expanduser())
    try:
        with quiet(datasets):
            found = _open(datasets, asked, where, cache)
    except DataError:
        raise
    # The exception depends on the format, and for an unreachable hub on the version of its client.
    except Exception as error:
        if where is None:
            raise DataError(
                f"data set {name!r}: there is no file or folder {asked.path!r}{_also_in(data_dir)}, and the hub of "
                f"Hugging Face does not give a data set of this name: {first_line(error)}"
            ) from error
        raise DataError(f"data set {name!r}: {str(where)!r} cannot be read: {first_line(error)}") from error
    return found if isinstance(found, Mapping) else {"train": found}


def _also_in(data_dir: str | None) -> str:
    return "" if data_dir is None else f" here or in {data_dir!r}"


def _open(datasets: Any, asked: HubName, where: Path | None, cache: str | None) -> Any:
    config = asked.config or None
    if where is None:
        return datasets.load_dataset(asked.path, config, cache_dir=cache)
    if where.is_dir():
        if any((where / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(where))
        return datasets.load_dataset(str(where), config)
    check_regular(where)
    builder = _BUILDERS.get(where.suffix.lower())
    if builder is None:
        raise DataError(
            f"{str(where)!r} cannot be read: the names of data files end in {', '.join(_BUILDERS)}, or a folder is "
            "given"
        )
    separator = {"sep": "\t"} if where.suffix.lower() == ".tsv" else {}
    return datasets.load_dataset(builder, data_files=os.fspath(where), **separator)


def _train_split(asked: HubName, name: str, splits: Mapping[str, Any]) -> str:
    if asked.train:
        return _known_split("train", asked.train, name, splits)
    others = [split for split in splits if split != asked.test]
    if "train" in splits:
        return "train"
    if len(others) == 1:
        return others[0]
    raise DataError(
        f"data set {name!r} has the splits {', '.join(splits)} and none called train: name one, for example "
        f"{name},train={next(iter(splits))}"
    )


def _test_split(asked: HubName, name: str, splits: Mapping[str, Any], train: str, form: Form) -> str:
    """Return the split of the common test set; an empty text if there is none."""
    if asked.test:
        return _known_split("test", asked.test, name, splits)
    found = [split for split in _TESTS if split in splits and split != train]
    return next((split for split in found if labelled(splits[split], form)), "")


def _known_split(option: str, split: str, name: str, splits: Mapping[str, Any]) -> str:
    if split not in splits:
        raise DataError(f"data set {name!r}: {unknown_name(f'{option} split', split, splits)}")
    return split


@contextmanager
def quiet(datasets: Any) -> Iterator[None]:
    """Hide the library's progress bars, and what it logs of each attempt to reach the hub, inside the block."""
    enabled_before = not datasets.utils.are_progress_bars_disabled()
    attempts = logging.getLogger("huggingface_hub")
    level = attempts.level
    datasets.disable_progress_bars()
    attempts.setLevel(logging.ERROR)
    try:
        yield
    finally:
        attempts.setLevel(level)
        if enabled_before:
            datasets.enable_progress_bars()
