"""Clients of Flower's Message API: what they send, how they fail, and that their numbers are a NumPyClient's."""

from __future__ import annotations

import functools
import pickle
import re
import subprocess
import sys
from typing import Any

import flwr.client.mod as old_mods
import flwr.clientapp.mod as mods
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from flwr_kd import client_app
from flwr_kd.checks import ConfigError
from flwr_kd.client.message_app import MessageApp
from flwr_kd.server.records import HandshakeError, KDResult
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing import inside
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, blobs, numbers, small_model
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.process_grid import ProcessGrid

ALL = range(4)


def both(name: str, **options: Any) -> tuple[KDResult, KDResult]:
    """Return the results of a run with clients of one kind, and with clients of the other kind."""
    federations = Federation(name), Federation(name, message_api=ALL)
    one, other = (federation.run(**options)[1] for federation in federations)
    return one, other


def build(context: Context, kind: type[FedAvgClient] = FedAvgClient) -> FedAvgClient:
    index = int(context.node_config["partition-id"])
    return kind(small_model(), blobs(24 + index, index), blobs(8, 100), context=context, device="cpu")


def started(app: ClientApp, clients: int = 2, **options: Any) -> KDResult:
    """Run a round of FedAvg."""
    federation = Federation("fedavg", clients)
    strategy = federation.strategy(max_void_rounds=1, **options)
    return strategy.start(InlineGrid(app, clients), federation.initial(), num_rounds=1)


class Exchanged(InlineGrid):
    """Notes the records of each message and of its reply, by message type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, dict[str, Any]] = {}

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            content = {name: (type(record), list(record)) for name, record in reply.content.items()}
            self.seen.setdefault(reply.metadata.message_type, content)
        return replies


def test_arrays_travel_by_name_in_the_records_of_flowers_own_strategies() -> None:
    federation = Federation("fedhkd", message_api=ALL)
    grid = Exchanged(federation.app(), 4)
    strategy = federation.strategy(fraction_evaluate=1.0)
    strategy.start(grid, federation.initial(), num_rounds=1)
    names = list(small_model().state_dict())
    train, evaluate = grid.seen["train"], grid.seen["evaluate"]
    assert {name: kind for name, (kind, _) in train.items()} == {
        "arrays": ArrayRecord,
        "metrics": MetricRecord,
        "knowledge": ConfigRecord,
    }
    assert train["arrays"][1] == names
    assert train["metrics"][1] == ["num-examples", "train-loss", "local-accuracy"]
    assert train["knowledge"][1] == ["payload"]
    assert evaluate == {"metrics": (MetricRecord, ["loss", "num-examples", "accuracy"])}
    for asked in inside.train_messages(
        strategy, "train", 2, inside.nodes_in_order(strategy), federation.initial()
    ):
        assert list(asked.content) == ["arrays", "config"]
        assert list(asked.content.array_records["arrays"]) == names


def test_initial_arrays_of_a_compiled_model_travel_by_the_names_of_the_clients_models() -> None:
    compiled = ArrayRecord({f"_orig_mod.{k}": value for k, value in small_model().state_dict().items()})
    results = []
    for kinds in ((), ALL):
        federation = Federation("fedavg", message_api=kinds)
        strategy = federation.strategy()
        results.append(strategy.start(InlineGrid(federation.app(), 4), compiled, num_rounds=1))
        (asked, *_) = inside.train_messages(strategy, "train", 2, inside.nodes_in_order(strategy), compiled)
    assert numbers(results[0]) == numbers(results[1])
    assert list(asked.content["arrays"]) == list(small_model().state_dict())


OPTIONS: dict[str, dict[str, Any]] = {
    "evaluation": {"fraction_evaluate": 1.0},
    "private updates": {"settings": ("dp-clip=0.5", "dp-noise=0.1")},
    "measured": {"measure": "every:1"},
    "adaptation": {"settings": ("personalize-epochs=1",)},
    "a client that raises": {"grid": {"faults": {1: Fault("raise", frozenset({1}))}}},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_the_numbers_are_those_of_a_numpy_client(case: str) -> None:
    one, other = both("fedavg", **OPTIONS[case])
    assert numbers(one) == numbers(other)
    assert one.evaluate_metrics_clientapp == other.evaluate_metrics_clientapp
    assert bool(one.evaluate_metrics_clientapp) == (case == "evaluation")
    assert [stats.clients for stats in one.rounds] == [stats.clients for stats in other.rounds]


@pytest.mark.parametrize("attack", ["sign-flip", "alie"])
def test_attacks_are_the_same(attack: str) -> None:
    """The second one colludes: what the attackers send is put together between the clients and the server."""
    results = [
        Federation("fedhkd", attack=attack, attackers=(1, 2), message_api=kinds).run()[1]
        for kinds in ((), ALL)
    ]
    assert numbers(results[0]) == numbers(results[1]) != numbers(Federation("fedhkd").run()[1])


def test_the_mean_of_personal_models_is_the_same() -> None:
    means: list[list[Any]] = []
    for kinds in ((), range(1, 4)):
        federation, seen = Federation("fedproto", message_api=kinds), []
        federation.strategy("global-model=average").start(
            InlineGrid(federation.app(), 4),
            ArrayRecord(),
            num_rounds=1,
            evaluate_fn=lambda _, arrays, seen=seen: seen.append([a.data for a in arrays.values()]),
        )
        means.append(seen)
    assert means[0] == means[1]
    assert len(means[0]) == 1


@pytest.mark.program
def test_in_processes_the_numbers_are_the_same() -> None:
    initial = ArrayRecord(small_model().state_dict())
    results = []
    for kind in (InlineGrid, ProcessGrid):
        federation, grid = Federation("fedavg", 2), kind(client_app(build), 2)
        results.append(numbers(federation.strategy().start(grid, initial, num_rounds=1)))
        grid.close()
    assert results[0] == results[1]


def test_it_can_be_pickled() -> None:
    app = pickle.loads(pickle.dumps(client_app(build, mods=[mods.message_size_mod])))
    assert isinstance(app, MessageApp)
    assert numbers(started(app)) == numbers(started(client_app(build)))


def test_what_a_client_fn_returns_is_served() -> None:
    expected = numbers(started(ClientApp(client_fn=lambda context: build(context).to_client())))
    for served in (build, lambda c: build(c).to_client(), lambda c: NumPyClient.to_client(build(c))):
        assert numbers(started(client_app(served))) == expected


def test_further_functions_can_be_registered() -> None:
    app = client_app(build)

    @app.query("ping")
    def ping(message: Message, context: Context) -> Message:
        return Message(RecordDict({"pong": ConfigRecord()}), reply_to=message)

    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    asked = Message(RecordDict(), dst_node_id=2, message_type="query.ping")
    assert list(app(asked, context).content) == ["pong"]


def test_a_client_that_cannot_be_built_is_refused_with_the_reason() -> None:
    with pytest.raises(
        HandshakeError, match=r"ConfigError: build must return a client of a method, .* got int"
    ):
        started(client_app(lambda context: 5))
    with pytest.raises(ConfigError, match=r"build must be a function .* got FedAvgClient"):
        client_app(build(Context(1, 2, {"partition-id": 0}, RecordDict(), {})))  # type: ignore[arg-type]


def test_the_versions_of_the_wire_are_compared() -> None:
    class Older(FedAvgClient):
        def get_properties(self, config: Any) -> Any:
            return {**super().get_properties(config), "wire-version": 1}

    with pytest.raises(HandshakeError, match="the client's wire version is 1, the server's is 2"):
        started(client_app(functools.partial(build, kind=Older)))


def test_a_client_may_say_no_other_kind() -> None:
    class Other(FedAvgClient):
        def get_properties(self, config: Any) -> Any:
            return {**super().get_properties(config), "client-api": "grpc"}

    def client_fn(context: Context) -> Any:
        return build(context, Other).to_client()

    with pytest.raises(
        HandshakeError, match="property 'client-api' must be 'message' or left out, got 'grpc'"
    ):
        started(ClientApp(client_fn=client_fn))


def with_reply(change: Any) -> Any:
    """Return a mod that changes the reply of one of two clients."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 1 and message.metadata.message_type == "train":
            change(reply.content)
        return reply

    return mod


def renamed(content: RecordDict, **names: str) -> None:
    arrays = content.array_records["arrays"]
    content["arrays"] = ArrayRecord({names.get(k.replace(".", "_"), k): v for k, v in arrays.items()})


def reordered(content: RecordDict) -> None:
    content["arrays"] = ArrayRecord(dict(reversed(content.array_records["arrays"].items())))


def in_other_records(content: RecordDict) -> None:
    content["fitres.parameters"] = content.array_records.pop("arrays")


def test_arrays_are_matched_by_name() -> None:
    expected = numbers(started(client_app(build)))
    assert numbers(started(client_app(build, train_mods=[with_reply(reordered)]))) == expected


FIRST = next(iter(small_model().state_dict()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda content: renamed(content, **{FIRST.replace(".", "_"): "x" * 500}),
            rf"arrays missing \['{FIRST}'\], not expected \['x{{80}}'\]",
        ),
        (lambda content: content["arrays"].popitem(), "arrays missing"),
        (in_other_records, r"record 'arrays' is missing"),
        (lambda content: content.pop("metrics"), "record 'metrics' is missing"),
        (lambda content: content["metrics"].pop("num-examples"), "num-examples must be a whole number"),
        (lambda content: content["metrics"].update({"a": float("nan")}), "metric 'a' must be finite"),
        (
            lambda content: content.update({"knowledge": ConfigRecord({"payload": b"x"})}),
            "a payload came back, expected none",
        ),
        (lambda content: content.update({"knowledge": MetricRecord()}), "record 'knowledge' is missing"),
    ],
)
def test_a_reply_that_breaks_a_rule_is_dropped(change: Any, text: str, flower_log: list[str]) -> None:
    result = started(client_app(build, train_mods=[with_reply(change)]), min_train_nodes=1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (1, 1)
    (line,) = [line for line in flower_log if "is dropped" in line]
    assert "(partition 1)" in line
    assert re.search(text, line), line


def test_messages_that_are_not_the_servers() -> None:
    app, context = client_app(build), Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    for kind, text in (
        ("train", "must have an ArrayRecord 'arrays' and a ConfigRecord 'config'"),
        ("evaluate", "must have an ArrayRecord 'arrays' and a ConfigRecord 'config'"),
        ("query", "the handshake of flwr-kd has a ConfigRecord"),
    ):
        asked = Message(RecordDict({"other": ConfigRecord()}), dst_node_id=2, message_type=kind)
        with pytest.raises(PayloadError, match=text):
            app(asked, context)


def test_the_handshake_is_a_query_where_flower_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    types: list[str] = []

    def noted(message: Message, context: Context, call_next: Any) -> Message:
        types.append(message.metadata.message_type)
        return call_next(message, context)

    expected = numbers(started(client_app(build, mods=[noted])))
    # Mods see a query, whatever the type under which it travels.
    assert types == ["query", "query", "train", "train"]
    monkeypatch.setattr("flwr.app.metadata.validate_legacy_message_type", lambda value: False)
    flower_records.handshake_type.cache_clear()
    try:
        assert flower_records.handshake_type() == "query"
        assert numbers(started(client_app(build))) == expected
    finally:
        flower_records.handshake_type.cache_clear()


@pytest.mark.program
def test_nothing_here_needs_flowers_numpy_client() -> None:
    """As in a Flower that has neither that class nor the messages of its old API."""
    code = """
import sys
import flwr.app.metadata, flwr.client, flwr.clientapp, flwr.common
for name in ("Client", "NumPyClient", "ClientFn", "ClientFnExt"):
    delattr(flwr.client, name)
for name in ("FitIns", "FitRes", "EvaluateIns", "EvaluateRes", "GetPropertiesIns", "ndarrays_to_parameters"):
    delattr(flwr.common, name)
flwr.app.metadata.validate_legacy_message_type = lambda value: False
from flwr.app import ArrayRecord
from flwr_kd import InlineGrid, client_app
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient
from flwr_kd.testing.federation import blobs, small_model

def build(context):
    return FedHKDClient(small_model(), blobs(24, 0), blobs(8, 1), context=context, device="cpu")

result = FedHKD(min_available_nodes=2, local_epochs=1).start(
    InlineGrid(client_app(build), 2), ArrayRecord(small_model().state_dict()), num_rounds=2
)
print([(stats.participants, stats.failures) for stats in result.rounds])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[(2, 0), (2, 0)]"], done.stderr


def test_mods_in_the_wrong_place_are_refused() -> None:
    local = mods.LocalDpMod(1.0, 0.1, 10.0, 1e-3)
    for mod, name in ((mods.fixedclipping_mod, "fixedclipping_mod"), (local, "LocalDpMod")):
        with pytest.raises(
            ConfigError, match=f"mods: {name} works on train messages only: move it to train_mods"
        ):
            client_app(build, mods=[mod])
    for mod in (old_mods.fixedclipping_mod, old_mods.secaggplus_mod):
        with pytest.raises(
            ConfigError, match=r"train_mods: .* of flwr.client.mod reads the messages of a NumPyClient"
        ):
            client_app(build, train_mods=[mod])


def test_flowers_own_fedavg_can_use_the_clients() -> None:
    """Not through a strategy of this package: without a config of ours, defaults hold."""
    initial = ArrayRecord(small_model().state_dict())
    strategy = FlowersFedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2)
    result = strategy.start(InlineGrid(client_app(build), 2), initial, num_rounds=2)
    assert result.train_metrics_clientapp[2]["train-loss"] < result.train_metrics_clientapp[1]["train-loss"]
    assert 0 <= result.evaluate_metrics_clientapp[2]["accuracy"] <= 1
    assert list(result.arrays) == list(initial)
    assert not np.array_equal(result.arrays[FIRST].numpy(), initial[FIRST].numpy())
