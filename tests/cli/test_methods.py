"""``flwr-kd methods``."""

from __future__ import annotations

import json

import pytest

from flwr_kd import registry
from tests.cli.commands import Command


@pytest.mark.parametrize("columns", ["60", "80", None])
def test_methods_are_listed_one_a_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", columns)
    code, out, err = command("methods")
    assert (code, err) == (0, "")
    _, *lines = out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.methods())
    if columns is None:  # a pipe
        exchanged = [method.exchanged for method in registry.methods().values()]
        assert all(line.endswith(text) for line, text in zip(lines, exchanged, strict=True))
    else:
        assert max(map(len, out.splitlines())) == int(columns)


def test_methods_as_json(command: Command) -> None:
    code, out, _ = command("methods", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows) == list(registry.methods())
    assert set(rows["fedhkd"]) == {
        "name", "paper", "exchanged", "public_at", "different_models", "global_model",
        "takes_multi_label",
    }  # fmt: skip
    assert rows["fedhkd"]["global_model"] is True
    assert rows["fedproto"]["different_models"] is True
    assert "FedHKD" in rows["fedhkd"]["paper"]


def test_the_hyper_parameters_of_a_method(command: Command) -> None:
    _, out, _ = command("methods", "fedhkd")
    assert "classifier-weight" in out
    assert "0.25" in out
    rows = {row["name"]: row for row in json.loads(command("methods", "fedhkd", "--json").out)}
    assert rows["gamma"] == {"name": "gamma", "type": "float", "default": 0.05, "help": rows["gamma"]["help"]}
    assert "eq. 11" in rows["gamma"]["help"]
    star = {row["name"] for row in json.loads(command("methods", "fedhkd-star", "--json").out)}
    assert star == set(rows) - {"gamma"}
    transfer = {row["name"]: row["default"] for row in json.loads(command("methods", "fedgkt", "--json").out)}
    assert transfer["send-test-features"] is True  # as a simulation has it
