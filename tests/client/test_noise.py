"""Who may have noise that the server knows."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from flwr_kd.checks import ConfigError
from flwr_kd.client.noise import in_simulation, reproducible_noise
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.wording import begin_run


def context(node: dict[str, Any], run: dict[str, Any]) -> Context:
    return Context(1, 1, node_config=node, state=RecordDict(), run_config=run)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Stand in for Ray, which Flower's simulation engine has started in a worker, or not."""
    begin_run()
    started = request.param
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: started))


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_the_run_config_counts_in_a_simulation(engine: None) -> None:
    assert in_simulation()
    assert reproducible_noise(context({}, {"reproducible-noise": True}))
    assert not reproducible_noise(context({}, {"reproducible-noise": False}))
    assert not reproducible_noise(context({}, {}))


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_a_server_cannot_turn_a_supernodes_noise_off(engine: None, flower_log: list[str]) -> None:
    assert not in_simulation()
    assert not reproducible_noise(context({}, {"reproducible-noise": True}))
    (line,) = flower_log
    assert "reproducible-noise=true in the run config is not followed" in line
    assert reproducible_noise(context({"reproducible-noise": True}, {}))


def test_without_ray_there_is_no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert not in_simulation()


@pytest.mark.parametrize(
    ("node", "run"), [({"reproducible-noise": "yes"}, {}), ({}, {"reproducible-noise": 1})]
)
def test_other_values_are_refused(node: dict[str, Any], run: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reproducible-noise"):
        reproducible_noise(context(node, run))


def test_a_grid_of_this_package_is_a_simulation(federation: Any) -> None:
    found = []
    fed = federation("fedavg", clients=2)

    def client_fn(context: Context) -> Any:
        found.append(
            (
                in_simulation(),
                reproducible_noise(Context(1, 1, {}, RecordDict(), {"reproducible-noise": True})),
            )
        )
        return fed.client_fn(context)

    fed.strategy().start(InlineGrid(ClientApp(client_fn=client_fn), 2), fed.initial(), num_rounds=1)
    assert set(found) == {(True, True)}
    assert not in_simulation()
