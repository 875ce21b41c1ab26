"""Messages in the words of the interface in use, and warnings that are logged once per run."""

from __future__ import annotations

import pytest

from flwr_kd.wording import Interface, assignment, begin_run, one_comparison, option, speaking, warn_once


@pytest.mark.parametrize(
    ("interface", "texts"),
    [
        (Interface.PYTHON, ("force=True", 'backend="inline"', "local_epochs=2")),
        (Interface.COMMAND, ("--force", "--backend inline", "--set local-epochs=2")),
        (
            Interface.APP,
            (
                "force=true in the run config",
                'backend="inline" in the run config',
                "local-epochs=2 in the run config",
            ),
        ),
    ],
)
def test_options_are_named_as_the_interface_has_them(interface: Interface, texts: tuple[str, ...]) -> None:
    with speaking(interface):
        assert (option("force"), option("backend", "inline"), assignment("local_epochs", 2)) == texts
    assert option("force") == "force=True"


def test_a_warning_is_logged_once_per_run_or_comparison(flower_log: list[str]) -> None:
    def run(name: str) -> None:
        begin_run()
        for server_round in (1, 2):
            warn_once("%s warns in round %d", name, server_round)

    run("first")
    run("second")
    with one_comparison():
        run("third")
        run("fourth")
        warn_once("another")
    run("fifth")
    assert flower_log == [
        *("first warns in round 1", "second warns in round 1", "third warns in round 1", "another"),
        "fifth warns in round 1",
    ]
