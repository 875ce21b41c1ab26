"""A method in a distribution of its own, found by its entry point; nothing in this repository knows of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "tests" / "plugin"
SMALL = ("--clients", "3", "--rounds", "2", "--seeds", "0", "--set", "local-epochs=1")


def install(target: Path, source: Path = PLUGIN) -> None:
    """Put a package and its metadata where an installation would put them."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (package,) = (path.parent for path in source.glob("*/__init__.py"))
    shutil.copytree(package, target / package.name)
    name = project["name"].replace("-", "_")
    metadata = target / f"{name}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def a_package(folder: Path, name: str, code: str) -> Path:
    """Write the source of a distribution with one module."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "3.1"\n[project.entry-points."flwr_kd.methods"]\nmine = "{name}"\n'
    )
    return folder


def python(target: Path, code: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(target)])}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
        timeout=280,
    )


HALF = """
from dataclasses import replace
from flwr_kd.registry import register
from flwr_kd.strategies.fedgkt import METHOD

register(replace(METHOD, name="half"))
raise ZeroDivisionError("not finished")
"""
TAKEN = """
from dataclasses import replace
from flwr_kd.registry import register
from flwr_kd.strategies.fedgkt import METHOD

register(replace(METHOD, name="fedavg", strategy_path="taken:Mine"))
"""
OBJECT = """
from dataclasses import replace
from flwr_kd.strategies.fedgkt import METHOD

method = replace(METHOD, name="mine")
"""
RUN_APP = """
import sys, tomllib
from pathlib import Path
from flwr.app import Context, RecordDict
from flwr_kd import InlineGrid
from my_fd_app import client_app, server_app

config = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
config |= {"num-server-rounds": 1, "limit": 60, "local-epochs": 1, "out": sys.argv[1]}
grid = InlineGrid(client_app.app, 2, run_config=config)
server_app.main(grid, Context(1, 0, {}, RecordDict(), config))
"""
COMMAND = "import sys; from flwr_kd.cli import main; sys.argv[0] = 'flwr-kd'; main()"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install(target)
    return target


@pytest.mark.slow
@pytest.mark.program
def test_it_passes_the_whole_matrix(site: Path) -> None:
    code = (
        "import json\nfrom flwr_kd.testing import check_method\nnames = []\n"
        "check_method('fd', on_check=lambda case, check: names.append(check))\nprint(json.dumps(names))"
    )
    done = python(site, code)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    assert len(names) > 35
    assert {"same-seed-same-numbers", "mutated-replies", "bytes-are-those-of-the-formula"} <= set(names)


@pytest.mark.program
def test_the_command_knows_it(site: Path, tmp_path: Path) -> None:
    shown = json.loads(python(site, COMMAND, "methods", "fd", "--json").stdout)
    assert {"distill-weight", "local-epochs"} <= {row["name"] for row in shown}
    done = python(
        site, COMMAND, "compare", "fd", "fedavg", "--backend", "inline", *SMALL, "--out", "o", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "o" / "result.json").read_text())["runs"]
    assert [run["method"] for run in runs] == ["fd", "fedavg"]
    assert all(row["failures"] == 0 for run in runs for row in run["rounds"])


@pytest.mark.slow
@pytest.mark.program
def test_it_becomes_a_flower_app(site: Path, tmp_path: Path) -> None:
    done = python(site, COMMAND, "app", "fd", "my-fd", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    needed = f"`flwr-kd[simulation]` and `{project['name']} {project['version']}` must be"
    assert needed in (tmp_path / "my-fd" / "README.md").read_text("utf-8")
    done = python(site, RUN_APP, str(tmp_path / "out"), cwd=tmp_path / "my-fd")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "out" / "result.json").read_text())["runs"]
    assert run["method"] == "fd"
    assert [(row["participants"], row["failures"]) for row in run["rounds"]] == [(2, 0)]


@pytest.mark.slow
@pytest.mark.ray
def test_rays_workers_know_it(site: Path, tmp_path: Path) -> None:
    done = python(
        site, COMMAND, "compare", "fd", "fedavg", "--backend", "ray", *SMALL, "--out", "o", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "o" / "result.json").read_text())["runs"]
    assert all(row["failures"] == 0 for run in runs for row in run["rounds"])


def test_no_file_of_the_repository_knows_it() -> None:
    """Nothing had to be edited for it outside its own folder and this test."""
    folders = ("flwr_kd", "strategies", "benchmarks", "apps", "notebooks", ".ci")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")
    ]
    files += [ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "README.md"]
    assert len(files) > 100
    assert [path.name for path in files if "flwr_kd_fd" in path.read_text(encoding="utf-8")] == []


@pytest.mark.program
def test_a_broken_one_is_left_out_with_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site)
    install(site, a_package(tmp_path / "source", "broken", HALF))
    done = python(site, "from flwr_kd import registry; print(' '.join(registry.methods()))")
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {"fd", "fedavg"} <= set(names)
    assert "half" not in names
    assert (
        "RuntimeWarning: the methods of broken 3.1 are left out: entry point 'mine' (broken) raised "
        "ZeroDivisionError: not finished" in done.stderr
    )


@pytest.mark.program
def test_a_name_that_is_taken_is_an_error_that_names_both(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, a_package(tmp_path / "source", "taken", TAKEN))
    done = python(site, COMMAND, "methods")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "flwr-kd: method 'fedavg' is registered twice: flwr_kd.strategies.fedavg.strategy:FedAvg (of flwr-kd), "
        "taken:Mine (of taken 3.1)"
    )


@pytest.mark.program
def test_an_entry_point_may_be_a_method(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    source = a_package(tmp_path / "source", "objects", OBJECT)
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('mine = "objects"', 'mine = "objects:method"'))
    install(site, source)
    done = python(site, COMMAND, "methods", "--json")
    assert "mine" in {row["name"] for row in json.loads(done.stdout)}
