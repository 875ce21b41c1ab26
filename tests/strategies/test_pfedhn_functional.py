"""pFedHN's maths: sizes, and vector-Jacobian products against finite differences, autograd and an oracle."""

from __future__ import annotations

import hypernet as oracle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.learning.weights import get_weights
from flwr_kd.models import build_model
from flwr_kd.strategies.pfedhn import HyperNetwork, embedding_size, hypernetwork_size, vector_jacobian
from flwr_kd.strategies.pfedhn.functional import gradient_norm_clipped

SHAPES = [(3, 2), (3,), (2, 3, 1), ()]


def network(**sizes: int) -> HyperNetwork:
    made = HyperNetwork(SHAPES, **{"embedding": 4, "hidden": 6, "layers": 2, "seed": 0, **sizes})
    made.add([5, 9])
    return made.double()


def deltas(seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]


class TestSizes:
    @pytest.mark.parametrize(
        ("clients", "size"), [(1, 1), (3, 1), (4, 2), (7, 2), (10, 3), (20, 6), (50, 13), (100, 26)]
    )
    def test_an_embedding(self, clients: int, size: int) -> None:
        assert embedding_size(clients) == size

    @pytest.mark.parametrize("layers", [0, 1, 3])
    def test_the_count_is_that_of_the_parameters(self, layers: int) -> None:
        made = HyperNetwork(SHAPES, embedding=3, hidden=7, layers=layers, seed=0)
        counted = sum(p.numel() for p in made.parameters())
        assert hypernetwork_size(SHAPES, embedding=3, hidden=7, layers=layers) == counted

    def test_a_resnet18_needs_more_than_a_thousand_million(self) -> None:
        model = build_model("resnet18", input_shape=(3, 32, 32), num_classes=10, seed=0)
        shapes = [tuple(p.shape) for p in model.parameters()]
        assert round(hypernetwork_size(shapes, embedding=embedding_size(20)) / 1e9, 1) == 1.1

    def test_the_layers_are_the_papers(self) -> None:
        made = HyperNetwork([(2, 5)], embedding=13, seed=0)
        kinds = [m for m in made.modules() if isinstance(m, nn.Linear | nn.ReLU)]
        linear = [(m.in_features, m.out_features) if isinstance(m, nn.Linear) else "relu" for m in kinds]
        assert linear == [(13, 100), *["relu", (100, 100)] * 3, (100, 10)]


class TestProducts:
    @pytest.mark.parametrize("client", [5, 9])
    def test_against_finite_differences(self, client: int) -> None:
        """Of each single number of φ and v."""
        made, changes = network(), deltas()
        vector_jacobian(made(client), changes)

        def along() -> float:
            with torch.no_grad():
                return float(sum((a * d).sum() for a, d in zip(made(client), changes, strict=True)))

        checked = 0
        for name, parameter in made.named_parameters():
            if parameter.grad is None:
                assert name == f"embeddings.{14 - client}"
                continue
            flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
            for i in range(len(flat)):
                flat[i] += 1e-6
                above = along()
                flat[i] -= 2e-6
                below = along()
                flat[i] += 1e-6
                assert grad[i].item() == pytest.approx((above - below) / 2e-6, abs=1e-7)
                checked += 1
        assert checked == hypernetwork_size(SHAPES, embedding=4, hidden=6, layers=2) + 4

    def test_against_the_gradient_of_the_whole(self) -> None:
        """With Δ = ∇_θ L the product is ∇_φ L of a client's loss, as autograd has it in one go."""
        x, y = torch.randn(7, 2, dtype=torch.float64), torch.arange(7) % 2

        def loss(theta: list[Tensor]) -> Tensor:
            weight, bias, second, scale = theta
            return F.cross_entropy(torch.tanh(x @ weight.T + bias) @ second[..., 0].T * scale, y)

        whole, parts = network(), network()
        loss(whole(5)).backward()  # type: ignore[no-untyped-call]
        theta = [array.detach().requires_grad_() for array in parts(5)]
        vector_jacobian(parts(5), list(torch.autograd.grad(loss(theta), theta)))
        for expected, actual in zip(whole.parameters(), parts.parameters(), strict=True):
            assert (expected.grad is None) == (actual.grad is None)
            if expected.grad is not None and actual.grad is not None:
                torch.testing.assert_close(actual.grad, expected.grad)

    @pytest.mark.parametrize("layers", [0, 1, 3])
    def test_against_backpropagation_by_hand(self, layers: int) -> None:
        made = network(layers=layers)
        mirror = oracle.HyperNet(get_weights(made), SHAPES)
        for actual, expected in zip(made(9), mirror.produced(9), strict=True):
            np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-12)
        vector_jacobian(made(9), deltas(), share=0.25)
        found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        by_hand = mirror.gradient(9, [delta.numpy() for delta in deltas()])
        assert found.keys() == by_hand.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value.numpy(), by_hand[name] / 4, atol=1e-12)

    def test_they_add_up(self) -> None:
        made, one, other = network(), network(), network()
        for key, seed in ((5, 1), (9, 2)):
            vector_jacobian(made(key), deltas(seed), share=0.5)
        vector_jacobian(one(5), deltas(1))
        vector_jacobian(other(9), deltas(2))
        actual, first, second = (n.heads[0].weight.grad for n in (made, one, other))
        torch.testing.assert_close(actual, (first + second) / 2)
        torch.testing.assert_close(made.embeddings["5"].grad, one.embeddings["5"].grad / 2)

    def test_other_shapes_are_refused(self) -> None:
        made = network()
        with pytest.raises(ValueError, match="deltas must have the shapes"):
            vector_jacobian(made(5), deltas()[:-1])
        with pytest.raises(ValueError, match="deltas must have the shapes"):
            vector_jacobian(made(5), [delta.unsqueeze(0) for delta in deltas()])


@pytest.mark.parametrize(("size", "scaled"), [(1e-3, False), (1e4, True)])
def test_the_gradient_is_clipped_as_one_vector(size: float, scaled: bool) -> None:
    made = network()
    vector_jacobian(made(5), [size * delta for delta in deltas()])
    before = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    gradient_norm_clipped(made.parameters(), 50.0)
    flat = torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None])
    assert "embeddings.5" in before
    assert (float(flat.norm()) == pytest.approx(50.0)) == scaled
    assert made.embeddings["9"].grad is None
    factor = 50.0 / float(torch.cat([g.flatten() for g in before.values()]).norm()) if scaled else 1.0
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, factor * before[name])


class TestEmbeddings:
    def test_they_do_not_depend_on_who_came_first(self) -> None:
        one, other = (HyperNetwork(SHAPES, embedding=4, seed=3) for _ in range(2))
        one.add([1, 2])
        other.add([2])
        other.add([7, 1])
        assert other.clients == [2, 7, 1]
        for client in (1, 2):
            assert torch.equal(one.embeddings[str(client)], other.embeddings[str(client)])
        assert not torch.equal(one.embeddings["1"], one.embeddings["2"])

    def test_one_that_is_added_again_stays(self) -> None:
        made = network()
        with torch.no_grad():
            made.embeddings["5"].fill_(7.0)
        made.add([5])
        assert bool((made.embeddings["5"] == 7.0).all())

    def test_a_client_without_one_has_that_with_which_it_would_begin(self) -> None:
        made = HyperNetwork(SHAPES, embedding=4, seed=0)
        before = made(11)
        assert made.clients == []
        made.add([11])
        for expected, actual in zip(before, made(11), strict=True):
            assert torch.equal(expected, actual)

    def test_the_seed_decides_and_the_global_generators_do_not(self) -> None:
        state = torch.get_rng_state()
        one, same, other = (HyperNetwork(SHAPES, embedding=4, seed=seed) for seed in (1, 1, 2))
        for made in (one, same, other):
            made.add([0])
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(99)
        late = HyperNetwork(SHAPES, embedding=4, seed=1)
        torch.set_rng_state(state)
        for name, value in get_weights(one).items():
            np.testing.assert_array_equal(value, get_weights(same)[name])
            assert not np.array_equal(value, get_weights(other)[name])
        for name, value in get_weights(late).items():
            np.testing.assert_array_equal(value, get_weights(one)[name])
