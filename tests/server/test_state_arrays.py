"""``state_arrays()`` may be called at any time, and ``reset()`` takes a strategy back to before its first run."""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import every

HOOKS = (
    "accept_node",
    "begin",
    "select",
    "configure_phase",
    "check_reply",
    "aggregate_phase",
    "finish_round",
)


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@every
def test_state_arrays_may_be_called_at_any_time(name: str, federation: Any) -> None:
    """Before a run and around every hook; what was returned stays as it was."""
    fed = federation(name)
    strategy = fed.strategy()
    kept: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []

    def look() -> None:
        state = strategy.state_arrays()
        kept.append((state, {key: value.copy() for key, value in state.items()}))

    def watched(hook: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            look()
            try:
                return hook(*args, **kwargs)
            finally:
                look()

        return call

    look()
    assert kept[0][0] == {}
    for hook in HOOKS:
        setattr(strategy, hook, watched(getattr(strategy, hook)))
    result = strategy.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=2)
    assert [(r.participants, r.failures) for r in result.rounds] == [(4, 0)] * 2
    assert len(kept) > 20
    for state, copy in kept:
        assert equal(state, copy)
    other = fed.strategy()
    other.load_state_arrays(strategy.state_arrays())
    assert equal(other.state_arrays(), strategy.state_arrays())


@every
def test_reset_goes_back_to_before_the_first_run(name: str, federation: Any) -> None:
    strategy, _ = federation(name).run(rounds=1)
    saved = {key: value.copy() for key, value in strategy.state_arrays().items()}
    strategy.reset()
    assert strategy.state_arrays() == {}
    strategy.load_state_arrays(saved)
    assert equal(strategy.state_arrays(), saved)
    strategy.load_state_arrays({})
    assert strategy.state_arrays() == {}
