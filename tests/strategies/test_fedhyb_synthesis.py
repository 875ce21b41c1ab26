"""FedHyb*'s generator: losses, training, and the proxy set at the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrid as oracle
import numpy as np
import pytest
import torch
from hybrid_rounds import (
    CLASSES,
    CPU,
    QUICK,
    Arrays,
    aggregated,
    equal,
    finite,
    generator,
    image_net,
    jittered,
    quick_run,
    repeatable,
    same,
    server,
    star,
    tensors,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.learning.weights import get_weights, load_weights
from flwr_kd.models import build_generator, build_model
from flwr_kd.strategies.fedhyb import (
    FedHybStar,
    synthesis,
    synthesise,
)
from flwr_kd.transport.inline_grid import InlineGrid


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
        with synthesis.batchnorm_loss(model) as actual:
            layer(x)
            alone(torch.zeros(4, 3, dtype=torch.float64))
        layer(x)
        assert len(actual) == 1
        actual[0].backward()  # type: ignore[no-untyped-call]
        mean, var = (kept[name].numpy() for name in ("running_mean", "running_var"))
        np.testing.assert_allclose(actual[0].item(), oracle.statistics(values, mean, var), rtol=1e-9)
        slope = oracle.gradient(lambda v: oracle.statistics(v, mean, var), values)
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(layer.state_dict()[name], kept[name]) for name in kept)


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
        for weight in weights:
            load_weights(model, weight)
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
        value, slope = synthesis.Ensemble(model, weights).loss_and_gradient(
            torch.tensor(x, dtype=torch.float32, requires_grad=True), torch.from_numpy(y),
            balance_weight=balance, batchnorm_weight=statistics,
        )  # fmt: skip
        assert value == pytest.approx(loss(x), rel=1e-5)
        np.testing.assert_allclose(slope.numpy(), oracle.gradient(loss, x), rtol=1e-4, atol=1e-6)

    def test_the_gradient_is_that_of_one_graph(self) -> None:
        weights = [jittered("resnet8", seed) for seed in range(3)]
        kept = [{name: value.copy() for name, value in weight.items()} for weight in weights]
        model = image_net("resnet8").eval()
        x = torch.randn(6, 3, 16, 16, generator=generator(), requires_grad=True)
        y = torch.arange(6) % CLASSES
        value, slope = synthesis.Ensemble(model, weights).loss_and_gradient(
            x, y, balance_weight=0.5, batchnorm_weight=0.3
        )
        after = get_weights(model)
        assert equal(
            [after[n] for n in kept[2] if "running" in n], [kept[2][n] for n in kept[2] if "running" in n]
        )

        total, distances = torch.zeros(6, CLASSES), []
        for weight in weights:
            found: list[Tensor] = []

            def note(layer: Any, args: tuple[Tensor, ...], found: list[Tensor] = found) -> None:
                var, mean = torch.var_mean(args[0], dim=(0, 2, 3), correction=0)
                found.append(
                    ((mean - layer.running_mean) ** 2).mean() + ((var - layer.running_var) ** 2).mean()
                )

            handles = [
                m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.BatchNorm2d)
            ]
            state = {name: torch.from_numpy(v) for name, v in weight.items()}
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
        actual = []
        before = torch.get_rng_state()
        for seed in (0, 0, 1):
            gen = build_generator((1, 6, 6), num_classes=4, latent_dim=8, seed=0)
            loss = train(gen, model, weights, draw=generator(seed))
            actual.append((loss, gen, synthesise(gen, 9, draw=generator(seed), device=CPU)))
        assert torch.equal(torch.get_rng_state(), before)
        assert actual[0][0] == actual[1][0] != actual[2][0]
        assert same(actual[0][1], actual[1][1])
        assert not same(actual[0][1], actual[2][1])
        assert torch.equal(actual[0][2][0], actual[1][2][0])

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
        value, slope = synthesis.Ensemble(model, weights).loss_and_gradient(x * 100, y, **options)
        for hostile in (broken, nan):
            mixed = [weights[0], hostile, weights[1]]
            actual, other = synthesis.Ensemble(model, mixed).loss_and_gradient(x * 100, y, **options)
            assert actual == value
            assert torch.equal(slope, other)
            with pytest.raises(FloatingPointError, match="no teacher has finite outputs"):
                synthesis.Ensemble(model, [hostile]).loss_and_gradient(x * 100, y, **options)

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


class TestStar:
    def test_a_round(self, ensemble: Any) -> None:
        strategy, weights = star(), ensemble[1]
        kept = [{name: value.copy() for name, value in weight.items()} for weight in weights]
        before = torch.get_rng_state()
        actual = aggregated(strategy, weights, [1, 2, 3])
        assert torch.equal(torch.get_rng_state(), before)
        assert len(strategy.distiller.samples) == 10
        first = torch.cat([x for x, _ in strategy.distiller.samples.ordered(4)])
        assert strategy.state_arrays().keys() > {"synthetic"}
        assert all(equal(list(a.values()), list(b.values())) for a, b in zip(kept, weights, strict=True))
        # The result is that of FedHyb's distillation on these samples.
        model = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, seed=0)
        expected = aggregated(server(model, TensorDataset(first), batch_size=8), weights, [1, 2, 3])
        assert equal(list(actual.values()), list(expected.values()))
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
        actual = aggregated(strategy, [broken, broken])
        assert any("round 1: the generator does not change" in line for line in flower_log)
        assert all(torch.equal(kept[name], value) for name, value in strategy.generator.state_dict().items())
        assert all(np.isfinite(value).all() for value in actual.values())
        assert strategy.state_arrays() == {}

    @pytest.mark.parametrize("steps", [1, 3])
    def test_a_client_without_a_finite_gradient_does_not_end_the_run(self, steps: int) -> None:
        model, hostile = infinite_slope()
        honest = get_weights(infinite_slope()[0])
        strategy = star(model, (1, 4, 4), generator_steps=steps)
        actual = aggregated(strategy, [honest, hostile, honest])
        assert finite(strategy.generator)
        assert all(np.isfinite(value).all() for value in actual.values())

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


def test_a_generator_that_diverges_is_left_as_it_was(flower_log: list[str]) -> None:
    strategy = star(image_net("resnet8"), (3, 16, 16), generator_learning_rate=1e30, generator_steps=1)
    before = {name: value.clone() for name, value in strategy.generator.state_dict().items()}
    strategy.renew_proxy([list(jittered("resnet8", seed).values()) for seed in range(2)], 1)
    assert any("the generator does not change" in line for line in flower_log)
    assert all(torch.equal(value, before[name]) for name, value in strategy.generator.state_dict().items())
    assert len(strategy.distiller.samples) == 10


class TestCores:
    def test_the_same_bits_on_any_number_of_cores(self) -> None:
        teachers = [jittered("resnet8", seed) for seed in range(4)]
        teachers[2] = {name: value * np.float32(np.nan) for name, value in teachers[2].items()}
        results = []
        for cores in (1, 2, 3):
            gen = build_generator((3, 16, 16), num_classes=CLASSES, latent_dim=8, seed=0)
            loss = train(gen, image_net("resnet8"), teachers, cores=cores)
            results.append((loss, get_weights(gen)))
        first, *others = results
        for loss, weights in others:
            assert loss == first[0]
            assert equal(list(weights.values()), list(first[1].values()))

    @pytest.mark.parametrize("cores", [1, 2, 3])
    def test_no_teacher_is_usable(self, cores: int) -> None:
        gen = build_generator((3, 16, 16), num_classes=CLASSES, latent_dim=8, seed=0)
        nan = {name: value * np.float32(np.nan) for name, value in jittered("resnet8", 0).items()}
        with pytest.raises(FloatingPointError, match="no teacher has finite outputs"):
            train(gen, image_net("resnet8"), [nan] * 3, cores=cores)
