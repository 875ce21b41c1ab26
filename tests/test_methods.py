"""What every method must withstand; a new one joins by being registered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_kd import registry
from flwr_kd.server.records import HandshakeError
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.transport.inline_grid import InlineGrid

ROOT = Path(__file__).resolve().parents[1]
METHODS = list(registry.methods())
WEIGHTS = [name for name in METHODS if registry.get(name).strategy.sends_weights]
ALIKE = [name for name in METHODS if not registry.get(name).heterogeneous]
UNLIKE = [name for name in METHODS if registry.get(name).heterogeneous]

every = pytest.mark.parametrize("name", METHODS)


def same_state(a: KDStrategy, b: KDStrategy) -> bool:
    left, right = a.state_arrays(), b.state_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def test_strategies_are_found_in_a_clone_that_is_not_installed() -> None:
    """As Ray's workers find it, which look into the working directory first."""
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path.insert(0, {str(ROOT)!r}); import flwr_kd.strategies.fedhkd as m; print(m.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ROOT / "strategies" / "fedhkd" / "__init__.py"), done.stderr


def test_the_registry_holds_the_methods_of_this_library() -> None:
    assert {"fedavg", "fedprox", "fedproto", "fedhkd", "fedhkd-star"} <= set(METHODS)


@every
def test_two_rounds_reach_everyone(name: str, federation: Any) -> None:
    _, result = federation(name).run()
    assert [r.server_round for r in result.rounds] == [1, 2]
    for stats in result.rounds:
        assert (stats.participants, stats.failures) == (4, 0)
        assert stats.local_accuracy is not None
        assert stats.local_accuracy > 0.3
        assert set(stats.bytes_by_partition) == {0, 1, 2, 3}
        assert stats.bytes_up == sum(up for _, up in stats.bytes_by_partition.values()) > 0
    # From round 2 on every method sends something down.
    assert result.rounds[1].bytes_down > 0


@every
def test_learning_goes_on(name: str, federation: Any) -> None:
    _, result = federation(name).run(rounds=6)
    first, last = result.rounds[0], result.rounds[-1]
    assert last.local_accuracy > first.local_accuracy
    assert last.local_accuracy > 0.75


@every
@pytest.mark.parametrize("kind", ["raise", "silent", "late"])
def test_a_faulty_client_costs_its_own_contribution(
    name: str, kind: str, federation: Any, numbers: Callable[..., Any]
) -> None:
    _, result = federation(name).run(grid={"faults": {1: Fault(kind, frozenset({1}))}}, timeout=0.4)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    assert 1 in result.rounds[0].bytes_by_partition or result.rounds[0].bytes_down == 0
    assert result.rounds[0].bytes_by_partition.get(1, (0, 0))[1] == 0
    if kind != "raise":
        # However the answer was lost, the others' numbers are the same.
        _, other = federation(name).run(grid={"faults": {1: Fault("raise", frozenset({1}))}})
        assert numbers(other)[0] == numbers(result)[0]


@every
@pytest.mark.parametrize("kind", list(GARBAGE))
def test_garbage_is_dropped_or_harmless(name: str, kind: str, federation: Any) -> None:
    fault = Fault("garbage", frozenset({1}), garble=GARBAGE[kind])
    strategy, result = federation(name).run(grid={"faults": {2: fault}})
    first, second = result.rounds
    assert first.participants + first.failures == 4
    assert first.participants >= 3
    assert (second.participants, second.failures) == (4, 0)
    for value in [*strategy.state_arrays().values(), *(a.numpy() for a in result.arrays.values())]:
        assert np.isfinite(value).all()
    always = kind in ("negative-examples", "metrics-of-nan", "no-records", "other-records", "payload-of-text")
    if (
        always
        or (strategy.reply_payloads and "payload" in kind)
        or (strategy.reply_arrays and "arrays" in kind)
    ):
        assert first.failures == 1


@every
@pytest.mark.parametrize("kind", ["raise", "silent", "late"])
def test_a_round_without_answers_changes_nothing(name: str, kind: str, federation: Any) -> None:
    faults = {i: Fault(kind, frozenset({1})) for i in range(4)}
    fed = federation(name)
    strategy, result = fed.run(rounds=1, grid={"faults": faults}, timeout=0.2)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (0, 4)
    assert strategy.state_arrays() == {}
    assert [a.data for a in result.arrays.values()] == [a.data for a in fed.initial().values()]
    _, longer = fed.run(rounds=2, grid={"faults": faults}, timeout=0.3)
    assert longer.rounds[1].participants == 4


@every
def test_same_seed_same_numbers(name: str, federation: Any, numbers: Callable[..., Any]) -> None:
    one, again, other = (federation(name).run(seed=seed)[1] for seed in (3, 3, 4))
    assert numbers(one) == numbers(again)
    assert numbers(one) != numbers(other)


@every
def test_node_ids_do_not_matter(name: str, federation: Any, numbers: Callable[..., Any]) -> None:
    one, other = (federation(name).run(grid={"seed": seed}, fraction_train=0.5)[1] for seed in (1, 2))
    assert numbers(one) == numbers(other)


@every
def test_a_strategy_can_be_started_again(name: str, federation: Any, numbers: Callable[..., Any]) -> None:
    fed = federation(name)
    strategy = fed.strategy()
    first, second = (
        strategy.start(InlineGrid(fed.app(), fed.clients), fed.initial(), num_rounds=2) for _ in range(2)
    )
    assert numbers(first) == numbers(second)


@every
def test_threads_give_the_same_numbers(name: str, federation: Any, numbers: Callable[..., Any]) -> None:
    in_turn, threads = (federation(name).run(grid={"workers": workers})[1] for workers in (1, 3))
    assert numbers(in_turn) == numbers(threads)


@every
def test_state_survives_save_and_resume(name: str, federation: Any, tmp_path: Path) -> None:
    fed = federation(name)
    saved, first = fed.run(rounds=2, checkpoint_dir=tmp_path)
    restored = fed.strategy(checkpoint_dir=tmp_path, resume=True)
    restored._begin(fed.initial())
    checkpoint = restored.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint[0] == 2
    assert same_state(saved, restored)
    assert {k: v.data for k, v in (checkpoint[1] or ArrayRecord()).items()} == {
        k: v.data for k, v in first.arrays.items()
    }


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, federation: Any, numbers: Callable[..., Any], tmp_path: Path
) -> None:
    fed = federation(name)
    _, whole = fed.run(rounds=3)
    fed.run(rounds=2, checkpoint_dir=tmp_path)
    _, rest = fed.run(rounds=3, checkpoint_dir=tmp_path, resume=True)
    assert [r.server_round for r in rest.rounds] == [3]
    assert numbers(rest) == numbers(whole)[2:]


@pytest.mark.parametrize("name", UNLIKE)
def test_models_may_differ(name: str, federation: Any) -> None:
    fed = federation(name)
    fed.models = ["mlp", "lenet", "mlp", "cnn"]
    _, result = fed.run()
    assert result.rounds[-1].participants == 4


@pytest.mark.parametrize("name", ALIKE)
def test_another_model_is_refused_before_training(name: str, federation: Any) -> None:
    fed = federation(name)
    fed.models = ["mlp", "lenet", "mlp", "mlp"]
    with pytest.raises(HandshakeError, match=r"3 clients fit, 4 are needed; refused: node .*arrays missing"):
        fed.run()


@every
def test_the_method_is_described(name: str) -> None:
    method = registry.get(name)
    assert method.paper
    assert method.exchanged
    assert method.global_model == method.strategy.sends_weights
    for parameter, _, _, text in method.config_class.help():
        assert text, parameter
