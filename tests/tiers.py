"""The tiers of the test suite: their options, their markers, and how pytest-xdist distributes the tests."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest

from flwr_kd import registry

# How long an example takes says nothing on a machine that also does other things.
hypothesis.settings.register_profile("flwr-kd", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("flwr-kd")

PROCESSES = ("ray", "flwr_run", "program")
"""Markers of tests that start processes. These tests wait more than they work."""
MARKED = (*PROCESSES, "long", "slow", "fuzz")
LONG_SECONDS = 5.0
"""A test that takes longer on a quiet machine has one of the markers in ``MARKED``."""
GROUPS = "flwr_kd_groups"
"""Key under which a worker of pytest-xdist finds the file for the groups of its tests."""
GROUPS_FILE = pytest.StashKey[Path]()


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
        choices=("all", "one", "kinds"),
        default="all",
        help="run a test of every method for all methods, for one method per (strategy, client) pair, or for one "
        "method per kind unless the test has the marker every_method",
    )


@pytest.fixture(scope="session")
def mutations(pytestconfig: pytest.Config) -> int:
    """Return the number of mutated replies per case."""
    return int(pytestconfig.getoption("mutations"))


# Before pytest leaves out the tests of other tiers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    firsts = first_variants()
    for item in items:
        if item.get_closest_marker("first_variant") and any(
            name not in firsts for name, _ in methods_of(item)
        ):
            item.add_marker(pytest.mark.slow)
    if (extent := config.getoption("variants")) != "all":
        dropped = set(repeated(items, extent))
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    groups: dict[str, tuple[str, bool]] = {}
    for item in items:
        starts = any(item.get_closest_marker(name) for name in PROCESSES)
        if starts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROCESS_TIMEOUT))
        group = item.get_closest_marker("xdist_group")
        if starts or group:
            groups[item.nodeid] = (str(group.args[0]) if group else item.nodeid, starts)
    worker = getattr(config, "workerinput", {})
    if worker.get("workerid") == "gw0" and GROUPS in worker:
        Path(worker[GROUPS]).write_text(json.dumps(groups), encoding="utf-8")


def halves() -> dict[str, tuple[str, str]]:
    """Return each method's strategy and client by its name; variants share them, and differ in hyper-parameters."""
    return {name: (m.strategy_path, m.client_path) for name, m in registry.methods().items()}


def first_variants() -> set[str]:
    """Return the first method of each pair of strategy and client."""
    firsts: dict[tuple[str, str], str] = {}
    for name, pair in halves().items():
        firsts.setdefault(pair, name)
    return set(firsts.values())


def simplest() -> dict[str, tuple[Any, ...]]:
    """Return each method's kind by its name, the simplest methods first.

    Methods of a kind agree in what their clients send: weights or none, knowledge or none, in one phase or several.
    The simplest one has the fewest hyper-parameters.
    """
    methods = registry.methods()
    strategies = {name: method.strategy for name, method in methods.items()}
    return {
        name: (
            strategies[name].sends_weights,
            bool(strategies[name].reply_payloads),
            len(strategies[name].phases) > 1,
        )
        for name in sorted(methods, key=lambda name: len(list(methods[name].config_class.help())))
    }


def methods_of(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """Yield the methods that a test is parametrised with, and the names of their parameters.

    The text of a case of the matrix, such as ``fedavg, batch norm``, begins with its method.
    """
    call = getattr(item, "callspec", None)
    for parameter, value in () if call is None else call.params.items():
        method = value.partition(", ")[0] if isinstance(value, str) else None
        if method in registry.methods():
            yield method, parameter


def repeated(items: Sequence[pytest.Item], extent: str) -> Iterator[pytest.Item]:
    """Yield tests that differ from one that stays only in a method's variant, or with "kinds" in the method."""
    classes: Mapping[str, tuple[Any, ...]] = simplest() if extent == "kinds" else halves()
    rank = {name: position for position, name in enumerate(classes)}
    same: dict[tuple[Any, ...], list[tuple[list[int], int]]] = {}
    for number, item in enumerate(items):
        methods = {parameter: name for name, parameter in methods_of(item)}
        if not methods or (extent == "kinds" and item.get_closest_marker("every_method")):
            continue
        values = {parameter: str(value) for parameter, value in item.callspec.params.items()}  # type: ignore[attr-defined]
        for parameter, name in methods.items():
            values[parameter] = f"{classes[name]}{values[parameter].removeprefix(name)}"
        key = (item.nodeid.partition("[")[0], *sorted(values.items()))
        same.setdefault(key, []).append(([rank[name] for name in methods.values()], number))
    for tests in same.values():
        yield from (items[number] for _, number in sorted(tests)[1:])


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


def groups_file(config: pytest.Config) -> Path:
    """Return the file by which the workers tell the scheduler which tests belong together."""
    if GROUPS_FILE not in config.stash:
        config.stash[GROUPS_FILE] = Path(tempfile.mkdtemp(prefix="flwr-kd-")) / "groups.json"
    return config.stash[GROUPS_FILE]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[GROUPS] = str(groups_file(node.config))


def pytest_unconfigure(config: pytest.Config) -> None:
    if GROUPS_FILE in config.stash:
        shutil.rmtree(config.stash[GROUPS_FILE].parent)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler by which tests that start processes overlap with the others.

    The second half of the workers, the larger one of an odd number, takes the tests that start processes first, and
    the first half takes the others. Workers that have nothing left of their own take what the other half has. Tests
    with the same ``xdist_group`` run on one worker: ``--dist loadgroup`` of pytest-xdist 3.8 does not do that with
    pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Overlapping(LoadScopeScheduling):  # type: ignore[misc]
        groups: ClassVar[dict[str, tuple[str, bool]]] = {}
        with_processes: ClassVar[set[str]] = set()

        def schedule(self) -> None:
            if self.collection is None:
                self.groups.update(json.loads(groups_file(config).read_text(encoding="utf-8")))
                self.with_processes.update(group for group, starts in self.groups.values() if starts)
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.groups[nodeid][0] if nodeid in self.groups else nodeid

        def _assign_work_unit(self, node: Any) -> None:
            second_half = int(node.gateway.id.removeprefix("gw")) >= max(self.numnodes // 2, 1)
            own = (group for group in self.workqueue if (group in self.with_processes) == second_half)
            self.workqueue.move_to_end(next(own, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return Overlapping(config, log) if config.getoption("dist") == "load" else None
