"""DaFKD: its losses against NumPy, whose discriminator is whose, and defects of public code."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from tensors import normal as doubles
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.learning.weights import get_weights
from flwr_kd.models import build_generator, build_model
from flwr_kd.server.records import Node, Reply
from flwr_kd.strategies.dafkd import (
    DaFKD,
    DaFKDClient,
    DaFKDConfig,
    Discriminator,
    DiscriminatorScores,
    build_discriminator,
    discriminator_loss,
    distillation_loss,
    domain_weights,
    gradient_penalty,
    sample_noise,
    teacher_logits,
)
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.flower_records import SEED
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError

CLASSES, SHAPE, NOISE = 3, (4,), 5
Array = np.ndarray[Any, Any]
QUICK: dict[str, Any] = {"noise_dim": NOISE, "local_epochs": 1, "batch_size": 8, "server_batches": 2}


def normal(*shape: int, seed: int) -> Tensor:
    return doubles(*shape, seed=seed).float()


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


def data(seed: int, size: int = 16) -> TensorDataset:
    return TensorDataset(normal(size, 4, seed=seed), torch.arange(size) % CLASSES)


def context(partition: int = 0) -> Context:
    config = {"partition-id": partition}
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})


def strategy_of(**options: Any) -> DaFKD:
    return DaFKD(**{"model": net(), "input_shape": SHAPE, "device": "cpu", **QUICK, **options})


def task(strategy: DaFKD, server_round: int, client: int = 0) -> Task[DaFKDConfig]:
    record = strategy.with_generator(ArrayRecord(net().state_dict()))
    arrays = [value.numpy() for value in record.values()]
    config = {SEED: strategy.seed}
    names = tuple(record)
    return Task(
        server_round, "train", 7, names, arrays, None, strategy.config, extra=config, client_seed=client
    )


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# ---------------------------------------------------------------------- maths


def test_weights_sum_to_one_and_follow_each_clients_own_discriminator() -> None:
    scores = [torch.rand(6, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    weights = domain_weights(scores, 6)
    torch.testing.assert_close(weights.sum(dim=0), torch.ones(6, dtype=torch.float64))
    table = torch.stack(scores).numpy()
    np.testing.assert_allclose(weights.numpy(), table / table.sum(axis=0), rtol=1e-6)
    # A client that finds a sample more like its own counts more for it, and for no other sample.
    more = [scores[0].clone(), *scores[1:]]
    more[0][2] = 1.0
    changed = domain_weights(more, 6)
    assert changed[0, 2] > weights[0, 2]
    assert torch.equal(changed[:, 3], weights[:, 3])


def test_without_scores_weights_are_uniform() -> None:
    tiny = torch.tensor([0.4, 1e-20])
    weights = domain_weights([tiny, torch.zeros(0), None, tiny], 2)
    assert weights.tolist() == [[0.5, 0.5], [0, 0], [0, 0], [0.5, 0.5]]
    assert domain_weights([None, None], 2).tolist() == [[0.5, 0.5]] * 2


def test_the_ensemble_is_of_logits() -> None:
    logits, weights = [normal(4, 3, seed=k) for k in range(2)], torch.rand(2, 4).double()
    expected = [
        [sum(weights[k, i].item() * logits[k][i, c].item() for k in range(2)) for c in range(3)]
        for i in range(4)
    ]
    np.testing.assert_allclose(teacher_logits(logits, weights).numpy(), expected, rtol=1e-5)


def test_the_distillation_is_a_mean_over_samples() -> None:
    """Public code has the mean over classes as well (KLDivLoss's default)."""
    teacher, student = normal(4, 3, seed=1), normal(4, 3, seed=2)
    p, q = softmax(teacher.numpy() / 10), softmax(student.numpy() / 10)
    expected = 100 * sum(p[i, c] * math.log(p[i, c] / q[i, c]) for i in range(4) for c in range(3)) / 4
    assert distillation_loss(teacher, student, 10).item() == pytest.approx(expected, rel=1e-4)


def test_the_discriminators_loss_is_binary_cross_entropy() -> None:
    real, made = normal(5, seed=1), normal(5, seed=2)
    a, b = (1 / (1 + np.exp(-logits.numpy())) for logits in (real, made))
    expected = -np.log(a).mean() - np.log(1 - b).mean()
    assert discriminator_loss(real, made).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2, 3)])
def test_the_penaltys_norm_is_over_all_axes_of_a_sample(shape: tuple[int, ...]) -> None:
    real, made, w = (normal(*shape, seed=k) for k in range(3))
    shares = torch.tensor([0.0, 0.3, 1.0])

    def discriminate(x: Tensor) -> Tensor:
        return torch.sigmoid((w[0] * x).flatten(1).sum(dim=1))

    terms = []
    for i, u in enumerate(shares.tolist()):
        x = (u * real[i] + (1 - u) * made[i]).double().numpy()
        p = 1 / (1 + math.exp(-float((w[0].double().numpy() * x).sum())))
        gradient = p * (1 - p) * w[0].double().numpy()
        terms.append((math.sqrt((gradient**2).sum()) - 1) ** 2)
    value = gradient_penalty(discriminate, real, made, shares)
    assert value.item() == pytest.approx(np.mean(terms), rel=1e-4)


def test_the_penalty_is_finite_where_there_is_no_gradient() -> None:
    weight = torch.zeros(4, requires_grad=True)
    value = gradient_penalty(
        lambda x: torch.sigmoid(x @ weight), *(normal(3, 4, seed=k) for k in (1, 2)), torch.ones(3)
    )
    value.backward()
    assert value.item() == 1
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_maps_are_averaged_over_their_places() -> None:
    discriminator = build_discriminator((3, 2, 2), seed=0)
    maps = normal(5, 3, 2, 2, seed=1)
    torch.testing.assert_close(discriminator(maps), discriminator.linear(maps.mean(dim=(2, 3))).squeeze(1))
    assert isinstance(discriminator, Discriminator)
    assert sum(p.numel() for p in discriminator.parameters()) == 4


@pytest.mark.parametrize("shape", [(4,), (1, 8, 8), (3, 9, 7)])
def test_the_generator_is_unconditional_and_has_the_inputs_shape(shape: tuple[int, ...]) -> None:
    generator = build_generator(shape, num_classes=0, latent_dim=7, seed=0)
    made = generator(normal(64, 7, seed=1)).detach()
    assert made.shape == (64, *shape)
    # Normalised as data are, and not squeezed into [-1, 1] by a Tanh.
    assert made.mean().abs() < 0.05
    assert made.std() == pytest.approx(1, abs=0.05)
    assert made.abs().max() > 1.2


# ---------------------------------------------------------------------- clients


def visit(client: DaFKDClient, strategy: DaFKD, server_round: int, number: int = 0) -> Any:
    return client.phase_train(task(strategy, server_round, number))


def client_of(seed: int = 0, *, of: Context | None = None, model: Any = None) -> DaFKDClient:
    return DaFKDClient(net() if model is None else model, data(seed), context=of or context(), device="cpu")


def test_a_discriminator_is_trained_in_its_clients_first_participations() -> None:
    """Late clients too: limits by the global round would leave theirs untrained."""
    strategy, kept, seen, moved = strategy_of(), context(), [], []
    first = [value.copy() for value in strategy.generator_arrays]
    for server_round in (11, 15, 20, 21, 30, 31, 40):
        answer = visit(client_of(of=kept), strategy, server_round)
        state = client_of(of=kept).state.load("discriminator")
        assert state is not None
        seen.append(state["linear.weight"].clone())
        generator = answer.arrays[-len(first) :]
        moved.append(any(not np.array_equal(a, b) for a, b in zip(generator, first, strict=True)))
        assert len(answer.payload.scores) == 16
    assert [not torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [True, True, *[False] * 4]
    assert moved == [True] * 5 + [False] * 2
    assert int(state["participations"]) == 7
    assert int(state["trainings"]) == 3


def test_each_client_has_a_discriminator_of_its_own() -> None:
    """In public code one trainer carries it over from client to client."""
    strategy, states = strategy_of(discriminator_rounds=0), []
    for number in (0, 1, 0):
        own = context(number)
        client = client_of(of=own)
        visit(client, strategy, 1, number)
        states.append(client.state.load("discriminator")["linear.weight"])  # type: ignore[index]
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])


def test_an_untrained_discriminator_gives_no_score() -> None:
    strategy = strategy_of(discriminator_rounds=0)
    assert len(visit(client_of(), strategy, 2).payload.scores) == 0
    assert len(visit(client_of(), strategy_of(adversarial_epochs=0), 2).payload.scores) == 0
    assert len(visit(client_of(), strategy_of(), 2).payload.scores) == 16


def test_scores_are_of_the_generator_with_which_the_round_started() -> None:
    strategy, client = strategy_of(local_epochs=3), client_of()
    answer = visit(client, strategy, 4)
    samples = strategy.samples(4)
    client.model.eval()
    with torch.no_grad():
        expected = torch.sigmoid(client._discriminator(client.model.features(samples)))
    np.testing.assert_allclose(answer.payload.scores, expected.numpy(), rtol=1e-5)
    # The generator that is sent back is another one by now.
    assert not np.array_equal(answer.arrays[-1], strategy.generator_arrays[-1])
    assert torch.equal(
        sample_noise(strategy.seed, 4, count=16, size=NOISE),
        sample_noise(strategy.seed, 4, count=16, size=NOISE),
    )
    assert not torch.equal(samples, strategy.samples(5))


def test_terms_count_in_the_first_local_epochs_only() -> None:
    strategy, client = strategy_of(adversarial_epochs=2, local_epochs=4), client_of()
    asked = task(strategy, 2)
    client.load(asked)
    loss = client.objective(asked)
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    for epoch, more in ((0, True), (1, True), (2, False), (3, False)):
        client.local_epoch = epoch
        client.model.eval()
        plain = nn.functional.cross_entropy(client.model(x), y).item()
        assert (loss(x, y).item() > plain + 0.5) is more


def test_the_discriminators_gradient_reaches_the_trunk_and_the_generators_step_moves_it_only() -> None:
    strategy, client = strategy_of(), client_of()
    asked = task(strategy, 2)
    client.load(asked)
    loss = client.objective(asked)
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    client.local_epoch = 0
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    own = client._discriminator.linear.weight.detach().clone()
    generator = get_weights(client._generator)  # type: ignore[arg-type]
    client.model.eval()
    value = loss(x, y) - nn.functional.cross_entropy(client.model(x), y)
    after = client.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(own, client._discriminator.linear.weight)
    moved = get_weights(client._generator)  # type: ignore[arg-type]
    assert not np.array_equal(moved["net.0.weight"], generator["net.0.weight"])
    assert all(p.grad is None for p in client.model.parameters())
    value.backward()
    gradient = client.model.state_dict(keep_vars=True)["0.weight"].grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-4
    assert {id(p) for p in client._discriminator.parameters()} <= {
        id(p) for p in client.trained().parameters()
    }


def test_generated_samples_change_no_running_statistics() -> None:
    strategy, client, plain = strategy_of(adversarial_epochs=5), client_of(), client_of()
    asked = task(strategy, 2)
    client.load(asked)
    plain.load(asked)
    loss = client.objective(asked)
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    client.local_epoch = 0
    client.model.train()
    plain.model.train()
    loss(x, y)
    plain.model(x)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, client.model.state_dict()[name])


def test_a_lost_state_begins_anew() -> None:
    strategy, kept = strategy_of(), context()
    visit(client_of(of=kept), strategy, 1)
    client = client_of(of=context())
    client._trained_round = 1
    visit(client, strategy, 2)
    assert client._lost_state
    assert client.state.load("discriminator")["participations"] == 1  # type: ignore[index]


def test_whole_numbers_as_inputs_are_refused() -> None:
    tokens = TensorDataset(torch.ones(8, 4, dtype=torch.int64), torch.arange(8) % CLASSES)
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, CLASSES))
    with pytest.raises(
        ConfigError, match=r"dafkd generates inputs of floating point, got data of torch\.int64"
    ):
        DaFKDClient(model, tokens, context=context(), device="cpu")
    with pytest.raises(ConfigError, match="does not take samples of its own"):
        strategy_of(model=model)
    with pytest.raises(ConfigError, match="input_shape must be the sizes of a sample"):
        strategy_of(input_shape="4")


# ---------------------------------------------------------------------- the server


def reply_of(number: int, scores: Array, strategy: DaFKD, model: nn.Module, count: int = 4) -> Reply[Any]:
    arrays = [*get_weights(model).values(), *(value + number for value in strategy.generator_arrays)]
    node = Node(number, number, num_examples=count, num_classes=CLASSES)
    return Reply(node, arrays, count, {}, DiscriminatorScores(scores.astype(np.float32)))


def begun(**options: Any) -> DaFKD:
    strategy = strategy_of(**options)
    strategy.prepare(ArrayRecord(net().state_dict()))
    return strategy


def test_the_first_round_averages_and_the_second_distils() -> None:
    strategy = begun(server_learning_rate=0.1)
    models = [net(1), net(2)]
    replies = [reply_of(k, np.full(16, 0.5), strategy, models[k], 1 + 2 * k) for k in range(2)]
    started = [value.copy() for value in strategy.generator_arrays]
    mean = strategy.aggregate_phase("train", 1, replies, None)
    assert mean is not None
    for name, value in mean.items():
        one, other = (get_weights(model)[name] for model in models)
        np.testing.assert_allclose(value.numpy(), (one + 3 * other.astype(float)) / 4, rtol=1e-5)
    # The generator is averaged by samples too, its statistics with it.
    for before, after in zip(started, strategy.generator_arrays, strict=True):
        np.testing.assert_allclose(
            after, np.round(before + 0.75) if before.dtype.kind == "i" else before + 0.75
        )
    again = strategy.aggregate_phase("train", 2, replies, None)
    assert again is not None
    assert any(
        not np.array_equal(a.numpy(), b.numpy()) for a, b in zip(mean.values(), again.values(), strict=True)
    )


def test_targets_are_each_samples_own_mixture() -> None:
    strategy, seen = begun(), []
    matching = __import__("flwr_kd.strategies.dafkd.strategy", fromlist=["x"])
    models = [net(1), net(2)]
    scores = [np.linspace(0, 1, 16), np.linspace(1, 0.2, 16)]
    strategy.aggregate_phase("train", 1, [reply_of(0, scores[0], strategy, models[0])], None)
    samples = strategy.samples(2)
    original = matching.distil_student
    try:
        matching.distil_student = lambda *args: seen.append(args) or original(*args)
        strategy.aggregate_phase(
            "train", 2, [reply_of(k, scores[k], strategy, models[k]) for k in range(2)], None
        )
    finally:
        matching.distil_student = original
    ((_, _, (targets,), batches, how, _),) = seen
    a = np.stack(scores) / np.stack(scores).sum(axis=0)
    logits = [model.eval()(samples).detach().numpy() for model in models]
    np.testing.assert_allclose(
        targets.numpy(), sum(a[k][:, None] * logits[k] for k in range(2)), rtol=1e-4, atol=1e-5
    )
    assert (len(batches), how.epochs, how.learning_rate, how.matching.training) == (16, 1, 1e-5, True)
    assert (how.config.optimizer, how.config.weight_decay) == ("adam", 0.0)


def test_teachers_and_generators_that_are_not_finite_are_left_out(flower_log: list[str]) -> None:
    strategy, alone = begun(), begun()
    bad = net(3)
    with torch.no_grad():
        bad[0].weight.fill_(3e38)
        bad[3].weight.fill_(3e38)
    for each, models in ((strategy, [net(1), bad]), (alone, [net(1)])):
        for server_round in (1, 2):
            replies = [reply_of(k, np.full(16, 0.5), each, model) for k, model in enumerate(models)]
            for reply in replies:
                reply.arrays[len(each.template.names) :] = [value.copy() for value in each._first.values()]
            result = each.aggregate_phase("train", server_round, replies, None)
        assert result is not None
        if each is strategy:
            mine = result
    assert any(
        "the model of node 1 (partition 1) has outputs that are not finite" in line for line in flower_log
    )
    for a, b in zip(mine.values(), result.values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    strategy.generator_arrays = [
        np.full_like(value, 3e38) if value.dtype.kind == "f" else value for value in strategy.generator_arrays
    ]
    assert strategy.aggregate_phase("train", 3, replies, None) is not None
    assert any(
        "distillation is left out: the generator's samples are not finite" in line for line in flower_log
    )


def test_an_error_of_the_distillation_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught, it would turn the method into FedAvg without a word."""

    def fails(*args: Any) -> None:
        raise RuntimeError("a fault")

    strategy = begun()
    replies = [reply_of(0, np.full(16, 0.5), strategy, net(1))]
    monkeypatch.setattr("flwr_kd.strategies.dafkd.strategy.distil_student", fails)
    strategy.aggregate_phase("train", 1, replies, None)
    with pytest.raises(RuntimeError, match="a fault"):
        strategy.aggregate_phase("train", 2, replies, None)


class TestScoresOfTheMeanGenerator:
    """scored-generator=round-mean: a second phase."""

    def test_each_client_gets_its_own_model_and_the_new_generator_and_scores_its_samples(self) -> None:
        strategy = begun(scored_generator="round-mean", server_learning_rate=0.1)
        assert strategy.phases == ("train", "score")
        models = [net(1), net(2), net(3)]
        none = np.zeros(0)
        replies = [reply_of(k, none, strategy, model, 1 + k) for k, model in enumerate(models)]
        nodes = [reply.node for reply in replies]
        strategy.aggregate_phase("train", 1, replies, None)
        # The first round's generator teaches nothing, as in one phase.
        assert strategy.select("score", 1, nodes, nodes) == []
        before = strategy.samples(2)
        for k, reply in enumerate(replies):
            trained = build_generator(SHAPE, num_classes=0, latent_dim=NOISE, seed=10 + k)
            reply.arrays[len(strategy.template.names) :] = list(get_weights(trained).values())
        mean = strategy.aggregate_phase("train", 2, replies, None)
        assert mean is not None
        alone = begun().averaging()([get_weights(model).values() for model in models], [1, 2, 3])
        for value, expected in zip(mean.values(), alone, strict=True):
            np.testing.assert_array_equal(value.numpy(), expected)
        samples = strategy.samples(2)
        assert not torch.equal(samples, before)
        assert strategy.select("score", 2, nodes, nodes[:2]) == nodes[:2]
        sent = list(strategy.configure_phase("score", 2, nodes[:2], mean))
        scores = []
        for k, outgoing in enumerate(sent):
            arrays = [value.numpy() for value in outgoing.arrays.values()]  # type: ignore[union-attr]
            for value, expected in zip(arrays, get_weights(models[k]).values(), strict=False):
                np.testing.assert_array_equal(value, expected)
            kept, asked = context(k), task(strategy, 2, k)
            assert len(visit(client_of(of=kept), strategy, 2, k).payload.scores) == 0
            client = client_of(of=kept)
            answer = client.phase_score(dataclasses.replace(asked, phase="score", arrays=arrays))
            client.model.eval()
            with torch.no_grad():
                expected = torch.sigmoid(client._discriminator(models[k].eval()[:-1](samples)))
            np.testing.assert_allclose(answer.payload.scores, expected.numpy(), rtol=1e-5)
            scores.append(Reply(nodes[k], [], 1 + k, {}, answer.payload))
            state = client.state.load("discriminator")
            assert state is not None
            assert int(state["participations"]) == 1
        self.check_distilled(strategy, scores, samples, models, mean)

    def check_distilled(
        self,
        strategy: DaFKD,
        scores: list[Reply[Any]],
        samples: Tensor,
        models: list[nn.Sequential],
        mean: ArrayRecord,
    ) -> None:
        """Two of three have scored: the third does not teach, and is in the mean."""
        module, seen = __import__("flwr_kd.strategies.dafkd.strategy", fromlist=["x"]), []
        original = module.distil_student
        try:
            module.distil_student = lambda *args: seen.append(args) or original(*args)
            new = strategy.aggregate_phase("score", 2, scores, mean)
        finally:
            module.distil_student = original
        ((_, student, (targets,), used, _, _),) = seen
        assert len(used) == len(samples)
        rows = np.stack([reply.payload.scores for reply in scores]).astype(float)
        logits = [model.eval()(samples).detach().numpy() for model in models[:2]]
        expected = sum((rows[k] / rows.sum(axis=0))[:, None] * logits[k] for k in range(2))
        np.testing.assert_allclose(targets.numpy(), expected, rtol=1e-4, atol=1e-5)
        for name, value in mean.items():
            np.testing.assert_array_equal(student[name], value.numpy())
        assert new is not None
        assert any(
            not np.array_equal(a.numpy(), b.numpy()) for a, b in zip(mean.values(), new.values(), strict=True)
        )
        assert strategy.finish_round(2, new) is None

    def test_rounds(self) -> None:
        settings = ["scored-generator=round-mean", "server-learning-rate=0.1"]
        first, again, plain = (
            Federation(name).run(rounds=3, settings=given)[1]
            for name, given in (("dafkd", settings), ("dafkd", settings), ("dafkd", settings[1:]))
        )
        assert [(r.participants, r.failures) for r in first.rounds] == [(4, 0)] * 3
        weights = [[value.numpy() for value in run.arrays.values()] for run in (first, again, plain)]
        assert all(np.array_equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(weights[0], weights[2], strict=True))
        # From round 2 on there is a further message down, of a model and a generator, and no further one up.
        down, up = ([getattr(r, f"bytes_{way}") for r in first.rounds] for way in ("down", "up"))
        assert down[1] == down[2] == 2 * down[0]
        assert up[1] < 1.1 * up[0]

    def test_without_scores_the_result_is_the_mean(self, flower_log: list[str]) -> None:
        strategy = begun(scored_generator="round-mean", server_learning_rate=0.1)
        replies = [reply_of(0, np.zeros(0), strategy, net(1))]
        for server_round in (1, 2):
            result = strategy.aggregate_phase("train", server_round, replies, None)
            assert strategy.finish_round(server_round, result) is None
        assert flower_log[-1:] == ["round 2: no client scored the samples, and nothing is distilled"]

    def test_fedhkds_knowledge_goes_with_the_training(self) -> None:
        """FedHKD+DaFKD has the same second phase."""
        settings = ["scored-generator=round-mean", "server-learning-rate=0.1"]
        strategy, result = Federation("fedhkd-dafkd").run(rounds=3, settings=settings)
        _, plain = Federation("fedhkd-dafkd").run(rounds=3, settings=settings[1:])
        assert [(r.participants, r.failures) for r in result.rounds] == [(4, 0)] * 3
        assert {name.partition("/")[0] for name in strategy.state_arrays()} == {"knowledge", "generator"}
        pairs = zip(result.arrays.values(), plain.arrays.values(), strict=True)
        assert not all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def test_scores_that_cannot_be_are_refused() -> None:
    with pytest.raises(PayloadError, match=r"'scores' must be in \[0, 1\], got"):
        DiscriminatorScores(np.float32([0.2, 1.2]))
    strategy = begun()
    node = Node(1, 1, num_examples=4, num_classes=CLASSES)
    with pytest.raises(PayloadError, match="15 scores, expected one for each of 16 samples, or none"):
        strategy.check_reply("train", Reply(node, [], 4, {}, DiscriminatorScores(np.zeros(15, np.float32))))


def test_rounds_with_images_and_batches_of_one_sample() -> None:
    def model() -> Any:
        return build_model("resnet8", input_shape=(1, 8, 8), num_classes=CLASSES, seed=0)

    def client_fn(given: Context) -> Any:
        index = int(given.node_config["partition-id"])
        size = (9, 1)[index]
        images = TensorDataset(normal(size, 1, 8, 8, seed=index), torch.arange(size) % CLASSES)
        return DaFKDClient(model(), images, images, context=given, device="cpu").to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), 2)
    strategy = strategy_of(model=model(), input_shape=(1, 8, 8), min_available_nodes=2)
    result = strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=3)
    grid.close()
    assert [(r.participants, r.failures) for r in result.rounds] == [(2, 0)] * 3
    assert all(np.isfinite(value.numpy()).all() for value in result.arrays.values())
    assert list(result.arrays) == list(model().state_dict())


def test_the_registry_describes_it() -> None:
    method = registry.get("dafkd")
    assert (method.global_model, method.heterogeneous, method.public_at) == (True, False, "synthetic")
    config = DaFKDConfig()
    assert (config.discriminator_rounds, config.generator_rounds, config.adversarial_epochs) == (3, 5, 5)
    assert (config.server_batches, config.server_temperature, config.server_learning_rate) == (5, 10.0, 1e-5)
    assert (config.penalty_weight, config.noise_dim, config.server_samples) == (0.3, 100, 320)
