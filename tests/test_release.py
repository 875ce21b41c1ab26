"""What a release needs: one version, and files of other tools that say the same as pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from flwr_kd import __version__

ROOT = Path(__file__).resolve().parent.parent


def document(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_there_is_one_version() -> None:
    assert "version" in project()["project"]["dynamic"]
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "flwr_kd.__version__"}
    assert document("CITATION.cff")["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    topmost = re.findall(r"^## (\S+) \((.+)\)$", changes, flags=re.M)[0]
    assert topmost[0] == __version__
    assert re.fullmatch(r"not released|\d{4}-\d\d-\d\d", topmost[1])


def test_pre_commit_has_the_ruff_of_the_environment() -> None:
    (ruff,) = (
        name for name in project()["project"]["optional-dependencies"]["dev"] if name.startswith("ruff")
    )
    (repository,) = document(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"].split()[:2] for hook in repository["hooks"]] == [
        ["ruff", "check"],
        ["ruff", "format"],
    ]
    assert {tuple(hook["additional_dependencies"]) for hook in repository["hooks"]} == {(ruff,)}


def test_the_workflows_run_what_make_check_runs() -> None:
    jobs = document(".github/workflows/ci.yml")["jobs"]
    assert [step["run"] for step in jobs["run"]["steps"] if "run" in step][-1] == "bash .ci/run"
    assert "bash .ci/run" in (ROOT / "Makefile").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^make (.+)$", script, flags=re.M) == [
        "install",
        "style",
        "types",
        "test",
        "test-slow",
    ]
    assert "bash .ci/packages.sh" in script


def test_a_release_is_published_only_after_the_checks_and_without_a_token() -> None:
    jobs = document(".github/workflows/release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"ci", "packages"}
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    # YAML 1.1 reads the key `on` as true.
    assert "workflow_call" in document(".github/workflows/ci.yml")[True]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
