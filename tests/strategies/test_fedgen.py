"""FedGen: the generator's loss and the clients' terms against NumPy, its rounds, and defects of public code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from tensors import normal as doubles
from tensors import random_labels
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.learning.weights import get_weights
from flwr_kd.models import as_feature_model, build_model, count_parameters
from flwr_kd.seeding import torch_generator
from flwr_kd.server.records import HandshakeError, Node, Reply
from flwr_kd.strategies.fedgen import (
    FedGen,
    FedGenClient,
    FedGenConfig,
    FedGenHead,
    FedGenHeadClient,
    LabelCounts,
    SharedGenerator,
    build_feature_generator,
    diversity_loss,
    ensemble_loss,
    guidance_loss,
    label_weights,
)
from flwr_kd.strategies.fedgen.messages import pack, unpack
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError

WIDTH, CLASSES, HIDDEN = 6, 4, 5
Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int) -> Tensor:
    return doubles(*shape, seed=seed).float()


def net(seed: int = 0, width: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    extractor = [nn.Linear(3, width), nn.ReLU(), nn.Linear(width, WIDTH), nn.ReLU()]
    return nn.Sequential(*extractor, nn.Linear(WIDTH, CLASSES))


def strategy_of(kind: type[FedGen] = FedGen, **options: Any) -> FedGen:
    values: dict[str, Any] = {
        "generator_hidden": HIDDEN,
        "generator_batch": 8,
        "local_epochs": 1,
        "batch_size": 8,
    }
    return kind(**{"model": net(), "device": "cpu", **values, **options})


def data(labels: list[int], seed: int = 0) -> TensorDataset:
    return TensorDataset(normal(len(labels), 3, seed=seed), torch.tensor(labels))


def lone_client(
    kind: type[FedGenClient] = FedGenClient, model: Any = None, labels: Any = None
) -> FedGenClient:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    samples = data([0, 1, 2, 1, 0, 1, 3, 0] if labels is None else labels)
    return kind(net() if model is None else model, samples, context=context, device="cpu")


def task(
    config: FedGenConfig, server_round: int = 2, payload: SharedGenerator | None = None
) -> Task[FedGenConfig]:
    sent = None if payload is None else payload.to_bytes()
    return Task(server_round, "train", 7, (), [], sent, config)


def shared(labels: tuple[int, ...] = (0, 1, 3), seed: int = 3) -> SharedGenerator:
    generator = build_feature_generator((WIDTH,), num_classes=CLASSES, hidden=HIDDEN, seed=seed)
    generator(normal(9, WIDTH, seed=seed), random_labels(9, CLASSES, seed))  # other statistics than 0 and 1
    known = torch.zeros(CLASSES, dtype=torch.bool)
    known[list(labels)] = True
    return pack(generator, known)


# ---------------------------------------------------------------------- NumPy's side


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def generated(state: dict[str, Array], noise: Array, labels: Array, *, training: bool) -> Array:
    inputs = np.concatenate([noise, np.eye(CLASSES)[labels]], axis=1)
    hidden = inputs @ state["hidden.weight"].T.astype(float) + state["hidden.bias"]
    mean, variance = state["norm.running_mean"], state["norm.running_var"]
    if training:
        mean, variance = hidden.mean(axis=0), hidden.var(axis=0)
    hidden = (hidden - mean) / np.sqrt(variance + 1e-5) * state["norm.weight"] + state["norm.bias"]
    return np.maximum(hidden, 0) @ state["output.weight"].T.astype(float) + state["output.bias"]


def generator_loss(
    features: Array,
    noise: Array,
    labels: Array,
    heads: list[dict[str, Array]],
    counts: Array,
    alpha: float,
    eta: float,
) -> float:
    total = 0.0
    for head, own in zip(heads, counts, strict=True):
        probabilities = softmax(features @ head["weight"].T.astype(float) + head["bias"])
        for i, y in enumerate(labels):
            total += alpha * own[y] / counts[:, y].sum() * -math.log(probabilities[i, y]) / len(labels)
    pairs = [
        ((a - b) ** 2).mean() * np.abs(x - z).mean()
        for a, x in zip(noise, features, strict=True)
        for b, z in zip(noise, features, strict=True)
    ]
    return total + eta * math.exp(-float(np.mean(pairs)))


# ---------------------------------------------------------------------- maths


@pytest.mark.parametrize(("classes", "parameters"), [(10, 72_256), (100, 118_336)])
def test_parameter_counts_are_those_of_fedhkds_tables(classes: int, parameters: int) -> None:
    config = FedGenConfig()
    generator = build_feature_generator((64,), num_classes=classes, hidden=config.generator_hidden, seed=0)
    assert count_parameters(generator) == parameters
    assert generator.noise_dim == 64


def test_features_have_the_shape_that_the_head_takes_and_depend_on_noise_class_and_seed() -> None:
    generator = build_feature_generator((2, 3), num_classes=CLASSES, hidden=HIDDEN, seed=1).eval()
    noise, labels = normal(5, 6, seed=1), random_labels(5, CLASSES, 1)
    made = generator(noise, labels)
    assert made.shape == (5, 2, 3)
    assert not torch.allclose(made, generator(noise + 1, labels))
    assert not torch.allclose(made, generator(noise, (labels + 1) % CLASSES))
    again = build_feature_generator((2, 3), num_classes=CLASSES, hidden=HIDDEN, seed=1).eval()
    assert torch.equal(made, again(noise, labels))


def test_the_diversity_term_has_means_over_dimensions() -> None:
    noise, features = normal(7, 64, seed=1), normal(7, 64, seed=2).requires_grad_()
    term = diversity_loss(noise, features)
    a, z = noise.double().numpy(), features.detach().double().numpy()
    pairs = [((a[i] - a[j]) ** 2).mean() * np.abs(z[i] - z[j]).mean() for i in range(7) for j in range(7)]
    assert math.isclose(term.item(), math.exp(-np.mean(pairs)), rel_tol=1e-5)
    term.backward()
    assert features.grad is not None
    assert features.grad.abs().max() > 1e-5
    # The defect: with sums over dimensions there is nothing left of it in float32.
    sums = np.exp(np.float32(-np.mean(pairs) * 64 * 64))
    assert sums == 0


def test_a_head_counts_for_a_label_by_its_clients_share_of_it() -> None:
    counts = torch.tensor([[3, 0, 0], [1, 5, 0]])
    weights = label_weights(counts, torch.tensor([0, 1, 2]))
    assert weights.tolist() == [[0.75, 0.0, 0.0], [0.25, 1.0, 0.0]]
    logits, labels = [normal(3, 3, seed=1), normal(3, 3, seed=2)], torch.tensor([0, 1, 0])
    weights = label_weights(counts, labels)
    expected = sum(
        weights[u, i].item() * -math.log(softmax(logits[u].numpy())[i, labels[i]]) / 3
        for u in range(2)
        for i in range(3)
    )
    assert math.isclose(ensemble_loss(logits, labels, weights).item(), expected, rel_tol=1e-5)
    assert not math.isclose(ensemble_loss(logits[::-1], labels, weights).item(), expected, rel_tol=1e-3)
    with pytest.raises(ValueError, match="of U heads expected, got"):
        ensemble_loss(logits[:1], labels, weights)
    with pytest.raises(ValueError, match="0 heads"):
        ensemble_loss([], labels, weights)


def test_the_clients_terms_are_a_cross_entropy_and_a_batch_mean_of_kl() -> None:
    logits, teacher, made = normal(5, 3, seed=1), normal(5, 3, seed=2).requires_grad_(), normal(2, 3, seed=3)
    drawn = torch.tensor([2, 0])
    value = guidance_loss(logits, teacher, made, drawn, label_weight=0.7, prediction_weight=1.3)
    p, q = softmax(teacher.detach().numpy()), softmax(logits.numpy())
    kl = sum(p[i, c] * math.log(p[i, c] / q[i, c]) for i in range(5) for c in range(3)) / 5
    ce = np.mean([-math.log(softmax(made.numpy())[i, y]) for i, y in enumerate(drawn.tolist())])
    assert math.isclose(value.item(), 0.7 * ce + 1.3 * kl, rel_tol=1e-5)
    assert not value.requires_grad


def test_the_clients_weights_fall_from_round_to_round() -> None:
    config = FedGenConfig()
    for server_round in (1, 2, 3, 50):
        expected = 10 * 0.98 ** (server_round - 1)
        assert config.guidance_at(server_round) == pytest.approx((expected, expected))
    assert config.guidance_at(5000) == (1e-4, 1e-4)


# ---------------------------------------------------------------------- the server's steps


COUNTS = [[4, 0, 2, 0], [0, 3, 2, 0], [1, 0, 0, 0]]


def replies_of(strategy: FedGen, counts: list[list[int]] = COUNTS) -> list[Reply[LabelCounts]]:
    sent = []
    for u, own in enumerate(counts):
        arrays = list(get_weights(net(seed=10 + u)).values())
        node = Node(node_id=u, partition_id=u, num_examples=sum(own), num_classes=CLASSES)
        sent.append(Reply(node, arrays, sum(own), {}, LabelCounts(np.array(own, np.int64))))
    return sent


def begun(**options: Any) -> FedGen:
    strategy = strategy_of(**options)
    strategy.prepare(ArrayRecord(net().state_dict()))
    return strategy


def test_the_generators_loss_is_that_of_every_clients_own_head() -> None:
    """Before the round's models are averaged, and not of the mean head."""
    alpha, eta = 0.6, 1.7
    strategy = begun(
        generator_epochs=1, ensemble_weight=alpha, diversity_weight=eta, generator_learning_rate=1e-3
    )
    before = get_weights(strategy.trained.module)
    losses = []
    steps = strategy._steps
    strategy._steps = lambda *args: losses.append(steps(*args)) or losses[-1]  # type: ignore[method-assign,func-returns-value]
    strategy.aggregate_phase("train", 1, replies_of(strategy), None)

    draw = torch_generator(strategy.seed, "generated-features", 1)
    labels = torch.tensor([0, 1, 2])[torch.randint(3, (8,), generator=draw)].numpy()
    noise = torch.randn(8, WIDTH, generator=draw).double().numpy()
    heads = [
        {"weight": (w := get_weights(net(seed=10 + u)))["4.weight"], "bias": w["4.bias"]} for u in range(3)
    ]

    def loss(state: dict[str, Array], heads: list[dict[str, Array]] = heads) -> float:
        features = generated(state, noise, labels, training=True)
        return generator_loss(features, noise, labels, heads, np.array(COUNTS), alpha, eta)

    assert losses == [pytest.approx(loss(before), rel=1e-5)]
    mean = {name: np.mean([head[name] for head in heads], axis=0) for name in heads[0]}
    assert losses[0] != pytest.approx(loss(before, [mean] * 3), rel=1e-3)
    # Adam's first step has the rate's size against the gradient's sign, that of the weight decay included.
    after = get_weights(strategy.trained.module)
    checked = 0
    for name in ("output.weight", "hidden.weight", "norm.weight"):
        for place in np.ndindex(before[name].shape):
            up, down = ({**before, name: before[name].astype(float)} for _ in range(2))
            up[name][place] += 1e-5
            down[name][place] -= 1e-5
            slope = (loss(up) - loss(down)) / 2e-5 + 1e-2 * before[name][place]
            if abs(slope) > 1e-3:
                step = after[name][place] - before[name][place]
                assert step == pytest.approx(-1e-3 * math.copysign(1, slope), rel=1e-2)
                checked += 1
    assert checked > 40


def test_labels_are_those_that_the_rounds_clients_hold() -> None:
    strategy, seen = begun(generator_batch=64), []
    strategy.trained.module.register_forward_pre_hook(lambda _, args: seen.append(set(args[1].tolist())))
    strategy.aggregate_phase("train", 1, replies_of(strategy, [[5, 0, 0, 1], [2, 0, 0, 0]]), None)
    assert seen == [{0, 3}] * 5
    seen.clear()
    strategy.aggregate_phase("train", 2, replies_of(strategy, [[0, 4, 0, 0], [2, 1, 0, 0]]), None)
    assert seen == [{0, 1}] * 5
    # Clients draw from all labels that any client has had.
    (sent,) = strategy.configure_phase("train", 3, [Node(1)], None)
    assert isinstance(sent.payload, SharedGenerator)
    assert sent.payload.labels.tolist() == [0, 1, 3]


def test_without_samples_there_is_no_generator(flower_log: list[str]) -> None:
    strategy = begun()
    before = get_weights(strategy.trained.module)
    assert strategy.aggregate_phase("train", 1, replies_of(strategy, [[0] * 4, [0] * 4]), None) is not None
    assert all(
        np.array_equal(value, before[name]) for name, value in get_weights(strategy.trained.module).items()
    )
    (sent,) = strategy.configure_phase("train", 2, [Node(1)], None)
    assert sent.payload is None
    assert any("no client has samples" in line for line in flower_log)


def test_the_generators_rate_falls_each_round() -> None:
    strategy = begun(generator_learning_rate=0.5)
    for server_round in (1, 2, 3):
        strategy.aggregate_phase("train", server_round, replies_of(strategy), None)
    (group,) = strategy.trained.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.5 * 0.98**3)
    assert group["weight_decay"] == 1e-2


def test_a_head_without_finite_outputs_does_not_teach(flower_log: list[str]) -> None:
    strategy, alone = begun(), begun()
    replies = replies_of(strategy)
    alone._train_generator([_teacher(alone, reply) for reply in replies[:2]], 1)
    replies[2].arrays[-2][:] = 3e38
    strategy._train_generator([_teacher(strategy, reply) for reply in replies], 1)
    for name, value in get_weights(strategy.trained.module).items():
        np.testing.assert_array_equal(value, get_weights(alone.trained.module)[name])
    assert sum("the head of node 2 (partition 2) has outputs" in line for line in flower_log) == 1
    for reply in replies:
        reply.arrays[-2][:] = 3e38
    before = strategy.state_arrays()
    strategy._train_generator([_teacher(strategy, reply) for reply in replies], 2)
    assert all(np.array_equal(value, before[name]) for name, value in strategy.state_arrays().items())
    assert any("the generator does not change: no head" in line for line in flower_log)


def _teacher(strategy: FedGen, reply: Reply[LabelCounts]) -> Any:
    from flwr_kd.strategies.fedgen.strategy import Teacher

    return Teacher(str(reply.node), strategy.head_in(reply.arrays), torch.tensor(reply.payload.counts))


# ---------------------------------------------------------------------- clients


def test_the_first_round_is_cross_entropy() -> None:
    client = lone_client()
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    value = client.objective(task(FedGenConfig(), 1))(x, y)
    assert value.item() == pytest.approx(nn.functional.cross_entropy(client.model(x), y).item())


def test_a_clients_loss_is_the_oracles() -> None:
    client, message = lone_client(), shared()
    config = FedGenConfig(generator_batch=6, batch_size=12, label_weight=2.0, prediction_weight=3.0)
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    client.local_epoch = 0
    value = client.objective(task(config, 4, message))(x, y)
    value.backward()

    draw = task(config, 4).generator("generated-features")
    drawn = torch.tensor([0, 1, 3])[torch.randint(3, (6,), generator=draw)].numpy()
    noise = torch.randn(6 + len(y), WIDTH, generator=draw).double().numpy()
    state = {name: v.numpy() for name, v in unpack(message, (WIDTH,))[0].state_dict().items()}
    weights = get_weights(net())

    def head(features: Array) -> Array:
        return softmax(features @ weights["4.weight"].T.astype(float) + weights["4.bias"])

    on_drawn = head(generated(state, noise[:6], drawn, training=False))
    teacher = head(generated(state, noise[6:], y.numpy(), training=False))
    own = softmax(client.model(x).detach().double().numpy())
    ce = np.mean([-math.log(own[i, c]) for i, c in enumerate(y.tolist())])
    ce_drawn = np.mean([-math.log(on_drawn[i, c]) for i, c in enumerate(drawn.tolist())])
    kl = (teacher * np.log(teacher / own)).sum() / len(y)
    a, b = 2.0 * 0.98**3, 3.0 * 0.98**3
    assert value.item() == pytest.approx(ce + 6 / 12 * a * ce_drawn + b * kl, rel=1e-5)


def test_the_terms_count_in_the_first_local_epochs_only() -> None:
    client = lone_client()
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    loss = client.objective(task(FedGenConfig(guided_epochs=2), 2, shared()))
    plain = nn.functional.cross_entropy(client.model(x), y).item()
    for epoch, guided in ((0, True), (1, True), (2, False), (9, False)):
        client.local_epoch = epoch
        assert (loss(x, y).item() != pytest.approx(plain)) is guided
    assert FedGenConfig().guided_epochs == 20


def test_training_knows_its_epoch() -> None:
    client, seen = lone_client(), []
    config = FedGenConfig(local_epochs=3, batch_size=4)
    client.train(task(config), lambda x, y: seen.append(client.local_epoch) or client.model(x).sum())  # type: ignore[func-returns-value]
    assert seen == [0, 0, 1, 1, 2, 2]


def test_generated_features_change_no_batchnorm_and_the_generator_stays() -> None:
    head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
    client = lone_client(model=(nn.Linear(3, WIDTH), head))
    x, y = client.train_batches.dataset.tensors  # type: ignore[union-attr]
    message = shared()
    loss = client.objective(task(FedGenConfig(), 2, message))
    client.local_epoch = 0
    client.model.train()
    loss(x, y).backward()
    statistics = client.model.head[0].running_mean.clone()
    other = lone_client(
        model=(nn.Linear(3, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)))
    )
    other.model.load_state_dict({**client.model.state_dict(), "head.0.running_mean": torch.zeros(WIDTH)})
    other.model.train()
    other.model(x)
    torch.testing.assert_close(statistics, other.model.head[0].running_mean)
    assert message == shared()


def test_a_client_counts_the_labels_of_its_samples() -> None:
    client = lone_client()
    config = FedGenConfig(local_epochs=2, batch_size=3)
    client.train(task(config), client.objective(task(config)))
    assert client.knowledge(task(config)).counts.tolist() == [3, 3, 1, 1]


@pytest.mark.parametrize("counts", [[-1, 0, 0, 0], [2**41, 0, 0, 0]])
def test_counts_out_of_range_are_refused(counts: list[int]) -> None:
    with pytest.raises(PayloadError, match=r"'counts' must be in 0\.\.2\^40"):
        LabelCounts(np.array(counts, np.int64))


def test_more_counts_than_samples_are_refused() -> None:
    strategy, (first, *_) = begun(), replies_of(begun())
    strategy.check_reply("train", first)
    with pytest.raises(PayloadError, match="counts of 7 samples from a client with 6"):
        strategy.check_reply("train", Reply(first.node, [], 6, {}, LabelCounts(np.array([4, 0, 3, 0]))))
    with pytest.raises(PayloadError, match="shape"):
        LabelCounts.from_bytes(LabelCounts(np.zeros(5, np.int64)).to_bytes(), dims={"C": 4})


def test_a_generator_of_other_sizes_or_without_labels_is_refused() -> None:
    sent = task(FedGenConfig(), 2, shared())
    client = lone_client(
        model=nn.Sequential(nn.Linear(3, WIDTH + 1), nn.ReLU(), nn.Linear(WIDTH + 1, CLASSES))
    )
    with pytest.raises(PayloadError, match="shape"):
        client.objective(sent)
    whole = shared()
    with pytest.raises(PayloadError, match="'labels' must be in"):
        SharedGenerator(whole.hidden, whole.units, whole.output, whole.output_bias, np.array([CLASSES]))
    units = whole.units.copy()
    units[-1, 0] = -1
    with pytest.raises(PayloadError, match="variances"):
        SharedGenerator(whole.hidden, units, whole.output, whole.output_bias, whole.labels)


# ---------------------------------------------------------------------- rounds


def run(
    strategy: FedGen, kind: type[FedGenClient], *, rounds: int = 3, clients: int = 3, width: Any = lambda i: 7
) -> tuple[Any, dict[int, list[FedGenClient]]]:
    made: dict[int, list[FedGenClient]] = {}

    def client_fn(context: Context) -> Any:
        index = int(context.node_config["partition-id"])
        labels = [index, index + 1] * 6
        client = kind(
            net(index, width(index)), data(labels, index), data(labels, 50), context=context, device="cpu"
        )
        made.setdefault(index, []).append(client)
        return client.to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), clients)
    initial = ArrayRecord(net().state_dict()) if strategy.sends_weights else ArrayRecord()
    result = strategy.start(grid, initial, num_rounds=rounds)
    grid.close()
    return result, made


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_full_participation_works(fraction: float) -> None:
    """The authors' code crashes there."""
    strategy = strategy_of(fraction_train=fraction, min_available_nodes=3)
    result, _ = run(strategy, FedGenClient)
    assert [r.participants for r in result.rounds] == [3 if fraction == 1 else 1] * 3
    assert all(r.failures == 0 for r in result.rounds)
    assert strategy.state_arrays()


def test_only_heads_travel_and_extractors_stay_and_may_differ() -> None:
    strategy = strategy_of(FedGenHead, min_available_nodes=3)
    assert isinstance(strategy, FedGenHead)
    result, made = run(strategy, FedGenHeadClient, width=lambda i: 5 + i)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 0)] * 3
    assert [value.shape for value in strategy.head_arrays] == [(CLASSES, WIDTH), (CLASSES,)]
    assert not result.arrays
    # Of the head alone, with some bytes of header for each array.
    assert result.rounds[0].bytes_down <= 3 * (4 * CLASSES * (WIDTH + 1) + 2 * 128)
    first, last = (made[0][place].model.state_dict() for place in (-2, -1))
    assert not torch.equal(first["0.weight"], last["0.weight"])


def test_a_head_client_begins_with_its_own_extractor_and_the_servers_head() -> None:
    client = lone_client(FedGenHeadClient)
    assert isinstance(client, FedGenHeadClient)
    head = {name: value + 1 for name, value in get_weights(client.head).items()}
    extractor = client.model.state_dict()["0.weight"].clone() + 2
    client.model.state_dict()["0.weight"].copy_(extractor)
    client.keep()
    again = lone_client(FedGenHeadClient, model=net(5))
    again.state = client.state
    again.load(Task(2, "train", 0, tuple(head), list(head.values()), None, FedGenConfig()))
    state = again.model.state_dict()
    assert torch.equal(state["0.weight"], extractor)
    np.testing.assert_array_equal(state["4.weight"].numpy(), head["weight"])
    with pytest.raises(PayloadError, match="head does not fit"):
        again.load(Task(2, "train", 0, ("weight",), [head["weight"]], None, FedGenConfig()))


def test_clients_with_other_features_are_refused() -> None:
    federation = Federation("fedgen-head")
    strategy = federation.strategy(model=build_model("mlp", input_shape=(1, 4, 4), num_classes=4, seed=0))
    grid = InlineGrid(federation.app(), 4)
    with pytest.raises(HandshakeError, match="4 classes and 8 features, expected 4 and 64"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)


def test_models_that_cannot_be_used_are_refused_before_any_work() -> None:
    class Whole(nn.Module):
        feature_dim, num_classes = WIDTH, CLASSES

        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)

        def features(self, x: Tensor) -> Tensor:
            return self.body(x)

        def classify(self, h: Tensor) -> Tensor:
            return self.last(h)

        def forward(self, x: Tensor) -> Tensor:
            return self.classify(self.features(x))

    for kind in (FedGen, FedGenHead):
        with pytest.raises(ConfigError, match="must have a head"):
            strategy_of(kind, model=Whole())
    with pytest.raises(ConfigError, match="fedgen-head needs a model with a head"):
        lone_client(FedGenHeadClient, model=Whole())
    strategy = strategy_of(min_available_nodes=1)
    strategy.prepare(ArrayRecord(net(width=9).state_dict()))
    with pytest.raises(ConfigError, match="model is not what initial_arrays are of"):
        strategy.begin([])


def test_the_registry_describes_both() -> None:
    whole, head = registry.get("fedgen"), registry.get("fedgen-head")
    assert (whole.global_model, whole.heterogeneous, head.global_model, head.heterogeneous) == (
        True,
        False,
        False,
        True,
    )
    for method in (whole, head):
        assert "number of its samples of each class" in method.leaves_client
    assert as_feature_model(net()).feature_dim == WIDTH
