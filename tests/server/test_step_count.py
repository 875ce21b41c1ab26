"""Steps of a run, by which learning rates fall: who is told which number, and what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context

from flwr_kd.testing.federation import Federation, numbers

DECAY = "step-decay=0.05"
STEPS = [3, 3, 4, 4]
"""Of clients with 24 to 27 samples and batches of 8: 25 are 8, 8 and 9, since a last single one joins."""


def watched(name: str, call: str, note: Callable[[Any, int], None]) -> Federation:
    """Return a federation that gives ``note`` the config and the partition of each ``fit`` or ``evaluate``."""

    class Watched(Federation):
        def client_fn(self, context: Context) -> Any:
            client = super().client_fn(context)
            plain = getattr(client, call)

            def noted(ins: Any) -> Any:
                note(ins.config, int(context.node_config["partition-id"]))
                return plain(ins)

            setattr(client, call, noted)
            return client

    return Watched(name)


def steps_before(name: str, *settings: str, rounds: int = 2, **options: Any) -> tuple[list[Any], int]:
    """Return what clients are told, as (round, phase, partition, steps), and the steps of the whole run."""
    told: list[Any] = []

    def note(config: Any, partition: int) -> None:
        told.append((config["server-round"], config["phase"], partition, config.get("steps-before")))

    strategy, _ = watched(name, "fit", note).run(rounds, settings=settings, **options)
    return sorted(told), strategy.current_run.steps.taken


def test_clients_are_told_the_steps_before_theirs_as_if_they_took_turns() -> None:
    told, taken = steps_before("fedavg", DECAY)
    expected = [(1, "train", k, before) for k, before in enumerate([0, 3, 6, 10])]
    expected += [(2, "train", k, before) for k, before in enumerate([14, 17, 20, 24])]
    assert (told, taken) == (expected, 28)


def test_without_a_decay_nobody_is_told_and_nothing_is_counted() -> None:
    told, taken = steps_before("fedavg", rounds=1)
    assert {steps for *_, steps in told} == {None}
    assert taken == 0


def test_a_claim_of_samples_counts_up_to_a_limit() -> None:
    told, _ = steps_before("fedavg", DECAY, rounds=1, max_examples=16)
    assert [steps for *_, steps in told] == [0, 2, 4, 6]


def test_steps_of_leaders_and_of_the_server_count_too() -> None:
    """32 public samples, a tenth held out: 29 in batches of 8; a leader's 24 to 27 samples leave 22 to 24 or 25."""
    told, taken = steps_before("fedhead-plus", DECAY, "sector-epochs=2", "server-epochs=3")
    first = [steps for number, phase, _, steps in told if (number, phase) == (1, "distill")]
    leaders = [(k, steps) for number, phase, k, steps in told if (number, phase) == (1, "distill")]
    assert sorted(first)[0] == sum(STEPS)
    after = sum(STEPS) + sum(2 * 3 for _ in leaders) + 3 * 4
    second = {k: steps for number, phase, k, steps in told if (number, phase) == (2, "train")}
    assert second == {k: after + sum(STEPS[:k]) for k in range(4)}
    assert len(leaders) == 2
    assert taken == 2 * after


def test_feddf_counts_its_distillation() -> None:
    assert steps_before("feddf", DECAY, "server-epochs=3", rounds=1)[1] == sum(STEPS) + 3 * 4
    assert steps_before("pfeddf", DECAY, "server-epochs=3", rounds=1)[1] == 2 * sum(STEPS) + 3 * 4


@pytest.mark.parametrize("name", ["fedavg", "fedhead-plus"])
def test_a_resumed_run_goes_on_at_the_rate_at_which_it_was(name: str, tmp_path: Path) -> None:
    whole = numbers(Federation(name).run(3, settings=[DECAY])[1])
    Federation(name).run(2, settings=[DECAY], checkpoint_dir=tmp_path)
    resumed = numbers(Federation(name).run(3, settings=[DECAY], checkpoint_dir=tmp_path, resume=True)[1])
    assert resumed[-len(whole) + 2 :] == whole[2:]
    assert whole != numbers(Federation(name).run(3)[1])


def test_fine_tuning_goes_on_at_the_rate_at_which_training_ended() -> None:
    told: list[Any] = []

    def note(config: Any, partition: int) -> None:
        told.append((config["phase"], config.get("steps-before")))

    watched("fedavg", "evaluate", note).run(2, settings=[DECAY, "personalize-epochs=1"])
    assert told == [("personalize", 2 * sum(STEPS))] * 4
