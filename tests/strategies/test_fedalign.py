"""FedAlign's client: its loss, where the gradient goes, running statistics, clipping, and degenerate cases."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import spectrum as oracle
import torch
from hybrid_rounds import CLASSES, FEATURES, data, equal, image_net, make_client
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.config import MethodConfig
from flwr_kd.learning.weights import get_weights
from flwr_kd.strategies.fedalign import FedAlignClient, FedAlignConfig, largest_singular_values
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing.federation import Federation, numbers

SHAPE = (3, 16, 16)
RATE = 0.05


def net(seed: int = 0, hidden: int = 8) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, block = nn.Linear(FEATURES, hidden), nn.Linear(hidden, hidden)
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), block, nn.ReLU(), nn.Linear(hidden, CLASSES))


def configured(**changes: Any) -> FedAlignConfig:
    values: dict[str, Any] = {"local_epochs": 1, "batch_size": 64, "learning_rate": RATE}
    return FedAlignConfig(**(values | changes))


def make(
    model: nn.Module | None = None, train: Any = None, kind: Any = FedAlignClient, **options: Any
) -> Any:
    return make_client(net() if model is None else model, train, kind, **options)


def task(config: MethodConfig, received: nn.Module, seed: int = 0) -> Task[Any]:
    return Task(
        1, "train", seed, (), [value.copy() for value in get_weights(received).values()], None, config
    )


def plain(config: FedAlignConfig) -> MethodConfig:
    return MethodConfig(**{name: getattr(config, name) for name in MethodConfig.field_types()})


def difference(model: nn.Sequential, x: Tensor, width: float = 0.25) -> float:
    """Return L_lip of a model with two hidden layers, by hand: its slim part has the first of 8 channels each."""
    inputs = F.relu(model[1](x.flatten(1)))
    outputs = F.relu(model[3](inputs))
    kept = -(-int(8 * width * 4) // 4)
    slim = F.relu(inputs[:, :kept] @ model[3].weight[:kept, :kept].T + model[3].bias[:kept])
    values = [
        [oracle.by_power_iterations(oracle.transmitting_matrix(a, b)) for a, b in zip(*pair, strict=True)]
        for pair in ((inputs[:, :kept].numpy(), slim.numpy()), (inputs.numpy(), outputs.numpy()))
    ]
    return oracle.lipschitz_difference(*values)


def gradients(client: Any, config: FedAlignConfig, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    client.model.train()
    client.model.zero_grad()
    loss = client.objective(Task(1, "train", 0, (), [], None, config))(x, y)
    loss.backward()
    return {name: p.grad.clone() for name, p in client.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize("width", [0.25, 0.5])
def test_the_loss_is_a_multiple_and_its_gradient_that_of_the_difference(size: int, width: float) -> None:
    """The value is (1 + μ)·CE. The slope along each weight of the block is CE' + μ · CE/L · L', by differences."""
    model, (x, y) = net(), data(3, size)
    client, config = make(model), configured(align_width=width, align_mu=0.45)
    with torch.no_grad():
        cross_entropy, whole = F.cross_entropy(model(x), y).item(), difference(model, x, width)
    assert whole > 1e-6
    loss = client.objective(Task(1, "train", 0, (), [], None, config))(x, y)
    assert loss.item() == pytest.approx(1.45 * cross_entropy, rel=1e-5)
    actual = gradients(client, config, x, y)["3.weight"]
    alone = gradients(client, configured(align_mu=0.0), x, y)["3.weight"]
    # Only the student moves with the block: the teacher is what it was.
    slopes = torch.zeros(8, 8, dtype=torch.float64)
    wide = copy.deepcopy(model).double()
    inputs = F.relu(wide[1](x.double().flatten(1))).detach()
    teacher = largest_singular_values(inputs, F.relu(wide[3](inputs)).detach())
    kept = int(8 * width)

    def lipschitz(weight: Tensor) -> float:
        slim = F.relu(inputs[:, :kept] @ weight[:kept, :kept].T + wide[3].bias[:kept]).detach()
        student = largest_singular_values(inputs[:, :kept], slim)
        return oracle.lipschitz_difference(student.tolist(), teacher.tolist())

    for i in range(8):
        for j in range(8):
            up, down = wide[3].weight.detach().clone(), wide[3].weight.detach().clone()
            up[i, j] += 1e-6
            down[i, j] -= 1e-6
            slopes[i, j] = (lipschitz(up) - lipschitz(down)) / 2e-6
    expected = alone.double() + 0.45 * cross_entropy / whole * slopes
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(actual, alone, atol=1e-4)


@pytest.mark.parametrize(("name", "block"), [("resnet8", "stage3"), ("shufflenet", "conv5"), ("cnn", "7")])
def test_the_alignment_reaches_the_last_block_only(name: str, block: str) -> None:
    x, y = data(1, 4, SHAPE)
    client = make(image_net(name), TensorDataset(x, y))
    with_term = gradients(client, configured(), x, y)
    without = gradients(client, configured(align_mu=0.0), x, y)
    moved = {
        key for key in with_term if not torch.allclose(with_term[key], without[key], rtol=1e-4, atol=1e-7)
    }
    inside = {key for key in with_term if f".{block}." in key}
    assert moved
    assert moved <= inside < set(with_term)
    # Of the block's convolutions and layers, the first channels only.
    for key in moved:
        kept = -(-len(with_term[key]) // 4)
        torch.testing.assert_close(with_term[key][kept:], without[key][kept:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet8", "shufflenet"])
@pytest.mark.parametrize("width", [0.25, 1.0])
def test_running_statistics_are_those_of_the_full_width(name: str, width: float) -> None:
    """One batch of FedAlign leaves those of one batch of plain training."""
    train = TensorDataset(*data(0, 8, SHAPE))
    config = configured(align_width=width)
    ours, fedavg = (
        dict(
            zip(
                get_weights(image_net(name)),
                make(image_net(name), train, kind).phase_train(task(each, image_net(name))).arrays,
                strict=True,
            )
        )
        for kind, each in ((FedAlignClient, config), (FedAvgClient, plain(config)))
    )
    running = [key for key in ours if "running" in key or "num_batches" in key]
    assert running
    assert all(np.array_equal(ours[key], fedavg[key]) for key in running)


def test_at_full_width_there_is_nothing_to_align() -> None:
    """Student and teacher are the same: L < 1e-12, and the loss is the cross-entropy alone."""
    model, (x, y) = net(), data(3, 9)
    client = make(model)
    loss = client.objective(Task(1, "train", 0, (), [], None, configured(align_width=1.0)))(x, y)
    assert loss.item() == pytest.approx(F.cross_entropy(model(x), y).item())
    ours = gradients(client, configured(align_width=1.0), x, y)
    plainly = gradients(client, configured(align_mu=0.0), x, y)
    assert all(torch.equal(ours[key], plainly[key]) for key in plainly)


@pytest.mark.parametrize("dead", ["inputs", "outputs", "slim part"])
def test_maps_of_zeros_leave_the_cross_entropy(dead: str) -> None:
    model, (x, y) = net(), data(3, 9)
    with torch.no_grad():
        rows = slice(0, 2) if dead == "slim part" else slice(None)
        layer = model[1] if dead == "inputs" else model[3]
        layer.weight[rows], layer.bias[rows] = 0.0, -1.0
    client = make(model)
    ours = gradients(client, configured(), x, y)
    plainly = gradients(client, configured(align_mu=0.0), x, y)
    assert all(torch.isfinite(slope).all() for slope in ours.values())
    assert all(torch.equal(ours[key], plainly[key]) for key in plainly)
    assert np.isfinite(client.phase_train(task(configured(local_epochs=3), model)).metrics["train-loss"])


def test_one_clip_on_the_summed_gradients() -> None:
    """All gradients together are scaled to the norm of 10, those of the alignment with them."""
    model, (x, y) = net(), data(0, 9)
    with torch.no_grad():
        # Large inputs, and with them large gradients.
        x *= 1000
    client = make(model, TensorDataset(x, y))
    slopes = gradients(client, configured(), x, y)
    norm = float(torch.stack([slope.norm() for slope in slopes.values()]).norm())
    assert norm > 20
    config = configured(momentum=0.0, weight_decay=0.0, learning_rate=1e-3)
    moved = dict(zip(get_weights(model), client.phase_train(task(config, model)).arrays, strict=True))
    for name, slope in slopes.items():
        before = get_weights(model)[name]
        np.testing.assert_allclose(
            before - moved[name], 1e-3 * 10 / norm * slope.numpy(), rtol=1e-3, atol=1e-6
        )
    # Short gradients are left as they are.
    client = make(model, TensorDataset(*data(0, 9)))
    slopes = gradients(client, configured(), *data(0, 9))
    moved = dict(zip(get_weights(model), client.phase_train(task(config, model)).arrays, strict=True))
    for name, slope in slopes.items():
        np.testing.assert_allclose(get_weights(model)[name] - moved[name], 1e-3 * slope, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_sgd_with_nesterovs_momentum(nesterov: bool) -> None:
    config = configured(align_mu=0.0, local_epochs=4, nesterov=nesterov)
    model, (x, y) = net(), data(0, 9)
    moved = make(model, TensorDataset(x, y)).phase_train(task(config, model)).arrays
    options = {"lr": RATE, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": nesterov}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for actual, expected in zip(moved, model.parameters(), strict=True):
        np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"optimizer": "adam"}, {"momentum": 0.0}])
def test_other_optimisers_have_no_nesterov(changes: dict[str, Any]) -> None:
    make().phase_train(task(configured(**changes), net()))


def test_momentum_does_not_pass_from_one_training_to_the_next() -> None:
    client, fresh = make(), make()
    client.phase_train(task(configured(local_epochs=3), net(1)))
    again = client.phase_train(task(configured(local_epochs=3), net(2), seed=5))
    assert equal(again.arrays, fresh.phase_train(task(configured(local_epochs=3), net(2), seed=5)).arrays)


def test_without_weight_it_is_fedavg_to_the_bit() -> None:
    config = configured(align_mu=0.0, nesterov=False, clip_norm=1e9, local_epochs=3, batch_size=4)
    ours = make().phase_train(task(config, net(1)))
    fedavg = make(kind=FedAvgClient).phase_train(task(plain(config), net(1)))
    assert equal(ours.arrays, fedavg.arrays)
    assert ours.metrics == fedavg.metrics


def test_accuracy_is_that_of_the_test_data() -> None:
    test = TensorDataset(*data(7, 40))
    client = make(test_set=test)
    answer = client.phase_train(task(configured(), net(1)))
    model = net()
    model.load_state_dict(dict(zip(get_weights(model), map(torch.from_numpy, answer.arrays), strict=True)))
    right = (model(test.tensors[0]).argmax(dim=1) == test.tensors[1]).float().mean().item()
    assert answer.metrics["local-accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_bfloat16_trains(name: str) -> None:
    train = TensorDataset(*data(0, 8, SHAPE))
    client = make(image_net(name), train, precision="bfloat16")
    answer = client.phase_train(task(configured(local_epochs=3), image_net(name)))
    assert all(np.isfinite(value).all() for value in answer.arrays)
    whole = make(image_net(name), train).phase_train(task(configured(local_epochs=3), image_net(name)))
    assert answer.metrics["train-loss"] == pytest.approx(whole.metrics["train-loss"], rel=0.1)


def test_the_full_network_is_what_it_was() -> None:
    model, x = image_net("shufflenet"), data(0, 4, SHAPE)[0]
    expected, names = model.eval()(x), list(model.state_dict())
    client = make(model, TensorDataset(*data(0, 4, SHAPE)))
    assert torch.equal(client.model.eval()(x), expected)
    assert list(client.model.state_dict()) == names


def test_a_model_without_a_block_is_refused_before_work_starts() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    with pytest.raises(ConfigError, match="no layer with a weight matrix below its last one"):
        make(model)


def test_rounds() -> None:
    _, ours = Federation("fedalign").run(rounds=2, settings=["align-mu=0"])
    _, aligned = Federation("fedalign").run(rounds=2, settings=["personalize-epochs=1"])
    assert numbers(ours)[-1] != numbers(aligned)[-1]
    assert all("local-accuracy-before" in reported for reported in aligned.rounds[-1].clients.values())


@pytest.mark.parametrize(
    ("name", "value"), [("align_mu", -1.0), ("align_width", 0.0), ("align_width", 1.5), ("clip_norm", 0.0)]
)
def test_hyper_parameters_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        FedAlignConfig(**{name: value})


def test_defaults() -> None:
    config = FedAlignConfig()
    assert (config.align_mu, config.align_width, config.clip_norm) == (0.45, 0.25, 10.0)
    assert (config.optimizer, config.learning_rate, config.momentum) == ("sgd", 0.01, 0.9)
    assert (config.nesterov, config.weight_decay) == (True, 1e-4)
