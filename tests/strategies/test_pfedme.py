"""pFedMe: the personal model against the closed-form prox, what is measured, and what public code gets wrong."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from tensors import normal
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.personal_state import PersonalState
from flwr_kd.learning.weights import buffer_names
from flwr_kd.server.records import Node, Reply
from flwr_kd.strategies.pfedme import PFedMe, PFedMeClient, PFedMeConfig, client, follow, mixed
from flwr_kd.testing.federation import Federation, blobs, small_model
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.template import ArrayTemplate

SAMPLES, WIDTH, CLASSES = 24, 5, 3
LAMBDA = 2.0


def samples(count: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % CLASSES
    x = torch.randn(count, WIDTH, generator=draw, dtype=torch.float64)
    x[:, 0] += y
    return x, y


def linear() -> nn.Module:
    model = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(normal(CLASSES, WIDTH, seed=4))
    return nn.Sequential(nn.Flatten(), model)


def client_of(model: nn.Module) -> PFedMeClient:
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    x, y = samples()
    return PFedMeClient(model, TensorDataset(x, y), TensorDataset(*samples(999, 5)), context=context)


def message(config: PFedMeConfig, phase: str = "train", **more: Any) -> dict[str, Any]:
    return {**config.to_wire(), "server-round": 1, "phase": phase, "seed": 0, **more}


def config_of(**settings: Any) -> PFedMeConfig:
    # All samples in one batch, so that their order does not matter.
    usual: dict[str, Any] = {"batch_size": SAMPLES, "proximal_lambda": LAMBDA}
    return PFedMeConfig(**{**usual, **settings})


def trained(one: PFedMeClient, **settings: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Return w_i as it is sent, θ_i as it is kept, and the metrics."""
    start = [value.numpy().copy() for value in one.model.state_dict().values()]
    arrays, count, metrics = one.fit(start, message(config_of(**settings)))
    assert count == SAMPLES
    kept = one.state.load()
    assert kept is not None
    return dict(zip(one.model.state_dict(), arrays, strict=True)), kept, metrics


def accuracy(model: nn.Module, state: dict[str, Any]) -> float:
    model.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    x, y = samples(999, 5)
    with torch.no_grad():
        return float((model.eval()(x).argmax(dim=1) == y).double().mean())


def test_theta_is_the_prox_of_a_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of f(θ) = ‖Xθᵀ - Y‖² / 2N it is (XᵀX/N + λI)⁻¹ (XᵀY/N + λw), and w_i goes a share ηλ of the way."""

    def squares(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - nn.functional.one_hot(y, CLASSES)).square().sum() / (2 * len(y))

    monkeypatch.setattr(client, "label_loss", squares)
    rates = {"learning_rate": 0.1, "personal_learning_rate": 0.3}
    w_i, theta, _ = trained(client_of(linear()), local_steps=1, inner_steps=400, **rates)
    x, y = samples()
    w = linear().state_dict()["1.weight"]
    gram, cross = x.T @ x / SAMPLES, x.T @ nn.functional.one_hot(y, CLASSES).double() / SAMPLES
    prox = torch.linalg.solve(gram + LAMBDA * torch.eye(WIDTH).double(), cross + LAMBDA * w.T).T
    torch.testing.assert_close(theta["1.weight"], prox, rtol=1e-9, atol=1e-12)
    expected = w - 0.1 * LAMBDA * (w - prox)
    torch.testing.assert_close(torch.from_numpy(w_i["1.weight"]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_steps_by_hand(decay: float) -> None:
    """θ goes on from the step before, and w_i follows after each batch."""
    rates = {"learning_rate": 0.1, "personal_learning_rate": 0.2, "weight_decay": decay}
    w_i, theta, _ = trained(client_of(linear()), local_steps=3, inner_steps=2, **rates)
    x, y = (value.numpy() for value in samples())
    own = linear().state_dict()["1.weight"].numpy().copy()
    personal = own.copy()
    for _ in range(3):
        for _ in range(2):
            p = np.exp(x @ personal.T)
            p = p / p.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]
            slope = p.T @ x / SAMPLES + decay * personal + LAMBDA * (personal - own)
            personal = personal - 0.2 * slope
        own = own - 0.1 * LAMBDA * (own - personal)
    np.testing.assert_allclose(theta["1.weight"], personal, rtol=1e-10)
    np.testing.assert_allclose(w_i["1.weight"], own, rtol=1e-10)


def test_theta_is_what_is_measured_and_neither_of_the_others() -> None:
    """The authors' class reports w_i as θ_i, by aliased parameters; other code measures the global model."""
    one, model = client_of(linear()), linear()
    w_i, theta, metrics = trained(one, personal_learning_rate=0.3)
    of_theta, of_own, of_global = (accuracy(model, state) for state in (theta, w_i, linear().state_dict()))
    assert len({of_theta, of_own, of_global}) == 3
    assert metrics["local-accuracy"] == of_theta
    # What is kept is a copy: the model that was sent is another one, and changes of it do not reach θ.
    before = copy.deepcopy(theta)
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.zero_()
    assert torch.equal(one.state.load()["1.weight"], before["1.weight"])  # type: ignore[index]
    # The next measurement is of θ; the evaluation of the global model is of that one.
    arrays = [value.numpy() for value in linear().state_dict().values()]
    for phase, expected in (
        ("measure", {"local-accuracy": of_theta, "stored-model": 1.0}),
        ("evaluate", None),
    ):
        _, _, found = one.evaluate(arrays, message(config_of(), phase))
        assert found == ({"accuracy": of_global} if expected is None else expected)


def test_a_client_that_was_never_drawn_is_measured_with_the_global_model() -> None:
    one = client_of(linear())
    arrays = [value.numpy() for value in linear().state_dict().values()]
    _, _, found = one.evaluate(arrays, message(config_of(), "measure"))
    assert found == {"local-accuracy": accuracy(linear(), linear().state_dict()), "stored-model": 0.0}


def test_all_clients_are_measured_after_the_last_round() -> None:
    fed = Federation("pfedme", clients=6)
    grid = InlineGrid(fed.app(), fed.clients)
    strategy = fed.strategy(fraction_train=1 / 3, seed=3)
    drawn: list[set[int]] = []
    real = strategy.select

    def select(*args: Any) -> list[Node]:
        nodes = real(*args)
        drawn.append({node.key for node in nodes})
        return nodes

    strategy.select = select  # type: ignore[method-assign]
    result = strategy.start(grid, fed.initial(), num_rounds=2)
    assert len(drawn[0] | drawn[1]) == 4
    assert len(drawn[1]) == 2
    last = result.rounds[-1]
    assert sorted(last.clients) == list(range(6))
    assert set(last.stored) == drawn[0] - drawn[1]
    assert set(last.received) == set(range(6)) - drawn[0] - drawn[1]
    model = small_model()
    for context in grid.contexts.values():
        index = int(context.node_config["partition-id"])
        state: Any = PersonalState(context).load()
        assert (state is None) == (index in last.received)
        model.load_state_dict(state or result.arrays.to_torch_state_dict())
        test = blobs(8, 100 + index)
        with torch.no_grad():
            right = (model.eval()(test.x).argmax(dim=1) == test.y).float().mean()
        assert last.clients[index]["local-accuracy"] == float(right)


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers).double()


def test_theta_is_kept_with_its_buffers() -> None:
    w_i, theta, _ = trained(client_of(normed()), local_steps=2, inner_steps=3)
    buffers = buffer_names(normed())
    assert buffers == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    for name, value in theta.items():
        if name == "1.bias":
            # BatchNorm takes it away: its gradient is 0.
            continue
        same = np.array_equal(w_i[name], value.numpy())
        assert same == (name in buffers), name
    assert theta["2.num_batches_tracked"] == 6


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"local_steps": 4}, [8] * 4),
        ({"local_epochs": 2}, [8] * 6),
        ({"local_steps": 1, "batch_size": 99}, [24]),
    ],
)
def test_a_batch_is_used_for_all_inner_steps(
    settings: dict[str, Any], batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = client_of(linear())
    seen: list[Tensor] = []
    real = one.in_precision

    def in_precision(objective: Any) -> Any:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            seen.append(x)
            return objective(x, y)  # type: ignore[no-any-return]

        return real(loss)

    monkeypatch.setattr(one, "in_precision", in_precision)
    trained(one, **{"batch_size": 8, "inner_steps": 3, **settings})
    assert [len(x) for x in seen[::3]] == batches
    assert len(seen) == 3 * len(batches)
    assert all(torch.equal(seen[i], seen[i - i % 3]) for i in range(len(seen)))
    assert all(not torch.equal(a, b) for a, b in zip(seen[::3], seen[3::3], strict=False))


def test_a_theta_that_is_not_finite_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = client_of(linear())
    _, before, _ = trained(one)

    def steep(outputs: Tensor, y: Tensor) -> Tensor:
        return (1e200 * outputs).square().sum().clamp(max=1.0) + 1e308 * outputs.sum()

    monkeypatch.setattr(client, "label_loss", steep)
    with pytest.raises(FloatingPointError):
        trained(one)
    assert torch.equal(one.state.load()["1.weight"], before["1.weight"])  # type: ignore[index]


# ---------------------------------------------------------------------- server


def replies(template: ArrayTemplate, count: int = 3) -> list[Reply[Any]]:
    made = []
    for i in range(count):
        node = Node(i, partition_id=i, template=template)
        arrays = [np.float32([1.0 + i, -2.0]), np.float32([0.5 * (1 + i)]), np.array(10 * i)]
        made.append(Reply(node, arrays, 10 * (i + 1), {}))
    return made


def aggregated(**settings: Any) -> dict[str, Any]:
    old = ArrayRecord({"w": normal(2, seed=1).float(), "v": torch.tensor([4.0]), "n": torch.tensor(7)})
    strategy = PFedMe(**settings)
    strategy.template = ArrayTemplate.of(old)
    template = ArrayTemplate(("w", "v", "n"), buffers=("v", "n"))
    new = strategy.aggregate_phase("train", 1, iter(replies(template)), old)
    assert new is not None
    return {name: value.numpy() for name, value in new.items()}


@pytest.mark.parametrize(("weighting", "mean"), [("samples", 7 / 3), ("uniform", 2.0)])
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_beta_is_for_parameters_alone(beta: float, weighting: str, mean: float) -> None:
    found = aggregated(beta=beta, weighting=weighting)
    old = normal(2, seed=1).float().numpy()
    np.testing.assert_allclose(found["w"], (1 - beta) * old + beta * np.array([mean, -2.0]), rtol=1e-6)
    np.testing.assert_allclose(found["v"], [mean / 2], rtol=1e-6)
    assert found["n"] == round(10 * (mean - 1))
    assert [found[name].dtype for name in ("w", "v", "n")] == [np.float32, np.float32, np.int64]


def test_by_default_the_new_global_model_is_the_clients_mean() -> None:
    """With a β of 0, a default in public code, it would stay the initial one."""
    np.testing.assert_allclose(aggregated()["w"], [7 / 3, -2.0], rtol=1e-6)


def test_a_lone_client_does_not_decide_what_is_a_buffer() -> None:
    old = ArrayRecord({"w": torch.zeros(2), "v": torch.zeros(1), "n": torch.tensor(0)})
    strategy = PFedMe(beta=2.0)
    strategy.template = ArrayTemplate.of(old)
    honest, liar = (ArrayTemplate(("w", "v", "n"), buffers=names) for names in (("v", "n"), ("w",)))
    made = [*replies(liar, 1), *replies(honest)[1:]]
    new = strategy.aggregate_phase("train", 1, iter(made), old)
    assert new is not None
    assert new["w"].numpy()[1] == -4.0


def test_the_handshake_names_buffers() -> None:
    for model, expected in ((normed(), buffer_names(normed())), (linear(), [])):
        text = client_of(model).get_properties({})["arrays"]
        template = ArrayTemplate.from_json(text)
        assert list(template.buffers) == expected
        assert template.not_finite == ()
        assert ArrayTemplate.from_json(template.to_json()).buffers == template.buffers
    # As a client of an earlier version writes it.
    assert ArrayTemplate.from_json('[["w"], ["float32"], [[2]], ["w"]]').buffers == ()


def test_variances_stay_those_of_the_clients_in_a_federation() -> None:
    """A step beyond the mean, β > 1, could make them negative."""
    fed = Federation("pfedme")
    fed.models = ["resnet8"] * 4
    initial = ArrayRecord(small_model("resnet8").state_dict())
    fed.initial = lambda: initial  # type: ignore[method-assign]
    found = {}
    for beta in (1, 3):
        _, result = fed.run(rounds=1, settings=[f"beta={beta}"])
        found[beta] = {name: value.numpy() for name, value in result.arrays.items()}
    buffers = set(buffer_names(small_model("resnet8")))
    assert buffers
    for name, value in found[1].items():
        start = initial[name].numpy()
        if name in buffers:
            assert np.array_equal(value, found[3][name])
        else:
            np.testing.assert_allclose(found[3][name] - start, 3 * (value - start), rtol=1e-3, atol=1e-5)


def test_the_mean_is_reached_with_beta_one_and_left_with_zero_rate() -> None:
    old, mean = {"w": np.float32([1.0, 3.0])}, {"w": np.float32([2.0, -1.0])}
    assert np.array_equal(mixed(old, mean, 1.0, buffers=())["w"], mean["w"])
    own = [torch.tensor([1.0, 2.0])]
    follow(own, [torch.tensor([5.0, 5.0])], 1.0)
    assert own[0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"personal_learning_rate": 0.2, "proximal_lambda": 15.0},
            "personal-learning-rate times proximal-lambda must be < 2, or the steps diverge; "
            "got 0.2 times 15, which is 3: reduce one of them",
        ),
        (
            {"learning_rate": 0.5, "proximal_lambda": 4.0, "personal_learning_rate": 0.1},
            "learning-rate times proximal-lambda must be < 2, or the steps diverge; "
            "got 0.5 times 4, which is 2: reduce one of them",
        ),
        ({"optimizer": "adam"}, "optimizer must be one of sgd, got 'adam'"),
        ({"momentum": 0.9}, "momentum must be 0, since the steps are those of plain SGD, got 0.9"),
        ({"beta": 0.0}, "beta must be > 0, got 0.0"),
        ({"proximal_lambda": 0.0}, "proximal-lambda must be > 0, got 0.0"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        PFedMe(**settings)


def test_rates_below_the_bound_are_taken() -> None:
    assert PFedMe(personal_learning_rate=0.49, proximal_lambda=4.0).config.personal_learning_rate == 0.49
