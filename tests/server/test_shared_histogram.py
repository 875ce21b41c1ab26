"""Clients' numbers of samples per class: sent only if a client's own node config says so."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flwr_kd.checks import ConfigError
from flwr_kd.server.records import Node, shared_histogram
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError


def handshake(make_model: Any, make_blobs: Any, **node_config: Any) -> dict[str, Any]:
    context = Context(1, 1, node_config=node_config, state=RecordDict(), run_config={"share-histogram": True})
    client = FedAvgClient(make_model(), make_blobs(25, 0), make_blobs(8, 1), context=context)
    return client.get_properties({})


def test_the_server_cannot_ask_for_it(make_model: Any, make_blobs: Any) -> None:
    assert "class-counts" not in handshake(make_model, make_blobs)
    assert "class-counts" not in handshake(make_model, make_blobs, **{"share-histogram": False})


def test_a_client_shares_its_true_counts(make_model: Any, make_blobs: Any) -> None:
    properties = handshake(make_model, make_blobs, **{"share-histogram": True})
    labels = make_blobs(25, 0).y.tolist()
    counts = [labels.count(c) for c in range(4)]
    assert json.loads(properties["class-counts"]) == counts
    assert Node.from_properties(1, {"wire-version": 2, **properties}).class_counts == tuple(counts)


def test_another_value_is_refused(make_model: Any, make_blobs: Any) -> None:
    with pytest.raises(ConfigError, match="share-histogram must be of type bool, got 'yes'"):
        handshake(make_model, make_blobs, **{"share-histogram": "yes"})


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "[25, 1, 0, 0]", "[-1, 2, 2, 2]", "[1.0, 2, 2, 2]", "{}", "[", 5, "[true, 1, 1, 1]"]
)
def test_counts_that_cannot_be_are_refused(text: object, make_model: Any, make_blobs: Any) -> None:
    properties = handshake(make_model, make_blobs, **{"share-histogram": True})
    with pytest.raises(PayloadError, match="class-counts"):
        Node.from_properties(1, {**properties, "class-counts": text})


def test_a_histogram_needs_all_clients(caplog: pytest.LogCaptureFixture) -> None:
    sharing = [Node(9, 1, num_classes=2, class_counts=(3, 4)), Node(5, 0, num_classes=2, class_counts=(1, 2))]
    assert shared_histogram(sharing) == [[1, 2], [3, 4]]
    with caplog.at_level(logging.INFO, "flwr"):
        assert shared_histogram([*sharing, Node(7, 2, num_classes=2)]) == []
    assert "1 of 3 clients do not share it (share-histogram=true in a node config)" in caplog.text


def test_a_run_knows_what_its_clients_share(federation: Any) -> None:
    fed = federation("fedavg", clients=2)
    for sharing in (True, False):
        strategy = fed.strategy()
        configs = [{"share-histogram": True}, {"share-histogram": sharing}]
        strategy.start(InlineGrid(fed.app(), 2, node_configs=configs), fed.initial(), num_rounds=1)
        found = shared_histogram(strategy.current_run.roster.nodes.values())
        assert [sum(row) for row in found] == ([24, 25] if sharing else [])
