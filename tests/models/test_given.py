"""Models as users bring them: compiled, wrapped, shared, in reduced precision."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from flwr_kd.models import FeatureModel, SplitModel, as_feature_model
from flwr_kd.models.given import check_dtypes, floating_dtype, plain_model, private_copy


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def hooked(module: nn.Module, where: str) -> nn.Module:
    """Return what Opacus makes of a module, by one of its marks."""

    def capture_backprops_hook(*_: Any) -> None: ...

    capture_backprops_hook.__module__ = "opacus.grad_sample.gsm_base"
    if where == "wrapper":
        wrapper: Any = type("GradSampleModule", (nn.Module,), {})()
        wrapper._module = module
        return wrapper  # type: ignore[no-any-return]
    if where == "list of hooks":
        module.autograd_grad_sample_hooks = []  # type: ignore[assignment]
    elif where == "hook":
        module[0].register_full_backward_hook(capture_backprops_hook)  # type: ignore[index]
    else:
        next(module.parameters()).grad_sample = None  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("where", ["wrapper", "list of hooks", "hook", "parameter"])
def test_per_sample_gradients_are_refused(where: str) -> None:
    for give in (as_feature_model, lambda model: FeatureModel(model, nn.Linear(2, 2)), plain_model):
        with pytest.raises(ValueError, match="differential privacy would not take place"):
            give(hooked(net(), where))


def test_a_model_wrapped_for_several_devices_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got DataParallel: .* give the model that is wrapped, model.module"):
        as_feature_model(nn.DataParallel(net()))


@pytest.mark.long  # torch.compile imports its compiler.
def test_compiled_models_are_unwrapped() -> None:
    plain = net()
    x, expected = torch.ones(3, 4), plain(torch.ones(3, 4))
    compiled = torch.compile(plain, backend="eager")
    assert plain_model(compiled) is plain
    pair = plain_model((torch.compile(plain, backend="eager"), nn.Linear(2, 2)))
    assert pair[0] is plain
    split = SplitModel(torch.compile(nn.Flatten(), backend="eager"), torch.compile(plain, backend="eager"))
    nested: Any = nn.Sequential(nn.Flatten(), torch.compile(net(), backend="eager"))
    nested[1].load_state_dict({f"_orig_mod.{k}": v for k, v in plain.state_dict().items()})
    in_place = net()
    in_place.load_state_dict(plain.state_dict())
    in_place.compile(backend="eager")
    for model in (compiled, split, nested, in_place):
        copied = as_feature_model(private_copy(plain_model(model)))
        assert not [name for name in copied.state_dict() if "_orig_mod" in name]
        assert torch.equal(copied.classify(copied.features(x)), expected)
    assert "1._orig_mod.0.weight" in nested.state_dict()  # the user's own is what it was


class TestCopies:
    def test_tied_weights_stay_tied(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        first, head = private_copy((model, model[0]))
        assert first[0].weight is first[1].weight is head.weight is not model[0].weight

    @pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
    def test_results_of_computations_lose_their_history(self) -> None:
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 2)))
        model(torch.ones(1, 4))
        with pytest.raises(RuntimeError):
            copy.deepcopy(model)
        copied = private_copy(model)
        assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))
        copied(torch.ones(1, 4)).sum().backward()
        assert copied[0].weight_g.grad is not None
        assert model[0].weight_g.grad is None

    def test_what_cannot_be_copied(self) -> None:
        model = net()
        model.lock = threading.Lock()  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"model cannot be copied \(TypeError: cannot pickle"):
            private_copy(model)

    @pytest.mark.parametrize("where", ["attribute", "list", "default", "hook", "nested", "forward"])
    def test_functions_that_refer_to_the_original_are_refused(self, where: str) -> None:
        """A copy would compute with the original's layers, and training would not change a number."""
        model: Any = net()
        first = model[0]
        if where == "hook":
            first.register_forward_hook(lambda _, x, y: y + model[0].weight.sum())
        elif where == "forward":
            before = model.forward
            model.forward = lambda x: before(x)
        else:
            inner = lambda x: first(x)  # noqa: E731
            model.function = {
                "attribute": inner,
                "list": [inner],
                "default": lambda x, layer=first: layer(x),
                "nested": lambda x: inner(x),
            }[where]
        with pytest.raises(TypeError, match="refers to the model's own layers"):
            private_copy(model)

    def test_other_functions_are_shared(self) -> None:
        model: Any = net()
        scale = 2.0
        model.double, model.own = (lambda x: scale * x), model.half
        assert private_copy(model).own.__self__ is not model

    @pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
    def test_scripted_parts_are_not_copied(self) -> None:
        """deepcopy makes their parameters results of a computation, which no optimiser takes."""
        with pytest.raises(TypeError, match="ScriptModule"):
            private_copy(nn.Sequential(torch.jit.script(nn.Linear(4, 8)), nn.Linear(8, 2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision_is_refused(dtype: torch.dtype) -> None:
    mixed = net()
    mixed[2].to(dtype)
    for model in (net().to(dtype), mixed):
        with pytest.raises(ValueError, match=rf'float32 or float64, got {dtype} .*precision="bfloat16"'):
            check_dtypes(model.state_dict())
    assert floating_dtype(mixed) is None
    check_dtypes(net().double().state_dict())
