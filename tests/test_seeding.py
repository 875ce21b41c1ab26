"""Generators for one purpose each, and random layers that do not change the global generator."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flwr_kd.seeding import derive_seed, forked_global_rng, numpy_generator, torch_generator

CPU = torch.device("cpu")
repeatable = settings(max_examples=100, deadline=None, derandomize=True)
purposes = st.lists(st.integers() | st.text(max_size=6), max_size=4).map(tuple)


class TestDerivedSeeds:
    @repeatable
    @given(st.integers(), purposes, st.integers(), purposes)
    def test_different_unless_the_same(
        self, a: int, first: tuple[int | str, ...], b: int, second: tuple[int | str, ...]
    ) -> None:
        assert (derive_seed(a, *first) == derive_seed(b, *second)) == ((a, first) == (b, second))

    def test_no_collisions_and_63_bits(self) -> None:
        seeds = {
            derive_seed(seed, purpose, server_round, partition)
            for seed in range(4)
            for purpose in ("sample", "train", "noise")
            for server_round in range(30)
            for partition in range(30)
        }
        assert len(seeds) == 4 * 3 * 30 * 30
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert max(seeds) > 2**62

    def test_parts_do_not_run_together(self) -> None:
        alike: list[tuple[int | str, ...]] = [
            (1, 23),
            (12, 3),
            (123,),
            ("1", 23),
            ("1, 23",),
            ("a", "b"),
            ("ab",),
            ("a', 'b",),
        ]
        assert len({derive_seed(0, *purpose) for purpose in alike}) == len(alike)

    def test_numpys_numbers_and_texts_are_pythons(self) -> None:
        plain = derive_seed(3, "train", 2, 7)
        assert derive_seed(np.int64(3), np.str_("train"), np.int32(2), np.uint8(7)) == plain  # type: ignore[arg-type]

    def test_fractions_are_refused(self) -> None:
        with pytest.raises(TypeError):
            derive_seed(0, "train", 1.5)  # type: ignore[arg-type]

    def test_same_in_another_process_and_version(self) -> None:
        """The seed of a saved result must give the same draws in future versions: the hashed text is fixed."""
        digest = hashlib.blake2b(b"(7, 'train', 3, 'x')", digest_size=8).digest()
        assert derive_seed(7, "train", 3, "x") == int.from_bytes(digest, "big") // 2

    def test_generators(self) -> None:
        a, b, c = (torch_generator(0, "x", i) for i in (1, 1, 2))
        draws = [torch.rand(5, generator=g).tolist() for g in (a, b, c)]
        assert draws[0] == draws[1] != draws[2]
        numbers = [numpy_generator(0, "x", i).random(5).tolist() for i in (1, 1, 2)]
        assert numbers[0] == numbers[1] != numbers[2]

    def test_generators_leave_the_global_ones(self) -> None:
        before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
        torch.rand(3, generator=torch_generator(0, "x"))
        numpy_generator(0, "x").random(3)
        assert torch.equal(torch.get_rng_state(), before)
        assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002


class OwnNoise(nn.Module):
    """A user's own layer, which may draw from any generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "rrelu": lambda: nn.RReLU(),
    "own layer": OwnNoise,
    "lstm": Recurrent,
    "attention": lambda: Attention(8, 2, dropout=0.5),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3),
}
any_random = pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM.keys())


def _bare(model: nn.Module) -> bool:
    """Return whether the model has no layer of the tests, so that only torch's layers decide."""
    return all(type(m).__module__.startswith("torch.") for m in model.modules())


def _forward(model: nn.Module, seed: int, x: Tensor) -> Tensor:
    with forked_global_rng(seed, model, CPU):
        return model(x).detach()  # type: ignore[no-any-return]


class TestForkedGlobalRng:
    @any_random
    def test_the_seed_decides_and_the_global_state_is_restored(self, make: Callable[[], nn.Module]) -> None:
        model, x = make(), torch.linspace(-1, 1, 5 * 2 * 8).reshape(5, 2, 8)
        model.train()
        before = torch.get_rng_state()
        first = _forward(model, 1, x)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)  # the caller's own draws change nothing inside
        assert torch.equal(_forward(model, 1, x), first)
        assert not torch.equal(_forward(model, 2, x), first)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.LSTM(8, 8, 2, dropout=0.5),
            nn.GRU(8, 8, 2, dropout=0.1),
            nn.MultiheadAttention(8, 2, dropout=0.5),
        ],
        ids=lambda layer: type(layer).__name__,
    )
    def test_torchs_layers_with_dropout_inside(self, layer: nn.Module) -> None:
        assert _bare(layer)
        x = torch.ones(5, 2, 8)
        inputs = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
        results = []
        before = torch.get_rng_state()
        for _ in range(2):
            with forked_global_rng(3, layer, CPU):
                results.append(layer(*inputs)[0].detach())
        assert torch.equal(*results)
        assert torch.equal(torch.get_rng_state(), before)

    def test_the_global_state_is_restored_after_an_error(self) -> None:
        model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))  # its initial weights are global draws
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="shape"):
            _forward(model, 0, torch.ones(1, 3))
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(_forward(nn.Dropout(), 0, torch.ones(9)), _forward(nn.Dropout(), 0, torch.ones(9)))

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_random_layer_inside_a_wrapped_model(self, wrapped: bool) -> None:
        model: nn.Module = nn.Identity()
        if wrapped:
            object.__setattr__(model, "original", nn.Dropout())
        with forked_global_rng(5, model, CPU):
            state = torch.get_rng_state()
        assert torch.equal(state, torch.get_rng_state()) is not wrapped

    def test_models_that_draw_nothing_run_at_the_same_time(self) -> None:
        barrier = threading.Barrier(2, timeout=120)
        models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()), nn.LSTM(2, 2, 2)]
        met: list[int] = []

        def work(model: nn.Module) -> None:
            with forked_global_rng(0, model, CPU):
                barrier.wait()
                met.append(1)

        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        assert len(met) == 2

    def test_threads_give_what_one_thread_gives(self) -> None:
        x = torch.ones(50, 8)
        models = [nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.2)) for _ in range(6)]

        def steps(index: int) -> list[Tensor]:
            with forked_global_rng(index, models[index], CPU):
                return [models[index](x) for _ in range(20)]

        expected = [steps(index) for index in range(6)]
        before = torch.get_rng_state()
        actual: dict[int, list[Tensor]] = {}
        start = threading.Barrier(6, timeout=120)

        def work(index: int) -> None:
            start.wait()
            actual[index] = steps(index)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        assert sorted(actual) == list(range(6))
        for index, results in enumerate(expected):
            assert torch.equal(torch.stack(actual[index]), torch.stack(results))
        assert torch.equal(torch.get_rng_state(), before)
