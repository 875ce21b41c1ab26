"""What a result was made with."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

from flwr_kd.results import provenance


def test_versions_are_those_installed(monkeypatch):
    versions = provenance.versions()
    assert versions["flwr"] == metadata.version("flwr")
    assert {"flwr-kd", "torch", "numpy", "python", "machine", "processor", "cores"} <= set(versions)
    real = metadata.version

    def without_ray(name):
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_ray)
    assert "ray" not in provenance.versions()


def test_the_commit_is_that_of_the_checkout(tmp_path):
    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    assert provenance.commit_of(tmp_path) is None
    (tmp_path / "flwr_kd").mkdir()
    code = tmp_path / "flwr_kd" / "a.py"
    code.write_text("1")
    result = tmp_path / "benchmarks" / "results" / "a.json"
    result.parent.mkdir(parents=True)
    result.write_text("1")
    git("init", "-q")
    assert provenance.commit_of(tmp_path) is None
    git("add", ".")
    git("commit", "-q", "-m", "a")
    head = git("rev-parse", "HEAD")
    assert provenance.commit_of(tmp_path) == head[:12]
    (tmp_path / "README.md").write_text("text is not code")
    assert provenance.commit_of(tmp_path) == head[:12]
    result.write_text("what a benchmark writes is not code either")
    assert provenance.commit_of(tmp_path) == head[:12]
    code.write_text("2")
    assert provenance.commit_of(tmp_path) == head[:12] + "+changes"


def test_a_result_names_the_commit_of_this_checkout():
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():
        assert provenance.versions()["commit"] == provenance.commit_of(checkout)
