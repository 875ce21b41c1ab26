"""FedHyb's rounds and its server's distillation, against the oracle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hybrid as oracle
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from hybrid import Net
from hybrid_rounds import (
    aggregated,
    close,
    data,
    equal,
    image_net,
    jittered,
    net,
    quick_run,
    server,
    to_oracle,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.distillation.teachers import ensemble_means
from flwr_kd.learning.weights import get_weights, load_weights
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedhyb import (
    FedHyb,
    FedHybClient,
    FedHybConfig,
    FedHybSelf,
    FedHybStar,
)
from flwr_kd.strategies.fedhyb import strategy as strategy_module
from flwr_kd.transport.inline_grid import InlineGrid

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
        # One core: `rows` watches the one model.
        given: dict[str, Any] = {"min_available_nodes": len(SIZES), "cores": 1}
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
        actual = [config.server_learning_rate_at(r) for r in (1, 2, 3, 4, 5)]
        np.testing.assert_allclose(actual, [3.0, 3.0, 0.3, 0.3, 0.03])

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
        actual = aggregated(strategy, [weights])
        for key, value in weights.items():
            np.testing.assert_allclose(actual[key], value, rtol=0, atol=1e-5, err_msg=key)

    def test_running_statistics_are_the_mean_s_and_teachers_stay(self) -> None:
        models = [jittered("resnet8", seed) for seed in (0, 1)]
        kept = [{key: value.copy() for key, value in model.items()} for model in models]
        x = data(0, 20, (3, 16, 16))[0]
        actual = aggregated(server(image_net("resnet8"), TensorDataset(x), batch_size=8), models, [3, 1])
        moved = 0
        for key, value in actual.items():
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
            for actual, expected in ((q, 0), (h, 1)):
                mean = np.mean([output[expected] for output in outputs], axis=0)
                np.testing.assert_allclose(
                    np.sort(actual.numpy(), axis=0), np.sort(mean, axis=0), rtol=1e-4, atol=1e-5
                )

    def test_labels_are_never_read(self) -> None:
        models = [get_weights(net(seed)) for seed in (0, 1)]
        x = data(0, 12)[0]
        actual = aggregated(server(net(), unlabelled(x)), models)
        assert equal(
            list(actual.values()), list(aggregated(server(net(), TensorDataset(x)), models).values())
        )

    def test_a_teacher_without_finite_outputs_is_left_out(self, flower_log: list[str]) -> None:
        models = [get_weights(net(seed)) for seed in (0, 1)]
        broken = {key: np.full_like(value, 3e38) for key, value in models[0].items()}
        strategy = server(net(), TensorDataset(data(0, 12)[0]))
        actual = aggregated(strategy, [models[0], broken, models[1]], [2, 9, 1])
        assert any("node 101 (partition 1) has outputs that are not finite" in line for line in flower_log)
        assert equal(list(actual.values()), list(aggregated(strategy, models, [2, 1]).values()))

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
