"""MOON's client: its first round, the frozen models, what it keeps, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import contrastive as oracle
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
from flwr_kd.config import MethodConfig
from flwr_kd.learning.weights import get_weights, size_of
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.strategies.moon import MOONClient, MOONConfig, contrastive_loss
from flwr_kd.strategies.moon import client as client_module
from flwr_kd.testing.federation import Federation, numbers

QUICK: dict[str, Any] = {"local_epochs": 2, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.2}


def net(seed: int = 0) -> nn.Sequential:
    """Return a model with BatchNorm and dropout, which tell training and eval mode apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, CLASSES))


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    z: Tensor = model[:-1](x)
    return z


def configured(**changes: Any) -> MOONConfig:
    return MOONConfig(**(QUICK | changes))


def plain(config: MOONConfig) -> MethodConfig:
    return MethodConfig(**{name: getattr(config, name) for name in MethodConfig.field_types()})


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def make(
    model: nn.Module | None = None, *, kind: Any = MOONClient, kept: Context | None = None, size: int = 9
) -> Any:
    train = TensorDataset(*data(0, size))
    return kind(net() if model is None else model, train, train, context=kept or context(), device="cpu")


def task(config: MethodConfig, server_round: int = 1, received: nn.Module | None = None) -> Task[Any]:
    arrays = [] if received is None else list(get_weights(received).values())
    return Task(server_round, "train", server_round, (), arrays, None, config)


def trained(client: Any, now: Task[Any]) -> Answer:
    """Train with dropout from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        answer: Answer = client.phase_train(now)
        return answer


def previous(kept: Context) -> list[dict[str, np.ndarray]]:
    """Return the models in a client's state, the latest first."""
    record: Any = kept.state.array_records.get("flwr-kd.personal.previous", {})
    models: dict[str, dict[str, np.ndarray]] = {}
    for key, value in record.items():
        age, _, name = key.partition("/")
        models.setdefault(age, {})[name] = value.numpy()
    return [models[str(age)] for age in range(len(models))]


def test_the_first_round_is_fedavgs_to_the_bit() -> None:
    """There is no contrastive term by definition, whatever its weight: not a loss that happens to be zero."""
    kept = context()
    config = configured(contrastive_mu=10.0)
    ours = trained(make(kept=kept), task(config, received=net(1)))
    expected = trained(make(kind=FedAvgClient), task(plain(config), received=net(1)))
    assert equal(ours.arrays, expected.arrays)
    assert ours.metrics == expected.metrics
    assert ours.num_examples == expected.num_examples
    # A client's first round, not the first of the run; the second differs.
    later = trained(make(), task(config, 7, net(1)))
    assert equal(later.arrays, trained(make(kind=FedAvgClient), task(plain(config), 7, net(1))).arrays)
    second = trained(make(kept=kept), task(config, 2, net(1)))
    assert not equal(second.arrays, trained(make(kind=FedAvgClient), task(plain(config), 2, net(1))).arrays)


def test_without_weight_it_is_fedavg_to_the_bit() -> None:
    kept, config = context(), configured(contrastive_mu=0.0)
    for server_round in (1, 2):
        ours = trained(make(kept=kept), task(config, server_round, net(server_round)))
        fedavg = trained(make(kind=FedAvgClient), task(plain(config), server_round, net(server_round)))
        assert equal(ours.arrays, fedavg.arrays)


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("models", [1, 2, 3])
def test_the_objective_against_the_oracle(size: int, models: int) -> None:
    """The model in training mode, all others in eval mode; all previous models count; one sample works."""
    kept, config = context(), configured(previous_models=models, contrastive_mu=5.0)
    history: list[nn.Sequential] = []
    for server_round in range(1, 5):
        answer = trained(make(kept=kept), task(config, server_round, net(server_round)))
        model = net()
        names = list(model.state_dict())
        model.load_state_dict(dict(zip(names, map(torch.from_numpy, answer.arrays), strict=True)))
        history.insert(0, model.eval())
    client, received = make(kept=kept), net(9)
    now = task(config, 5, received)
    client.load(now)
    loss = client.objective(now)
    x, y = data(3, size)
    # As the training loop does for one sample.
    client.model.train(size > 1)
    own = copy.deepcopy(client.model.original)
    torch.manual_seed(0)
    value = loss(x, y)
    torch.manual_seed(0)
    z = features(own, x)
    received.eval()
    others = [features(other, x).tolist() for other in history[:models]]
    term = oracle.contrastive_loss(z.tolist(), features(received, x).tolist(), others, 0.5)
    assert value.item() == pytest.approx(F.cross_entropy(own[-1](z), y).item() + 5 * term, rel=1e-5)


def test_only_the_model_in_training_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The global and the previous model stay what they are: frozen, in eval mode, with their running statistics."""
    frozen: list[tuple[Any, dict[str, Tensor]]] = []
    make_copy = MOONClient._frozen

    def noted(self: MOONClient, weights: Any) -> Any:
        model = make_copy(self, weights)
        frozen.append((model, copy.deepcopy(model.state_dict())))
        return model

    kept, config = context(), configured(contrastive_mu=5.0, previous_models=2)
    for server_round in (1, 2):
        trained(make(kept=kept), task(config, server_round, net(server_round)))
    last = previous(kept)
    client = make(kept=kept)
    modes: list[bool] = []

    def checked(z: Tensor, z_global: Tensor, others: Any, tau: float) -> Tensor:
        modes.extend(module.training for model, _ in frozen for module in model.modules())
        modes.extend(tensor.requires_grad for tensor in (z_global, *others))
        return contrastive_loss(z, z_global, others, tau)

    monkeypatch.setattr(MOONClient, "_frozen", noted)
    monkeypatch.setattr(client_module, "contrastive_loss", checked)
    client.phase_train(task(config, 3, net(3)))
    assert len(frozen) == 3
    expected = [get_weights(net(3)), *last]
    for (model, before), weights in zip(frozen, expected, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(np.array_equal(value.numpy(), weights[name]) for name, value in before.items())
        assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert modes
    assert not any(modes)
    # The model itself was in training mode.
    assert client.model.state_dict()["2.num_batches_tracked"] > 0
    assert all(p.requires_grad for p in client.model.parameters())


@pytest.mark.parametrize("models", [1, 2, 3])
def test_what_is_kept_are_the_last_models_that_it_sent(models: int) -> None:
    kept, config = context(), configured(previous_models=models)
    sent: list[dict[str, np.ndarray]] = []
    for server_round in (1, 2, 5, 9):
        answer = trained(make(kept=kept), task(config, server_round, net(server_round)))
        sent.insert(0, dict(zip(get_weights(net()), answer.arrays, strict=True)))
        have = previous(kept)
        assert len(have) == min(models, len(sent))
        for mine, theirs in zip(have, sent, strict=False):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_a_previous_model_counts_however_old_it_is() -> None:
    kept, config = context(), configured()
    trained(make(kept=kept), task(config, 1, net(1)))
    old = copy.deepcopy(kept)
    late = trained(make(kept=kept), task(config, 40, net(2)))
    alone = trained(make(), task(config, 40, net(2)))
    assert not equal(late.arrays, alone.arrays)
    again = trained(make(kept=old), task(config, 40, net(2)))
    assert equal(late.arrays, again.arrays)


def test_a_training_that_fails_leaves_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = context()
    trained(make(kept=kept), task(configured(), 1, net(1)))
    before = previous(kept)
    with pytest.raises(FloatingPointError, match="learning-rate"):
        trained(make(kept=kept), task(configured(learning_rate=1e30), 2, net(2)))
    (now,), (then,) = previous(kept), before
    assert all(np.array_equal(now[name], then[name]) for name in then)


def test_a_history_that_cannot_be_kept_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    client = make()
    size = size_of(client.model.state_dict())
    assert client.kept_bytes() == size
    monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 2 * size)
    monkeypatch.setattr(MOONClient, "train", lambda *_, **__: pytest.fail("it trained"))
    with pytest.raises(StateError, match="name a folder for it"):
        client.phase_train(task(configured(previous_models=3), received=net()))


def test_a_lost_state_is_reported_and_begins_anew(flower_log: list[str]) -> None:
    class Losing(Federation):
        def client_fn(self, context: Context) -> Any:
            context.state.array_records.clear()
            return super().client_fn(context)

    _, result = Losing("moon").run(rounds=2)
    _, fedavg = Federation("fedavg").run(rounds=2)
    assert [a.data for a in result.arrays.values()] == [a.data for a in fedavg.arrays.values()]
    assert sum("what it kept as 'previous' of round 1 is no longer here" in line for line in flower_log) == 4


def test_rounds_without_weight_are_fedavgs() -> None:
    _, ours = Federation("moon").run(rounds=3, settings=["contrastive-mu=0"])
    _, fedavg = Federation("fedavg").run(rounds=3)
    assert numbers(ours)[-1] == numbers(fedavg)[-1]
    _, weighted = Federation("moon").run(rounds=3)
    assert numbers(weighted)[-1] != numbers(fedavg)[-1]


def test_the_global_model_can_be_adapted() -> None:
    _, result = Federation("moon").run(rounds=2, settings=["personalize-epochs=1"])
    assert all("local-accuracy-before" in reported for reported in result.rounds[-1].clients.values())


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = net()
    model.scale = lambda x: model[1](x)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="MOON computes with frozen copies"):
        make(model)


@pytest.mark.parametrize(
    ("name", "value"), [("contrastive_mu", -1.0), ("temperature", 0.0), ("previous_models", 0)]
)
def test_hyper_parameters_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        MOONConfig(**{name: value})


def test_defaults() -> None:
    config = MOONConfig()
    assert (config.contrastive_mu, config.temperature, config.previous_models) == (1.0, 0.5, 1)
