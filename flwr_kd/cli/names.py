"""``flwr-kd datasets``, ``models`` and ``partitions``: the names that options take, without importing PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

from flwr_kd import catalogue
from flwr_kd.cli.help import columns, definitions

__all__ = ["list_datasets", "list_models", "list_partitions"]


def list_datasets() -> None:
    """List the data sets, for --dataset and --public."""
    _print(catalogue.DATASETS)


def list_models() -> None:
    """List the models, for --model."""
    _print({**catalogue.MODELS, **catalogue.MODEL_FORMS})


def list_partitions() -> None:
    """List the ways to divide the data among the clients, for --partition."""
    _print(catalogue.PARTITIONS)


def _print(names: Mapping[str, str]) -> None:
    print("\n".join(definitions(names.items(), columns(), indent=0)))
