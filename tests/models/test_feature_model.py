from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from flwr.common import ArrayRecord
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.models import FeatureModel, SplitModel, as_feature_model, build_model, count_parameters
from flwr_kd.models.feature import find_head


class ConvNet(nn.Module):
    """A model that registers its head first, and has names that a wrapper may also use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.original = nn.Linear(4 * 36, 8)
        self.num_classes = 99
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.flatten(self.features(x), 1)
        self.seen.append(type(h))
        h = F.dropout(F.relu(self.original(h)), 0.5, training=self.training)
        return self.head(h)


class Branching(nn.Module):
    """A model whose control flow depends on the data, so that no symbolic run is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if h.sum() > 0:
            h = torch.tanh(h)
        return self.head(h)


class Ends(Branching):
    """A model that ends in a given layer; `branches` hides the layer from a symbolic run."""

    def __init__(self, end: Callable[[Tensor], Any], *, branches: bool) -> None:
        super().__init__()
        self.end = end
        self.branches = branches

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        if self.branches and h.sum() > 1e9:
            h = -h
        return self.end(self.head(h))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 5)
        self.unused = nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(x.shape[0], -1, 8)
        mixed, _ = self.attention(tokens, tokens, tokens)
        return self.out(self.norm(tokens + mixed * self.scale).mean(1))


def sequential() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 2, 3),
            flatten=nn.Flatten(),
            hidden=nn.Linear(72, 7),
            drop=nn.Dropout(0.5),
            fc=nn.Linear(7, 4),
            same=nn.Identity(),
        )
    )


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(64, 9), nn.Sequential(nn.ReLU(), nn.Linear(9, 2)))
    )


def torchvision_net() -> nn.Module:
    from torchvision.models import shufflenet_v2_x0_5

    return shufflenet_v2_x0_5(weights=None, num_classes=6)


WRAPPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, int, int]] = {
    # model, input, name of the head, D, C
    "names-collide": (ConvNet, (5, 1, 8, 8), "head", 8, 3),
    "branching": (Branching, (5, 4), "head", 6, 3),
    "attention": (Residual, (5, 24), "out", 8, 5),
    "sequential": (sequential, (5, 1, 8, 8), "fc", 7, 4),
    "nested": (nested, (5, 1, 8, 8), "1.1.1", 9, 2),
    "linear": (lambda: nn.Linear(6, 3), (5, 6), "", 6, 3),
    "torchvision": (torchvision_net, (5, 3, 32, 32), "fc", 1024, 6),
}


@pytest.fixture(params=list(WRAPPED))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, str, int, int]:
    make, shape, head, width, classes = WRAPPED[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make(), torch.randn(shape), head, width, classes


def test_wrapper_computes_what_the_original_computes(case: tuple[nn.Module, Tensor, str, int, int]) -> None:
    model, x, head, width, classes = case
    untouched = copy.deepcopy(model)
    wrapped = as_feature_model(model)
    for mode in (True, False):
        wrapped.train(mode)
        untouched.train(mode)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expected = untouched(x)
            torch.manual_seed(0)
            got = wrapped(x)
        assert torch.equal(got, expected)
    h = wrapped.features(x)
    assert h.shape == (len(x), width) == (len(x), wrapped.feature_dim)
    assert torch.equal(wrapped.classify(h), untouched(x))
    assert wrapped.num_classes == classes == untouched(x).shape[1]
    assert torch.equal(wrapped.classify(h), F.linear(h, *untouched.get_submodule(head).parameters()))


def test_wrapper_has_the_originals_state(case: tuple[nn.Module, Tensor, str, int, int]) -> None:
    model, x, *_ = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = as_feature_model(model)
    state = wrapped.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert count_parameters(wrapped) == count_parameters(model)

    # Through Flower's record into a second wrapped model and an unwrapped one.
    other = {name: value + 1 for name, value in before.items()}
    arrays = ArrayRecord(OrderedDict(other))
    wrapped.load_state_dict(arrays.to_torch_state_dict())
    bare = copy.deepcopy(model)
    bare.load_state_dict(ArrayRecord(OrderedDict(wrapped.state_dict())).to_torch_state_dict())
    for name, value in bare.state_dict().items():
        assert torch.equal(value, other[name])
    assert torch.equal(wrapped.eval()(x), bare.eval()(x))


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: cloudpickle.loads(cloudpickle.dumps(model)),
    ],
    ids=["deepcopy", "pickle", "cloudpickle"],
)
def test_wrapper_clones_are_whole_and_independent(
    case: tuple[nn.Module, Tensor, str, int, int], clone: Callable[[nn.Module], nn.Module]
) -> None:
    model, x, *_ = case
    wrapped = as_feature_model(model).eval()
    expected = wrapped(x)
    twin = clone(wrapped)
    assert torch.equal(twin(x), expected)
    assert torch.equal(twin.features(x), wrapped.features(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    # The clone's forward uses the clone's parameters, and the first model does not.
    assert not torch.any(twin(x))
    assert torch.equal(wrapped(x), expected)
    twin.train()
    assert not wrapped.training
    assert not model.training


def test_wrapper_of_a_local_class_goes_through_cloudpickle_and_torch_save() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x * 2)

    wrapped = as_feature_model(Local())
    x = torch.ones(3, 4)
    twin = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert torch.equal(twin.features(x), 2 * x)
    file = io.BytesIO()
    saved = as_feature_model(ConvNet())
    torch.save(saved, file)
    file.seek(0)
    assert list(torch.load(file, weights_only=False).state_dict()) == list(saved.state_dict())


def test_wrapping_neither_runs_nor_changes_the_model() -> None:
    model = ConvNet()
    calls: list[Any] = []
    model.features.register_forward_hook(lambda *args: calls.append(args))
    attributes = dict(vars(model))
    before = torch.random.get_rng_state()
    wrapped = as_feature_model(model)
    assert vars(model) == attributes
    assert model.seen == []
    assert calls == []
    assert type(model) is ConvNet
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.num_classes == 99
    assert wrapped.num_classes == 3


def test_features_leaves_no_hook_behind_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    wrapped = as_feature_model(model)
    wrapped.features(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        wrapped.features(torch.ones(2, 5))
    assert not model[2]._forward_hooks


def test_wrapper_follows_dtype_mode_and_gradients_of_the_original() -> None:
    model = ConvNet()
    wrapped = as_feature_model(model)
    wrapped.eval()
    assert not model.training
    assert not model.features.training
    wrapped.double()
    assert model.head.weight.dtype == model.features[1].running_mean.dtype == torch.float64
    x = torch.ones(2, 1, 8, 8, dtype=torch.float64)
    assert wrapped(x).dtype == torch.float64

    wrapped.train()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    before = model.head.weight.detach().clone()
    wrapped.classify(wrapped.features(x + torch.arange(2.0)[:, None, None, None])).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
    assert model.features[1].num_batches_tracked == 1
    wrapped.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrapper_keeps_the_originals_own_train_and_extra_state() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.fc = nn.Linear(4, 2)
            self.rounds = torch.tensor(7)

        def train(self, mode: bool = True) -> Custom:
            super().train(mode)
            self.bn.eval()
            return self

        def get_extra_state(self) -> Tensor:
            return self.rounds

        def set_extra_state(self, state: Tensor) -> None:
            self.rounds = state

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.bn(x))

    model = Custom()
    wrapped = as_feature_model(model).train()
    assert wrapped.training
    assert model.training
    assert not model.bn.training
    state = wrapped.state_dict()
    assert list(state) == list(model.state_dict())
    state["_extra_state"] = torch.tensor(8)
    wrapped.load_state_dict(state)
    assert model.rounds == 8


def test_wrapper_works_inside_another_module() -> None:
    inner = ConvNet()
    outer = nn.ModuleDict({"client": as_feature_model(inner)})
    assert list(outer.state_dict()) == [f"client.{name}" for name in inner.state_dict()]
    outer.load_state_dict({name: torch.ones_like(value) for name, value in outer.state_dict().items()})
    assert torch.all(inner.head.weight == 1)
    outer.load_state_dict(
        {name: torch.zeros_like(value) for name, value in outer.state_dict().items()}, assign=True
    )
    assert torch.all(inner.head.weight == 0)
    outer["client"].apply(
        lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None
    )
    assert torch.all(inner.head.weight == 1)


def test_submodules_are_found_by_the_originals_names() -> None:
    model = ConvNet()
    wrapped = as_feature_model(model)
    assert wrapped.get_submodule("features.0") is model.features[0]
    assert wrapped.get_parameter("features.0.weight") is model.features[0].weight


def test_replacing_the_head_is_followed_or_refused() -> None:
    model = sequential()
    wrapped = as_feature_model(model)
    model.fc = nn.Linear(7, 11)
    assert wrapped.num_classes == 11
    assert wrapped(torch.ones(2, 1, 8, 8)).shape == (2, 11)
    model.fc = nn.Bilinear(7, 7, 2)
    with pytest.raises(TypeError, match=r"'fc' was a Linear when wrapped and is now Bilinear"):
        wrapped.features(torch.ones(2, 1, 8, 8))


def test_a_shared_linear_gives_the_input_of_its_last_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(self.fc(x)))

    model = Twice()
    x = torch.ones(2, 4)
    assert torch.equal(as_feature_model(model).features(x), torch.tanh(model.fc(x)))


def test_head_called_by_keyword_and_in_inference_mode() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x + 1)

    wrapped = as_feature_model(Keyword())
    with torch.inference_mode():
        assert torch.equal(wrapped.features(torch.zeros(3, 4)), torch.ones(3, 4))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (nn.Softmax(dim=1), "ends in Softmax 'end'"),
        (nn.LogSoftmax(dim=1), "ends in LogSoftmax 'end'"),
        (nn.Dropout(), "ends in Dropout 'end'"),
        (nn.Conv1d(1, 1, 1), "ends in Conv1d 'end'"),
        (lambda z: F.log_softmax(z, dim=1), "ends in log_softmax"),
        (lambda z: z / 2, "ends in truediv"),
        (lambda z: z.mul_(2), "ends in mul_"),
        (lambda z: (z, z), "returns tuple"),
        (lambda z: {"logits": z}, "returns dict"),
    ],
)
def test_a_layer_after_the_linear_is_named(end: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_feature_model(Ends(end, branches=False))


@pytest.mark.parametrize(
    "end",
    [
        nn.Softmax(dim=1),
        lambda z: F.log_softmax(z, dim=1),
        lambda z: z.mul_(2),
        lambda z: z + 0,
        lambda z: (z, z),
    ],
)
def test_features_refuses_errors_that_a_symbolic_run_misses(end: Callable[[Tensor], Any]) -> None:
    wrapped = as_feature_model(Ends(end, branches=True))
    with pytest.raises(
        ValueError, match=r"Ends: its output is not that of its Linear 'head'.*something follows"
    ):
        wrapped.features(torch.ones(2, 4))


def test_a_linear_that_was_not_called_is_refused() -> None:
    class Elsewhere(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) if x.sum() > 0 else self.head(self.body(x))

    with pytest.raises(ValueError, match="'head' \\(which was not called\\)"):
        as_feature_model(Elsewhere()).features(torch.ones(2, 4))


def test_features_that_are_no_matrix_are_refused() -> None:
    wrapped = as_feature_model(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"input of '0'.*\[B, D\], got \[2, 3, 4\]"):
        wrapped.features(torch.ones(2, 3, 4))


class LastIsConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.conv = nn.Conv1d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) if x.sum() > 0 else x
        return self.conv(h[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: "resnet", TypeError, "pair .*, got str"),
        (lambda: [nn.ReLU(), nn.Linear(2, 2)], TypeError, "got list"),
        (lambda: (nn.Flatten(), nn.ReLU(), nn.Linear(2, 2)), TypeError, "got 3 parts"),
        (lambda: (nn.Flatten(), 3), TypeError, "head must be an nn.Module, got int"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), TypeError, "before scripting"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), ValueError, "ends in Flatten '1'"),
        (lambda: nn.Sequential(), ValueError, "ends in its input"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), ValueError, "lazy Linear"),
        (LastIsConv, ValueError, "last layer with parameters is Conv1d 'conv'"),
    ],
)
def test_models_that_cannot_be_wrapped(
    model: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        as_feature_model(model())


def test_a_model_with_its_own_features_and_classify_is_returned_as_it_is() -> None:
    class Own(nn.Module):
        def features(self, x: Tensor) -> Tensor:
            return x

        def classify(self, h: Tensor) -> Tensor:
            return h

    own = Own()
    assert as_feature_model(own) is own
    zoo = build_model("mlp", input_shape=(4,), num_classes=2, seed=0)
    assert as_feature_model(zoo) is zoo
    wrapped = as_feature_model(nn.Linear(4, 2))
    assert as_feature_model(wrapped) is wrapped


def test_a_pair_becomes_a_feature_model() -> None:
    extractor = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU())
    head = nn.Sequential(nn.Dropout(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Identity())
    model = as_feature_model((extractor, head))
    assert isinstance(model, FeatureModel)
    assert (model.feature_dim, model.num_classes) == (5, 3)
    x = torch.ones(2, 1, 2, 2)
    model.eval()
    assert torch.equal(model(x), head(extractor(x)))
    assert torch.equal(model.features(x), extractor(x))
    assert [name.split(".")[0] for name in model.state_dict()] == 2 * ["extractor"] + 4 * ["head"]


class Cosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3, 4))

    def forward(self, h: Tensor) -> Tensor:
        return F.normalize(h) @ self.weight.T


def test_sizes_of_a_head_without_linear_must_be_given() -> None:
    with pytest.raises(ValueError, match="feature_dim cannot be read from a head of type Cosine"):
        FeatureModel(nn.Identity(), Cosine())
    with pytest.raises(ValueError, match="num_classes cannot be read from a head of type Cosine"):
        FeatureModel(nn.Identity(), Cosine(), feature_dim=4)
    model = FeatureModel(nn.Identity(), Cosine(), feature_dim=4, num_classes=3)
    assert model(torch.ones(2, 4)).shape == (2, 3)


def test_width_before_a_reshaping_layer_is_no_contradiction() -> None:
    head = nn.Sequential(nn.AvgPool1d(2), nn.Linear(4, 3))
    model = FeatureModel(nn.Identity(), head, feature_dim=8)
    assert model(torch.ones(2, 8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"feature_dim": 5}, ValueError, "feature_dim is 5, but the head's Linear has 4"),
        ({"num_classes": 5}, ValueError, "num_classes is 5, but the head's Linear has 3"),
        ({"feature_dim": 0}, ValueError, "feature_dim must be a whole number from 1, got 0"),
        ({"num_classes": -1}, ValueError, "num_classes must be a whole number from 1, got -1"),
        ({"num_classes": 3.0}, TypeError, "num_classes must be a whole number from 1, got 3.0"),
        ({"feature_dim": True}, TypeError, "feature_dim must be a whole number from 1, got True"),
    ],
)
def test_wrong_sizes(sizes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FeatureModel(nn.Identity(), nn.Linear(4, 3), **sizes)


def test_a_head_must_give_logits() -> None:
    with pytest.raises(ValueError, match="head ends in Softmax"):
        FeatureModel(nn.Identity(), nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)))


def test_wrong_shapes_are_named() -> None:
    pooled = FeatureModel(nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"extractor: features .* \[B, 4\], got \[2, 4, 1, 1\]"):
        pooled(torch.ones(2, 4, 5, 5))
    narrow = FeatureModel(nn.Identity(), Cosine(), feature_dim=4, num_classes=9)
    with pytest.raises(ValueError, match=r"head: logits .* \[B, 9\], got \[2, 3\]"):
        narrow(torch.ones(2, 4))
    recurrent = FeatureModel(nn.LSTM(4, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="features must be a tensor, got tuple"):
        recurrent(torch.ones(2, 4))


def test_count_parameters_counts_shared_ones_once_and_frozen_ones_too() -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    assert count_parameters(nn.Sequential(first, second, nn.BatchNorm1d(4))) == 16 + 4 + 4 + 8


def test_state_hooks_and_non_persistent_buffers_are_shared() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    seen: list[str] = []
    model.register_state_dict_pre_hook(lambda *args: seen.append("save"))
    wrapped = as_feature_model(model)
    wrapped._register_load_state_dict_pre_hook(lambda *args: seen.append("load"))  # public from torch 2.5 on
    wrapped.register_buffer("cache", torch.zeros(3), persistent=False)
    assert model.cache.shape == (3,)
    wrapped.load_state_dict(wrapped.state_dict())
    assert seen == ["save", "load"]
    assert list(wrapped.state_dict()) == list(model.state_dict()) == ["0.weight", "0.bias"]


def test_the_head_of_a_model_is_the_module_after_its_features() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert find_head(as_feature_model(net)) is net[2]
    pair = FeatureModel(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    assert find_head(pair) is pair.head
    split = SplitModel(nn.Linear(4, 3), nn.Linear(3, 2))
    assert find_head(split) is split.predictor
    assert find_head(nn.Identity()) is None
