"""The package's front door: the names that users import from ``flwr_kd`` itself."""

from __future__ import annotations

import importlib

import pytest

import flwr_kd
from tests.test_registry import typed_imports


def test_names_are_those_of_the_type_checker() -> None:
    typed = typed_imports("flwr_kd")
    assert {name for _, name in typed} == set(flwr_kd.__all__) - {"__version__"}
    for home, name in typed:
        assert getattr(flwr_kd, name) is getattr(importlib.import_module(home), name)
        assert name in dir(flwr_kd)


def test_unknown_names_and_submodules() -> None:
    with pytest.raises(AttributeError, match="module 'flwr_kd' has no attribute 'nothing'"):
        _ = flwr_kd.nothing  # type: ignore[attr-defined]
    from flwr_kd import registry

    assert registry.get("fedavg").strategy.__name__ == "FedAvg"
