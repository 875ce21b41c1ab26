"""``flwr-kd datasets``, ``models`` and ``partitions``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flwr_kd import catalogue
from tests.cli.commands import Command


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("datasets", catalogue.DATASETS),
        ("models", {**catalogue.MODELS, **catalogue.MODEL_FORMS}),
        ("partitions", catalogue.PARTITIONS),
    ],
)
def test_names_are_listed_each_with_a_line(command: Command, name: str, listed: Mapping[str, str]) -> None:
    code, out, err = command(name)
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines == dict(listed)
    assert f"`flwr-kd {name}`" in command("simulate", "--help").out
