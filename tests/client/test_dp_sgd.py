"""``dp-sgd-clip`` and ``dp-sgd-noise``: training against explicit loops over samples, and what is refused."""

from __future__ import annotations

import builtins
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from token_models import LENGTH, Masked, small_bert, texts, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.client.dp_sgd import dp_sgd_refusal
from flwr_kd.inputs import NamedDataset, NamedInputs
from flwr_kd.server.stated_privacy import stated_privacy
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedprox import FedProx, FedProxClient
from flwr_kd.testing.federation import Federation, blobs, small_model

RATE, CLIP, SAMPLES = 0.5, 0.2, 12


def placed(size: int, seed: int) -> NamedDataset:
    """Return texts with the positions that a BERT would make itself."""
    ids, mask, labels = tokens(size, seed)
    positions = torch.arange(LENGTH).repeat(size, 1)
    return NamedDataset({"input_ids": ids, "attention_mask": mask, "position_ids": positions}, labels)


def trained(
    kind: type[KDClient[Any]], strategy: Any, model: nn.Module, *, reproducible: bool = True
) -> tuple[KDClient[Any], dict[str, Tensor]]:
    """Return a client, and its weights after a round."""
    context = Context(1, 17, {"partition-id": 0}, RecordDict(), {})
    client = kind(model, blobs(SAMPLES, 0), context=context, device="cpu", reproducible_noise=reproducible)
    run = strategy.prepare(ArrayRecord(client.model.state_dict()))
    names = strategy.template.names
    sent, _, _ = client.fit(client.arrays(()), run.messages.config("train", 1, names))
    return client, dict(zip(names, map(torch.from_numpy, sent), strict=True))


def options(**more: Any) -> dict[str, Any]:
    """Return those of one step on all samples, or more of them."""
    plain = {"optimizer": "sgd", "learning_rate": RATE, "local_epochs": 1, "batch_size": SAMPLES}
    return {**plain, "dp_sgd_clip": CLIP, **more}


def stepped(client: KDClient[Any], before: nn.Module, steps: int = 1, mu: float = 0.0) -> dict[str, Tensor]:
    """Return the weights after steps on all samples, whose gradients are computed and clipped one by one."""
    model = before
    data = blobs(SAMPLES, 0)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in zip(data.x, data.y, strict=True):
            loss = F.cross_entropy(model(x[None]), y[None])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
            for place, gradient in enumerate(gradients):
                total[place] += gradient * min(1.0, CLIP / norm)
        with torch.no_grad():
            for p, summed, first in zip(model.parameters(), total, start, strict=True):
                p -= RATE * (summed / SAMPLES + mu * (p - first))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def expected_model(client_model: nn.Module) -> nn.Module:
    """Return a model with the weights with which a client of the same model begins."""
    context = Context(1, 17, {"partition-id": 0}, RecordDict(), {})
    return FedAvgClient(client_model, blobs(SAMPLES, 0), context=context, device="cpu").model.train()


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_step_is_that_of_explicit_loops_over_samples(epochs: int) -> None:
    client, sent = trained(FedAvgClient, FedAvg(**options(local_epochs=epochs)), small_model())
    expected = stepped(client, expected_model(small_model()), epochs)
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value, rtol=1e-4, atol=1e-6)
    # It clips: without it the step is longer.
    _, plain = trained(FedAvgClient, FedAvg(**options(dp_sgd_clip=0.0, local_epochs=epochs)), small_model())
    assert any(not torch.allclose(plain[name], value, atol=1e-4) for name, value in expected.items())


def test_a_step_on_samples_of_several_inputs_by_name() -> None:
    node = Context(1, 17, {"partition-id": 0}, RecordDict(), {})
    client = FedAvgClient(Masked(), texts(SAMPLES, 0), context=node, device="cpu")
    model = FedAvgClient(Masked(), texts(SAMPLES, 0), context=node, device="cpu").model.train()
    strategy = FedAvg(**options())
    run = strategy.prepare(ArrayRecord(client.model.state_dict()))
    sent, _, _ = client.fit(client.arrays(()), run.messages.config("train", 1, strategy.template.names))
    ids, mask, labels = tokens(SAMPLES, 0)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for row in range(SAMPLES):
        one = NamedInputs({"input_ids": ids[row : row + 1], "attention_mask": mask[row : row + 1]})
        loss = F.cross_entropy(model(one), labels[row : row + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        for place, gradient in enumerate(gradients):
            total[place] += gradient * min(1.0, CLIP / norm)
    expected = {
        name: (value - RATE * summed / SAMPLES).detach()
        for (name, value), summed in zip(model.named_parameters(), total, strict=True)
    }
    for name, array in zip(strategy.template.names, sent, strict=True):
        torch.testing.assert_close(torch.from_numpy(array), expected[name], rtol=1e-4, atol=1e-6)


class TestModelsThatAreTried:
    """A model is tried on a sample in the handshake."""

    @staticmethod
    def refusal(model: nn.Module, data: Any, **more: Any) -> str | None:
        node = Context(1, 17, {"partition-id": 0}, RecordDict(), {})
        client = FedAvgClient(model, data, context=node, device="cpu", **more)
        before = {name: value.clone() for name, value in client.model.state_dict().items()}
        torch.manual_seed(3)
        state, training = torch.get_rng_state(), client.model.training
        found = dp_sgd_refusal(client, registry.get("fedavg").config(["dp-sgd-clip=1"]))
        assert torch.equal(torch.get_rng_state(), state)
        assert client.model.training is training
        assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())
        assert [vars(parameter) for parameter in client.model.parameters()] == [{}] * len(
            [*model.parameters()]
        )
        assert all(parameter.grad is None for parameter in client.model.parameters())
        return found

    def test_a_bert_needs_the_positions_of_each_sample(self) -> None:
        refusal = self.refusal(small_bert(), texts(SAMPLES, 0))
        assert refusal is not None
        assert "position_embeddings.weight has no gradient for each sample" in refusal
        assert "such as position_ids" in refusal
        names = ["input_ids", "attention_mask", "position_ids"]
        assert self.refusal(small_bert(), placed(SAMPLES, 0), input_key=names) is None

    def test_a_parameter_that_is_not_used(self) -> None:
        class Spare(Masked):
            def __init__(self) -> None:
                super().__init__()
                self.spare = nn.Linear(2, 2)

        model = Spare()
        assert "spare.weight has no gradient for each sample" in str(self.refusal(model, texts(SAMPLES, 0)))
        model.spare.requires_grad_(False)
        assert self.refusal(model, texts(SAMPLES, 0)) is None

    def test_one_input(self) -> None:
        assert self.refusal(small_model(), blobs(SAMPLES, 0)) is None


def test_fedproxs_term_is_added_after_the_clipping() -> None:
    strategy = FedProx(**options(local_epochs=3, proximal_mu=0.5))
    client, sent = trained(FedProxClient, strategy, small_model())
    for name, value in stepped(client, expected_model(small_model()), 3, mu=0.5).items():
        torch.testing.assert_close(sent[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reproducible", [True, False])
def test_noise_has_the_size_asked_for(reproducible: bool) -> None:
    _, clean = trained(FedAvgClient, FedAvg(**options()), small_model())
    _, sent = trained(
        FedAvgClient, FedAvg(**options(dp_sgd_noise=3.0)), small_model(), reproducible=reproducible
    )
    noise = np.concatenate([(sent[name] - clean[name]).ravel().numpy() for name in clean])
    std = RATE * 3.0 * CLIP / SAMPLES
    assert noise.std() == pytest.approx(std, rel=4 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 4 * std / math.sqrt(noise.size)
    _, again = trained(
        FedAvgClient, FedAvg(**options(dp_sgd_noise=3.0)), small_model(), reproducible=reproducible
    )
    assert all(torch.equal(again[name], sent[name]) for name in sent) is reproducible


def test_nothing_of_opacus_stays_on_the_model() -> None:
    client, _ = trained(FedAvgClient, FedAvg(**options(dp_sgd_noise=1.0)), small_model())
    fresh = expected_model(small_model())
    for module, untouched in zip(client.model.modules(), fresh.modules(), strict=True):
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert vars(module).keys() == vars(untouched).keys()
    assert [vars(parameter) for parameter in client.model.parameters()] == [{}] * len([*fresh.parameters()])


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavg-ft", "fedprox", "feddf", "pfeddf", "ktpfl-weights", "fedamp"]
)
def test_methods_of_plain_losses_run_with_it(name: str) -> None:
    settings = ("dp-sgd-clip=0.5", "dp-sgd-noise=0.1")
    _, result = Federation(name, 3).run(1, settings=settings)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 0)]
    _, again = Federation(name, 3).run(1, settings=settings)
    _, plain = Federation(name, 3).run(1)
    assert result.rounds[0].train_loss == again.rounds[0].train_loss
    assert result.rounds[0].train_loss != plain.rounds[0].train_loss


SUPPORTED = {name for name, method in registry.methods().items() if method.client.dp_sgd}


def test_the_methods_that_have_it() -> None:
    plain = {"fedavg", "fedavg-ft", "feddf", "pfeddf", "ktpfl-weights"}
    assert plain | {"fedprox", "fedamp", "heur-fedamp"} == SUPPORTED


def test_a_class_below_that_trains_otherwise_has_to_say_that_it_has_it() -> None:
    class Other(FedAvgClient):
        def objective(self, task: Any) -> Any:
            return super().objective(task)

    class Same(Other):
        dp_sgd = True

    with pytest.raises(ConfigError, match="does not work with Other"):
        trained(Other, FedAvg(**options()), small_model())
    trained(Same, FedAvg(**options()), small_model())


@pytest.mark.parametrize("name", [name for name in registry.methods() if name not in SUPPORTED])
def test_other_methods_refuse_it_in_the_handshake(name: str) -> None:
    config = registry.get(name).config(["dp-sgd-clip=1"])
    client = object.__new__(registry.get(name).client)
    refusal = dp_sgd_refusal(client, config)
    assert refusal is not None
    assert f"does not work with {registry.get(name).client.__name__}" in refusal


def test_a_federation_of_a_method_without_it_does_not_begin() -> None:
    with pytest.raises(Exception, match="dp-sgd-clip=1 does not work with MOONClient"):
        Federation("moon", 2).run(1, settings=("dp-sgd-clip=1",))


def test_batchnorm_is_refused_with_opacus_reason() -> None:
    with pytest.raises(ConfigError, match=r"Opacus: .*BatchNorm"):
        trained(FedAvgClient, FedAvg(**options()), small_model("batch-norm"))


def test_without_opacus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "opacus":
            raise ImportError("No module named 'opacus'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"flwr-kd\[dp\]"):
        trained(FedAvgClient, FedAvg(**options()), small_model())


def test_noise_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="dp-sgd-clip must be > 0 with dp-sgd-noise=1"):
        FedAvg(dp_sgd_noise=1.0)


def test_what_is_stated_counts_epochs_of_all_rounds() -> None:
    config = registry.get("fedavg").config(["dp-sgd-clip=1", "dp-sgd-noise=3", "local-epochs=4"])
    first, second = stated_privacy(config, ("train",), {"train"}, 10)
    assert first.startswith("40 epochs of DP-SGD with dp-sgd-noise=3")
    assert second.startswith("not covered")
    both = registry.get("fedavg").config(["dp-sgd-clip=1", "dp-clip=1", "dp-noise=1"])
    lines = stated_privacy(both, ("train",), {"train"}, 10)
    assert [line.split()[0] for line in lines] == ["10", "dp-sgd-clip", "not"]


def test_a_client_is_freed_when_it_is_no_longer_referenced() -> None:
    client, _ = trained(FedAvgClient, FedAvg(**options(dp_sgd_noise=1.0)), small_model())
    reference = weakref.ref(client)
    del client
    assert reference() is None
