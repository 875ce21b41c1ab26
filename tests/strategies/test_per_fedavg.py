"""Per-FedAvg's clients: steps, statistics, personal models, and what public code gets wrong."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from flwr_kd.checks import ConfigError
from flwr_kd.seeding import derive_seed, torch_generator
from flwr_kd.strategies.per_fedavg import PerFedAvg, PerFedAvgClient, PerFedAvgConfig, draw_rows
from flwr_kd.testing.federation import Federation, blobs, small_model

SAMPLES, WIDTH, CLASSES = 30, 5, 3
HESSIAN_FREE = {"meta_gradient": "hessian-free"}


def samples(count: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=draw, dtype=torch.float64), torch.arange(count) % CLASSES


def linear() -> nn.Module:
    model = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(0.3 * torch.arange(15).sin().reshape(CLASSES, WIDTH))
        model.bias.zero_()
    return nn.Sequential(nn.Flatten(), model)


def client_of(
    model: nn.Module, count: int = SAMPLES, test: tuple[Tensor, Tensor] | None = None, **options: Any
) -> PerFedAvgClient:
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    x, y = samples(count)
    dtype = next(model.parameters()).dtype
    test_set = TensorDataset(*(test or samples(9, 5)))
    return PerFedAvgClient(model, TensorDataset(x.to(dtype), y), test_set, context=context, **options)


def message(config: PerFedAvgConfig, phase: str = "train") -> dict[str, Any]:
    return {**config.to_wire(), "server-round": 1, "phase": phase, "seed": 0}


def trained(client: PerFedAvgClient, **settings: Any) -> list[np.ndarray[Any, Any]]:
    config = PerFedAvgConfig(**{"local_steps": 1, "batch_size": 4, **settings})
    start = [value.numpy().copy() for value in client.model.state_dict().values()]
    arrays, count, metrics = client.fit(start, message(config))
    assert count == len(client.train_batches)
    assert np.isfinite(metrics["train-loss"])
    return arrays


def rows_of(count: int, steps: int, size: int = 4) -> Tensor:
    seed = derive_seed(0, "client", "train", 1, 0)
    return draw_rows(count, size, steps, torch_generator(seed, "draws"))


def by_hand(
    count: int, steps: int, *, alpha: float, beta: float, delta: float | None, decay: float = 0.0
) -> Any:
    """Softmax regression, its gradient written out, in numpy."""
    x, y = (value.numpy() for value in samples(count))
    state = linear().state_dict()
    w, b = state["1.weight"].numpy().copy(), state["1.bias"].numpy().copy()

    def gradient(w: Any, b: Any, rows: Any) -> tuple[Any, Any]:
        logits = x[rows] @ w.T + b
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y[rows]]
        return p.T @ x[rows] / len(rows) + decay * w, p.mean(axis=0) + decay * b

    for one, two, three in rows_of(count, steps).numpy():
        inner = gradient(w, b, one)
        g = gradient(w - alpha * inner[0], b - alpha * inner[1], two)
        step = g
        if delta is not None:
            ahead = gradient(w + delta * g[0], b + delta * g[1], three)
            behind = gradient(w - delta * g[0], b - delta * g[1], three)
            step = tuple(  # type: ignore[assignment]
                each - alpha * (a - c) / (2 * delta) for each, a, c in zip(g, ahead, behind, strict=True)
            )
        w, b = w - beta * step[0], b - beta * step[1]
    return [w, b]


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("hessian_free", [False, True])
@pytest.mark.parametrize("count", [SAMPLES, 5])
def test_steps_by_hand(count: int, hessian_free: bool, decay: float) -> None:
    settings = HESSIAN_FREE if hessian_free else {}
    rates = {"alpha": 0.5, "learning_rate": 0.2, "delta": 0.01, "weight_decay": decay}
    found = trained(client_of(linear(), count), local_steps=3, **rates, **settings)
    delta = 0.01 if hessian_free else None
    expected = by_hand(count, 3, alpha=0.5, beta=0.2, delta=delta, decay=decay)
    for mine, hand in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, hand, rtol=1e-10, atol=1e-12)


def test_both_rates_matter() -> None:
    """PFLlib ignores β."""
    results = {}
    for gradient in ("first-order", "hessian-free"):
        for alpha, beta in ((0.5, 0.2), (0.1, 0.2), (0.5, 0.1)):
            found = trained(client_of(linear()), alpha=alpha, learning_rate=beta, meta_gradient=gradient)
            results[gradient, alpha, beta] = found[0]
    values = list(results.values())
    assert all(np.abs(a - b).max() > 1e-4 for i, a in enumerate(values) for b in values[:i])
    # One step, so β is a factor.
    initial = linear().state_dict()["1.weight"].numpy()
    ratio = (results["first-order", 0.5, 0.2] - initial) / (results["first-order", 0.5, 0.1] - initial)
    np.testing.assert_allclose(ratio, 2.0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_clients_smaller_than_two_batches_step(count: int) -> None:
    """In public code they never do."""
    first = trained(client_of(linear(), count), local_steps=1)
    second = trained(client_of(linear(), count), local_steps=2)
    assert not np.array_equal(first[0], linear().state_dict()["1.weight"].numpy())
    assert not np.array_equal(first[0], second[0])


def test_a_round_has_local_steps_or_local_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(linear())
    sizes: list[int] = []
    real = client.in_precision

    def in_precision(objective: Any) -> Any:
        return real(lambda x, y: (sizes.append(len(x)), objective(x, y))[1])

    monkeypatch.setattr(client, "in_precision", in_precision)
    for settings, expected in (({"local_steps": 3}, 6), ({"local_epochs": 2}, 32), (HESSIAN_FREE, 4)):
        sizes.clear()
        trained(client, personalize_steps=0, **settings)
        assert sizes == [4] * expected


@pytest.mark.parametrize("settings", [{}, HESSIAN_FREE])
def test_a_sampler_without_fixed_rows_decides_what_is_trained_on(settings: dict[str, Any]) -> None:
    x, y = samples()
    x[10:] = torch.nan
    weights = [1.0] * 10 + [0.0] * (SAMPLES - 10)
    loader = DataLoader(TensorDataset(x, y), sampler=WeightedRandomSampler(weights, SAMPLES))
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    client = PerFedAvgClient(linear(), loader, context=context)
    assert np.isfinite(trained(client, local_steps=5, **settings)[0]).all()


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers).double()


@pytest.mark.parametrize("settings", [{}, HESSIAN_FREE])
def test_batchnorms_statistics_are_those_of_b2(settings: dict[str, Any]) -> None:
    model = normed()
    client = client_of(model)
    names = list(client.model.state_dict())
    found = dict(zip(names, trained(client, alpha=0.5, learning_rate=0.2, **settings), strict=True))
    # The model one step further on B1, which then sees B2 once.
    x, y = samples()
    one, two, _ = rows_of(SAMPLES, 1)[0]
    ahead = copy.deepcopy(model).train()
    slopes = torch.autograd.grad(nn.functional.cross_entropy(ahead(x[one]), y[one]), list(ahead.parameters()))
    ahead = copy.deepcopy(model).train()
    with torch.no_grad():
        for parameter, slope in zip(ahead.parameters(), slopes, strict=True):
            parameter.sub_(0.5 * slope)
        ahead(x[two])
    for name, value in ahead.named_buffers():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-12, err_msg=name)
    assert found["2.num_batches_tracked"] == 1
    assert client.model.training is False


def adapted(client: PerFedAvgClient, **settings: Any) -> dict[str, Tensor]:
    config = PerFedAvgConfig(**{"batch_size": 4, "alpha": 0.5, **settings})
    start = [value.numpy().copy() for value in client.model.state_dict().values()]
    _, _, metrics = client.evaluate(start, message(config, "personalize"))
    assert 0 <= metrics["local-accuracy"] <= 1
    return copy.deepcopy(client.model.state_dict())


def test_the_personal_model_is_one_step_on_one_training_batch() -> None:
    """The most copied code adapts on test batches."""
    found = adapted(client_of(linear()))["1.weight"]
    x, y = samples()
    model = linear()
    moves = []
    # It is one of the batches of the training data, which the seed decides.
    order = torch.randperm(
        SAMPLES, generator=torch_generator(derive_seed(0, "client", "personalize", 1, 0), "personal")
    )
    rows = order[:4]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    (slope,) = torch.autograd.grad(loss, model[1].weight)  # type: ignore[index]
    torch.testing.assert_close(found, (model[1].weight - 0.5 * slope).detach(), rtol=1e-12, atol=1e-14)  # type: ignore[index]
    moves.append(found - linear().state_dict()["1.weight"])
    # Test data has no influence, and the rate has.
    other = adapted(client_of(linear(), test=samples(9, 99)))["1.weight"]
    assert torch.equal(found, other)
    smaller = adapted(client_of(linear()), alpha=0.25)["1.weight"]
    torch.testing.assert_close(smaller - linear().state_dict()["1.weight"], moves[0] / 2)


def test_the_number_of_steps_to_the_personal_model() -> None:
    initial = linear().state_dict()["1.weight"]
    by_steps = [adapted(client_of(linear()), personalize_steps=steps)["1.weight"] for steps in (1, 2, 8)]
    assert not torch.equal(by_steps[0], by_steps[1])
    # 30 samples are 8 batches of 4.
    assert torch.equal(adapted(client_of(linear()), personalize_epochs=1)["1.weight"], by_steps[2])
    assert not PerFedAvgConfig(personalize_steps=0).personalizes
    assert PerFedAvgConfig().personalizes
    assert torch.equal(adapted(client_of(linear()), personalize_steps=0)["1.weight"], initial)


@pytest.mark.parametrize("part", ["model", "head"])
def test_the_personal_model_has_the_global_statistics(part: str) -> None:
    client = client_of(normed())
    found = adapted(client, personalize_part=part)
    changed = {name for name, value in normed().state_dict().items() if not torch.equal(value, found[name])}
    # BatchNorm takes the bias before it away.
    weights = {name for name, _ in normed().named_parameters()} - {"1.bias"}
    assert changed - {"1.bias"} == (weights if part == "model" else {"4.weight", "4.bias"})


def test_dropout_is_the_same_on_both_sides_of_the_difference() -> None:
    """Its noise, divided by δ, would be hundreds of times the gradient."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES, dtype=torch.float64))
    with torch.no_grad():
        model[2].weight.copy_(linear().state_dict()["1.weight"])  # type: ignore[union-attr]
    first, hessian_free, smaller = (
        trained(client_of(model), alpha=0.5, learning_rate=0.2, **settings)[0]
        for settings in ({}, HESSIAN_FREE, {**HESSIAN_FREE, "delta": 1e-5})
    )
    np.testing.assert_allclose(hessian_free, smaller, atol=1e-7)
    assert 0 < np.abs(first - hessian_free).max() < 0.2


def test_weights_that_change_between_two_passes_count_in_bfloat16() -> None:
    """Autocast keeps copies of weights as long as it is open."""
    model = linear().float()
    near, far = (
        trained(client_of(model, precision="bfloat16"), alpha=alpha, learning_rate=0.5)[0]
        for alpha in (1e-9, 5.0)
    )
    assert np.abs(near - far).max() > 0.02


@pytest.mark.parametrize("name", ["per-fedavg", "per-fedavg-hf"])
def test_all_clients_are_measured_before_and_after_their_step(name: str) -> None:
    fed = Federation(name)
    _, result = fed.run(fraction_train=0.5)
    last = result.rounds[-1]
    assert sorted(last.clients) == [0, 1, 2, 3]
    model = small_model()
    model.load_state_dict({name: torch.from_numpy(value.numpy()) for name, value in result.arrays.items()})
    for client, measured in last.clients.items():
        test = blobs(8, 100 + client)
        with torch.no_grad():
            right = (model.eval()(test.x).argmax(dim=1) == test.y).float().mean()
        assert measured["local-accuracy-before"] == float(right)
    assert last.accuracy_before is not None
    assert result.rounds[0].accuracy_before is None
    # The step is not part of what is averaged.
    _, without = Federation(name).run(fraction_train=0.5, settings=["personalize-steps=0"])
    assert all(array.data == without.arrays[key].data for key, array in result.arrays.items())
    assert without.rounds[-1].accuracy_before is None


def test_both_versions_see_the_same_first_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {}
    for gradient in ("first-order", "hessian-free"):
        client = client_of(linear())
        seen[gradient] = []
        real = client.in_precision

        def in_precision(objective: Any, real: Any = real, kept: list[Tensor] = seen[gradient]) -> Any:
            return real(lambda x, y: (kept.append(x), objective(x, y))[1])

        monkeypatch.setattr(client, "in_precision", in_precision)
        trained(client, meta_gradient=gradient, personalize_steps=0)
    first, hessian_free = seen["first-order"], seen["hessian-free"]
    assert (len(first), len(hessian_free)) == (2, 4)
    assert all(torch.equal(a, b) for a, b in zip(first, hessian_free[:2], strict=True))
    assert torch.equal(hessian_free[2], hessian_free[3])
    assert not torch.equal(hessian_free[2], hessian_free[0])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer": "adam"}, "optimizer must be one of sgd, got 'adam'"),
        ({"momentum": 0.9}, "momentum must be 0, since the steps are those of plain SGD, got 0.9"),
        ({"alpha": 0.0}, "alpha must be > 0, got 0.0"),
        ({"delta": 0.0}, "delta must be > 0, got 0.0"),
        ({"learning_rate": 0.0}, "learning-rate must be > 0, got 0.0"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PerFedAvg(**settings)
