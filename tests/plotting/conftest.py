"""A result with a method that has a global model and one that has none."""

from __future__ import annotations

import pytest

from tests.plotting.examples import a_comparison, a_run


@pytest.fixture
def comparison():
    return a_comparison(
        a_run("fedavg", 0, [0.2, 0.4, 0.6], [0.1, 0.3, 0.5]),
        a_run("fedavg", 1, [0.4, 0.6, 0.8], [0.3, 0.3, 0.7]),
        a_run("ktpfl", 0, [0.3, 0.5, 0.7]),
        a_run("ktpfl", 1, [0.3, 0.5, 0.9]),
    )
