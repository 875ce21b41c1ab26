"""Completion: in bash itself, by the protocol of zsh and fish, and of what the command knows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flwr_kd import catalogue, registry
from flwr_kd.cli.completion import values_of
from flwr_kd.experiments.options import BACKENDS
from flwr_kd.results.formats import FORMATS
from tests.cli.commands import Command
from tests.processes import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
eval "$(flwr-kd completion bash)" || exit 1
complete -p flwr-kd >/dev/null || exit 1
while read -r line; do
  read -ra COMP_WORDS <<< "$line"
  [ "${line: -1}" = "|" ] && COMP_WORDS[-1]=""
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _flwr_kd_completion flwr-kd
  echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which ``flwr-kd`` is this repository's."""
    program = tmp_path / "flwr-kd"
    call = "from flwr_kd.cli import main; main()"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{call}' \"$@\"\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


@pytest.mark.program
def test_bash_completes_commands_options_and_names(environment: dict[str, str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    expected = {
        "flwr-kd sim": ["simulate"],
        "flwr-kd compare fedh": [name for name in registry.methods() if name.startswith("fedh")],
        "flwr-kd compare fedavg --part": ["--partition"],
        "flwr-kd compare --partition k": ["ktpfl-1", "ktpfl-2"],
        "flwr-kd compare --model mlp,lene": ["mlp,lenet"],
        "flwr-kd compare --format |": list(FORMATS),
        "flwr-kd completion |": ["bash", "zsh", "fish"],
    }
    done = subprocess.run(
        [bash, "--norc", "-c", SCRIPT], input="".join(f"{line}\n" for line in expected), env=environment,
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    answers = dict(zip(expected, (line.split() for line in done.stdout.splitlines()), strict=True))
    assert answers == expected


@pytest.mark.parametrize(
    ("shell", "word", "answer"),
    [
        ("zsh", "1", "plain\nsimulate\nFederate one method"),
        ("fish", "sim", "plain,simulate"),
    ],
)
def test_zsh_and_fish_ask_and_are_answered(
    command: Command, monkeypatch: pytest.MonkeyPatch, shell: str, word: str, answer: str
) -> None:
    code, script, err = command("completion", shell)
    assert (code, err) == (0, "")
    assert f"_FLWR_KD_COMPLETE={shell}_complete" in script
    for name, value in {"COMP_WORDS": "flwr-kd sim", "COMP_CWORD": word}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_FLWR_KD_COMPLETE", f"{shell}_complete")
    assert command().out.startswith(answer)


def test_an_unknown_shell_is_a_line(command: Command) -> None:
    code, _, err = command("completion", "tcsh")
    assert code == 2
    assert err.startswith("flwr-kd: unknown shell 'tcsh'; valid: bash, zsh, fish")


def test_the_values_are_those_of_the_options() -> None:
    def of(name: str, incomplete: str = "") -> list[str]:
        complete = values_of(name)
        assert complete is not None
        return complete(incomplete)

    assert of("methods") == [*registry.methods(), "alone"]
    assert of("model") == list(catalogue.MODELS)
    assert tuple(of("backend")) == BACKENDS
    assert tuple(of("format")) == FORMATS
    assert of("partition", "dir") == ["dirichlet:"]
    assert values_of("rounds") is None


@pytest.mark.parametrize(
    "words",
    [
        [],
        *(
            [name]
            for name in ("methods", "datasets", "models", "partitions", "simulate", "compare", "reproduce")
        ),
        *([name] for name in ("privacy", "table", "report", "completion", "plot")),
        ["plot", "curves"],
    ],
)
def test_h_is_help_everywhere(command: Command, words: list[str]) -> None:
    short, long = command(*words, "-h"), command(*words, "--help")
    assert short.code == 0
    assert short == long
    assert f"Usage: {' '.join(['flwr-kd', *words])} " in short.out
