"""Runs the examples in all docstrings.

By module name and not by file: pytest would import ``strategies/`` a second time, under that name.
"""

import doctest
import importlib
import pkgutil

import pytest

import flwr_kd
import flwr_kd.strategies

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = sorted(
    {
        module.name
        for package in (flwr_kd, flwr_kd.strategies)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    }
)


def test_there_are_modules_to_look_at() -> None:
    assert {"flwr_kd.transport.payload", "flwr_kd.strategies.fedhkd.functional"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed == 0
