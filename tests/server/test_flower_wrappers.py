"""Flower's mods and wrappers around each kind of method: they work, or are refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import flwr.client.mod as mods
import flwr.clientapp.mod as new_mods
import flwr.serverapp.strategy as wrappers
import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from flwr_kd import client_app, registry
from flwr_kd.checks import ConfigError
from flwr_kd.server.records import HandshakeError, VoidRoundsError
from flwr_kd.testing.federation import Federation, small_model
from flwr_kd.testing.reply_parts import arrays_of
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
    "arrays_size": "use message_size_mod, or flwr_kd.client_app",
    "local_dp": "LocalDpMod works on",
    "secaggplus": "need Flower's SecAgg workflow at the server",
    "secagg": "need Flower's SecAgg workflow at the server",
    "fixed": "not supplied by the DifferentialPrivacyClientSideFixedClipping",
    "adaptive": "not supplied by the DifferentialPrivacyClientSideFixedClipping",
    "new fixed": "those of the same names in flwr.client.mod on a NumPyClient's",
    "new adaptive": "those of the same names in flwr.client.mod on a NumPyClient's",
    "new local_dp": "those of the same names in flwr.client.mod on a NumPyClient's",
}


BY_MESSAGES = {
    "arrays_size": new_mods.arrays_size_mod,
    "message_size": new_mods.message_size_mod,
    "local_dp": new_mods.LocalDpMod(**LOCAL),
    "fixed": new_mods.fixedclipping_mod,
    "adaptive": new_mods.adaptiveclipping_mod,
}
"""Mods around train messages of clients of the Message API."""
WORK_BY_MESSAGES = {"arrays_size": set(METHODS), "message_size": set(METHODS), "local_dp": WEIGHTS}
REASONS_BY_MESSAGES = {
    "local_dp": "LocalDpMod works on",
    "fixed": "fixedclipping_mod requires the key 'clipping_norm'",
    "adaptive": "adaptiveclipping_mod requires the key 'clipping_norm'",
}


def message_app_of(fed: Federation, *names: str) -> ClientApp:
    return client_app(fed.client_fn, train_mods=[BY_MESSAGES[name] for name in names])


def app_of(fed: Federation, *names: str) -> ClientApp:
    return ClientApp(client_fn=lambda context: fed.client_fn(context), mods=[MODS[name] for name in names])


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("name", METHODS)
def test_mods(name: str, mod: str, flower_log: list[str]) -> None:
    check_mod(Federation(name), app_of, mod, WORK, REASONS, flower_log)


@pytest.mark.parametrize("mod", BY_MESSAGES)
@pytest.mark.parametrize("name", METHODS)
def test_mods_around_clients_of_the_message_api(name: str, mod: str, flower_log: list[str]) -> None:
    check_mod(Federation(name), message_app_of, mod, WORK_BY_MESSAGES, REASONS_BY_MESSAGES, flower_log)


def check_mod(
    fed: Federation,
    app: Callable[..., ClientApp],
    mod: str,
    work: Mapping[str, set[str]],
    reasons: Mapping[str, str],
    flower_log: list[str],
) -> None:
    """Run a round of a method with a mod around its clients."""
    name = fed.method.name
    strategy, grid = fed.strategy(max_void_rounds=1), InlineGrid(app(fed, mod), 4)
    if name in work.get(mod, ()):
        result = strategy.start(grid, fed.initial(), num_rounds=1)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)
        uncovered = "the knowledge that it sends beside them is not covered"
        assert sum(uncovered in line for line in flower_log) == (mod == "local_dp" and name == "fedhkd")
        return
    with pytest.raises((HandshakeError, VoidRoundsError)) as error:
        strategy.start(grid, fed.initial(), num_rounds=1)
    assert any(reasons[mod] in text for text in (*flower_log, str(error.value)))


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


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["fedavg", "fedhkd"])
def test_wrappers_with_clients_of_the_message_api(name: str, wrapper: str, flower_log: list[str]) -> None:
    fed = Federation(name)
    kind, args, names = WRAPPERS[wrapper]
    wrapped, grid = kind(fed.strategy(max_void_rounds=1), *args), InlineGrid(message_app_of(fed, *names), 4)
    before = wrapped.clipping_norm
    result = wrapped.start(grid, fed.initial(), num_rounds=2)
    assert list(result.train_metrics_clientapp) == [1, 2]
    # More than half of the updates are clipped, from which the adaptive ones learn.
    assert (wrapped.clipping_norm != before) == ("adaptive" in wrapper)
    uncovered = "the knowledge that FedHKD's clients send beside them (HyperKnowledge) is not covered"
    assert sum(uncovered in line for line in flower_log) == (name == "fedhkd")


def test_a_numpy_client_cannot_send_what_adaptive_clipping_reads(flower_log: list[str]) -> None:
    """It is refused alone, beside clients that can."""
    fed = Federation("fedavg")
    kinds = message_app_of(fed, "adaptive"), app_of(fed, "adaptive")

    def served(message: Message, context: Context) -> Message:
        return kinds[context.node_config["partition-id"] == 1](message, context)

    strategy = fed.strategy(min_available_nodes=3, min_train_nodes=3)
    wrapped = wrappers.DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.1, 3)
    result = wrapped.start(InlineGrid(cast(ClientApp, served), 4), fed.initial(), num_rounds=1)
    assert list(result.train_metrics_clientapp) == [1]
    (line,) = [line for line in flower_log if "is refused" in line]
    assert "reads norm_bit from a MetricRecord, in which a NumPyClient cannot send it: serve it by" in line


@pytest.mark.parametrize("messages", [False, True])
def test_the_mods_of_either_package_clip_to_the_norm(messages: bool) -> None:
    fed = Federation("fedavg")
    app = message_app_of(fed, "fixed") if messages else app_of(fed, "fixed")
    seen: list[Any] = []

    class Noting(InlineGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            seen.extend(
                [value.numpy() for value in arrays_of(reply.content).values()]
                for reply in replies
                if reply.metadata.message_type == "train"
            )
            return replies

    wrapped = wrappers.DifferentialPrivacyClientSideFixedClipping(fed.strategy(), 0.1, 0.5, 4)
    wrapped.start(Noting(app, 4), fed.initial(), num_rounds=1)
    start = [value.numpy() for value in fed.initial().values()]
    norms = [np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(model, start, strict=True))) for model in seen]
    np.testing.assert_allclose(norms, 0.5, rtol=1e-5)


def test_clients_that_do_not_clip_are_noticed_by_their_updates(flower_log: list[str]) -> None:
    fed = Federation("fedavg")
    wrapped = wrappers.DifferentialPrivacyClientSideFixedClipping(
        fed.strategy(max_void_rounds=1), 0.1, 1e-3, 4
    )
    with pytest.raises(VoidRoundsError):
        wrapped.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=2)
    expected = (
        "above the clipping norm 0.001: its ClientApp needs fixedclipping_mod, of flwr.clientapp.mod in"
    )
    assert expected in flower_log[0]


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "usage.md"
ROWS: dict[str, tuple[Callable[..., ClientApp], str, Callable[[Any], Any]]] = {
    "`LocalDpMod`": (message_app_of, "local_dp", lambda strategy: strategy),
    "`DifferentialPrivacyServerSideFixedClipping`, ": (
        message_app_of,
        "message_size",
        lambda strategy: wrappers.DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 0.5, 4),
    ),
}
"""By the beginning of a row of the guide's table: the clients' kind, the mod around them, and the wrapper."""


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_the_guide_names_the_methods_that_work(row: str) -> None:
    app, mod, wrapper = ROWS[row]
    (line,) = [text for text in GUIDE.read_text(encoding="utf-8").splitlines() if text.startswith(f"| {row}")]
    named = set(re.findall(r"`([^`]+)`", line.split(" | ", 1)[1])) - {"initial_arrays"}
    works = set()
    for name in registry.methods():
        fed = Federation(name)
        initial = ArrayRecord(small_model().state_dict())
        strategy = wrapper(fed.strategy(max_void_rounds=1))
        try:
            result = strategy.start(InlineGrid(app(fed, mod), 4), initial, num_rounds=2)
        except (ConfigError, RuntimeError):
            continue
        # Clients may fail in the second round only.
        if len(result.train_metrics_clientapp) == 2:
            works.add(name)
    assert works == named
