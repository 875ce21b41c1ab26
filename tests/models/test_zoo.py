from __future__ import annotations

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flwr_kd.catalogue import FEATURE_LAYERS
from flwr_kd.models import (
    MODELS,
    FeatureModel,
    SplitModel,
    as_feature_model,
    build_model,
    build_predictor,
    count_parameters,
)
from flwr_kd.seeding import may_draw_from_global_rng

FULL = [(1, 28, 28), (3, 32, 32), (3, 28, 28), (1, 32, 32)]
SMALL = [(1, 8, 8)]
SHAPES = FULL + SMALL
FEATURE_DIMS = {
    "alexnet": 512,
    "cnn": 512,
    "lenet": 84,
    "mlp": 64,
    "mlp-bn": 64,
    "mlp4": 200,
    "resnet18": 64,
    "resnet32": 64,
    "resnet8": 64,
    "shufflenet": 32,
}
PRINTED = {"resnet2": 634, "resnet4": 5_306, "resnet6": 19_994, "resnet10": 43_226, "resnet12": 61_786}
SPLIT = {f"{name}{suffix}": size for name, size in PRINTED.items() for suffix in ("", "-pooled")}
SIGNED = ("resnet18", "shufflenet")
SMALLEST = {"alexnet": 8, "cnn": 4, "lenet": 4, "resnet18": 8, "resnet32": 4, "resnet8": 4, "shufflenet": 8}
SMALLEST |= dict.fromkeys(SPLIT, 4)
IMAGE_MODELS = tuple(name for name in MODELS if name != "bilstm")
VOCABULARY, LENGTH = 50, 12


def batch(shape: tuple[int, ...], size: int = 2) -> torch.Tensor:
    return torch.randn((size, *shape), generator=torch.Generator().manual_seed(1))


def texts(*lengths: int, padded_to: int = LENGTH) -> torch.Tensor:
    """Return token ids of texts with the given lengths."""
    shape = len(lengths), padded_to
    tokens = torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return tokens * (torch.arange(padded_to) < torch.tensor(lengths)[:, None])


def inputs(name: str, shape: tuple[int, ...], size: int = 2) -> torch.Tensor:
    return texts(*(LENGTH - i for i in range(size))) if name == "bilstm" else batch(shape, size)


def build(name: str, shape: tuple[int, ...] = (3, 32, 32), **changes: Any) -> FeatureModel:
    """Build a model for images of a shape, or for texts."""
    options: dict[str, Any] = {"input_shape": shape, "num_classes": 10, "seed": 0}
    if name == "bilstm":
        options |= {"input_shape": (LENGTH,), "vocabulary": VOCABULARY}
    return build_model(name, **(options | changes))


def test_names() -> None:
    assert tuple(sorted([*FEATURE_DIMS, *SPLIT, "bilstm"])) == MODELS


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        # These are printed in the papers.
        ("resnet18", (3, 32, 32), 10, 11_209_994),
        ("resnet18", (3, 32, 32), 100, 11_215_844),
        ("shufflenet", (3, 32, 32), 10, 1_286_734),
        ("cnn", (1, 28, 28), 10, 1_663_370),  # McMahan et al. 2017
        ("lenet", (1, 32, 32), 10, 61_706),  # LeNet-5 with dense second convolution
        ("lenet", (1, 28, 28), 10, 61_706),
        *((name, (3, 32, 32), 10, size) for name, size in SPLIT.items()),  # FedDKC's Table 3
        ("resnet32", (3, 32, 32), 10, 464_154),  # He et al. 2016: 0.46 M
        # These were counted by hand.
        ("resnet8", (3, 32, 32), 10, 75_290),
        ("mlp", (1, 8, 8), 10, 64 * 200 + 200 + 200 * 64 + 64 + 64 * 10 + 10),
        ("mlp-bn", (1, 8, 8), 10, 64 * 200 + 200 + 2 * 200 + 200 * 64 + 64 + 64 * 10 + 10),
        ("mlp4", (1, 8, 8), 10, 64 * 200 + 200 + 3 * (200 * 200 + 200) + 200 * 10 + 10),
        ("resnet18", (1, 28, 28), 10, 11_209_994 - 2 * 64 * 49),
        ("shufflenet", (1, 28, 28), 10, 1_286_734 - 2 * 24 * 9),
        ("resnet18", (3, 8, 8), 10, 11_209_994),
        ("shufflenet", (3, 8, 8), 10, 1_286_734),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert count_parameters(build(name, shape, num_classes=classes)) == expected


def test_torchvision_backbones_are_unchanged() -> None:
    from torchvision import models

    for name, original in (("resnet18", models.resnet18), ("shufflenet", models.shufflenet_v2_x1_0)):
        backbone = build(name).extractor.backbone
        reference = original(weights=None)
        reference.fc = nn.Identity()
        reference.load_state_dict(backbone.state_dict())
        x = batch((3, 32, 32))
        assert torch.equal(backbone.eval()(x), reference.eval()(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FEATURE_DIMS)
def test_forward_is_classify_of_features(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, num_classes=7).eval()
    x = batch(shape)
    with torch.no_grad():
        h = model.features(x)
        logits = model(x)
        assert h.shape == (2, FEATURE_DIMS[name]) == (2, model.feature_dim)
        assert logits.shape == (2, 7) == (2, model.num_classes)
        kept = h.clone()
        assert torch.equal(model.classify(h), logits)
        assert torch.equal(h, kept)
        assert torch.any(h < 0) == (name in SIGNED)
        assert torch.any(h > 0)
        # Different images have different features, so that no layer is constant.
        assert not torch.equal(h[0], h[1])
        one = model(x[:1])
        torch.testing.assert_close(one, logits[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape)
    # A dropout mask could hide a parameter.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    h = model.features(inputs(name, shape, 8))
    loss = nn.functional.cross_entropy(model.classify(h), torch.arange(8)) + h.square().mean()
    loss.backward()
    dead = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None
        or not torch.any(parameter.grad)
        or not torch.all(torch.isfinite(parameter.grad))
    ]
    assert dead == []


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_pixel_of_a_small_image_counts(name: str) -> None:
    model = build(name, (1, 8, 8)).eval()
    x = batch((1, 8, 8)).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).float().mean() > 0.95


@pytest.mark.parametrize("name", MODELS)
def test_seed_alone_decides_the_weights(name: str) -> None:
    before = torch.random.get_rng_state()
    first = build(name, (1, 8, 8), seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(987)
        again = build(name, (1, 8, 8), seed=5).state_dict()
    other = build(name, (1, 8, 8), seed=6).state_dict()
    assert list(first) == list(again) == list(other)
    assert all(torch.equal(first[key], again[key]) for key in first)
    matrices = [key for key in first if first[key].dim() > 1]
    assert matrices
    assert not any(torch.equal(first[key], other[key]) for key in matrices)


def test_threads_that_build_or_draw_do_not_disturb_each_other() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.rand(7)
        return nn.utils.parameters_to_vector(build("resnet8", (1, 8, 8), seed=seed).parameters()).detach()

    with torch.random.fork_rng(devices=[]):
        alone = [weights(seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(weights, [0, 1, 2, 3] * 8))
    assert all(torch.equal(got, alone[index % 4]) for index, got in enumerate(together))


def test_weights_have_torchs_own_distribution() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        expected = [nn.Linear(64, 200), nn.Linear(200, 64), nn.Linear(64, 10)]
    got = [module for module in build("mlp", (1, 8, 8), seed=4).modules() if isinstance(module, nn.Linear)]
    for one, two in zip(got, expected, strict=True):
        assert torch.equal(one.weight, two.weight)
        assert torch.equal(one.bias, two.bias)


def test_embeddings_and_lstms_draw_as_torchs_own() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        expected = [
            nn.Embedding(VOCABULARY, 128, padding_idx=0),
            *(nn.LSTM(128, 128) for _ in range(2)),
            *(nn.LSTM(256, 64) for _ in range(2)),
        ]
    model = build("bilstm", seed=4)
    got = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.LSTM)]
    for one, two in zip(got, expected, strict=True):
        for mine, torchs in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(mine, torchs)


def test_default_device_is_not_used() -> None:
    with torch.device("meta"):
        model = build("resnet8", (1, 8, 8))
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_mode_draws_nothing_and_keeps_its_state(name: str) -> None:
    model = build(name, (1, 8, 8)).eval()
    state = copy.deepcopy(model.state_dict())
    x = inputs(name, (1, 8, 8))
    before = torch.random.get_rng_state()
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_pickled(name: str) -> None:
    model = build(name, (1, 8, 8)).eval()
    x = inputs(name, (1, 8, 8))
    twin = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    for size in ("feature_dim", "feature_shape", "num_classes"):
        assert getattr(twin, size, None) == getattr(model, size, None)


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("name", [*FEATURE_DIMS, "bilstm"])
def test_feature_dim_sets_the_width(name: str, width: int) -> None:
    model = build(name, (1, 8, 8), feature_dim=width).eval()
    with torch.no_grad():
        h = model.features(inputs(name, (1, 8, 8)))
    assert h.shape == (2, width)
    assert model.head.in_features == model.feature_dim == width


@pytest.mark.parametrize("shape", [(1, 12, 20), (3, 17, 9), (2, 15, 33)], ids=str)
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_odd_sizes_and_other_channel_counts(name: str, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        assert build(name, shape).eval()(batch(shape)).shape == (2, 10)


@pytest.mark.parametrize(("name", "side"), SMALLEST.items())
def test_smallest_size_works_and_one_less_is_refused(name: str, side: int) -> None:
    model = build(name, (1, side, side))
    x = batch((1, side, side))
    with torch.no_grad():
        if "alexnet" in name:
            model.eval()
        assert model(x).shape == (2, 10)
    message = rf"{name} cannot take {side + 5}x{side - 1} images: its smallest is {side}x{side}"
    with pytest.raises(ValueError, match=message):
        build(name, (1, side + 5, side - 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPLIT)
def test_split_models_meet_at_maps(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, num_classes=7).eval()
    assert isinstance(model, SplitModel)
    x = batch(shape)
    with torch.no_grad():
        maps = model.features(x)
        factor = 2 if name.endswith("-pooled") else 1
        assert maps.shape == (2, 16, shape[1] // factor, shape[2] // factor) == (2, *model.feature_shape)
        assert torch.equal(model.classify(maps), model(x))
        assert model(x).shape == (2, 7) == (2, model.num_classes)
    with pytest.raises(ValueError, match="feature_dim must be None, got 64"):
        build(name, shape, feature_dim=64)
    with pytest.raises(ValueError, match="feature_layer must be None, got linear"):
        build(name, shape, feature_layer="linear")


def test_extractors_of_one_shape_have_the_same_first_weights() -> None:
    stems = [build(name).extractor.state_dict() for name in SPLIT]
    for stem in stems[1:]:
        assert all(torch.equal(value, stem[key]) for key, value in stems[0].items())


class ElementOperations(TorchDispatchMode):
    """Counts 2 operations per element of a BatchNorm, and 1 per element of a ReLU and of what is pooled."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, cost in (("batch_norm", 2), ("relu", 1), ("max_pool2d", 1), ("aten.mean", 1)):
            if name in str(func):
                self.total += cost * args[0].numel()
        return func(*args, **(kwargs or {}))


def operations(model: nn.Module, x: torch.Tensor) -> tuple[int, float]:
    """Return the multiply-adds of convolutions and linear layers, and all operations in millions."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, ElementOperations() as elements:
        model.eval()(x)
    multiply_adds = counter.get_total_flops() // 2
    return multiply_adds, (multiply_adds + elements.total) / 1e6


@pytest.mark.parametrize(
    ("name", "printed"),
    [("resnet2", 0.51), ("resnet4", 5.31), ("resnet6", 9.02), ("resnet10", 18.59), ("resnet12", 23.35)],
)
def test_the_operations_of_feddkcs_clients_are_those_without_pooling(name: str, printed: float) -> None:
    x = batch((3, 32, 32), 1)
    _, plain = operations(build(name), x)
    _, pooled = operations(build(f"{name}-pooled"), x)
    assert plain == pytest.approx(printed, rel=0.006)
    assert name == "resnet2" or pooled < 0.45 * printed


def test_a_predictor_has_the_printed_parameters_and_nearly_the_operations() -> None:
    model = build_predictor((16, 32, 32), num_classes=10, seed=0)
    assert count_parameters(model) == 167_306  # printed: 167.31 K
    multiply_adds, millions = operations(model, batch((16, 32, 32), 1))
    assert multiply_adds == 33_294_848
    assert millions == pytest.approx(34.8, abs=0.1)  # printed: 34.58 M
    pooled, _ = operations(build_predictor((16, 16, 16), num_classes=10, seed=0), batch((16, 16, 16), 1))
    assert 3.9 < multiply_adds / pooled <= 4
    assert model(batch((16, 32, 32))).shape == (2, 10)


def test_a_basic_predictor_has_resnet20s_stages() -> None:
    model = build_predictor((16, 16, 16), num_classes=10, seed=0, kind="basic")
    assert count_parameters(model) == 272_010
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) == 18
    assert model(batch((16, 16, 16))).shape == (2, 10)
    fewer = build_predictor((8, 4, 4), num_classes=10, seed=0, kind="basic")
    assert count_parameters(fewer) != 272_010
    with pytest.raises(ValueError, match="kind must be one of bottleneck, basic, got 'resnet20'"):
        build_predictor((16, 4, 4), num_classes=10, seed=0, kind="resnet20")


@pytest.mark.parametrize("side", [1, 2, 4, 7])
def test_a_predictor_takes_maps_of_any_side(side: int) -> None:
    model = build_predictor((16, side, side), num_classes=5, seed=0)
    assert model(batch((16, side, side))).shape == (2, 5)


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet8", "shufflenet"])
def test_a_feature_layer_decides_the_sign_of_the_features(name: str) -> None:
    shape = (3, 16, 16)
    x = batch(shape, 64)
    found = {}
    for layer in FEATURE_LAYERS:
        model = build(name, shape, feature_layer=layer, feature_dim=24)
        with torch.no_grad():
            found[layer] = model.train().features(x)
        assert found[layer].shape == (64, 24)
        assert count_parameters(model) == count_parameters(build(name, shape, feature_dim=24))
    assert (found["relu"] >= 0).all()
    assert (found["relu"] > 0).any()
    assert (found["linear"] < 0).any()
    assert (found["linear"] > 0).any()
    # Equation 15 of FedHKD's paper, over the batch.
    whitened = found["batchnorm"]
    torch.testing.assert_close(whitened.mean(dim=0), torch.zeros(24), atol=1e-4, rtol=0)
    expected = (found["linear"] - found["linear"].mean(dim=0)) / (
        found["linear"].var(dim=0, correction=0) + 1e-5
    ).sqrt()
    torch.testing.assert_close(whitened, expected, atol=1e-3, rtol=1e-3)


def test_a_resnet_for_cifar_gets_a_feature_layer_where_features_shall_have_both_signs() -> None:
    x = batch((3, 8, 8), 8)
    plain, signed = build("resnet8", (3, 8, 8)), build("resnet8", (3, 8, 8), feature_layer="linear")
    assert count_parameters(signed) - count_parameters(plain) == 64 * 64 + 64
    with torch.no_grad():
        assert (plain.features(x) >= 0).all()
        assert (signed.features(x) < 0).any()


@pytest.mark.parametrize("shape", [(64,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_a_predictor_takes_features_of_any_shape(shape: tuple[int, ...]) -> None:
    first, again, other = (
        build_predictor(shape, num_classes=4, seed=seed)(batch(shape)) for seed in (0, 0, 1)
    )
    assert first.shape == (2, 4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_split_model_is_split_before_its_last_linear_where_vectors_are_wanted() -> None:
    model = build("resnet6").eval()
    vectors = as_feature_model(model)
    x = batch((3, 32, 32))
    with torch.no_grad():
        assert vectors.features(x).shape == (2, 32)
        assert torch.equal(vectors(x), model(x))
    assert list(vectors.state_dict()) == list(model.state_dict())


def test_a_split_model_names_mismatches() -> None:
    stem, head = nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    with pytest.raises(ValueError, match=r"features must have the shape \[B, 4, 7, 7\], got \[2, 4, 8, 8\]"):
        SplitModel(stem, head, feature_shape=(4, 7, 7)).features(batch((1, 8, 8)))
    with pytest.raises(ValueError, match=r"Sequential ends in Softmax"):
        SplitModel(stem, nn.Sequential(*head, nn.Softmax(dim=1)))
    with pytest.raises(TypeError, match=r"extractor must be an nn\.Module, got function"):
        SplitModel(batch, head)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(16,), (1,), (2, 3), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "mlp-bn", "mlp4"])
def test_mlps_take_any_shape(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, shape)(batch(shape)).shape == (2, 10)


def lstm_size(inputs: int, units: int) -> int:
    """Count the parameters of both directions: four gates with a matrix and a bias each for input and state."""
    return 2 * 4 * (units * inputs + units * units + 2 * units)


def test_bilstm_has_the_papers_layers() -> None:
    dense = 129 * 1024 + 1025 * 512 + 513 * 256 + 257 * 128 + 129 * 64 + 65 * 7
    expected = VOCABULARY * 128 + lstm_size(128, 128) + lstm_size(256, 64) + dense
    model = build("bilstm", num_classes=7)
    assert count_parameters(model) == expected == 1_265_287
    assert model.feature_dim == 64


@pytest.mark.parametrize(("name", "layers"), [("bilstm", 5), ("mlp", 2), ("mlp-bn", 2), ("mlp4", 4)])
def test_every_hidden_layer_has_a_relu(name: str, layers: int) -> None:
    linear = [m for m in build(name).extractor.modules() if isinstance(m, nn.Linear | nn.ReLU)]
    assert [type(m) for m in linear] == [nn.Linear, nn.ReLU] * layers


def reference_features(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Compute the features of one unpadded text with torch's bidirectional LSTMs."""
    extractor = model.extractor
    x = extractor.embedding(text[None])
    for ours, (width, units) in ((extractor.lstm1, (128, 128)), (extractor.lstm2, (256, 64))):
        lstm = nn.LSTM(width, units, bidirectional=True, batch_first=True)
        ahead, back = ours.ahead.state_dict(), ours.back.state_dict()
        lstm.load_state_dict(ahead | {f"{key}_reverse": value for key, value in back.items()})
        x, _ = lstm(x)
    return extractor.dense(x.max(dim=1).values)[0]


def test_bilstm_reads_each_text_as_if_it_were_alone() -> None:
    model = build("bilstm").eval()
    lengths = [5, 1, 12, 7]
    tokens = texts(*lengths)
    with torch.no_grad():
        h = model.features(tokens)
        for row, text, length in zip(h, tokens, lengths, strict=True):
            torch.testing.assert_close(row, reference_features(model, text[:length]), rtol=1e-4, atol=1e-6)
    assert not any(torch.allclose(h[i], h[j], rtol=1e-3) for i in range(4) for j in range(i))


@pytest.mark.parametrize("more", [1, 30])
def test_padding_makes_no_difference_to_bilstm(more: int) -> None:
    model = build("bilstm")
    tokens, weights = texts(5, 1, 12), batch((10,), 3)
    results = []
    for x in (tokens, nn.functional.pad(tokens, (0, more))):
        model.zero_grad()
        logits = model(x)
        (logits * weights).sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_bilstm_takes_texts_without_words() -> None:
    model = build("bilstm")
    mixed, empty = texts(0, 4), texts(0, 0)
    logits = model(torch.cat([mixed, empty]))
    nothing = model.classify(model.extractor.dense(torch.zeros(1, 128)))
    torch.testing.assert_close(logits[[0, 2, 3]], nothing.expand(3, -1))
    torch.testing.assert_close(model(empty), nothing.expand(2, -1))
    assert not torch.allclose(logits[1], nothing[0], rtol=1e-3)
    logits.square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_the_paddings_vector_stays_zero() -> None:
    model = build("bilstm")
    vectors = model.extractor.embedding.weight
    before = vectors.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    tokens = texts(5, 0, 12)
    nn.functional.cross_entropy(model(tokens), torch.arange(3)).backward()
    used = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, tokens[tokens != 0], True)
    assert torch.equal(vectors.grad.any(dim=1), used)
    optimizer.step()
    assert not vectors[0].any()
    assert (vectors[used] != before[used]).any(dim=1).all()


def test_bilstm_draws_nothing_in_training() -> None:
    model = build("bilstm").train()
    before = torch.random.get_rng_state()
    assert torch.equal(model(texts(5, 3)), model(texts(5, 3)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not may_draw_from_global_rng(model)


def test_texts_still_differ_after_bilstms_many_layers() -> None:
    extractor = build("bilstm").extractor
    with torch.no_grad():
        pooled, features = [], []
        extractor.dense.register_forward_hook(lambda _, x, y: (pooled.append(x[0]), features.append(y)))
        extractor(texts(*range(1, 13)))
    assert features[0].std(0).norm() > 0.1 * pooled[0].std(0).norm()


@pytest.mark.long
def test_bilstm_can_be_trained() -> None:
    # The class depends on which of two words occurs among random ones.
    tokens = texts(*range(4, 12), *range(4, 12), *range(4, 12), *range(4, 12)).clamp(max=40)
    y = torch.arange(32) % 2
    tokens[torch.arange(32), torch.arange(32) % 4] = 48 + y
    model = build("bilstm", num_classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), y).backward()
        optimizer.step()
    assert torch.equal(model(tokens).argmax(1), y)


@pytest.mark.parametrize("x", [torch.ones(2, LENGTH), torch.ones(2, 3, LENGTH, dtype=torch.int64)])
def test_bilstm_refuses_anything_but_token_ids(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"takes int64 token ids \[B, L\], got {x.dtype} \[2, "):
        build("bilstm")(x)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_only_bilstm_takes_token_ids(name: str) -> None:
    for none in (None, 0):
        build(name, (1, 8, 8), vocabulary=none)
    with pytest.raises(ValueError, match=f"{name} takes numbers and no token ids: .* None or 0, got 50"):
        build(name, (1, 8, 8), vocabulary=50)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocabulary": None}, ValueError, "bilstm takes token ids: vocabulary .* at least 2, got None"),
        ({"vocabulary": 0}, ValueError, "bilstm takes token ids: vocabulary .* at least 2, got 0"),
        ({"vocabulary": 1}, ValueError, "at least 2, got 1"),
        ({"vocabulary": -5}, ValueError, "vocabulary must be a whole number from 0, got -5"),
        ({"vocabulary": 50.0}, TypeError, "vocabulary must be a whole number from 0, got 50.0"),
        ({"input_shape": (1, 8, 8)}, ValueError, r"bilstm takes an input_shape \(length,\), got \(1, 8, 8\)"),
    ],
)
def test_bad_arguments_of_bilstm(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build("bilstm", **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "vgg"}, ValueError, "name must be one of alexnet, bilstm, .*shufflenet, got 'vgg'"),
        ({"input_shape": (28, 28)}, ValueError, r"lenet takes an input_shape \(channels, height, width\)"),
        ({"input_shape": ()}, ValueError, "input_shape must have at least one size"),
        ({"input_shape": (0, 28, 28)}, ValueError, r"all at least 1, got \(0, 28, 28\)"),
        ({"input_shape": (1.0, 28, 28)}, TypeError, "input_shape must be a tuple of ints"),
        ({"input_shape": 28}, TypeError, "input_shape must be a tuple of ints, got 28"),
        ({"num_classes": 1}, ValueError, "num_classes must be a whole number from 2, got 1"),
        ({"num_classes": "10"}, TypeError, "num_classes must be a whole number from 2, got '10'"),
        ({"seed": -1}, ValueError, "seed must be a whole number from 0 to 9223372036854775807, got -1"),
        ({"seed": 2**63}, ValueError, "seed must be a whole number from 0 to 9223372036854775807"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number from 0 to 9223372036854775807, got 1.5"),
        ({"seed": None}, TypeError, "seed must be a whole number from 0 to 9223372036854775807, got None"),
        (
            {"feature_layer": "tanh"},
            ValueError,
            "feature_layer must be one of relu, linear, batchnorm, got 'tanh'",
        ),
        ({"feature_dim": 0}, ValueError, "feature_dim must be a whole number from 1, got 0"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"name": "lenet", "input_shape": (1, 28, 28), "num_classes": 10, "seed": 0}
    with pytest.raises(error, match=message):
        build_model(**(options | changes))


def test_largest_seed() -> None:
    build("mlp", (4,), seed=2**63 - 1)


def test_torchvision_is_needed_by_its_own_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for name in MODELS:
        if name in ("resnet18", "shufflenet"):
            with pytest.raises(ImportError, match=r"pip install 'flwr-kd\[simulation\]'"):
                build(name)
        else:
            build(name)
