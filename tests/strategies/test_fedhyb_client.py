"""FedHyb's client: slim sub-networks, views, and models that cannot be made slim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hybrid as oracle
import numpy as np
import pytest
import torch
from hybrid_rounds import (
    CLASSES,
    FEATURES,
    close,
    data,
    equal,
    image_net,
    make_client,
    net,
    plain,
    to_oracle,
    trained,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.learning.weights import get_weights, load_weights
from flwr_kd.models import slimmed
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.strategies.fedhyb import (
    FedHybClient,
    FedHybConfig,
)
from flwr_kd.strategies.fedhyb import client as client_module


def configured(**changes: Any) -> FedHybConfig:
    values: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.3, "local_epochs": 2, "batch_size": 64}
    return FedHybConfig(**(values | changes))


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
        for actual, slope in zip(slopes, [own, *others], strict=True):
            np.testing.assert_allclose(actual.numpy(), slope, rtol=1e-3, atol=2e-6)

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
        actual, _ = trained(image_net(name), config, train)
        expected, _ = trained(image_net(name), plain(config), train, FedAvgClient)
        running = [key for key in actual if "running" in key or "num_batches" in key]
        assert running
        assert all(np.array_equal(actual[key], expected[key]) for key in running)
        assert not equal(list(actual.values()), list(expected.values()))

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
        actual, loss = trained(net(), config)
        expected, plain_loss = trained(net(), plain(config), kind=FedAvgClient)
        close(to_oracle(actual), to_oracle(expected), atol=2e-6)
        assert loss == pytest.approx(plain_loss, abs=2e-6)
        other, _ = trained(net(), configured(batch_size=4, self_weight=2.0))
        assert not np.allclose(other["1.weight"], expected["1.weight"], atol=1e-3)

    @pytest.mark.parametrize("name", ["resnet8", "mlp"])
    def test_without_self_distillation_it_is_fedavg_to_the_bit(self, name: str) -> None:
        train = TensorDataset(*data(0, 11, (3, 16, 16)))
        config = configured(self_weight=0.0, batch_size=4, optimizer="adam", learning_rate=1e-2)
        actual, loss = trained(image_net(name), config, train)
        expected, plain_loss = trained(image_net(name), plain(config), train, FedAvgClient)
        assert loss == plain_loss
        assert equal(list(actual.values()), list(expected.values()))

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


class _Counts(nn.Module):
    """Its code knows the number of channels."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.first, self.last, self.shape = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(96, 4), shape

    def forward(self, x: Tensor) -> Tensor:
        maps = self.first(x)
        return self.last((maps.flatten(1) if self.shape == () else maps.view(self.shape)).flatten(1))


class _ChannelsLast(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).permute(0, 2, 3, 1).reshape(self.shape))


def test_a_model_whose_code_has_numbers_of_channels_is_refused(make_blobs: Any) -> None:
    # torch accepts this view, which makes one sample of two.
    text = r"does not run with fewer channels \(it returns \[2, 4\], not \[4, 4\]\); .*x\.flatten\(1\)"
    with pytest.raises(ConfigError, match=text):
        make_client(_Counts((-1, 6, 4, 4)), make_blobs(8, 0))
    # With half of the channels, height and width happen to be like maps of eight channels.
    with pytest.raises(ConfigError, match=r"does not run with fewer channels .*x\.flatten\(1\)"):
        make_client(_ChannelsLast((-1, 96)), make_blobs(8, 0))


@pytest.mark.parametrize("width", [0.3, 0.5, 0.8])
def test_a_view_that_names_the_channels_flattens_fewer(make_blobs: Any, width: float) -> None:
    viewing, flattening = _Counts((-1, 96)), _Counts(())
    flattening.load_state_dict(viewing.state_dict())
    x = make_blobs(8, 0).x
    with torch.no_grad():
        full = viewing(x)
        clients = [make_client(model, make_blobs(8, 0)) for model in (viewing, flattening)]
        assert torch.equal(clients[0].model(x), full)
        narrow = []
        for client in clients:
            with slimmed(client.model, width):
                narrow.append(client.model(x))
    assert torch.equal(*narrow)
    assert not torch.equal(narrow[0], full)
