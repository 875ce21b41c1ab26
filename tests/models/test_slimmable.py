from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.models import (
    MODELS,
    FeatureModel,
    SlimmableBatchNorm1d,
    SlimmableBatchNorm2d,
    SlimmableConv2d,
    SlimmableLinear,
    as_feature_model,
    build_model,
    count_flops,
    make_slimmable,
    slimmed,
)

pytestmark = pytest.mark.long

SHAPE, CLASSES, BATCH = (3, 16, 16), 10, 4
# The light models of FedDKC's clients have the parameters of the others.
NAMES = (
    *(name for name in MODELS if not name.endswith("-pooled")),
    "torchvision resnet18",
    "torchvision shufflenet_v2_x0_5",
)
WIDTHS = (0.25, 0.3, 0.5, 0.77)


def torchvision_models() -> Any:
    """Import what takes seconds where it is used: every worker imports this module."""
    from torchvision import models

    return models


def build(name: str) -> nn.Module:
    """Build a feature model with the same weights each time."""
    if name.startswith("torchvision"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = getattr(torchvision_models(), name.split()[1])(weights=None, num_classes=CLASSES)
        return as_feature_model(net)
    options: dict[str, Any] = {"input_shape": SHAPE}
    if name == "bilstm":
        options = {"input_shape": (12,), "vocabulary": 50}
    return as_feature_model(build_model(name, num_classes=CLASSES, seed=0, **options))


def batch(name: str = "", size: int = BATCH) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    if name == "bilstm":
        return torch.randint(1, 50, (size, 12), generator=draw)
    return torch.randn((size, *SHAPE), generator=draw)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def pass_of(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return logits and gradients, with the same dropout masks in each call."""
    model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        logits = model(x)
    F.cross_entropy(logits, torch.arange(len(x)) % CLASSES).backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), gradients


@pytest.mark.parametrize("name", NAMES)
def test_full_width_is_the_unconverted_model(name: str) -> None:
    plain, model, x = build(name), build(name), batch(name)
    before, parameters = state(model), [id(p) for p in model.parameters()]
    assert make_slimmable(model) is model
    assert_same_state(before, state(model))
    assert parameters == [id(p) for p in model.parameters()]
    for training in (True, False):
        plain.train(training)
        model.train(training)
        one, gradients = pass_of(plain, x)
        other, others = pass_of(model, x)
        assert torch.equal(one, other)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
        assert_same_state(state(plain), state(model))
    with torch.no_grad(), slimmed(model, 1.0):  # a full pass by name is one, too
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model.features(x), plain.features(x))
    fresh = build(name)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert_same_state(state(fresh), state(model))


@pytest.mark.parametrize("name", NAMES)
def test_narrow_passes_give_logits_and_leave_the_state(name: str) -> None:
    model, x = make_slimmable(build(name)), batch(name)
    before, logits = state(model), model.eval()(x)
    flops = []
    for width in WIDTHS:
        for training in (True, False):
            model.train(training)
            with torch.no_grad(), slimmed(model, width):
                assert model(x).shape == (BATCH, CLASSES)
                if width == 0.3:  # BatchNorm has no statistics on single pixels
                    assert model(x[:1]).shape == (1, CLASSES)
        flops.append(count_flops(model, x, width))
    assert_same_state(before, state(model))
    assert torch.equal(model(x), logits)
    flops.append(count_flops(model, x))
    assert all(a < b for a, b in itertools.pairwise(flops))
    if name not in ("mlp", "mlp-bn", "mlp4", "lenet", "bilstm", "resnet2", "resnet4"):
        # Nearly all operations are in layers with narrowed inputs and outputs. resnet2 has only its stem.
        assert flops[WIDTHS.index(0.5)] < 0.35 * flops[-1]
    features = math.ceil(model.feature_dim / 2)
    with torch.no_grad(), slimmed(model, 0.5):
        h = model.features(x)
        assert h.shape == (BATCH, features)
        assert torch.equal(model.classify(h), model(x))


# Oracles: ordinary layers of the narrow size, with the same names in their state and the first slices of weights.


def kept(width: float, channels: int) -> int:
    return max(1, math.ceil(Fraction(str(width)) * channels))


def lenet(width: float | None) -> nn.Module:
    a, b, c, d = (channels if width is None else kept(width, channels) for channels in (6, 16, 120, 84))
    return FeatureModel(
        nn.Sequential(
            *(nn.Conv2d(3, a, 5, padding=0), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(4 * b, c), nn.ReLU(), nn.Linear(c, d), nn.ReLU()),
        ),
        nn.Linear(d, CLASSES),
    )


class Block(nn.Module):
    """Two convolutions; the shortcut's new channels are zeros, `before` of them in front."""

    def __init__(self, inputs: int, outputs: int, stride: int, before: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.before = stride, before

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = torch.zeros_like(out)
        for channel in range(x.shape[1]):
            if channel + self.before < out.shape[1]:
                shortcut[:, channel + self.before] = x[:, channel, :: self.stride, :: self.stride]
        return F.relu(out + shortcut)


def resnet8(width: float | None) -> nn.Module:
    if width is None:
        return build_model("resnet8", input_shape=SHAPE, num_classes=CLASSES, seed=0)
    a, b, c = (kept(width, channels) for channels in (16, 32, 64))
    extractor = nn.Sequential()
    extractor.add_module(
        "stem", nn.Sequential(nn.Conv2d(3, a, 3, padding=1, bias=False), nn.BatchNorm2d(a), nn.ReLU())
    )
    extractor.add_module("stage1", nn.Sequential(Block(a, a, 1, 0)))
    extractor.add_module("stage2", nn.Sequential(Block(a, b, 2, 8)))
    extractor.add_module("stage3", nn.Sequential(Block(b, c, 2, 16)))
    extractor.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    return FeatureModel(extractor, nn.Linear(c, CLASSES))


def depthwise(width: float | None) -> nn.Module:
    a, b = (channels if width is None else kept(width, channels) for channels in (8, 11))
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3),  # before anything is narrowed: keeps all six
        *(nn.Conv2d(6, a, 3, padding="same", padding_mode="reflect"), nn.BatchNorm2d(a), nn.ReLU()),
        *(nn.Conv2d(a, a, 3, groups=a, padding=1, padding_mode="circular"), nn.ReLU()),
        *(nn.Conv2d(a, 3 * a, (3, 1), groups=a, stride=2, dilation=2, padding=(1, 2)), nn.ReLU()),
        *(nn.Conv2d(3 * a, b, 1), nn.BatchNorm2d(b, affine=False), nn.Flatten(2)),
        *(nn.BatchNorm1d(b, track_running_stats=False), nn.PReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten()),
        nn.Linear(2 * b, CLASSES, bias=False),
    )


def shuffle_blocks(width: float | None) -> nn.Module:
    block = torchvision_models().shufflenetv2.InvertedResidual
    a, b = (channels if width is None else kept(width, channels) for channels in (10, 13))
    return nn.Sequential(
        *(nn.Conv2d(3, a, 3, stride=2), block(a, 2 * b, 2), block(2 * b, 2 * b, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * b, CLASSES)),
    )


def shufflenet(width: float | None) -> nn.Module:
    # In the middle three blocks each half is a branch.
    sizes = [24, 48, 96, 192, 1024]
    if width is not None:
        sizes = [kept(width, 24), *(2 * kept(width, size // 2) for size in sizes[1:4]), kept(width, 1024)]
    return torchvision_models().ShuffleNetV2([2, 2, 2], sizes, num_classes=CLASSES)


def resnet18(width: float | None) -> nn.Module:
    net = torchvision_models().resnet18(weights=None, num_classes=CLASSES)
    if width is None:
        return net
    for name, layer in list(net.named_modules()):
        parent, _, key = name.rpartition(".")
        if isinstance(layer, nn.Conv2d):
            inputs = 3 if layer.in_channels == 3 else kept(width, layer.in_channels)
            where: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "bias": False}
            new: nn.Module = nn.Conv2d(inputs, kept(width, layer.out_channels), layer.kernel_size, **where)
        elif isinstance(layer, nn.BatchNorm2d):
            new = nn.BatchNorm2d(kept(width, layer.num_features))
        elif isinstance(layer, nn.Linear):
            new = nn.Linear(kept(width, layer.in_features), CLASSES)
        else:
            continue
        setattr(net.get_submodule(parent), key, new)
    return net


def check_against(oracle: Callable[[float | None], nn.Module], width: float) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        full, small = oracle(None).double(), oracle(width).double()
    make_slimmable(full)
    values = full.state_dict()
    assert list(values) == list(small.state_dict())
    small.load_state_dict(
        {
            name: values[name][tuple(slice(size) for size in value.shape)]
            for name, value in small.state_dict().items()
        }
    )
    x = batch().double()
    expected, _ = pass_of(small, x)
    for training in (True, False):  # the batch's statistics in both
        full.train(training)
        with slimmed(full, width):
            logits, _ = pass_of(full, x)
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
        for (name, mine), theirs in zip(full.named_parameters(), small.parameters(), strict=True):
            assert mine.grad is not None, name
            assert theirs.grad is not None, name
            inside = tuple(slice(size) for size in theirs.shape)
            torch.testing.assert_close(mine.grad[inside], theirs.grad, rtol=1e-7, atol=1e-10)
            if width >= 0.25 and mine.dim() > 1:  # a shift before BatchNorm has no gradient
                assert mine.grad[inside].count_nonzero() > 0, name
            rest = mine.grad.clone()
            rest[inside] = 0
            assert not rest.any(), name


@pytest.mark.parametrize("width", [0.1, *WIDTHS])
@pytest.mark.parametrize("oracle", [lenet, resnet8, depthwise, shuffle_blocks], ids=lambda f: f.__name__)
def test_narrow_pass_is_the_small_network(oracle: Callable[[float | None], nn.Module], width: float) -> None:
    check_against(oracle, width)


@pytest.mark.parametrize("oracle", [resnet18, shufflenet], ids=lambda f: f.__name__)
def test_narrow_pass_of_torchvision(oracle: Callable[[float | None], nn.Module]) -> None:
    check_against(oracle, 0.3)


@settings(max_examples=8, deadline=None)
@given(width=st.integers(1, 49).map(lambda k: k / 50))
def test_narrow_pass_at_any_width(width: float) -> None:
    check_against(depthwise, width)
    check_against(shuffle_blocks, width)


@pytest.mark.parametrize("name", ["lenet", "resnet8"])
def test_gradients_stay_in_the_first_channels(name: str) -> None:
    """Compare with a list of the layers' sizes."""
    model = make_slimmable(build(name))
    assert isinstance(model, FeatureModel)
    # Width 0.3 of 6, 16, 120, 84 and of 16, 32, 64.
    lenet = {"0": (2, 3), "3": (5, 2), "7": (36, 5 * 4), "9": (26, 36)}
    resnet = {"stem.0": (5, 3), "stage1.0.conv1": (5, 5), "stage1.0.conv2": (5, 5)}
    resnet |= {"stage2.0.conv1": (10, 5), "stage2.0.conv2": (10, 10)}
    resnet |= {"stage3.0.conv1": (20, 10), "stage3.0.conv2": (20, 20)}
    sides = {f"extractor.{layer}": size for layer, size in (lenet if name == "lenet" else resnet).items()}
    sides["head"] = (CLASSES, 26 if name == "lenet" else 20)
    with slimmed(model, 0.3):
        pass_of(model, batch())
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert layers == set(sides)
    for layer, (out, into) in sides.items():
        gradient = model.get_parameter(f"{layer}.weight").grad
        assert gradient is not None
        rest = gradient.clone()
        rest[:out, :into] = 0
        assert not rest.any(), layer
        assert gradient[:out, :into].count_nonzero() > 0.2 * gradient[:out, :into].numel(), layer


@example(percent=7, channels=100)  # 7.000000000000001 in floating point
@given(percent=st.integers(1, 99), channels=st.integers(1, 2048))
@settings(max_examples=100, deadline=None)
def test_channels_are_the_ceiling(percent: int, channels: int) -> None:
    layer = SlimmableLinear(1, channels, bias=False, device="meta")
    layer.width = percent / 100
    expected = -(-percent * channels // 100)
    assert layer(torch.empty(1, 1, device="meta")).shape[1] == expected


def test_at_least_one_channel() -> None:
    layer = SlimmableConv2d(3, 4, 1)
    layer.width = 1e-12
    assert layer(torch.zeros(2, 3, 5, 5)).shape == (2, 1, 5, 5)
    assert layer(torch.zeros(3, 5, 5)).shape == (1, 5, 5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_batchnorm(tracked: bool, affine: bool, training: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"affine": affine, "track_running_stats": tracked, "eps": 0.1}
    for norm, sides in (
        (SlimmableBatchNorm1d(5, **options), ()),
        (SlimmableBatchNorm1d(5, **options), (4,)),
        (SlimmableBatchNorm2d(5, **options), (2, 3)),
    ):
        norm.train(training)
        for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            if values is not None:
                values.data.uniform_(0.5, 2, generator=draw)
        before = state(norm)
        norm.width = 0.6
        x = torch.randn(6, 3, *sides, generator=draw).double().requires_grad_()
        norm.double()
        axes = [0, *range(2, x.dim())]
        shape = [1, 3] + [1] * len(sides)
        scale, shift = (
            (v[:3].detach().reshape(shape) if affine else d)
            for v, d in ((norm.weight, torch.tensor(1.0)), (norm.bias, torch.tensor(0.0)))
        )
        centred = x - x.mean(axes, keepdim=True)
        expected = centred / ((centred**2).mean(axes, keepdim=True) + 0.1).sqrt() * scale + shift
        torch.testing.assert_close(norm(x), expected)
        # One value per channel.
        single = (
            x[:1].detach() if not sides else x[:1, :, :1, :1].detach() if len(sides) > 1 else x[:1, :, :1]
        )
        if tracked:
            mean, variance = (v[:3].reshape(shape) for v in (norm.running_mean, norm.running_var))
            torch.testing.assert_close(
                norm(single), (single - mean) / (variance + 0.1).sqrt() * scale + shift
            )
            assert norm(x[:0]).shape == x[:0].shape
        else:
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                norm(single)
        with pytest.raises(ValueError, match="expected"):
            norm(torch.zeros(2, 3, 4, 4, 4))
        after = state(norm)
        assert all(torch.equal(value.to(after[name].dtype), after[name]) for name, value in before.items())
        assert norm.training is training


def test_width_is_restored() -> None:
    model, x = make_slimmable(build("resnet8")), batch()
    shapes = lambda: {m.width for m in model.modules() if hasattr(m, "width")}  # noqa: E731
    with slimmed(model, 0.5):
        assert shapes() == {0.5}
        with pytest.raises(RuntimeError, match="channels"), slimmed(model, 0.25):
            model(torch.zeros(2, 7, 16, 16))
        assert shapes() == {0.5}
        assert model.features(x).shape == (BATCH, 32)
        assert count_flops(model, x) == count_flops(model, x, 1.0)  # not the block's
        assert shapes() == {0.5}
    assert shapes() == {1.0}
    assert not any("width" in m.__dict__ or "_width" in m.__dict__ for m in model.modules())
    model.extractor.pool = nn.Flatten()
    with pytest.raises(ValueError, match=r"features must have the shape \[B, 64\]"):  # checked again
        model.features(x)


@pytest.mark.parametrize("width", [0, 0.0, -0.5, 1.0001, 2, float("nan"), float("inf")])
def test_width_out_of_range(width: float) -> None:
    model = make_slimmable(build("mlp"))
    with pytest.raises(ValueError, match=r"width must be in \(0, 1\], got"), slimmed(model, width):
        pass
    with pytest.raises(ValueError, match="width must be in"):
        count_flops(model, batch(), width)


def test_allowed_widths() -> None:
    model = make_slimmable(build("mlp"))
    for width, features in ((1, 64), (np.float32(0.5), 32), (np.float64(0.25), 16)):
        with slimmed(model, width):
            assert model.features(batch()).shape[1] == features
    for wrong in ("0.5", None, True):
        with pytest.raises(TypeError, match=r"width must be in \(0, 1\], got"), slimmed(model, wrong):
            pass


def test_slimmed_needs_slimmable_layers() -> None:
    model = build("lenet")
    with pytest.raises(ValueError, match="FeatureModel has no slimmable layer"), slimmed(model, 0.5):
        pass
    with pytest.raises(ValueError, match="no slimmable layer"):
        count_flops(model, batch(), 0.5)
    assert count_flops(model, batch()) > 0


class OwnConv(nn.Conv2d):
    pass


class Scaled(nn.Module):
    """A module with parameters outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 1)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))


def around(middle: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


@pytest.mark.parametrize(
    "middle",
    [
        *(nn.Conv2d(8, 8, 1, groups=2), nn.ConvTranspose2d(8, 8, 1), nn.Conv1d(8, 8, 1), nn.Conv3d(8, 8, 1)),
        *(nn.GroupNorm(2, 8), nn.GroupNorm(2, 8, affine=False), nn.LayerNorm(8), nn.RMSNorm(8)),
        *(nn.LayerNorm(8, elementwise_affine=False), nn.InstanceNorm2d(8, affine=True)),
        *(nn.InstanceNorm2d(8, track_running_stats=True), nn.BatchNorm3d(8), nn.SyncBatchNorm(8)),
        *(nn.MultiheadAttention(8, 2), nn.Bilinear(8, 8, 8), nn.LSTM(8, 8), nn.Embedding(5, 8)),
        *(nn.PReLU(8), OwnConv(8, 8, 1), nn.LazyConv2d(8, 1), nn.LazyBatchNorm2d(), Scaled()),
    ],
    ids=lambda m: type(m).__name__,
)
def test_layers_that_cannot_run_narrow(middle: nn.Module) -> None:
    net = around(middle)
    kinds = [type(module) for module in net.modules()]
    with pytest.raises(ValueError, match=rf"^'1' \({type(middle).__name__}\) cannot run narrow: "):
        make_slimmable(net)
    assert kinds == [type(module) for module in net.modules()]  # nothing was converted


@pytest.mark.parametrize(
    "middle",
    [nn.Identity(), nn.PReLU(), nn.Dropout2d(), nn.LocalResponseNorm(2), nn.Conv2d(8, 8, 1, groups=8)],
    ids=lambda m: type(m).__name__,
)
def test_layers_that_can(middle: nn.Module) -> None:
    net = make_slimmable(around(middle))
    with slimmed(net, 0.5):
        assert net(batch()).shape == (BATCH, CLASSES)
        assert net[1](torch.zeros(1, 4, 5, 5)).shape[1] == 4


def test_wrong_models() -> None:
    with pytest.raises(ValueError, match="ends in Softmax"):
        make_slimmable(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)))
    net = around(nn.Identity())
    net.register_parameter("token", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="cannot run narrow: it has parameters outside of layers, token"):
        make_slimmable(net)
    with pytest.raises(TypeError, match=r"must be an nn.Module, got tuple"):
        make_slimmable((nn.Flatten(), nn.Linear(4, 2)))  # type: ignore[arg-type]


def test_layers_before_the_first_narrow_one_stay_whole() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.mean

    net = make_slimmable(
        nn.Sequential(Scale(), nn.GroupNorm(3, 3), around(nn.BatchNorm2d(8))[0:2], around(nn.Identity())[2:])
    )
    with slimmed(net, 0.5):
        assert net(batch()).shape == (BATCH, CLASSES)


def test_final_linear_is_not_the_last_registered() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, CLASSES)
            self.body = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    x = torch.ones(2, 4)
    for net in (make_slimmable(Net()), make_slimmable(as_feature_model(Net()))):
        with slimmed(net, 0.5):
            assert net(x).shape == (2, CLASSES)
    # Also for a pair. A part that was made slimmable alone does not stay whole in the larger model.
    body = make_slimmable(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6)))
    pair = make_slimmable(FeatureModel(body, nn.Sequential(nn.Linear(6, 4), nn.Linear(4, CLASSES))))
    with slimmed(pair, 0.5):
        assert pair.features(x).shape == (2, 3)
        assert pair(x).shape == (2, CLASSES)


def test_a_single_linear_keeps_everything() -> None:
    for net in (nn.Linear(4, 3), as_feature_model(nn.Linear(4, 3))):
        make_slimmable(net)
        x = torch.ones(2, 4)
        full = net(x)
        with slimmed(net, 0.1):
            assert torch.equal(net(x), full)


def test_split_models_without_a_wrapper() -> None:
    model = build_model("resnet6", input_shape=SHAPE, num_classes=CLASSES, seed=0)
    make_slimmable(model)
    with slimmed(model, 0.5):
        h = model.features(batch())
        assert h.shape == (BATCH, 8, 16, 16)
        assert model.classify(h).shape == (BATCH, CLASSES)
    model.extractor.append(nn.MaxPool2d(2))
    with pytest.raises(ValueError, match="features must have the shape"):
        model.features(batch())


def test_a_wrapper_shares_the_conversion_and_the_width() -> None:
    net = torchvision_models().resnet18(weights=None, num_classes=CLASSES)
    model = make_slimmable(as_feature_model(net))
    assert type(net.conv1) is SlimmableConv2d
    assert type(net.fc) is SlimmableLinear
    with slimmed(model, 0.5):
        assert net.conv1.width == 0.5
        assert net.fc.whole
    assert net.conv1.width == 1.0


def test_conversion_twice_hooks_and_optimizer() -> None:
    model, x = build("resnet8"), batch()
    calls: list[int] = []
    model.extractor.stem[0].register_forward_hook(lambda module, args, out: calls.append(out.shape[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make_slimmable(make_slimmable(model))
    before = state(model)
    with slimmed(model, 0.5):
        pass_of(model, x)
    optimizer.step()
    assert calls == [8]
    after = state(model)
    stem = "extractor.stem.0.weight"
    assert not torch.equal(before[stem][:8], after[stem][:8])
    assert torch.equal(before[stem][8:], after[stem][8:])
    model(x=x)
    assert model.head(input=torch.zeros(1, 64)).shape == (1, CLASSES)  # torch's own name of the argument


@pytest.mark.parametrize("name", ["resnet8", "resnet6", "torchvision resnet18", "bilstm"])
def test_copies(name: str) -> None:
    model, x = make_slimmable(build(name)).eval(), batch(name)
    with torch.no_grad(), slimmed(model, 0.5):
        narrow = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_state(state(model), state(other))
        with torch.no_grad():
            assert torch.equal(other(x), model(x))
            with slimmed(other, 0.5):
                assert torch.equal(other(x), narrow)
                assert not torch.equal(model(x), narrow)  # the original is not narrowed with it


def test_no_draws() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = make_slimmable(build("alexnet"))
    count_flops(model, batch(), 0.5)
    with slimmed(model, 0.5), torch.no_grad():
        model.eval()(batch())
    assert torch.equal(before, torch.get_rng_state())


def test_two_models_in_two_threads() -> None:
    x = batch()

    def run(width: float) -> Tensor:
        model = make_slimmable(build("resnet8"))
        with torch.no_grad():
            for _ in range(5):
                with slimmed(model, width):
                    out = model(x)
        return out

    alone = [run(width) for width in (0.5, 0.25)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, (0.5, 0.25)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_flops_by_hand() -> None:
    net = make_slimmable(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(1152, 5))
    )
    x = batch(size=2)
    assert count_flops(net, x) == 2 * 2 * (8 * 14 * 14 * 27 + 8 * 12 * 12 * 9 + 1152 * 5)
    assert count_flops(net, x, 0.5) == 2 * 2 * (4 * 14 * 14 * 27 + 4 * 12 * 12 * 9 + 576 * 5)


@pytest.mark.parametrize("name", ["resnet8", "torchvision resnet18"])
def test_counting_flops_changes_nothing(name: str) -> None:
    model = make_slimmable(build(name))
    some = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    some.eval()
    modes, before = [module.training for module in model.modules()], state(model)
    count_flops(model, batch())
    count_flops(model, batch(), 0.5)
    with pytest.raises(RuntimeError):
        count_flops(model, torch.zeros(2, 7, 16, 16), 0.5)
    assert modes == [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    assert_same_state(before, state(model))
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
