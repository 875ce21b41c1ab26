"""The wire's version in the handshake: both sides name theirs, and a mismatch is a refusal that names both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.wire_version import WIRE_VERSION


def of_version(version: int | None) -> type[FedAvgClient]:
    """Return a client of another version of flwr-kd; None is one that names no version."""

    class Other(FedAvgClient):
        def get_properties(self, config: Any) -> Any:
            properties = super().get_properties({**config, "wire-version": WIRE_VERSION})
            del properties["wire-version"]
            return properties if version is None else {**properties, "wire-version": version}

    return Other


class OlderServer(InlineGrid):
    """Carries the messages of a server that names another version, or none."""

    version: int | None = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        asked = list(messages)
        for message in asked:
            for record in message.content.config_records.values():
                record.pop("wire-version", None)
                if self.version is not None:
                    record["wire-version"] = self.version
        return super().push_messages(asked)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            None,
            "the client names no wire version, as flwr-kd before 0.2; the server's is 2: update",
        ),
        (3, "the client's wire version is 3, the server's is 2: install the same version of flwr-kd at both"),
    ],
)
def test_a_client_of_another_version_is_refused(
    version: int | None, text: str, federation: Any, flower_log: list[str], make_model: Any, make_blobs: Any
) -> None:
    """The others go on without it; where all are refused, the run ends before any training."""
    fed = federation("fedavg", clients=3)

    def client_fn(context: Context) -> Any:
        kind = of_version(version) if context.node_config["partition-id"] == 1 else FedAvgClient
        return kind(make_model(), make_blobs(16, 0), context=context, device="cpu").to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), 3)
    result = fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=1)
    assert sorted(result.rounds[0].bytes_by_partition) == [0, 2]
    (line,) = flower_log
    assert text in line
    with pytest.raises(HandshakeError, match=text):
        fed.strategy(min_available_nodes=3).start(grid, fed.initial(), num_rounds=1)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            None,
            "the server names no wire version, as flwr-kd before 0.2; the client's is 2: update",
        ),
        (3, "the server's wire version is 3, the client's is 2: install the same version of flwr-kd at both"),
    ],
)
def test_a_server_of_another_version_is_refused_by_the_clients(
    version: int | None, text: str, federation: Any
) -> None:
    fed = federation("fedavg", clients=2)
    grid = OlderServer(fed.app(), 2)
    grid.version = version
    with pytest.raises(HandshakeError, match=text):
        fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=1)


def test_a_version_is_not_counted_as_bytes() -> None:
    message = flower_records.properties_message(1, config={})
    assert message.content.config_records["getpropertiesins.config"]["wire-version"] == 2
    assert flower_records.nbytes(message.content) == 0
