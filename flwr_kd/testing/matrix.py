"""The checks that every method must pass, and :func:`check_method`, which runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flwr_kd.checks import ConfigError, whole_number
from flwr_kd.registry import Method
from flwr_kd.testing import (
    aggregation_checks,
    byte_checks,
    device_checks,
    handshake_checks,
    kept_runs,
    memory_checks,
    payload_checks,
    reply_checks,
    run_checks,
)
from flwr_kd.testing.federation import quiet
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.testing.outcomes import CheckError
from flwr_kd.testing.recording import Case, cases
from flwr_kd.text import unknown_name

__all__ = ["CHECKS", "Check", "check_method"]

RunCheck = Callable[[Case], None]
FuzzCheck = Callable[[Case, int, int], None]
LOST = ("raise", "silent", "late")
_MOST_LINES = 5
"""Number of the last logged lines that an error quotes."""
OF_MESSAGE_CLIENTS = "-of-message-clients"
"""How the names of checks end whose clients are those of Flower's Message API."""


def _every(method: Method) -> bool:
    return True


@dataclass(frozen=True)
class Check:
    """One check of the matrix.

    Attributes
    ----------
    name : str
        In kebab-case.
    run : callable
        Given the case, and, if ``fuzzes``, the number of mutations and the seed.
    applies : callable
        Given the method's entry in the registry: whether the check is meant for it.
    variants : bool
        Whether the method's variants are checked as well.
    fuzzes : bool
        Whether the check draws mutations.
    """

    name: str
    run: Callable[..., None]
    applies: Callable[[Method], bool] = _every
    variants: bool = False
    fuzzes: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def recorded(self) -> bool:
        """Whether the check works on recorded rounds, and not on runs of its own."""
        run = self.run.func if isinstance(self.run, partial) else self.run
        return run.__module__.rpartition(".")[2] not in ("run_checks", "byte_checks", "device_checks")

    def cases(self, method: str) -> list[Case]:
        """Return the cases of a method that the check is meant for."""
        return [case for case in cases(method, variants=self.variants) if self.applies(case.method)]

    def __call__(self, case: Case, *, mutations: int = 50, seed: int = 0) -> None:
        """Check a case.

        Raises
        ------
        CheckError
            If the method does not pass; the text names the method and the check.
        """
        try:
            with quiet() as lines:
                if self.fuzzes:
                    self.run(case, mutations, seed)
                else:
                    self.run(case)
        except CheckError as error:
            raise CheckError(f"{case}: {self.name}: {error}{_logged(lines)}") from None
        except Exception as error:
            what = f"raised {type(error).__name__}: {error}; expected: no error"
            raise CheckError(f"{case}: {self.name}: {what}{_logged(lines)}") from error


def _logged(lines: Sequence[str]) -> str:
    """Return the last lines of a log: what a client in another process has failed with is there alone."""
    if not lines:
        return ""
    return "\n- ".join(["\nlogged meanwhile:", *lines[-_MOST_LINES:]])


def _weights(method: Method) -> bool:
    return method.strategy.sends_weights


def _one_phase(method: Method) -> bool:
    return len(method.strategy.phases) == 1


def _payloads(method: Method) -> bool:
    return bool(method.strategy.reply_payloads)


def _arrays(method: Method) -> bool:
    return bool(method.strategy.reply_arrays)


def _trained_arrays(method: Method) -> bool:
    return "train" in method.strategy.reply_arrays


def _by_messages(
    run: Callable[..., None], applies: Callable[[Method], bool] = _every, *, fuzzes: bool = False
) -> Iterator[Check]:
    """Yield a check of recorded rounds for clients of Flower's Message API, whose replies have other records."""

    @functools.wraps(run)
    def by_messages(case: Case, *options: int) -> None:
        run(replace(case, message_api=True), *options)

    name = by_messages.__name__.replace("_", "-")
    yield Check(f"{name}{OF_MESSAGE_CLIENTS}", by_messages, applies, fuzzes=fuzzes)


HARMS: dict[str, Callable[[Method], bool]] = {
    "random-payload": _payloads,
    "no-payload": _payloads,
    "arrays-of-nan": _arrays,
    "arrays-of-other-shape": _arrays,
}
"""To which methods a kind of garbage does anything, if not to all."""


def _all_checks() -> Iterator[Check]:
    yield Check("method-is-described", run_checks.method_is_described)
    yield Check("two-rounds-reach-everyone", run_checks.two_rounds_reach_everyone)
    yield Check("clients-may-come-later", run_checks.clients_may_come_later)
    yield Check("learning-goes-on", run_checks.learning_goes_on)
    yield Check("measuring-changes-nothing", run_checks.measuring_changes_nothing)
    for kind in LOST:
        run: RunCheck = partial(run_checks.faulty_client_costs_its_own_contribution, kind=kind)
        yield Check(f"a-client-fails-{kind}", run)
    for kind in GARBAGE:
        run = partial(run_checks.garbage_is_dropped_or_harmless, kind=kind)
        yield Check(f"garbage-{kind}", run, HARMS.get(kind, _every))
    for kind in LOST:
        run = partial(run_checks.round_without_replies_changes_nothing, kind=kind)
        yield Check(f"all-clients-fail-{kind}", run)
    yield Check("same-seed-same-numbers", run_checks.same_seed_same_numbers)
    yield Check("node-ids-do-not-matter", run_checks.node_ids_do_not_matter)
    yield Check("a-strategy-can-be-started-again", run_checks.strategy_can_be_started_again)
    yield Check("threads-give-the-same-numbers", run_checks.threads_give_the_same_numbers)
    yield Check("reused-models-give-the-same-numbers", run_checks.reused_models_give_the_same_numbers)
    yield Check("processes-give-the-same-numbers", run_checks.processes_give_the_same_numbers)
    yield Check("message-clients-give-the-same-numbers", run_checks.message_clients_give_the_same_numbers)
    yield Check("state-survives-save-and-resume", run_checks.state_survives_save_and_resume)
    yield Check("a-resumed-run-equals-an-uninterrupted-one", run_checks.resumed_run_equals, _weights)
    yield Check("models-may-differ", run_checks.models_may_differ, lambda method: method.heterogeneous)
    yield Check(
        "another-model-is-refused",
        run_checks.another_model_is_refused,
        lambda method: not method.heterogeneous,
    )
    yield Check("bytes-are-those-of-the-formula", byte_checks.bytes_are_those_of_the_formula)
    yield Check("steps-do-not-wait-for-a-gpu", device_checks.steps_do_not_wait_for_a_gpu)
    yield Check("mutated-replies", reply_checks.mutated_replies, variants=True, fuzzes=True)
    yield Check("error-replies", reply_checks.error_replies, variants=True)
    yield Check(
        "aggregations-of-mutated-replies",
        aggregation_checks.aggregations_of_mutated_replies,
        variants=True,
        fuzzes=True,
    )
    yield Check("payloads-that-lie", payload_checks.payloads_that_lie, _payloads, variants=True, fuzzes=True)
    yield Check("broken-rules-are-named", payload_checks.broken_rules_are_named, _payloads, variants=True)
    yield Check("extremes-do-no-harm", payload_checks.extremes_do_no_harm, _payloads, variants=True)
    yield Check("flowers-own-loop", aggregation_checks.flowers_own_loop, _one_phase, variants=True)
    yield Check("replies-to-other-messages", aggregation_checks.replies_to_other_messages)
    yield Check("replies-of-other-rounds-and-phases", aggregation_checks.replies_of_other_phases)
    yield Check(
        "whole-runs-with-mutated-replies", aggregation_checks.whole_runs_with_mutated_replies, variants=True
    )
    yield Check("hostile-handshakes", handshake_checks.hostile_handshakes)
    yield Check("a-liar-that-comes-first", handshake_checks.liar_that_comes_first)
    yield Check("what-is-no-handshake", handshake_checks.what_is_no_handshake)
    yield Check("claims-take-no-memory", memory_checks.claims_take_no_memory, variants=True)
    yield Check("payloads-beyond-the-limit", memory_checks.payloads_beyond_the_limit, variants=True)
    yield Check("arrays-beyond-the-model", memory_checks.arrays_beyond_the_model)
    yield Check("memory-of-an-honest-reply", memory_checks.memory_of_an_honest_reply, _trained_arrays)
    yield from _by_messages(reply_checks.mutated_replies, fuzzes=True)
    yield from _by_messages(aggregation_checks.aggregations_of_mutated_replies, fuzzes=True)
    yield from _by_messages(aggregation_checks.replies_of_other_phases)
    yield from _by_messages(memory_checks.claims_take_no_memory)
    yield from _by_messages(memory_checks.payloads_beyond_the_limit)
    yield from _by_messages(memory_checks.arrays_beyond_the_model)
    yield from _by_messages(memory_checks.memory_of_an_honest_reply, _trained_arrays)


CHECKS: dict[str, Check] = {check.name: check for check in _all_checks()}
"""All checks by name, in the order in which they run."""


def check_method(
    name: str,
    *,
    mutations: int = 50,
    seed: int = 0,
    checks: Iterable[str] | None = None,
    on_check: Callable[[str, str], Any] | None = None,
) -> None:
    """Run the shared matrix on a method: faults, garbage, seeds, resumption, mutated replies, memory and bytes.

    Parameters
    ----------
    name : str
        A registered method, of this library or another one.
    mutations : int
        Number of mutated replies per case, at least 20.
    seed : int
        Seed of the mutations. The same seed gives the same inputs.
    checks : iterable of str, optional
        Names in :data:`CHECKS`; all if None.
    on_check : callable, optional
        Called before each check with the texts of the case and of the check, for example to print them.

    Raises
    ------
    CheckError
        An ``AssertionError`` whose text names the method, the check, what happened and what is expected.
    ConfigError
        If there is no such method or check.

    Examples
    --------
    >>> check_method("fedavg", checks=["method-is-described", "garbage-no-payload"])
    """
    whole_number("mutations", mutations, 20)
    wanted = list(CHECKS) if checks is None else list(checks)
    for each in wanted:
        if each not in CHECKS:
            raise ConfigError(unknown_name("check", each, CHECKS))
    cases(name)
    kept_runs.forget()
    try:
        for each in wanted:
            for case in CHECKS[each].cases(name):
                if on_check is not None:
                    on_check(str(case), each)
                CHECKS[each](case, mutations=mutations, seed=seed)
    finally:
        kept_runs.forget()
