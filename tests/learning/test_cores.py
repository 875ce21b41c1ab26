"""Work on several cores: the same bits on any number of them, errors, interrupts, and the end of the threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flwr_kd.learning import cores as cores_module
from flwr_kd.learning.cores import Copies, Cores, available_cores, draws_at_random
from flwr_kd.models import build_model
from flwr_kd.models.feature import as_feature_model
from flwr_kd.transport.node_threads import ask_to_end

COUNTS = [1, 2, 3]


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note the threads; none survives a test."""
    begun: list[int] = []
    work = cores_module._work

    def noted(*args: Any) -> None:
        begun.append(threading.get_ident())
        try:
            work(*args)
        finally:
            begun.remove(threading.get_ident())

    monkeypatch.setattr(cores_module, "_work", noted)
    yield begun
    # They are waited for until their last line; one whose start was interrupted, not at all.
    deadline = time.monotonic() + 60
    while begun and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not begun


@pytest.mark.parametrize("count", COUNTS)
class TestMap:
    def test_results_come_in_the_order_of_the_parts(self, count: int, alive: list[int]) -> None:
        def late(part: int) -> int:
            time.sleep(0.02 if part % 2 == 0 else 0)
            return part * part

        with Cores(count) as cores:
            assert cores.map(late, range(7)) == [part * part for part in range(7)]
            assert cores.map(late, []) == []
            assert len(alive) <= (count if count > 1 else 0)

    def test_each_part_has_one_thread_and_gradients(self, count: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            with Cores(count) as cores, torch.no_grad():
                seen = cores.map(lambda _: (torch.get_num_threads(), torch.is_grad_enabled()), range(4))
                assert not torch.is_grad_enabled()
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(before)
        assert seen == [(1, True)] * 4

    def test_the_first_error_is_raised_after_the_parts_that_run(self, count: int) -> None:
        begun, ended = [], []

        def part(number: int) -> None:
            begun.append(number)
            if number in (2, 4):
                raise FloatingPointError(f"part {number}")
            time.sleep(0.01)
            ended.append(number)

        with Cores(count) as cores:
            with pytest.raises(FloatingPointError, match="part 2"):
                cores.map(part, range(50))
            assert set(begun) - set(ended) <= {2, 4}
            assert len(begun) < 50
            assert cores.map(abs, [-1, -2, -3]) == [1, 2, 3]

    def test_a_stream_holds_few_parts(self, count: int) -> None:
        taken: list[int] = []

        def parts() -> Iterator[int]:
            for number in range(40):
                taken.append(number)
                yield number

        with Cores(count) as cores:
            results = cores.stream(abs, parts())
            assert next(results) == 0
            assert len(taken) <= 4 * count
            assert list(results) == list(range(1, 40))

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
    def test_an_interrupt_within_a_part_ends_it(self, count: int, interrupt: type[BaseException]) -> None:
        def part(number: int) -> None:
            if number == 1:
                raise interrupt

        with pytest.raises(interrupt), Cores(count) as cores:
            cores.map(part, range(10))


# Where it is raised within a weak reference's callback, Python drops it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", COUNTS)
def test_a_thread_that_is_asked_to_end_ends_with_all_its_threads(count: int) -> None:
    """As the server's is, where Ctrl-C ends a simulation."""
    computing, raised = threading.Event(), []

    def part(number: int) -> None:
        computing.set()
        time.sleep(0.01)

    def serve() -> None:
        try:
            with Cores(count) as cores:
                cores.map(part, range(100_000))
        except SystemExit as error:
            raised.append(error)

    server = threading.Thread(target=serve)
    server.start()
    assert computing.wait(60)
    assert server.ident is not None
    deadline = time.monotonic() + 60
    # More than once: Python may raise it in a thread that the server is just starting.
    while server.is_alive() and time.monotonic() < deadline:
        ask_to_end(server.ident)
        server.join(1)
    assert not server.is_alive()
    assert raised


def test_numbers_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert available_cores() == 3
    for value in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert available_cores() >= 1
    assert Cores().count == torch.get_num_threads()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Cores(0)


class Tapped(nn.Module):
    """A model whose features are read off by a hook during the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.hidden(x)))


class TestCopies:
    def test_shared_copies_follow_the_model(self) -> None:
        model = as_feature_model(Tapped())
        with Cores(3) as cores:
            copies = Copies(model, cores, parts=9, shared=True)
        with copies.taken() as one, copies.taken() as two, copies.taken() as three:
            assert len({id(one), id(two), id(three)}) == 3
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            x = torch.ones(2, 4)
            for copy in (one, two, three):
                assert torch.equal(copy(x), model(x))

    def test_other_weights_can_be_loaded_into_copies_of_their_own(self) -> None:
        model = Tapped()
        copies = Copies(model, Cores(2), parts=2)
        with copies.taken() as one, copies.taken() as two:
            two.load_state_dict(Tapped().state_dict())
            assert one is model
            assert not torch.equal(one.last.weight, two.last.weight)

    def test_there_are_no_more_than_parts(self) -> None:
        copies = Copies(Tapped(), Cores(8), parts=2)
        with copies.taken(), copies.taken():
            assert copies._free.empty()

    @pytest.mark.parametrize("count", COUNTS)
    def test_parts_take_turns_with_a_model_that_cannot_be_copied(self, count: int) -> None:
        class Locked(Tapped):
            def __deepcopy__(self, memo: Any) -> Any:
                raise TypeError("not this one")

        model, users = Locked(), []

        def part(number: int) -> int:
            with copies.taken() as taken:
                assert taken is model
                users.append(number)
                time.sleep(0.001)
                assert users == [number]
                users.clear()
            return number

        with Cores(count) as cores:
            copies = Copies(model, cores, parts=9)
            assert cores.map(part, range(9)) == list(range(9))

    @pytest.mark.parametrize("name", ["mlp", "lenet", "resnet8"])
    def test_features_at_the_same_time(self, name: str) -> None:
        """A hook of one pass does not see another's: what a model computes is what it computes alone."""
        model = as_feature_model(build_model(name, input_shape=(3, 8, 8), num_classes=4, seed=0)).eval()
        tapped = as_feature_model(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4)))
        x = list(torch.randn(24, 5, 3, 8, 8))
        for each in (model, tapped.eval()):
            alone = [each.features(part) for part in x]
            with Cores(3) as cores:
                copies = Copies(each, cores, parts=len(x), shared=True)

                def features(part: Tensor, copies: Copies = copies) -> Tensor:
                    with copies.taken() as taken:
                        result: Tensor = taken.features(part)
                        return result

                assert all(torch.equal(a, b) for a, b in zip(alone, cores.map(features, x), strict=True))


def test_models_that_draw() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(x.shape[0], 1)

    before = torch.get_rng_state()
    x = torch.ones(1, 4)
    assert draws_at_random(Noisy(4, 2), x)
    assert not draws_at_random(nn.Sequential(nn.Linear(4, 2), nn.Dropout()).train(), x)
    torch.set_rng_state(before)
