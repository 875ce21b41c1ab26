"""How a client describes itself in the handshake."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr_kd.client.dp_sgd import dp_sgd_refusal
from flwr_kd.client.personal_state import StateError
from flwr_kd.client.private_update import noise_refusal
from flwr_kd.learning.weights import buffer_names
from flwr_kd.transport import flower_records
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.transport.wire_version import VERSION, WIRE_VERSION, version_mismatch

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient

__all__ = ["described"]


def described(
    client: KDClient[Any], config: Mapping[str, Any]
) -> dict[str, bool | int | float | str | bytes]:
    """Return a client's properties; see :meth:`flwr_kd.KDClient.get_properties`."""
    client.data_sets.warn_of_samplers()
    found = {
        VERSION: WIRE_VERSION,
        "num-examples": len(client.train_batches),
        "num-test-examples": 0 if client.test_batches is None else len(client.test_batches),
        "num-common-examples": 0 if client.common_test_batches is None else len(client.common_test_batches),
        "num-classes": client.num_classes,
        "num-parameters": sum(p.numel() for p in client.model.parameters() if p.requires_grad),
        "num-held-parameters": client.held_parameters(client.read_config(config)),
        "feature-shape": json.dumps(client.feature_shape),
        "arrays": ArrayTemplate.of_ndarrays(client.named_arrays(), buffer_names(client.model)).to_json(),
        **client.data_sets.shared_counts(client.context.node_config, client.num_classes),
        **client.properties(),
    }
    version = config.get(VERSION)
    refusal = version_mismatch(version, theirs="server", ours="client")
    if refusal is None:
        try:
            client.check_state()
        except StateError as error:
            refusal = str(error)
    if refusal is None:
        asked = client.read_config(config)
        refusal = dp_sgd_refusal(client, asked) or noise_refusal(client.context.node_config, asked)
    if refusal is not None:
        found[flower_records.REFUSAL] = refusal
    for key in ("partition-id", "num-partitions", "sector"):
        if key in client.context.node_config:
            found[key] = client.context.node_config[key]
    return found
