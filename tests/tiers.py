"""The tiers of the test suite: their options, their markers, and how pytest-xdist distributes the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from flwr_kd import registry

PROCESSES = ("ray", "flwr_run", "program")
"""Markers of tests that start processes. These tests wait more than they work."""
MARKED = (*PROCESSES, "long", "slow", "fuzz")
LONG_SECONDS = 5.0
"""A test that takes longer on a quiet machine has one of the markers in ``MARKED``."""
GROUP = "processes:"
"""Part of the group name of each test that starts processes, by which the scheduler recognises it."""


PROCESS_TIMEOUT = 1500
"""Seconds after which such a test ends as failed. What it waits for has a bound of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tiers of the test suite")
    group.addoption(
        "--mutations",
        type=int,
        default=50,
        metavar="N",
        help="mutated replies per case of the tests marked fuzz (default: 50, in the slow tier 500)",
    )
    group.addoption(
        "--variants",
        choices=("all", "one"),
        default="all",
        help="run a test of every method for all methods, or for one method per (strategy, client) pair",
    )


@pytest.fixture(scope="session")
def mutations(pytestconfig: pytest.Config) -> int:
    """Return the number of mutated replies per case."""
    return int(pytestconfig.getoption("mutations"))


# First, since pytest-xdist appends the names of the groups to the names of the tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("variants") == "one":
        dropped = set(further_variants(items))
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    for item in items:
        if any(item.get_closest_marker(name) for name in PROCESSES):
            shared = item.get_closest_marker("xdist_group") is not None
            # A name may not have the brackets of parameters: pytest-xdist takes what follows them.
            name = GROUP if shared else GROUP + item.nodeid.replace("[", "(").replace("]", ")")
            item.add_marker(pytest.mark.xdist_group(name))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PROCESS_TIMEOUT))


def further_variants(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield tests that differ from an earlier one only in the variant of a method.

    Variants share the strategy and the client, and differ in their hyper-parameters.
    """
    pairs = {name: f"{m.strategy} {m.client}" for name, m in registry.methods().items()}
    seen: set[tuple[Any, ...]] = set()
    for item in items:
        call = getattr(item, "callspec", None)
        values = {} if call is None else {name: str(value) for name, value in call.params.items()}
        if not any(value in pairs for value in values.values()):
            continue
        parameters = tuple(sorted((name, pairs.get(value, value)) for name, value in values.items()))
        key = (item.nodeid.partition("[")[0], parameters)
        if key in seen:
            yield item
        seen.add(key)


class LongTests:
    """Lists the tests that take long and have no marker, at the end of the output."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.duration > LONG_SECONDS and not any(name in report.keywords for name in MARKED):
            self.lines.append(f"{report.duration:6.1f} s {report.when:8} {report.nodeid}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.lines:
            terminalreporter.section(f"over {LONG_SECONDS:g} s and without a marker")
            terminalreporter.write_line("\n".join(sorted(self.lines, reverse=True)))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LongTests())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler by which tests that start processes overlap with the others.

    The second half of the workers takes the tests that start processes first, and the first half takes the others.
    Workers that have nothing left of their own take what the other half has.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Overlapping(LoadGroupScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            starts = int(node.gateway.id.removeprefix("gw")) >= max(self.numnodes // 2, 1)
            preferred = (group for group in self.workqueue if (GROUP in group) == starts)
            self.workqueue.move_to_end(next(preferred, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return Overlapping(config, log)
