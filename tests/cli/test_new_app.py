"""``flwr-kd app``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.cli.commands import Command


def test_it_writes_an_app_and_says_where(command: Command, tmp_path: Path) -> None:
    code, out, err = command("app", "fedproto", "apps/my-app", "--publisher", "me")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"app: {tmp_path / 'apps' / 'my-app'}"
    assert "flwr run apps/my-app --stream" in out
    project = tomllib.loads((tmp_path / "apps" / "my-app" / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["name"] == "my-app"
    assert project["tool"]["flwr"]["app"]["publisher"] == "me"
    assert "method" not in project["tool"]["flwr"]["app"]["config"]


def test_it_takes_several_methods(command: Command, tmp_path: Path) -> None:
    assert command("app", "ktpfl,fedmd", "both").code == 0
    project = tomllib.loads((tmp_path / "both" / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["flwr"]["app"]["config"]["method"] == "ktpfl"


def test_mistakes_are_one_line_and_write_nothing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for words, message in (
        (("fedprot", "new"), "unknown method 'fedprot' (did you mean 'fedproto'?)"),
        (("fedproto,", "new"), "unknown method ''"),
        (
            ("fedproto", "my_app"),
            "name must be a letter, then letters, digits and hyphens, 32 at most, got 'my_app'",
        ),
        (("fedproto", "full"), "full' exists already: name a folder that is new or empty"),
        (("fedavg,ktpfl", "new"), "have different defaults of"),
        (("fedproto", "new", "--publisher", "a b"), "publisher must be an account's name"),
    ):
        code, out, err = command("app", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
