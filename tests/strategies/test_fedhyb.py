"""FedHyb against its oracle: equations, clients, whole rounds, the server, and the generator of FedHyb*."""

from __future__ import annotations

import doctest
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hybrid as oracle
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from hybrid import Net
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Task
from flwr_kd.config import MethodConfig
from flwr_kd.distillation.teachers import ensemble_means
from flwr_kd.learning.weights import get_weights, load_weights
from flwr_kd.models import build_generator, build_model
from flwr_kd.server.records import Node, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.strategies.fedhyb import (
    FedHyb,
    FedHybClient,
    FedHybConfig,
    FedHybSelf,
    FedHybStar,
    ensemble_distillation_loss,
    self_distillation_loss,
    sub_network_weight,
    synthesis,
    synthesise,
    train_generator,
)
from flwr_kd.strategies.fedhyb import client as client_module
from flwr_kd.strategies.fedhyb import strategy as strategy_module
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.template import ArrayTemplate

CLASSES, SHAPE, FEATURES, HIDDEN = 3, (1, 2, 4), 8, 6
CPU = torch.device("cpu")
repeatable = settings(max_examples=60, deadline=None, derandomize=True)
Arrays = dict[str, np.ndarray]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(
    index: int, size: int, shape: Sequence[int] = SHAPE, classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    draw = generator(index)
    y = torch.randint(classes, (size,), generator=draw)
    x = torch.randn(size, *shape, generator=draw)
    return x + y.view(-1, *[1] * len(shape)), y


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
        return nn.Sequential(*layers)


def image_net(name: str, seed: int = 0) -> nn.Module:
    return build_model(name, input_shape=(3, 16, 16), num_classes=CLASSES, seed=seed)


def jittered(name: str, seed: int) -> Arrays:
    """Return an image model's weights with running statistics that are not what they were at first."""
    rng = np.random.default_rng(seed)
    weights = get_weights(image_net(name, seed=seed))
    for key, value in weights.items():
        if key.endswith("running_mean"):
            weights[key] = rng.normal(scale=0.2, size=value.shape).astype(np.float32)
        if key.endswith("running_var"):
            weights[key] = rng.uniform(0.5, 2.0, size=value.shape).astype(np.float32)
        if key.endswith("num_batches_tracked"):
            weights[key] = np.array(10 * seed + 4)
    return weights


def to_oracle(arrays: Any) -> Net:
    values = {
        name: value if isinstance(value, np.ndarray) else value.numpy() for name, value in arrays.items()
    }
    return oracle.net(*(values[name] for name in ("1.weight", "1.bias", "3.weight", "3.bias")))


def close(a: Net, b: Net, atol: float = 1e-5) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 40
    assert results.failed == 0


# ---------------------------------------------------------------------- equations 3 to 5


def tensors(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def check_client_loss(
    logits: np.ndarray,
    subs: Sequence[np.ndarray],
    y: np.ndarray,
    a: float,
    atol: float = 1e-9,
    **options: bool,
) -> None:
    own, others = tensors(logits), [tensors(sub) for sub in subs]
    renamed = {"dynamic_weighting": options.get("dynamic", True)}
    renamed |= {name: value for name, value in options.items() if name != "dynamic"}
    value = self_distillation_loss(own, torch.from_numpy(y), others, weight=a, **renamed)
    value.backward()
    expected = oracle.client_loss(logits, subs, y, a, dynamic=options.get("dynamic", True))
    np.testing.assert_allclose(value.item(), expected, rtol=1e-9, atol=atol)
    slopes = oracle.client_gradients(logits, subs, y, a, **options)
    for found, slope in zip([own, *others], [slopes[0], *slopes[1]], strict=True):
        gradient = torch.zeros_like(found) if found.grad is None else found.grad
        np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-8, atol=atol)


class TestClientLoss:
    @repeatable
    @given(
        st.integers(1, 4), st.integers(2, 5), st.integers(0, 3), st.sampled_from([0.1, 1.0, 8.0]),
        st.sampled_from([0.0, 0.3, 1.0, 20.0]), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99),
    )  # fmt: skip
    def test_values_and_gradients(
        self, rows: int, classes: int, subs: int, scale: float, a: float,
        dynamic: bool, detach_target: bool, detach_weight: bool, seed: int,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        logits, *others = rng.normal(scale=scale, size=(1 + subs, rows, classes))
        y = rng.integers(classes, size=rows)
        options = {"dynamic": dynamic, "detach_target": detach_target, "detach_weight": detach_weight}
        check_client_loss(logits, others, y, a, **options)

    @pytest.mark.parametrize("detach_target", [True, False])
    @pytest.mark.parametrize("detach_weight", [True, False])
    @pytest.mark.parametrize("size", [50.0, 300.0, 1000.0])
    def test_extreme_logits(self, size: float, detach_target: bool, detach_weight: bool) -> None:
        """Where a probability is 0 in floating point, p log p and its gradient are 0."""
        logits = np.array([[size, 0.0, -size], [0.0, 1.0, size]])
        subs = [np.array([[1.0, 0.0, 0.5], [-1.0, 1.0, 2.0]]), np.array([[3.0, 0.0, 2.0], [0.0, 0.0, 0.0]])]
        y = np.array([0, 2])
        options = {"detach_target": detach_target, "detach_weight": detach_weight}
        check_client_loss(logits, subs, y, 1.0, **options)

    def test_wrong_and_extreme_sub_networks(self) -> None:
        logits, subs = np.array([[1.0, 0.0], [0.0, 2.0]]), [np.array([[-900.0, 0.0], [0.0, 0.0]])]
        check_client_loss(logits, subs, np.array([0, 1]), 1.0)
        check_client_loss(logits, subs, np.array([0, 1]), 1.0, detach_weight=False)

    @pytest.mark.parametrize("scale", [0.0, 1.0, 40.0, 500.0])
    def test_the_weight(self, scale: float) -> None:
        rng = np.random.default_rng(0)
        logits, y = rng.normal(scale=scale, size=(4, 3)), rng.integers(3, size=4)
        found = sub_network_weight(tensors(logits), torch.from_numpy(y))
        expected = oracle.beta(oracle.cross_entropy(logits, y))
        np.testing.assert_allclose(found.item(), expected, rtol=1e-9, atol=1e-300)
        assert 0 <= found.item() <= 0.5
        own = tensors(logits)
        sub_network_weight(own, torch.from_numpy(y)).backward()
        slope = oracle.gradient(lambda u: oracle.beta(oracle.cross_entropy(u, y)), logits)
        assert own.grad is not None
        np.testing.assert_allclose(own.grad.numpy(), slope, rtol=1e-9, atol=1e-12)

    def test_a_better_sub_network_counts_more(self) -> None:
        y = torch.tensor([0])
        right, wrong = torch.tensor([[2.0, 0.0]]), torch.tensor([[-2.0, 0.0]])
        assert sub_network_weight(right, y) > sub_network_weight(wrong, y)
        assert sub_network_weight(torch.tensor([[99.0, 0.0]]), y) == 0.5

    @pytest.mark.parametrize("weight", [-0.1, float("nan")])
    def test_weights_refused(self, weight: float) -> None:
        with pytest.raises(ValueError, match="weight must be at least 0"):
            self_distillation_loss(torch.zeros(2, 3), torch.zeros(2).long(), [], weight=weight)

    @pytest.mark.parametrize(
        ("logits", "labels", "sub"), [((2, 3), (3,), (2, 3)), ((3,), (3,), (3,)), ((2, 3), (2,), (2, 4))]
    )
    @pytest.mark.parametrize("dynamic", [True, False])
    def test_shapes_refused(self, logits: Any, labels: Any, sub: Any, dynamic: bool) -> None:
        y = torch.zeros(labels, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"\[B, C\]|\[N, C\]"):
            self_distillation_loss(
                torch.zeros(logits), y, [torch.zeros(sub)], weight=1.0, dynamic_weighting=dynamic
            )


# ---------------------------------------------------------------------- equations 6 to 8


class TestServerLoss:
    @repeatable
    @given(
        st.integers(1, 4), st.integers(2, 5), st.integers(1, 5), st.sampled_from([0.1, 1.0, 30.0, 400.0]),
        st.sampled_from([0.0, 0.5, 10.0]), st.sampled_from([0.0, 0.5, 3.0]), st.integers(0, 99),
    )  # fmt: skip
    def test_values_and_gradients(
        self, rows: int, classes: int, dim: int, scale: float, eta: float, nu: float, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        logits, of_target = rng.normal(scale=scale, size=(2, rows, classes))
        features, h = rng.normal(scale=scale, size=(2, rows, dim))
        q = oracle.softmax(of_target)
        found, own, target_q, target_h = tensors(logits), tensors(features), tensors(q), tensors(h)
        value = ensemble_distillation_loss(
            found, own, target_q, target_h, logits_weight=eta, feature_weight=nu
        )
        value.backward()
        expected = oracle.server_loss(q, h, logits, features, eta, nu)
        np.testing.assert_allclose(value.item(), expected, rtol=1e-9, atol=1e-9)
        assert target_q.grad is None
        assert target_h.grad is None
        assert found.grad is not None
        assert own.grad is not None
        slope = oracle.gradient(lambda u: oracle.server_loss(q, h, u, features, eta, nu), logits)
        np.testing.assert_allclose(found.grad.numpy(), slope, rtol=1e-8, atol=1e-9)
        slope = oracle.gradient(lambda f: oracle.server_loss(q, h, logits, f, eta, nu), features)
        np.testing.assert_allclose(own.grad.numpy(), slope, rtol=1e-8, atol=1e-9)

    @pytest.mark.parametrize(("eta", "nu"), [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
    def test_weights_refused(self, eta: float, nu: float) -> None:
        h, q = torch.zeros(2, 3), torch.full((2, 3), 1 / 3)
        with pytest.raises(ValueError, match="weights must be at least 0"):
            ensemble_distillation_loss(h, h, q, h, logits_weight=eta, feature_weight=nu)

    @pytest.mark.parametrize(
        ("features", "targets", "q"),
        [((2, 4), (2, 3), (2, 3)), ((4,), (4,), (2, 3)), ((2, 4), (2, 4), (2, 2))],
    )
    def test_shapes_refused(self, features: Any, targets: Any, q: Any) -> None:
        with pytest.raises(ValueError, match=r"\[N, C\]|\[B, D\]"):
            ensemble_distillation_loss(
                torch.zeros(2, 3), torch.zeros(features), torch.full(q, 0.5), torch.zeros(targets),
                logits_weight=1.0, feature_weight=1.0,
            )  # fmt: skip


# ---------------------------------------------------------------------- clients


def make_client(
    model: nn.Module, train: Any = None, kind: type[KDClient] = FedHybClient, **options: Any
) -> Any:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    train = TensorDataset(*data(0, 9)) if train is None else train
    return kind(model, train, context=context, device="cpu", **options)


def configured(**changes: Any) -> FedHybConfig:
    values: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.3, "local_epochs": 2, "batch_size": 64}
    return FedHybConfig(**(values | changes))


def trained(
    model: nn.Module,
    config: MethodConfig,
    train: Any = None,
    kind: type[KDClient] = FedHybClient,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], float]:
    """Train from the model's own weights; return arrays and loss."""
    client = make_client(model, train, kind)
    arrays = [value.copy() for value in get_weights(model).values()]
    answer = client.phase_train(Task(1, "train", seed, (), arrays, None, config))
    return dict(zip(get_weights(model), answer.arrays, strict=True)), answer.metrics["train-loss"]


def plain(config: FedHybConfig) -> MethodConfig:
    """Return what FedAvg takes of a config."""
    return MethodConfig(**{name: getattr(config, name) for name in MethodConfig.field_types()})


class Passes:
    """Widths, inputs and logits of all passes through a client's model, in turn."""

    def __init__(self, client: FedHybClient) -> None:
        self.widths: list[float] = []
        self.inputs: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.training: list[bool] = []
        layers = [m for m in client.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        layers[0].register_forward_pre_hook(self._enter)
        layers[-1].register_forward_hook(lambda _, args, out: self.logits.append(out))

    def _enter(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.widths.append(float(layer.width))  # type: ignore[arg-type]
        self.inputs.append(args[0].detach().clone())
        self.training.append(layer.training)


def widths_of(model: nn.Module) -> set[float]:
    return {float(m.width) for m in model.modules() if hasattr(m, "width")}  # type: ignore[arg-type]


class TestClient:
    @pytest.mark.parametrize("options", [
        {}, {"dynamic_weighting": False}, {"detach_target": False}, {"detach_weight": False},
        {"sub_networks": 1, "self_weight": 3.0}, {"sub_networks": 4},
    ])  # fmt: skip
    def test_the_objective_is_equation_5_of_its_passes(self, options: dict[str, Any]) -> None:
        config = configured(**options)
        client = make_client(net())
        passes = Passes(client)
        loss = client.objective(Task(1, "train", 0, (), [], None, config))
        x, y = data(3, 7)
        value = loss(x, y)
        assert len(passes.widths) == 1 + config.sub_networks
        logits = [u.detach().numpy() for u in passes.logits]
        expected = oracle.client_loss(
            logits[0], logits[1:], y.numpy(), config.self_weight, dynamic=config.dynamic_weighting
        )
        np.testing.assert_allclose(value.item(), expected, rtol=1e-5)
        slopes = torch.autograd.grad(value, passes.logits)
        detached = {"detach_target": config.detach_target, "detach_weight": config.detach_weight}
        own, others = oracle.client_gradients(
            logits[0], logits[1:], y.numpy(), config.self_weight, dynamic=config.dynamic_weighting, **detached
        )
        for found, slope in zip(slopes, [own, *others], strict=True):
            np.testing.assert_allclose(found.numpy(), slope, rtol=1e-3, atol=2e-6)

    def test_widths_and_views(self) -> None:
        config = configured(
            min_width=0.3, sub_networks=3, batch_size=3, local_epochs=20, degrees=30.0, learning_rate=1e-6
        )

        def run(seed: int) -> Passes:
            client = make_client(net(), TensorDataset(*data(0, 9)))
            passes = Passes(client)
            task = Task(1, "train", seed, (), [], None, config)
            before = torch.get_rng_state()
            client.train(task, client.objective(task))
            assert torch.equal(torch.get_rng_state(), before)
            assert widths_of(client.model) == {1.0}
            assert not any(module.training for module in client.model.modules())
            return passes

        passes, again, other = run(0), run(0), run(1)
        steps = np.array(passes.widths).reshape(-1, 4)
        assert len(steps) == 3 * 20
        assert (steps[:, 0] == 1).all()
        narrow = steps[:, 1:]
        assert ((narrow > 0.3) & (narrow <= 1)).all()
        assert len(set(narrow.ravel())) == narrow.size
        assert abs(narrow.mean() - 0.65) < 0.06
        assert narrow.min() < 0.35
        assert narrow.max() > 0.95
        assert all(passes.training)
        for full, *views in zip(*[iter(passes.inputs)] * 4, strict=True):
            assert all(not torch.allclose(full, view, atol=1e-2) for view in views)
            assert not torch.equal(views[0], views[1])
            assert all(view.shape == full.shape for view in views)
        assert passes.widths == again.widths
        assert all(torch.equal(a, b) for a, b in zip(passes.inputs, again.inputs, strict=True))
        assert passes.widths != other.widths

    def test_views_have_the_config_s_ranges(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[dict[str, Any]] = []

        def noted(x: Tensor, draw: torch.Generator, **options: Any) -> Tensor:
            calls.append(options)
            return x

        monkeypatch.setattr(client_module, "random_affine", noted)
        config = configured(degrees=7.0, min_scale=0.5, max_scale=3.0, local_epochs=1)
        trained(net(), config)
        assert calls == [{"degrees": 7.0, "scale": (0.5, 3.0)}] * 2

    @pytest.mark.parametrize("name", ["resnet8", "shufflenet"])
    @pytest.mark.parametrize("min_width", [0.25, 1.0])
    def test_running_statistics_are_the_full_network_s(self, name: str, min_width: float) -> None:
        """One batch of FedHyb leaves those of one batch of plain training, whatever the views were."""
        train = TensorDataset(*data(0, 8, (3, 16, 16)))
        config = configured(local_epochs=1, min_width=min_width, sub_networks=3)
        found, _ = trained(image_net(name), config, train)
        expected, _ = trained(image_net(name), plain(config), train, FedAvgClient)
        running = [key for key in found if "running" in key or "num_batches" in key]
        assert running
        assert all(np.array_equal(found[key], expected[key]) for key in running)
        assert not equal(list(found.values()), list(expected.values()))

    @pytest.mark.parametrize("name", ["resnet8", "shufflenet"])
    def test_a_sub_network_moves_its_own_channels_only(self, name: str) -> None:
        """Without the full network's part, what no narrow pass used has no gradient."""
        client = make_client(image_net(name), TensorDataset(*data(0, 4, (3, 16, 16))))
        config = configured(min_width=0.999999, sub_networks=1)
        loss = client.objective(Task(1, "train", 0, (), [], None, config))
        passes = Passes(client)
        x, y = data(1, 4, (3, 16, 16))
        width = 0.5
        with pytest.MonkeyPatch.context() as patch:
            slimmed = client_module.slimmed
            patch.setattr(client_module, "slimmed", lambda model, _: slimmed(model, width))
            loss(x, y)
        client.model.zero_grad()
        passes.logits[1].sum().backward()
        checked = 0
        for layer in client.model.modules():
            if isinstance(layer, nn.Conv2d) and layer.groups == 1:
                assert layer.weight.grad is not None
                kept = -(-layer.out_channels // 2)
                assert not layer.weight.grad[kept:].any()
                checked += 1
        assert checked > 3

    def test_evaluation_is_in_eval_mode_and_whole(self) -> None:
        client = make_client(image_net("resnet8"), TensorDataset(*data(0, 6, (3, 16, 16))),
                             test_set=TensorDataset(*data(1, 5, (3, 16, 16))))  # fmt: skip
        arrays = [value.copy() for value in get_weights(image_net("resnet8")).values()]
        passes = Passes(client)
        answer = client.phase_train(Task(1, "train", 0, (), arrays, None, configured(local_epochs=1)))
        assert passes.widths[0] == 1
        assert passes.widths[-1] == 1
        assert passes.training == [True, True, True, False]
        x, y = data(1, 5, (3, 16, 16))
        model = image_net("resnet8").eval()
        load_weights(model, dict(zip(get_weights(model), answer.arrays, strict=True)))
        right = (model(x).argmax(dim=1) == y).float().mean().item()
        assert answer.metrics["local-accuracy"] == pytest.approx(right)

    @pytest.mark.parametrize("detach_target", [True, False])
    @pytest.mark.parametrize("detach_weight", [True, False])
    def test_with_whole_sub_networks_and_no_views_it_is_fedavg(
        self, detach_target: bool, detach_weight: bool
    ) -> None:
        """Every sub-network is the full network on the same batch: KL 0 with gradient 0."""
        whole = {"min_width": 1.0, "degrees": 0.0, "min_scale": 1.0, "max_scale": 1.0}
        config = configured(
            **whole, detach_target=detach_target, detach_weight=detach_weight, batch_size=4, self_weight=2.0
        )
        found, loss = trained(net(), config)
        expected, plain_loss = trained(net(), plain(config), kind=FedAvgClient)
        close(to_oracle(found), to_oracle(expected), atol=2e-6)
        assert loss == pytest.approx(plain_loss, abs=2e-6)
        other, _ = trained(net(), configured(batch_size=4, self_weight=2.0))
        assert not np.allclose(other["1.weight"], expected["1.weight"], atol=1e-3)

    @pytest.mark.parametrize("name", ["resnet8", "mlp"])
    def test_without_self_distillation_it_is_fedavg_to_the_bit(self, name: str) -> None:
        train = TensorDataset(*data(0, 11, (3, 16, 16)))
        config = configured(self_weight=0.0, batch_size=4, optimizer="adam", learning_rate=1e-2)
        found, loss = trained(image_net(name), config, train)
        expected, plain_loss = trained(image_net(name), plain(config), train, FedAvgClient)
        assert loss == plain_loss
        assert equal(list(found.values()), list(expected.values()))

    def test_without_self_distillation_no_sub_network_runs(self) -> None:
        client = make_client(net())
        passes = Passes(client)
        task = Task(1, "train", 0, (), [], None, configured(self_weight=0.0, local_epochs=3))
        client.train(task, client.objective(task))
        assert passes.widths == [1.0] * 3

    @pytest.mark.parametrize("size", [1, 9])
    def test_inputs_that_are_no_images(self, size: int) -> None:
        x, y = data(0, size)
        model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))
        client = make_client(model, TensorDataset(x.flatten(1), y))
        passes = Passes(client)
        task = Task(1, "train", 0, (), [], None, configured(local_epochs=1))
        assert np.isfinite(client.train(task, client.objective(task)))
        assert all(torch.equal(view, passes.inputs[0]) for view in passes.inputs)
        assert passes.widths[0] == 1 > max(passes.widths[1:])
        assert all(torch.isfinite(value).all() for value in client.model.state_dict().values())

    def test_what_cannot_be_slim_is_refused(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(32, CLASSES)
        )
        with pytest.raises(ConfigError, match=r"model cannot be used: '1' \(GroupNorm\) cannot run narrow"):
            make_client(model)

    def test_the_full_network_is_what_it_was(self) -> None:
        model, x = image_net("shufflenet"), data(0, 4, (3, 16, 16))[0]
        names = list(model.state_dict())
        expected = model.eval()(x)
        client = make_client(model, TensorDataset(*data(0, 4, (3, 16, 16))))
        assert torch.equal(client.model.eval()(x), expected)
        assert list(client.model.state_dict()) == names


# ---------------------------------------------------------------------- whole rounds

SIZES, PROXY = (5, 8, 3), 17
RATE, SERVER_RATE, ETA, NU = 0.3, 0.2, 1.5, 0.7


class Rows:
    """Which samples of `x` pass through a distiller's model, by students (with a gradient) and by teachers."""

    def __init__(self, strategy: FedHyb, x: Tensor) -> None:
        self.row = {value: i for i, value in enumerate(x.flatten(1)[:, 0].tolist())}
        assert len(self.row) == len(x)
        self.student: list[list[int]] = []
        self.teachers: list[int] = []
        self.modes: set[bool] = set()
        layers = [m for m in strategy.distiller.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        layers[0].register_forward_pre_hook(self._note)

    def _note(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = [self.row[value] for value in args[0].flatten(1)[:, 0].tolist()]
        self.modes.add(layer.training)
        if torch.is_grad_enabled():
            self.student.append(rows)
        else:
            self.teachers += rows


class Run:
    """A federation of nets with one hidden layer on the inline grid."""

    def __init__(
        self, kind: type[KDStrategy] = FedHyb, *, options: dict[str, Any] | None = None, **config: Any
    ):
        values: dict[str, Any] = {
            "optimizer": "sgd",
            "local_epochs": 3,
            "server_epochs": 4,
            "self_weight": 0.0,
        }
        values |= {"learning_rate": RATE, "server_learning_rate": SERVER_RATE, "batch_size": 64}
        values |= {"logits_weight": ETA, "feature_weight": NU, "lr_decay": 0.5, "lr_decay_every": 1}
        given: dict[str, Any] = {"min_available_nodes": len(SIZES)}
        self.proxy = data(1000, PROXY)[0]
        if issubclass(kind, FedHyb):
            given |= {"model": net(), "public_set": TensorDataset(self.proxy), "device": "cpu"}
        self.strategy: Any = kind(FedHybConfig(**(values | config)), **(given | (options or {})))
        self.rows = Rows(self.strategy, self.proxy) if issubclass(kind, FedHyb) else None
        self.models: list[Net] = []
        self.batches: list[list[list[int]]] = [[]]

    def start(self, rounds: int) -> None:
        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            train = TensorDataset(*data(index, SIZES[index]))
            return FedHybClient(net(), train, context=context, device="cpu").to_client()

        def keep(_: int, arrays: ArrayRecord) -> None:
            self.models.append(to_oracle(arrays))
            if self.rows is not None and len(self.models) > 1:
                self.batches.append(self.rows.student)
                self.rows.student = []

        grid = InlineGrid(ClientApp(client_fn=client_fn), len(SIZES))
        self.strategy.start(grid, ArrayRecord(net().state_dict()), rounds, 20.0, evaluate_fn=keep)
        grid.close()

    def expected(self, server_round: int, **changes: float) -> Net:
        decay = 0.5 ** (server_round - 1)
        options: dict[str, Any] = {"server_rate": SERVER_RATE * decay, "eta": ETA, "nu": NU} | changes
        clients = [oracle.samples(*(part.numpy() for part in data(i, size))) for i, size in enumerate(SIZES)]
        proxy = oracle.samples(self.proxy.numpy(), np.zeros(PROXY)).x
        batches = self.batches[server_round]
        return oracle.fedhyb(
            self.models[server_round - 1], clients, proxy, batches, rate=RATE * decay, epochs=3, **options
        )


class TestRounds:
    @pytest.mark.parametrize("batch_size", [64, 8])
    def test_equal_the_oracle(self, batch_size: int) -> None:
        run = Run(batch_size=batch_size)
        run.start(3)
        for server_round in (1, 2, 3):
            batches = run.batches[server_round]
            seen = Counter(row for batch in batches for row in batch)
            assert seen == dict.fromkeys(range(PROXY), 4)
            assert len(batches) == (4 if batch_size == 64 else len(batches))
            assert max(map(len, batches)) <= (PROXY if batch_size == 64 else 9)
            close(run.models[server_round], run.expected(server_round))
        if batch_size == 8:
            assert len(run.batches[1]) >= 8
            assert run.batches[1] != run.batches[2]
        # Distillation is what moved it: without it is another model.
        assert np.abs(run.models[1].W2 - run.expected(1, eta=0.0, nu=0.0).W2).max() > 1e-3
        assert np.abs(run.models[1].W2 - run.expected(1, nu=0.0).W2).max() > 1e-4

    @pytest.mark.parametrize("weights", [(0.0, NU), (ETA, 0.0), (0.0, 0.0)])
    def test_either_part_alone(self, weights: tuple[float, float]) -> None:
        run = Run(logits_weight=weights[0], feature_weight=weights[1])
        run.start(1)
        close(run.models[1], run.expected(1, eta=weights[0], nu=weights[1]))

    def test_each_teacher_sees_each_sample_once_a_round(self) -> None:
        run = Run()
        run.start(2)
        assert run.rows is not None
        assert Counter(run.rows.teachers) == dict.fromkeys(range(PROXY), 2 * len(SIZES))
        assert run.rows.modes == {False}

    def test_the_ablations_average_only(self) -> None:
        run = Run(FedHybSelf)
        run.start(1)
        run.batches.append([])
        close(run.models[1], run.expected(1))

    def test_self_distillation_reaches_the_clients(self) -> None:
        plain, dynamic, constant = (
            Run(FedHybSelf, self_weight=a, dynamic_weighting=d)
            for a, d in ((0.0, True), (1.0, True), (1.0, False))
        )
        for run in (plain, dynamic, constant):
            run.start(1)
        models = [run.models[1].W1 for run in (plain, dynamic, constant)]
        assert all(np.abs(a - b).max() > 1e-4 for i, a in enumerate(models) for b in models[:i])

    def test_the_server_s_learning_rate(self) -> None:
        config = FedHybConfig(learning_rate=0.5, server_learning_rate=3.0, lr_decay=0.1, lr_decay_every=2)
        found = [config.server_learning_rate_at(r) for r in (1, 2, 3, 4, 5)]
        np.testing.assert_allclose(found, [3.0, 3.0, 0.3, 0.3, 0.03])

    def test_registration(self) -> None:
        expected = {
            "fedhyb": (FedHyb, "server", {}),
            "fedhyb-star": (FedHybStar, "synthetic", {}),
            "fedhyb-1": (FedHybSelf, "", {"dynamic_weighting": False}),
            "fedhyb-2": (FedHybSelf, "", {"dynamic_weighting": True}),
            "fedhyb-3": (FedHyb, "server", {"self_weight": 0.0}),
        }
        for name, (strategy, public, fixed) in expected.items():
            method = registry.get(name)
            assert (method.strategy, method.client, method.public_at) == (strategy, FedHybClient, public)
            assert dict(method.fixed) == fixed
        with pytest.raises(ConfigError, match="self-weight is fixed"):
            registry.get("fedhyb-3").config(["self-weight=1"])

    def test_the_paper_s_values_are_the_defaults(self) -> None:
        """Section 4.1."""
        config = FedHybConfig()
        assert (config.batch_size, config.local_epochs, config.sub_networks) == (64, 5, 2)
        assert (config.learning_rate, config.optimizer, config.weight_decay) == (1e-3, "adam", 0.0)
        assert config.dynamic_weighting
        assert config.detach_target
        assert config.detach_weight

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"min_scale": 1.3}, "min-scale must be at most max-scale, got 1.3 and 1.2"),
            ({"min_width": 0.0}, "min-width must be > 0"),
            ({"min_width": 1.1}, "min-width must be > 0 and <= 1"),
            ({"sub_networks": 0}, "sub-networks must be >= 1"),
            ({"self_weight": -1.0}, "self-weight must be >= 0"),
            ({"degrees": 181.0}, "degrees must be >= 0 and <= 180"),
            ({"synthetic_samples": 0}, "synthetic-samples must be >= 1"),
        ],
    )
    def test_what_is_out_of_range(self, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            FedHybConfig(**changes)


# ---------------------------------------------------------------------- the server


def server(model: nn.Module, public: Any, kind: type[FedHyb] = FedHyb, **config: Any) -> Any:
    values: dict[str, Any] = {"optimizer": "sgd", "server_epochs": 3, "server_learning_rate": 0.1}
    given: dict[str, Any] = {"public_set": public} if kind is FedHyb else {"input_shape": public}
    strategy = kind(FedHybConfig(**(values | config)), model=model, device="cpu", **given)
    strategy.template = ArrayTemplate.of(ArrayRecord(model.state_dict()))
    return strategy


def aggregated(
    strategy: Any, models: Sequence[Arrays], counts: Sequence[int] | None = None, server_round: int = 1
) -> Arrays:
    replies = [
        Reply(Node(100 + i, i), list(model.values()), count, {}, None)
        for i, (model, count) in enumerate(zip(models, counts or [1] * len(models), strict=True))
    ]
    record = strategy.aggregate_phase("train", server_round, replies, None)
    return {name: value.numpy() for name, value in record.items()}


class Untouchable:
    """A label that nobody may look at."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("a label was read")

    __int__ = __float__ = __index__ = __array__ = __iter__ = __len__ = __bool__ = __add__ = __eq__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def unlabelled(x: Tensor) -> DataLoader[Any]:
    def collate(rows: list[tuple[Tensor]]) -> Any:
        return torch.stack([row for (row,) in rows]), Untouchable()

    return DataLoader(TensorDataset(x), batch_size=64, collate_fn=collate)


QUICK = ("generator-steps=3", "synthetic-samples=24", "server-epochs=1", "sub-networks=1")


def quick_run(fed: Any, rounds: int, **options: Any) -> tuple[Any, Any]:
    strategy, grid = fed.strategy(*QUICK, **options), InlineGrid(fed.app(), fed.clients)
    result = strategy.start(grid, fed.initial(), num_rounds=rounds, timeout=30.0)
    grid.close()
    return strategy, result


class TestServer:
    @pytest.mark.parametrize("name", ["resnet8", "shufflenet", "mlp"])
    def test_one_client_has_nothing_to_teach(self, name: str) -> None:
        """K = 1 with its own data as proxy: loss 0 and gradient 0, but for float32's rounding."""
        weights = jittered(name, 1)
        x = data(0, 24, (3, 16, 16))[0]
        strategy = server(image_net(name), TensorDataset(x), batch_size=8)
        matching = strategy_module.predictions_and_features(strategy.config)
        model = strategy.distiller.model
        targets, left_out = ensemble_means(model, [weights], [1.0], lambda: [x], matching)
        assert left_out == ()
        assert {target.dtype for target in targets} == {torch.float32}
        load_weights(model, weights)
        loss = matching.loss(targets, matching.outputs(model.train(matching.training), x))
        assert abs(loss.item()) < 1e-6
        loss.backward()
        assert max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None) < 1e-5
        found = aggregated(strategy, [weights])
        for key, value in weights.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-5, err_msg=key)

    def test_running_statistics_are_the_mean_s_and_teachers_stay(self) -> None:
        models = [jittered("resnet8", seed) for seed in (0, 1)]
        kept = [{key: value.copy() for key, value in model.items()} for model in models]
        x = data(0, 20, (3, 16, 16))[0]
        found = aggregated(server(image_net("resnet8"), TensorDataset(x), batch_size=8), models, [3, 1])
        moved = 0
        for key, value in found.items():
            mean = 0.75 * models[0][key].astype(np.float64) + 0.25 * models[1][key]
            if "num_batches" in key:
                assert value == np.rint(mean)
            elif "running" in key:
                np.testing.assert_array_equal(value, mean.astype(np.float32), err_msg=key)
            else:
                moved += bool(np.abs(value - mean).max() > 1e-5)
        assert moved > 5
        for before, after in zip(kept, models, strict=True):
            assert equal(list(before.values()), list(after.values()))

    def test_teachers_count_alike_and_their_targets_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        models = [jittered("resnet8", seed) for seed in (0, 1, 2)]
        x = data(0, 12, (3, 16, 16))[0]
        seen: list[tuple[Tensor, Tensor]] = []
        original = strategy_module.ensemble_distillation_loss

        def noted(logits: Tensor, features: Tensor, q: Tensor, h: Tensor, **weights: float) -> Tensor:
            seen.append((q.clone(), h.clone()))
            return original(logits, features, q, h, **weights)

        monkeypatch.setattr(strategy_module, "ensemble_distillation_loss", noted)
        aggregated(server(image_net("resnet8"), TensorDataset(x), batch_size=64), models, [98, 1, 1])
        assert len(seen) == 3
        outputs = []
        for weights in models:
            model: Any = image_net("resnet8").eval()
            load_weights(model, weights)
            with torch.no_grad():
                h = model.features(x)
                outputs.append((oracle.softmax(model.classify(h).numpy()), h.double().numpy()))
        for q, h in seen:
            assert q.dtype == h.dtype == torch.float32
            for found, expected in ((q, 0), (h, 1)):
                mean = np.mean([each[expected] for each in outputs], axis=0)
                np.testing.assert_allclose(
                    np.sort(found.numpy(), axis=0), np.sort(mean, axis=0), rtol=1e-4, atol=1e-5
                )

    def test_labels_are_never_read(self) -> None:
        models = [get_weights(net(seed)) for seed in (0, 1)]
        x = data(0, 12)[0]
        found = aggregated(server(net(), unlabelled(x)), models)
        assert equal(list(found.values()), list(aggregated(server(net(), TensorDataset(x)), models).values()))

    def test_a_teacher_beyond_all_numbers_is_left_out(self, flower_log: list[str]) -> None:
        models = [get_weights(net(seed)) for seed in (0, 1)]
        broken = {key: np.full_like(value, 3e38) for key, value in models[0].items()}
        strategy = server(net(), TensorDataset(data(0, 12)[0]))
        found = aggregated(strategy, [models[0], broken, models[1]], [2, 9, 1])
        assert any("node 101 (partition 1) has outputs that are not finite" in line for line in flower_log)
        assert equal(list(found.values()), list(aggregated(strategy, models, [2, 1]).values()))

    def test_rounds_differ_in_order_and_seeds_decide(self) -> None:
        models = [get_weights(net(seed)) for seed in (0, 1)]
        strategy = server(net(), TensorDataset(data(0, 12)[0]), batch_size=4, lr_decay=1.0)
        first, again, other = (list(aggregated(strategy, models, None, r).values()) for r in (1, 1, 2))
        assert equal(first, again)
        assert not equal(first, other)

    @pytest.mark.parametrize("attack", ["gaussian:2.0", "sign-flip:10", "label-flip", "nan"])
    @pytest.mark.parametrize("name", ["fedhyb", "fedhyb-star", "fedhyb-2"])
    def test_poisoned_runs_end_and_stay_finite(self, name: str, attack: str, federation: Any) -> None:
        _, result = quick_run(federation(name, attack=attack, attackers={0, 2}), 2)
        assert len(result.rounds) == 2
        assert all(np.isfinite(value.numpy()).all() for value in result.arrays.values())


# ---------------------------------------------------------------------- the generator's losses


class TestSynthesisLosses:
    @repeatable
    @given(st.integers(1, 6), st.integers(2, 4), st.sampled_from([0.1, 1.0, 5.0]), st.integers(0, 99))
    def test_confidence_and_balance(self, rows: int, classes: int, scale: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        logits, y = rng.normal(scale=scale, size=(rows, classes)), rng.integers(classes, size=rows)
        labels = torch.from_numpy(y)
        cases: list[tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = [
            (lambda q: synthesis.confidence_loss(q, labels), lambda q: oracle.confidence(q, y)),
            (synthesis.balance_loss, oracle.balance),
        ]
        for loss, expected in cases:
            u = tensors(logits)
            value = loss(u.softmax(dim=1))
            value.backward()
            np.testing.assert_allclose(value.item(), expected(oracle.softmax(logits)), rtol=1e-9, atol=1e-9)
            assert u.grad is not None
            slope = oracle.gradient(lambda v, expected=expected: expected(oracle.softmax(v)), logits)
            np.testing.assert_allclose(u.grad.numpy(), slope, rtol=1e-8, atol=1e-9)

    def test_a_class_that_is_never_predicted(self) -> None:
        """A probability may be 0 in float32; the loss is log C - H(1), and its gradient must be a number."""
        p = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
        value = synthesis.balance_loss(p)
        value.backward()  # type: ignore[no-untyped-call]
        assert value.item() == pytest.approx(np.log(2))
        assert p.grad is not None
        assert torch.isfinite(p.grad).all()

    @repeatable
    @given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 99))
    def test_diversity(self, rows: int, classes: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, z, y = rng.normal(size=(rows, 2, 3)), rng.normal(size=(rows, 4)), rng.integers(classes, size=rows)
        samples = tensors(x)
        value = synthesis.diversity_loss(samples, tensors(z), torch.from_numpy(y))
        value.backward()
        np.testing.assert_allclose(value.item(), oracle.diversity(x, z, y), rtol=1e-9)
        slope = oracle.gradient(lambda v: oracle.diversity(v, z, y), x)
        assert samples.grad is not None
        np.testing.assert_allclose(samples.grad.numpy(), slope, rtol=1e-9, atol=1e-12)

    def test_equal_samples(self) -> None:
        x = tensors(np.ones((3, 2)))
        value = synthesis.diversity_loss(x, tensors(np.arange(3.0)[:, None]), torch.zeros(3).long())
        value.backward()
        assert value.item() == 1
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()

    @pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 2, 4)])
    def test_batchnorm_statistics(self, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        layer = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3)
        alone = nn.BatchNorm1d(3, track_running_stats=False)
        model = nn.ModuleList([layer, alone]).double().eval()
        layer.running_mean.copy_(torch.randn(3, generator=generator()))  # type: ignore[union-attr]
        layer.running_var.copy_(torch.rand(3, generator=generator()) + 0.5)  # type: ignore[union-attr]
        kept = {name: value.clone() for name, value in layer.state_dict().items()}
        values = rng.normal(loc=1.0, scale=2.0, size=shape)
        x = tensors(values)
        with synthesis.batchnorm_loss(model) as found:
            layer(x)
            alone(torch.zeros(4, 3, dtype=torch.float64))
        layer(x)
        assert len(found) == 1
        found[0].backward()  # type: ignore[no-untyped-call]
        mean, var = (kept[name].numpy() for name in ("running_mean", "running_var"))
        np.testing.assert_allclose(found[0].item(), oracle.statistics(values, mean, var), rtol=1e-9)
        slope = oracle.gradient(lambda v: oracle.statistics(v, mean, var), values)
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(layer.state_dict()[name], kept[name]) for name in kept)


# ---------------------------------------------------------------------- the generator's training


def rows_net(seed: int = 0, features: int = 5, classes: int = CLASSES) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, classes)).eval()


def rows_weights(seed: int, features: int = 5) -> Arrays:
    rng = np.random.default_rng(seed)
    weights = get_weights(rows_net(seed))
    for name, low, high in (
        ("weight", 0.5, 2),
        ("bias", -1, 1),
        ("running_mean", -1, 1),
        ("running_var", 0.5, 2),
    ):
        weights[f"0.{name}"] = rng.uniform(low, high, size=features).astype(np.float32)
    return weights


def rows_logits(x: Any, weights: Arrays) -> Any:
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    h = (x - w["0.running_mean"]) / np.sqrt(w["0.running_var"] + 1e-5) * w["0.weight"] + w["0.bias"]
    return h @ w["1.weight"].T + w["1.bias"]


def train(gen: Any, model: nn.Module, teachers: Sequence[Arrays], **changes: Any) -> float:
    options: dict[str, Any] = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2, "draw": generator()}
    options |= {"balance_weight": 1.0, "diversity_weight": 1.0, "batchnorm_weight": 1.0, "device": CPU}
    return train_generator(gen, model, teachers, **(options | changes))


def finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def ensemble() -> tuple[nn.Module, list[Arrays], Callable[[Tensor], Tensor]]:
    """Three trained models of images with four classes, each of which lacks a class, and their mean prediction."""
    patterns = torch.randn(4, 1, 6, 6, generator=generator(1))
    weights: list[Arrays] = []
    model: nn.Module = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, seed=0)
    for seed in range(3):
        model = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, seed=seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        y = torch.arange(96) % 4
        y = y[y != seed]
        x = patterns[y] + 0.5 * torch.randn(len(y), 1, 6, 6, generator=generator(seed))
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        weights.append({name: value.copy() for name, value in get_weights(model).items()})

    @torch.no_grad()
    def mean(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 4)
        for each in weights:
            load_weights(model, each)
            total += model.eval()(x).softmax(dim=1) / len(weights)
        return total

    return model, weights, mean


def infinite_slope() -> tuple[nn.Sequential, Arrays]:
    """Return a model whose outputs are numbers of ordinary size, and whose gradient in the inputs is not finite."""
    layers = [nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, 4))
    small, large = 1e-20, 1e20
    values: dict[str, Any] = {"1.weight": small * np.eye(8, 16), "1.bias": np.full(8, small)}
    values |= {
        "3.weight": small * np.eye(8),
        "5.weight": large * np.eye(8),
        "7.weight": 3 * large * np.eye(4, 8),
    }
    weights = {
        name: np.asarray(values.get(name, np.zeros(value.shape)), dtype=np.float32)
        for name, value in get_weights(model).items()
    }
    return model, weights


class TestTraining:
    @pytest.mark.parametrize("teachers", [1, 3])
    @pytest.mark.parametrize(("balance", "statistics"), [(1.0, 0.7), (0.0, 0.0), (2.5, 0.0), (0.0, 3.0)])
    def test_the_gradient_through_the_ensemble(
        self, teachers: int, balance: float, statistics: float
    ) -> None:
        weights = [rows_weights(seed) for seed in range(teachers)]
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(6, 5)).astype(np.float32).astype(np.float64), np.arange(6) % CLASSES

        def loss(v: Any) -> Any:
            p = sum(oracle.softmax(rows_logits(v, w)) for w in weights) / teachers
            distances = [oracle.statistics(v, w["0.running_mean"], w["0.running_var"]) for w in weights]
            return (
                oracle.confidence(p, y) + balance * oracle.balance(p) + statistics * sum(distances) / teachers
            )

        model = rows_net()
        value, slope = synthesis._through_ensemble(
            model, weights, torch.tensor(x, dtype=torch.float32, requires_grad=True), torch.from_numpy(y),
            balance_weight=balance, batchnorm_weight=statistics,
        )  # fmt: skip
        assert value == pytest.approx(loss(x), rel=1e-5)
        np.testing.assert_allclose(slope.numpy(), oracle.gradient(loss, x), rtol=1e-4, atol=1e-6)

    def test_the_gradient_is_that_of_one_graph(self) -> None:
        weights = [jittered("resnet8", seed) for seed in range(3)]
        kept = [{name: value.copy() for name, value in each.items()} for each in weights]
        model = image_net("resnet8").eval()
        x = torch.randn(6, 3, 16, 16, generator=generator(), requires_grad=True)
        y = torch.arange(6) % CLASSES
        value, slope = synthesis._through_ensemble(
            model, weights, x, y, balance_weight=0.5, batchnorm_weight=0.3
        )
        after = get_weights(model)
        assert equal(
            [after[n] for n in kept[2] if "running" in n], [kept[2][n] for n in kept[2] if "running" in n]
        )

        total, distances = torch.zeros(6, CLASSES), []
        for each in weights:
            found: list[Tensor] = []

            def note(layer: Any, args: tuple[Tensor, ...], found: list[Tensor] = found) -> None:
                var, mean = torch.var_mean(args[0], dim=(0, 2, 3), correction=0)
                found.append(
                    ((mean - layer.running_mean) ** 2).mean() + ((var - layer.running_var) ** 2).mean()
                )

            handles = [
                m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.BatchNorm2d)
            ]
            state = {name: torch.from_numpy(v) for name, v in each.items()}
            total = total + torch.func.functional_call(model, state, (x,)).softmax(dim=1) / 3
            for handle in handles:
                handle.remove()
            distances.append(torch.stack(found).mean())
        mean = total.mean(dim=0)
        loss = -total[torch.arange(6), y].log().mean() + 0.5 * (np.log(CLASSES) + (mean * mean.log()).sum())
        loss = loss + 0.3 * torch.stack(distances).mean()
        assert value == pytest.approx(loss.item(), rel=1e-4)
        (expected,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
        assert all(equal(list(a.values()), list(b.values())) for a, b in zip(kept, weights, strict=True))

    def test_a_step_is_adam_s_on_the_whole_loss(self) -> None:
        """From one graph with one teacher, all three parts together, two steps."""
        weights = rows_weights(0)
        gen = build_generator((5,), num_classes=CLASSES, latent_dim=4, seed=0)
        train(
            gen,
            rows_net(),
            [weights],
            steps=2,
            balance_weight=0.5,
            diversity_weight=2.0,
            batchnorm_weight=0.3,
        )
        other = build_generator((5,), num_classes=CLASSES, latent_dim=4, seed=0).train()
        model, draw = rows_net(), generator()
        load_weights(model, weights)
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        layer: Any = model[0]
        for step in range(2):
            y = torch.arange(8 * step, 8 * step + 8) % CLASSES
            z = torch.randn(8, 4, generator=draw)
            x = other(z, y)
            p = model(x).softmax(dim=1)
            mean, (var, middle) = p.mean(dim=0), torch.var_mean(x, dim=0, correction=0)
            pairs = [(i, j) for i in range(8) for j in range(i) if y[i] == y[j]]
            apart = [(x[i] - x[j]).abs().mean() * (z[i] - z[j]).abs().mean() for i, j in pairs]
            loss = -p[torch.arange(8), y].log().mean() + 0.5 * (np.log(3) + (mean * mean.log()).sum())
            loss = loss + 2 * torch.exp(-torch.stack(apart).mean())
            of_statistics = ((middle - layer.running_mean) ** 2).mean() + (
                (var - layer.running_var) ** 2
            ).mean()
            loss = loss + 0.3 * of_statistics
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for (name, a), b in zip(gen.state_dict().items(), other.state_dict().values(), strict=True):
            # Before a BatchNorm a bias has no gradient but rounding, of which Adam makes whole steps.
            if name not in ("net.0.bias", "net.3.bias"):
                torch.testing.assert_close(a, b, rtol=0, atol=2e-3, msg=name)
        assert not gen.training

    def test_it_learns(self, ensemble: Any) -> None:
        model, weights, mean = ensemble
        gen = build_generator((1, 6, 6), num_classes=4, latent_dim=8, seed=0)

        def accuracy() -> float:
            x, y = synthesise(gen, 200, draw=generator(7), device=CPU)
            return (mean(x).argmax(dim=1) == y).float().mean().item()

        before = accuracy()
        first = train(gen, model, weights, steps=1, batch_size=32, learning_rate=5e-3)
        last = train(gen, model, weights, steps=60, batch_size=32, learning_rate=5e-3)
        assert last < 0.7 * first
        assert before < 0.5
        assert accuracy() > 0.85
        x, y = synthesise(gen, 40, draw=generator(8), device=CPU)
        for label in range(4):  # not one sample again and again
            assert x[y == label].std(dim=0).mean() > 0.05

    def test_seeds_decide_and_the_global_generator_stays(self, ensemble: Any) -> None:
        model, weights, _ = ensemble
        found = []
        before = torch.get_rng_state()
        for seed in (0, 0, 1):
            gen = build_generator((1, 6, 6), num_classes=4, latent_dim=8, seed=0)
            loss = train(gen, model, weights, draw=generator(seed))
            found.append((loss, gen, synthesise(gen, 9, draw=generator(seed), device=CPU)))
        assert torch.equal(torch.get_rng_state(), before)
        assert found[0][0] == found[1][0] != found[2][0]
        assert same(found[0][1], found[1][1])
        assert not same(found[0][1], found[2][1])
        assert torch.equal(found[0][2][0], found[1][2][0])

    @pytest.mark.parametrize("shape", [(3, 5, 7), (12,), (4, 5), (1, 1, 1)])
    @pytest.mark.parametrize("batch_size", [1, 2, 7])
    def test_shapes_and_batches(self, shape: tuple[int, ...], batch_size: int) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 2))
        gen = build_generator(shape, num_classes=2, latent_dim=3, seed=0)
        kept = {name: value.clone() for name, value in gen.state_dict().items()}
        assert np.isfinite(train(gen, model, [get_weights(model)] * 2, batch_size=batch_size))
        assert finite(gen)
        assert not all(torch.equal(kept[name], value) for name, value in gen.state_dict().items())
        x, y = synthesise(gen, 5, draw=generator(), device=CPU)
        assert x.shape == (5, *shape)
        assert torch.isfinite(x).all()
        assert y.tolist().count(0) in (2, 3)

    @pytest.mark.parametrize(("batch_size", "classes"), [(9, 3), (8, 3), (4, 10), (1, 3)])
    def test_every_class_is_trained(self, batch_size: int, classes: int) -> None:
        """Equally frequent in each batch, up to one; none is left out where there are more classes than samples."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, classes))
        gen = build_generator((4,), num_classes=classes, latent_dim=3, seed=0)
        batches: list[list[int]] = []
        gen.register_forward_pre_hook(lambda _, args: batches.append(args[1].tolist()))
        train(gen, model, [get_weights(model)], steps=30, batch_size=batch_size)
        assert len(batches) == 30
        for labels in batches:
            counts = np.bincount(labels, minlength=classes)
            assert counts.max() - counts.min() <= 1
        assert {label for labels in batches for label in labels} == set(range(classes))

    @pytest.mark.parametrize("count", [1, 7, 256, 300])
    def test_synthesise(self, count: int) -> None:
        gen = build_generator((1, 3, 5), num_classes=3, latent_dim=4, seed=0).train()
        kept = {name: value.clone() for name, value in gen.state_dict().items()}
        x, y = synthesise(gen, count, draw=generator(2), device=CPU)
        counts = np.bincount(y.numpy(), minlength=3)
        assert counts.max() - counts.min() <= 1
        assert counts.sum() == count
        assert not x.requires_grad
        assert not gen.training
        assert all(torch.equal(kept[name], value) for name, value in gen.state_dict().items())
        z = torch.randn(count, 4, generator=generator(2))
        torch.testing.assert_close(x, gen(z, y).detach(), rtol=0, atol=1e-5)

    def test_a_teacher_without_finite_outputs_has_no_part(self) -> None:
        weights = [rows_weights(seed) for seed in range(2)]
        broken = {name: value.copy() for name, value in weights[0].items()}
        broken["1.weight"] = np.full_like(broken["1.weight"], 3e38)
        broken["1.weight"][:, ::2] *= -1
        nan = {name: value * np.float32(np.nan) for name, value in weights[0].items()}
        x, y = torch.randn(6, 5, generator=generator(), requires_grad=True), torch.arange(6) % CLASSES
        options = {"balance_weight": 1.0, "batchnorm_weight": 1.0}
        model = rows_net()
        value, slope = synthesis._through_ensemble(model, weights, x * 100, y, **options)
        for hostile in (broken, nan):
            mixed = [weights[0], hostile, weights[1]]
            found, other = synthesis._through_ensemble(model, mixed, x * 100, y, **options)
            assert found == value
            assert torch.equal(slope, other)
            with pytest.raises(FloatingPointError, match="no teacher has finite outputs"):
                synthesis._through_ensemble(model, [hostile], x * 100, y, **options)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_a_teacher_without_a_finite_gradient(self, steps: int) -> None:
        """Its outputs are numbers: it passes the check, and its gradient must not ruin the generator."""
        model, hostile = infinite_slope()
        honest = get_weights(nn.Sequential(*infinite_slope()[0]))
        gen = build_generator((1, 4, 4), num_classes=4, latent_dim=4, seed=0)
        kept = build_generator((1, 4, 4), num_classes=4, latent_dim=4, seed=0)
        # Refusing the round (which the strategy takes for "as it was") is as good.
        try:
            train(gen, model, [hostile, honest], steps=steps)
        except FloatingPointError:
            gen.load_state_dict(kept.state_dict())
        assert finite(gen)


# ---------------------------------------------------------------------- FedHyb*


def star(model: nn.Module | None = None, shape: Any = (1, 6, 6), **config: Any) -> FedHybStar:
    values = {"generator_steps": 2, "synthetic_samples": 10, "latent_dim": 4, "batch_size": 8} | config
    model = build_model("mlp", input_shape=shape, num_classes=4, seed=0) if model is None else model
    found: FedHybStar = server(model, shape, FedHybStar, **values)
    return found


class TestStar:
    def test_a_round(self, ensemble: Any) -> None:
        strategy, weights = star(), ensemble[1]
        kept = [{name: value.copy() for name, value in each.items()} for each in weights]
        before = torch.get_rng_state()
        found = aggregated(strategy, weights, [1, 2, 3])
        assert torch.equal(torch.get_rng_state(), before)
        assert len(strategy.distiller.samples) == 10
        first = torch.cat([x for x, _ in strategy.distiller.samples.ordered(4)])
        assert strategy.state_arrays().keys() > {"synthetic"}
        assert all(equal(list(a.values()), list(b.values())) for a, b in zip(kept, weights, strict=True))
        # It is FedHyb's distillation on these samples.
        model = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, seed=0)
        expected = aggregated(server(model, TensorDataset(first), batch_size=8), weights, [1, 2, 3])
        assert equal(list(found.values()), list(expected.values()))
        noise: list[Tensor] = []
        strategy.generator.register_forward_pre_hook(
            lambda module, args: None if module.training else noise.append(args[0])
        )
        for server_round in (2, 3):
            aggregated(strategy, weights, [1, 2, 3], server_round=server_round)
        assert len(noise) == 2
        assert not torch.equal(noise[0], noise[1])
        second = torch.cat([x for x, _ in strategy.distiller.samples.ordered(4)])
        assert second.shape == first.shape
        assert not torch.allclose(first, second, atol=1e-3)

    def test_the_samples_shown_are_ordered_by_class(self, ensemble: Any) -> None:
        strategy = star(generator_steps=60, batch_size=32, generator_learning_rate=5e-3)
        assert strategy.state_arrays() == {}
        seen: list[tuple[Tensor, Tensor]] = []
        strategy.renew_proxy([list(each.values()) for each in ensemble[1]], 1)
        strategy.generator.register_forward_pre_hook(lambda _, args: seen.append(args))
        samples = strategy.state_arrays()["synthetic"]
        assert samples.shape == (4 * 8, 1, 6, 6)
        ((z, labels),) = seen
        assert labels.tolist() == [label for label in range(4) for _ in range(8)]
        assert all(torch.equal(z[:8], part) for part in z.split(8))
        right = ensemble[2](torch.from_numpy(samples)).argmax(dim=1) == labels
        assert right.float().mean() > 0.8
        assert np.array_equal(samples, strategy.samples().numpy())

    def test_vectors_are_not_shown(self) -> None:
        strategy = star(nn.Sequential(nn.Linear(6, 4)), (6,))
        weights = get_weights(nn.Sequential(nn.Linear(6, 4)))
        aggregated(strategy, [weights, weights])
        assert strategy.state_arrays()
        assert "synthetic" not in strategy.state_arrays()

    def test_resumption(self, federation: Any, tmp_path: Path) -> None:
        whole, of_whole = quick_run(federation("fedhyb-star"), 3)
        first, _ = quick_run(federation("fedhyb-star"), 2, checkpoint_dir=tmp_path)
        rest, result = quick_run(federation("fedhyb-star"), 3, checkpoint_dir=tmp_path, resume=True)
        assert len(result.rounds) == 1
        for name, value in of_whole.arrays.items():
            assert np.array_equal(value.numpy(), result.arrays[name].numpy()), name
        a, b, before = (strategy.state_arrays() for strategy in (whole, rest, first))
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)
        assert not all(np.array_equal(a[name], before[name]) for name in a)

    def test_a_second_run_begins_anew(self, federation: Any) -> None:
        fed = federation("fedhyb-star")
        strategy = fed.strategy(*QUICK)
        states = []
        for _ in range(2):
            grid = InlineGrid(fed.app(), fed.clients)
            strategy.start(grid, fed.initial(), num_rounds=1, timeout=30.0)
            grid.close()
            states.append(strategy.state_arrays())
        assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])

    def test_another_state_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the state is not this generator's"):
            star().load_state_arrays({"generator.net.0.weight": np.zeros((2, 2), dtype=np.float32)})

    def test_without_a_usable_teacher_the_generator_stays(self, flower_log: list[str]) -> None:
        strategy = star()
        weights = get_weights(build_model("mlp", input_shape=(1, 6, 6), num_classes=4, seed=0))
        broken = {name: np.full_like(value, 3e38) for name, value in weights.items()}
        kept = {name: value.clone() for name, value in strategy.generator.state_dict().items()}
        found = aggregated(strategy, [broken, broken])
        assert any("round 1: the generator is left as it was" in line for line in flower_log)
        assert all(torch.equal(kept[name], value) for name, value in strategy.generator.state_dict().items())
        assert all(np.isfinite(value).all() for value in found.values())
        assert strategy.state_arrays() == {}

    @pytest.mark.parametrize("steps", [1, 3])
    def test_a_client_without_a_finite_gradient_does_not_end_the_run(self, steps: int) -> None:
        model, hostile = infinite_slope()
        honest = get_weights(infinite_slope()[0])
        strategy = star(model, (1, 4, 4), generator_steps=steps)
        found = aggregated(strategy, [honest, hostile, honest])
        assert finite(strategy.generator)
        assert all(np.isfinite(value).all() for value in found.values())

    def test_one_client_s_running_statistics_do_not_stop_the_generator(self) -> None:
        """A variance of 1e30 is a number, whose squared distance is none in float32."""
        honest = [jittered("resnet8", seed) for seed in range(3)]
        hostile = {name: value.copy() for name, value in honest[0].items()}
        name = next(name for name in hostile if name.endswith("running_var"))
        hostile[name] = np.full_like(hostile[name], 1e30)
        strategy = star(image_net("resnet8"), (3, 16, 16))
        strategy.renew_proxy([list(each.values()) for each in [*honest, hostile]], 1)
        assert strategy.trained

    @pytest.mark.parametrize("shape", [(), 5, (1.0, 6, 6), (-1, 6, 6), (1, 0, 6), (1, 5, 5), "abc"])
    def test_shapes_refused(self, shape: Any) -> None:
        model = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, seed=0)
        with pytest.raises(ConfigError, match=r"input_shape|model does not take"):
            FedHybStar(model=model, input_shape=shape, device="cpu")

    def test_one_class_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="classes"):
            FedHybStar(
                model=nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), input_shape=(1, 4, 4), device="cpu"
            )

    def test_a_model_that_is_not_the_clients(self, federation: Any) -> None:
        other = build_model("mlp", input_shape=(1, 4, 4), num_classes=5, seed=0, feature_dim=8)
        with pytest.raises(ConfigError, match="model is not what initial_arrays are of"):
            federation("fedhyb-star").run(rounds=1, model=other)


class _Counts(nn.Module):
    """Its code knows the number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(-1, 96))


def test_a_model_whose_code_has_numbers_of_channels_is_refused(make_blobs: Any) -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ConfigError, match=r"does not run with fewer channels \(.*shape"):
        FedHybClient(_Counts(), make_blobs(8, 0), context=context, device="cpu")


def test_a_generator_that_diverges_is_left_as_it_was(flower_log: list[str]) -> None:
    strategy = star(image_net("resnet8"), (3, 16, 16), generator_learning_rate=1e30, generator_steps=1)
    before = {name: value.clone() for name, value in strategy.generator.state_dict().items()}
    strategy.renew_proxy([list(jittered("resnet8", seed).values()) for seed in range(2)], 1)
    assert any("the generator is left as it was" in line for line in flower_log)
    assert all(torch.equal(value, before[name]) for name, value in strategy.generator.state_dict().items())
    assert len(strategy.distiller.samples) == 10
