"""Flower's mods and wrappers around each kind of method: they work, or are refused with the reason."""

from __future__ import annotations

from typing import Any

import flwr.client.mod as mods
import flwr.clientapp.mod as new_mods
import flwr.serverapp.strategy as wrappers
import pytest
from flwr.clientapp import ClientApp

from flwr_kd.checks import ConfigError
from flwr_kd.server.records import HandshakeError, VoidRoundsError
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.inline_grid import InlineGrid

LOCAL = {"clipping_norm": 1.0, "sensitivity": 0.1, "epsilon": 10.0, "delta": 1e-3}
MODS = {
    "arrays_size": mods.arrays_size_mod,
    "message_size": mods.message_size_mod,
    "local_dp": mods.LocalDpMod(**LOCAL),
    "secaggplus": mods.secaggplus_mod,
    "secagg": mods.secagg_mod,
    "fixed": mods.fixedclipping_mod,
    "adaptive": mods.adaptiveclipping_mod,
    "new fixed": new_mods.fixedclipping_mod,
    "new adaptive": new_mods.adaptiveclipping_mod,
    "new local_dp": new_mods.LocalDpMod(**LOCAL),
}
# One method of each kind: a mean of weights, the same with knowledge, weights that are distilled, knowledge alone,
# two phases with knowledge, with weights, and with weights that are distilled.
METHODS = (
    "fedavg",
    "fedhkd",
    "feddf",
    "fedhyb",
    "fedproto",
    "fedgkt",
    "fedmd",
    "ktpfl-weights",
    "fedhead-plus",
    "pfeddf",
)
WEIGHTS = {"fedavg", "fedhkd", "feddf", "fedhyb"}
WORK = {"arrays_size": WEIGHTS, "local_dp": WEIGHTS, "message_size": set(METHODS)}
REASONS = {
    "arrays_size": "use message_size_mod",
    "local_dp": "LocalDpMod works on",
    "secaggplus": "need Flower's SecAgg workflow at the server",
    "secagg": "need Flower's SecAgg workflow at the server",
    "fixed": "not supplied by the DifferentialPrivacyClientSideFixedClipping",
    "adaptive": "not supplied by the DifferentialPrivacyClientSideFixedClipping",
    "new fixed": "use the one of this name in flwr.client.mod",
    "new adaptive": "use the one of this name in flwr.client.mod",
    "new local_dp": "use the one of this name in flwr.client.mod",
}


def app_of(fed: Federation, *names: str) -> ClientApp:
    return ClientApp(client_fn=lambda context: fed.client_fn(context), mods=[MODS[name] for name in names])


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("name", METHODS)
def test_mods(name: str, mod: str, flower_log: list[str]) -> None:
    fed = Federation(name)
    strategy, grid = fed.strategy(max_void_rounds=1), InlineGrid(app_of(fed, mod), 4)
    if name in WORK.get(mod, ()):
        result = strategy.start(grid, fed.initial(), num_rounds=1)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)
        uncovered = "the knowledge that it sends beside them is not covered"
        assert sum(uncovered in line for line in flower_log) == (mod == "local_dp" and name == "fedhkd")
        return
    with pytest.raises((HandshakeError, VoidRoundsError)) as error:
        strategy.start(grid, fed.initial(), num_rounds=1)
    assert any(REASONS[mod] in text for text in (*flower_log, str(error.value)))


WRAPPERS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...]]] = {
    "server fixed": (wrappers.DifferentialPrivacyServerSideFixedClipping, (0.1, 0.5, 4), ()),
    "server adaptive": (wrappers.DifferentialPrivacyServerSideAdaptiveClipping, (0.1, 4), ()),
    "client fixed": (wrappers.DifferentialPrivacyClientSideFixedClipping, (0.1, 0.5, 4), ("fixed",)),
    "client adaptive": (wrappers.DifferentialPrivacyClientSideAdaptiveClipping, (0.1, 4), ("adaptive",)),
}
REFUSED = {
    "feddf": "makes its global model in another way",
    "fedhyb": "makes its global model in another way",
    "fedproto": "sends none",
    "fedgkt": "sends none",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", METHODS)
def test_wrappers(name: str, wrapper: str, flower_log: list[str]) -> None:
    fed = Federation(name)
    kind, args, names = WRAPPERS[wrapper]
    wrapped, grid = kind(fed.strategy(max_void_rounds=1), *args), InlineGrid(app_of(fed, *names), 4)
    if name in ("fedavg", "fedhkd") and wrapper != "client adaptive":
        result = wrapped.start(grid, fed.initial(), num_rounds=2)
        assert list(result.train_metrics_clientapp) == [1, 2]
        uncovered = "the knowledge that FedHKD's clients send beside them (HyperKnowledge) is not covered"
        assert sum(uncovered in line for line in flower_log) == (name == "fedhkd")
        return
    reason = REFUSED.get(
        name, "reads norm_bit" if name in ("fedavg", "fedhkd") else f"its own start.*{kind.__name__}"
    )
    with pytest.raises((ConfigError, RuntimeError), match=reason):
        wrapped.start(grid, fed.initial(), num_rounds=2)


def test_clients_that_do_not_clip_are_noticed_by_their_updates(flower_log: list[str]) -> None:
    fed = Federation("fedavg")
    wrapped = wrappers.DifferentialPrivacyClientSideFixedClipping(
        fed.strategy(max_void_rounds=1), 0.1, 1e-3, 4
    )
    with pytest.raises(VoidRoundsError):
        wrapped.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=2)
    assert (
        "above the clipping norm 0.001: its ClientApp needs flwr.client.mod.fixedclipping_mod"
        in flower_log[0]
    )
