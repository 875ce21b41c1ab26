"""Which layers FedAlign takes for a model's last feature block, and which models it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.checks import ConfigError
from flwr_kd.models import FeatureModel, as_feature_model, build_model
from flwr_kd.strategies.fedalign import Block, find_block

SIDE = 16


def images(samples: int = 4, channels: int = 1, side: int = SIDE) -> Tensor:
    return torch.randn(samples, channels, side, side, generator=torch.Generator().manual_seed(0))


def block_of(model: nn.Module, x: Tensor | None = None) -> Block:
    return find_block(as_feature_model(model), images() if x is None else x)


@pytest.mark.parametrize(("name", "layer", "channels", "step"), [
    ("mlp", "extractor.3", 200, 1),
    ("mlp-bn", "extractor.4", 200, 1),
    ("mlp4", "extractor.7", 200, 1),
    ("lenet", "extractor.9", 120, 1),
    ("cnn", "extractor.7", 64, 16),
    ("alexnet", "extractor.18", 1024, 1),
    ("resnet8", "extractor.stage3", 32, 1),
    ("resnet32", "extractor.stage3", 32, 1),
    ("resnet18", "extractor.backbone.layer4", 256, 1),
    ("shufflenet", "extractor.backbone.conv5", 464, 1),
    ("resnet6", "predictor.1", 16, 1),
])  # fmt: skip
@pytest.mark.parametrize("side", [8, SIDE])
def test_the_models_that_the_papers_use(name: str, layer: str, channels: int, step: int, side: int) -> None:
    """The last stage or ``Linear``, before global pooling; a flattened input is known by its channels."""
    model = build_model(name, input_shape=(1, side, side), num_classes=3, seed=0)
    step = step * side**2 // SIDE**2
    block = block_of(model, images(side=side))
    assert (block.name, block.channels, block.step) == (layer, channels, max(step, 1))
    assert len(block.layers) == 1
    # A stage has its activation inside.
    assert len(block.activations) == isinstance(block.layers[0], nn.Linear)


def test_a_text_model_has_its_last_linear() -> None:
    model = build_model("bilstm", input_shape=(6,), num_classes=3, seed=0, vocabulary=20)
    block = block_of(model, torch.ones(4, 6, dtype=torch.int64))
    assert (block.name, block.channels, block.step) == ("extractor.dense.8", 128, 1)


class Functional(nn.Module):
    """As most users write them: activations and flattening are functions, and the head is a layer like others."""

    def __init__(self, *, pool: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = pool
        self.fc1 = nn.Linear(8 if pool else 8 * SIDE**2, 20)
        self.fc2 = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv2(torch.tanh(self.conv1(x)))), inplace=True)
        x = x.mean(dim=(2, 3)) if self.pool else x.view(len(x), -1)
        return self.fc2(F.relu(self.fc1(x)))


def test_activations_may_be_functions() -> None:
    block = block_of(Functional())
    assert (block.name, block.channels, block.step, len(block.activations)) == ("fc1", 8, SIDE**2, 1)
    assert torch.equal(block.activations[0](torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_global_pooling_may_be_a_function() -> None:
    block = block_of(Functional(pool=True))
    assert (block.name, block.channels, block.step) == ("conv2", 6, 1)
    assert [type(layer).__name__ for layer in block.layers] == ["SlimmableConv2d", "SlimmableBatchNorm2d"]
    assert len(block.activations) == 1


@pytest.mark.parametrize("pool", [False, True])
def test_input_and_output_are_copies_that_a_model_cannot_change(pool: bool) -> None:
    """Its ReLU works in place; what was noted are the values before and after the block."""
    model: Any = as_feature_model(Functional(pool=pool)).train()
    block = find_block(model, images())
    x = images(3)
    own = copy.deepcopy(model.original).train()
    before = torch.tanh(own.conv1(x))
    maps = F.relu(own.norm(own.conv2(before)))
    expected = (before, maps) if pool else (maps.flatten(1), F.relu(own.fc1(maps.flatten(1))))
    with block.watched() as passed:
        model.train()
        model.features(x)
    seen = passed()
    assert torch.equal(seen.inputs, expected[0])
    assert torch.equal(seen.outputs, expected[1])
    assert not seen.inputs.requires_grad
    assert not seen.outputs.requires_grad
    # Nothing is watched any more.
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_stage_is_of_one_size_and_not_the_beginning() -> None:
    def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())

    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    body = nn.Sequential(nn.Sequential(conv(4, 4), conv(4, 4)), nn.Sequential(conv(4, 8, 2), conv(8, 8)))
    assert block_of(nn.Sequential(conv(1, 4), body, *pool)).name == "1.1"
    # All of one size: the whole of what comes after the beginning.
    body = nn.Sequential(nn.Sequential(conv(4, 4), conv(4, 4)), nn.Sequential(conv(4, 8), conv(8, 8)))
    assert block_of(nn.Sequential(conv(1, 4), body, *pool)).name == "1"
    # A module that has all convolutions is the beginning as well.
    whole = nn.Sequential(nn.Sequential(conv(1, 4), conv(4, 8)), *pool)
    assert block_of(whole).name == "0.1"


def test_layers_after_global_pooling_do_not_count() -> None:
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), *pool)
    hidden = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    block = block_of(nn.Sequential(*model, *hidden))
    assert (block.name, block.channels, len(block.activations)) == ("2", 4, 1)
    # Without a hidden layer it is the same.
    assert block_of(nn.Sequential(*copy.deepcopy(model), nn.Linear(8, 3))).name == "2"


def test_the_only_layer_may_be_the_block() -> None:
    block = block_of(nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert (block.name, block.channels, block.step) == ("1", 1, SIDE**2)


def test_the_slim_part_is_the_first_channels() -> None:
    linear, norm = nn.Linear(9, 5), nn.BatchNorm1d(5)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, 9), nn.ReLU(), linear, norm, nn.Tanh(), nn.Linear(5, 3)
    )
    block = block_of(model)
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    block.layers[1].train()
    first, out = block.narrow(x, 0.25)
    z = x[:, :3] @ linear.weight[:2, :3].T + linear.bias[:2]
    z = (z - z.mean(0)) / (z.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight[:2] + norm.bias[:2]
    torch.testing.assert_close(first, x[:, :3])
    torch.testing.assert_close(out, torch.tanh(z))
    # A width of 0.07 of 100 channels is 7, whatever floating-point numbers say.
    wide = block_of(nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 100), nn.Linear(100, 4), nn.Linear(4, 3)))
    assert wide.narrow(torch.ones(2, 100), 0.07)[0].shape == (2, 7)


@pytest.mark.parametrize("width", [0.25, 1.0])
def test_a_flattened_input_is_cut_by_channel(width: float) -> None:
    block = block_of(Functional())
    first, out = block.narrow(torch.ones(2, 8 * SIDE**2), width)
    assert first.shape == (2, int(8 * width) * SIDE**2)
    assert out.shape == (2, int(20 * width))


class Twice(nn.Module):
    """Calls its last layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(SIDE**2, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.again(self.first(x.flatten(1)))))


class Counts(nn.Module):
    """A stage whose code has its number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + torch.ones(1, 8, 1, 1)


class Sequence(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2)


POOL = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
REFUSED: dict[str, tuple[Any, str]] = {
    "logistic regression": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 3)),
        "no layer with a weight matrix below its last one",
    ),
    "no features at all": (
        lambda: FeatureModel(nn.Flatten(), nn.Linear(SIDE**2, 3)),
        "no layer with a weight matrix",
    ),
    "called twice": (Twice, r"'again' \(Linear\) or its norm is called more than once"),
    "sequences": (
        lambda: nn.Sequential(Sequence(), nn.Conv1d(1, 8, 3), nn.AdaptiveAvgPool1d(1), *POOL[1:]),
        r"'1' \(Conv1d\) maps .* neither maps \[B, C, H, W\] nor vectors",
    ),
    "a norm of all channels": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()), *POOL
        ),
        r"a layer that is not for it: .*GroupNorm\) cannot run narrow",
    ),
    "a fixed number of channels": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), Counts(), *POOL),
        r"'1' does not run with fewer channels .*x\.flatten\(1\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_such_a_block_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"needs a last feature block .*{reason}"):
        block_of(make())


def test_other_parts_of_the_model_may_be_anything() -> None:
    """Only the block must run narrow."""
    norm = nn.GroupNorm(2, 4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()), *POOL)
    x = images()
    expected = model(x)
    assert block_of(model).name == "2"
    assert torch.equal(model(x), expected)
