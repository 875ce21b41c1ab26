"""pFedHN's clients: the steps, the change that is sent, and what stays with the client."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from hybrid_rounds import CLASSES, FEATURES, data, equal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.client import personal_state
from flwr_kd.client.personal_state import StateError
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.weights import size_of
from flwr_kd.models import FeatureModel
from flwr_kd.strategies.pfedhn import PFedHNClient, PFedHNConfig, PFedHNPCClient
from flwr_kd.strategies.pfedhn import client as client_module
from flwr_kd.transport.payload import PayloadError

KINDS = [PFedHNClient, PFedHNPCClient]
HEAD = ("4.weight", "4.bias")
QUICK: dict[str, Any] = {"local_steps": 7, "batch_size": 4, "learning_rate": 0.1, "weight_decay": 0.01}


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, CLASSES))


def configured(**changes: Any) -> PFedHNConfig:
    return PFedHNConfig(**(QUICK | changes))


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def make(kind: Any = PFedHNClient, model: nn.Module | None = None, *, kept: Context | None = None) -> Any:
    model = net() if model is None else model
    dtype = next(model.parameters()).dtype
    train, test = (TensorDataset(x.to(dtype), y) for x, y in (data(0, 10), data(1, 8)))
    return kind(model, train, test, context=kept or context(), device="cpu")


def theta(client: Any, seed: int) -> dict[str, Tensor]:
    """Return parameters as a hypernetwork would produce them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (0.3 * torch.randn(p.shape, generator=draw)).to(p.dtype)
        for name, p in client.produced().items()
    }


def task(config: PFedHNConfig, produced: dict[str, Tensor], number: int = 1) -> Task[Any]:
    arrays = [value.numpy() for value in produced.values()]
    return Task(number, "train", number, tuple(produced), arrays, None, config)


def batches(config: PFedHNConfig, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the batches of a round: epoch after epoch, a single last sample in the batch before it."""
    order = task(config, {}, number).generator("order")
    x, y = data(0, 10)
    while True:
        rows = torch.randperm(10, generator=order)
        parts = list(rows.split(config.batch_size))
        for part in parts:
            yield x[part], y[part]


class Mirror:
    """The same client in plain PyTorch: SGD with momentum and decay, written out, in float64."""

    def __init__(self, model: nn.Module, stays: tuple[str, ...] = ()) -> None:
        self.model = copy.deepcopy(model).double()
        self.stays, self.kept = stays, {}

    def round(self, config: PFedHNConfig, produced: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in produced.items():
                named[name].copy_(value)
        momentum = dict(self.kept)
        self.model.train()
        for x, y in islice(batches(config, number), config.local_steps):
            grads = torch.autograd.grad(F.cross_entropy(self.model(x.double()), y), list(named.values()))
            found = dict(zip(named, grads, strict=True))
            norm = torch.cat([found[name].flatten() for name in produced]).norm()
            factor = min(1.0, config.clip_norm / float(norm))
            with torch.no_grad():
                for name, p in named.items():
                    scaled = found[name] * factor if name in produced else found[name]
                    grad = scaled + config.weight_decay * p
                    momentum[name] = config.momentum * momentum.get(name, 0.0) + grad
                    p -= config.learning_rate * momentum[name]
        self.kept = {name: momentum[name] for name in self.stays}
        return {name: value.double() - named[name].detach() for name, value in produced.items()}

    @torch.no_grad()
    def accuracy(self) -> float:
        x, y = data(1, 8)
        return float((self.model.eval()(x.double()).argmax(dim=1) == y).double().mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"clip_norm": 0.05}, {"momentum": 0.0}, {"weight_decay": 0.0}],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_three_rounds_against_the_oracle(kind: Any, changes: dict[str, Any]) -> None:
    """A fresh optimiser each round; the classifier of pfedhn-pc goes on with its momentum, and is not clipped.

    In float64 but for what is sent: BatchNorm over batches of 4 makes rounding errors grow.
    """
    config, kept = configured(**changes), context()
    mirror = Mirror(net(), HEAD if kind is PFedHNPCClient else ())
    for number in (1, 2, 3):
        client = make(kind, net().double(), kept=kept)
        produced = theta(client, number)
        assert set(produced).isdisjoint(mirror.stays)
        answer: Answer = client.phase_train(task(config, produced, number))
        expected = mirror.round(config, produced, number)
        for name, actual in zip(produced, answer.arrays, strict=True):
            np.testing.assert_allclose(actual, expected[name].numpy(), rtol=0, atol=1e-6)
        assert answer.metrics["local-accuracy"] == mirror.accuracy()
        for name, value in mirror.model.state_dict().items():
            np.testing.assert_allclose(
                client.model.state_dict()[name].numpy(), value.numpy(), rtol=0, atol=1e-6
            )


def test_the_optimiser_is_fresh_each_round() -> None:
    """The same parameters lead to the same change again: nothing of the first round is left in the second."""
    client = make(model=nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES)))
    now = task(configured(), theta(client, 1))
    assert equal(client.phase_train(now).arrays, client.phase_train(now).arrays)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_classifiers_optimiser_stays(optimizer: str) -> None:
    """pfedhn-pc: a client that is made anew goes on as one object does; the body's optimiser is fresh in both."""
    config, kept = configured(optimizer=optimizer, learning_rate=0.01), context()
    one = make(PFedHNPCClient, kept=kept)
    produced = theta(one, 1)
    one.phase_train(task(config, produced))
    record: Any = kept.state.array_records["flwr-kd.personal.own"]
    own = {name: array.numpy() for name, array in record.items()}
    slots = {"sgd": {"momentum_buffer"}, "adam": {"exp_avg", "exp_avg_sq", "step"}}[optimizer]
    assert {name for name in own if name.startswith("optimizer/")} == {
        f"optimizer/{place}/{slot}" for place in (0, 1) for slot in slots
    }
    assert {name.removeprefix("model/") for name in own if name.startswith("model/")} == {
        *HEAD,
        *(name for name, _ in net().named_buffers()),
    }
    # Without it the second round is another.
    forgetful = context()
    forgetful.state.array_records["flwr-kd.personal.own"] = type(record)(
        {name: array for name, array in record.items() if name.startswith("model/")}
    )
    forgetful.state.config_records["flwr-kd.personal-of.own"] = kept.state.config_records[
        "flwr-kd.personal-of.own"
    ]
    second = make(PFedHNPCClient, kept=kept).phase_train(task(config, produced, 2))
    other = make(PFedHNPCClient, kept=forgetful).phase_train(task(config, produced, 2))
    assert not equal(second.arrays, other.arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_batchnorms_buffers_stay(kind: Any) -> None:
    kept = context()
    first = make(kind, kept=kept)
    produced = theta(first, 1)
    assert not {name for name in produced if "running" in name or "num_batches" in name}
    first.phase_train(task(configured(), produced))
    trained = {name: value.clone() for name, value in first.model.named_buffers()}
    again, other = make(kind, kept=kept), make(kind)
    for client in (again, other):
        client.load(task(configured(), produced))
    built = dict(net().named_buffers())
    for name, value in trained.items():
        assert torch.equal(dict(again.model.named_buffers())[name], value)
        assert torch.equal(dict(other.model.named_buffers())[name], built[name])
        assert not torch.equal(value, built[name])


def test_a_client_without_anything_of_its_own_keeps_nothing() -> None:
    kept = context()
    client = make(model=nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES)), kept=kept)
    client.phase_train(task(configured(), theta(client, 1)))
    assert client.kept_bytes() == 0
    assert not kept.state.array_records


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_bounded(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make(kind)
    client.phase_train(task(configured(optimizer="adam"), theta(client, 1)))
    record = client.context.state.array_records["flwr-kd.personal.own"]
    assert 0 < sum(array.numpy().nbytes for array in record.values()) <= client.kept_bytes() + 8
    assert (client.kept_bytes() == size_of(dict(net().named_buffers()))) == (kind is PFedHNClient)
    monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", client.kept_bytes() - 1)
    with pytest.raises(StateError, match="state-dir"):
        make(kind).check_state()


class TestFrozen:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_frozen_parameter_is_not_produced(self, kind: Any) -> None:
        model = net()
        model[1].weight.requires_grad_(False)
        client = make(kind, model)
        produced = theta(client, 1)
        assert "1.weight" not in produced
        answer = client.phase_train(task(configured(), produced))
        assert len(answer.arrays) == len(produced)
        assert torch.equal(client.model.state_dict()["1.weight"], model[1].weight)
        assert all(np.abs(array).max() > 0 for array in answer.arrays)

    def test_the_handshake_names_what_is_produced(self) -> None:
        model = net()
        model[4].weight.requires_grad_(False)
        assert '"4.bias"' in str(make(model=model).get_properties({})["arrays"])
        assert '"4.' not in str(make(PFedHNPCClient, model).get_properties({})["arrays"])
        names, *_ = json.loads(str(make().get_properties({})["arrays"]))
        assert not [name for name in names if "running" in name]

    def test_a_shared_parameter_is_produced_once(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
        model[2].weight = model[1].weight
        tied = nn.Sequential(*model, nn.Linear(FEATURES, CLASSES))
        client = make(model=tied)
        produced = theta(client, 1)
        assert list(produced) == ["1.weight", "1.bias", "2.bias", "3.weight", "3.bias"]
        client.load(task(configured(), produced))
        assert torch.equal(client.model.state_dict()["2.weight"], produced["1.weight"])

    def test_without_anything_to_produce_nothing_is_named(self) -> None:
        client = make(PFedHNPCClient, nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES)))
        assert client.get_properties({})["arrays"] == "[[], [], []]"


class Headless(nn.Module):
    num_classes, feature_dim = CLASSES, FEATURES

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def classify(self, h: Tensor) -> Tensor:
        return self.last(h)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class TestRefusals:
    def test_a_model_that_names_no_head(self) -> None:
        with pytest.raises(ValueError, match="pfedhn-pc needs a model with a head"):
            make(PFedHNPCClient, Headless()).get_properties({})
        assert make(model=Headless()).get_properties({})

    def test_a_pair_has_one(self) -> None:
        pair = FeatureModel(nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 5)), nn.Linear(5, CLASSES))
        assert list(make(PFedHNPCClient, pair).produced()) == ["extractor.1.weight", "extractor.1.bias"]

    def test_arrays_of_another_model(self) -> None:
        client = make()
        produced = theta(client, 1)
        del produced["1.bias"]
        with pytest.raises(PayloadError, match="does not fit"):
            client.phase_train(task(configured(), produced))

    def test_a_mod_that_clips(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would take the weights that came from the change, which is none of them."""
        monkeypatch.setattr(client_module, "active_mods", lambda: ["fixedclipping_mod"])
        client = make()
        with pytest.raises(ConfigError, match=r"fixedclipping_mod clips the difference .* set clip-norm"):
            client.phase_train(task(configured(), theta(client, 1)))

    def test_a_loss_that_is_not_finite(self) -> None:
        client = make()
        produced = {name: 1e30 * value for name, value in theta(client, 1).items()}
        with pytest.raises(FloatingPointError):
            client.phase_train(task(configured(), produced))
        assert not client.context.state.array_records


def test_the_metrics_before_and_after_training() -> None:
    client = make()
    produced = theta(client, 1)
    client.load(task(configured(), produced))
    before = client.measure(4)
    answer = client.phase_train(task(configured(), produced))
    after = client.measure(4)
    assert answer.metrics["produced-accuracy"] == before.accuracy
    assert answer.metrics["local-accuracy"] == after.accuracy
    assert before.accuracy != after.accuracy
    assert answer.num_examples == 10


@pytest.mark.parametrize(("epochs", "steps"), [(0, 7), (1, 3), (4, 12)])
def test_the_number_of_batches(epochs: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    client = make()
    forward = client.model.forward

    def counted(x: Tensor) -> Tensor:
        if client.model.training:
            seen.append(len(x))
        result: Tensor = forward(x)
        return result

    monkeypatch.setattr(client.model, "forward", counted)
    config = configured(local_epochs=epochs)
    client.phase_train(task(config, theta(client, 1)))
    assert len(seen) == steps == config.steps(10)
    assert sum(seen[:3]) == 10
