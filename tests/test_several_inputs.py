"""Federations whose models take several inputs by name, under every method; a BERT under some of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from token_models import Masked, MaskedByZeros, node, small_bert, texts, tokens
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.inputs import NamedDataset
from flwr_kd.registry import Method
from flwr_kd.server.records import HandshakeError, KDResult
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing.federation import numbers
from flwr_kd.transport.inline_grid import InlineGrid

METHODS = registry.methods()
ONE_TENSOR = {name for name, method in METHODS.items() if method.one_tensor}
"""Methods that make inputs, or compute with them beside the model."""
QUICK = ("local-epochs=1", "batch-size=4", "optimizer=adam", "learning-rate=0.01")
CLIENTS = 2


def one_input(size: int, seed: int) -> TensorDataset:
    ids, _, labels = tokens(size, seed)
    return TensorDataset(ids, labels)


def run(
    name: str,
    build: Callable[[], nn.Module] = Masked,
    data: Callable[[int, int], Any] = texts,
    *settings: str,
    rounds: int = 2,
) -> KDResult:
    """Run a method on two clients, and hold that none failed."""
    method = METHODS[name]
    quick = [text for text in QUICK if text.partition("=")[0].replace("-", "_") not in method.fixed]
    strategy = method.strategy(
        method.config([*quick, *method.quick, *settings]),
        min_available_nodes=CLIENTS,
        **at_server(method, build, data, settings),
    )

    def client_fn(context: Context) -> Any:
        i = int(context.node_config["partition-id"])
        public = {"public_set": data(12, 99)} if method.public_at == "clients" else {}
        options = {"context": context, "device": "cpu", **method.client_options, **public}
        client: Any = method.client(build(), data(12 + i, i), data(9, 50 + i), **options)
        return client.to_client()

    weights = ArrayRecord(build().state_dict())
    uses = method.strategy.sends_weights or method.strategy.uses_initial_arrays
    grid = InlineGrid(ClientApp(client_fn=client_fn), CLIENTS)
    result: KDResult = strategy.start(grid, weights if uses else ArrayRecord(), num_rounds=rounds)
    assert [(stats.failures, stats.participants) for stats in result.rounds] == [(0, CLIENTS)] * rounds
    return result


def at_server(method: Method, build: Any, data: Any, settings: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if method.public_at == "server":
        options = {"models": [build()]} if method.heterogeneous else {"model": build()}
        options |= {"public_set": data(12, 99), "device": "cpu"}
    if "public-at=server" in settings:
        options = {"public_set": data(12, 99)}
    if method.public_at == "synthetic":
        options = {"model": build(), "input_shape": (6,), "device": "cpu"}
    if method.server_model:
        options |= {"model": build()}
    if method.server_device:
        options |= {"device": "cpu"}
    return options


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(METHODS) - ONE_TENSOR))
def test_numbers_are_those_of_a_model_with_one_input(name: str) -> None:
    """That model makes the mask itself; all else is the same, to the last bit, in any method."""
    expected = numbers(run(name, MaskedByZeros, one_input))
    assert numbers(run(name, Masked, texts)) == expected


@pytest.mark.parametrize("name", ["fedmd", "ktpfl"])
def test_public_samples_that_are_sent_are_those_at_the_clients(name: str) -> None:
    there, sent = (run(name, Masked, texts, f"public-at={where}") for where in ("clients", "server"))
    assert [s.local_accuracy for s in sent.rounds] == [s.local_accuracy for s in there.rounds]
    assert [s.train_loss for s in sent.rounds] == [s.train_loss for s in there.rounds]
    assert sent.rounds[0].bytes_down > there.rounds[0].bytes_down + 2 * CLIENTS * 12 * 2 * 6 * 8


def test_warm_up_on_labelled_public_data() -> None:
    warm, cold = (run("fedmd", Masked, texts, f"warmup-epochs={epochs}") for epochs in (1, 0))
    assert warm.rounds[0].train_loss != cold.rounds[0].train_loss


@pytest.mark.parametrize("name", sorted(ONE_TENSOR))
def test_methods_that_compute_with_the_inputs_say_so(name: str) -> None:
    """Why, what is allowed, and what takes several inputs; at the client and, of those with a model, the server."""
    method = METHODS[name]
    client: Any = method.client
    instead = ", ".join(sorted(set(METHODS) - ONE_TENSOR))
    got = "each sample must be one tensor, got named inputs (input_ids [6], attention_mask [6]); methods"
    whole = f"{got} that take several inputs by name: {instead}"
    with pytest.raises(ConfigError, match=re.escape(whole)):
        client(Masked(), texts(6, 0), context=node(), device="cpu", **method.client_options)
    with pytest.raises((ConfigError, HandshakeError)) as refused:
        run(name)
    if method.public_at == "synthetic":
        assert f"; {name} {method.one_tensor}, so each" in str(refused.value)
        assert "missing 1 required positional argument: 'attention_mask'" in str(refused.value)
    else:
        assert got in str(refused.value)


@pytest.mark.long
class TestBert:
    @pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedhkd", "fedmd", "feddf"])
    def test_learns(self, name: str) -> None:
        result = run(name, small_bert, texts, "local-epochs=8", "learning-rate=0.02", rounds=3)
        accuracy = result.rounds[-1].local_accuracy
        assert accuracy is not None
        assert accuracy > 0.6  # three classes

    def test_equal_seeds_give_equal_numbers(self) -> None:
        """Dropout draws from torch's global generator."""
        torch.manual_seed(1)
        first = numbers(run("fedhkd", small_bert))
        torch.manual_seed(2)
        assert numbers(run("fedhkd", small_bert)) == first

    def test_trains_in_bfloat16(self) -> None:
        client = FedAvgClient(
            small_bert(), texts(6, 0), texts(6, 1), context=node(), device="cpu", precision="bf16"
        )
        loss = client.in_precision(lambda x, y: nn.functional.cross_entropy(client.model(x), y))
        (x, y) = next(client.train_batches.ordered(6))
        plain = nn.functional.cross_entropy(client.model.eval()(x), y)
        assert float(loss(x, y).detach()) == pytest.approx(float(plain.detach()), abs=0.02)
        assert float(loss(x, y).detach()) != float(plain.detach())


class TestClient:
    def test_augmentation_gets_the_named_inputs(self) -> None:
        seen: list[int] = []

        def augment(x: Any, generator: torch.Generator) -> Any:
            seen.append(len(x["input_ids"]))
            return x

        client = FedAvgClient(Masked(), texts(6, 0), context=node(), device="cpu", augment=augment)
        assert client.to_device(client.train_batches.example())["input_ids"].device.type == "cpu"
        method = METHODS["fedavg"]
        strategy = method.strategy(method.config(["local-epochs=1", "batch-size=3"]), min_available_nodes=1)
        grid = InlineGrid(ClientApp(client_fn=lambda context: client.to_client()), 1)
        strategy.start(grid, ArrayRecord(Masked().state_dict()), num_rounds=1)
        assert seen == [3, 3]

    def test_a_loss_that_is_not_finite_because_of_an_input(self) -> None:
        class Weighted(Masked):
            def forward(self, input_ids: Any, attention_mask: Any, weight: Any) -> Any:  # type: ignore[override]
                return super().forward(input_ids, attention_mask) * weight

        ids, mask, labels = tokens(6, 0)
        weight = torch.ones(6, 1)
        weight[2] = torch.nan
        data = NamedDataset({"input_ids": ids, "attention_mask": mask, "weight": weight}, labels)
        method = METHODS["fedavg"]
        client = FedAvgClient(Weighted(), data, context=node(), device="cpu")
        config = {**method.config(["local-epochs=1"]).to_wire(), "flwr-kd.phase": "train"}
        arrays = list(client.named_arrays().values())
        with pytest.raises(FloatingPointError, match="because inputs are not finite"):
            client.fit(arrays, config)
