"""Runs those benchmarks that have no result in benchmarks/results; `make results` calls it.

A result is removed to have it made again. All of them take a day on two cores; what is interrupted goes on where it
was, except for the shorter ones. The papers' tables come last, one by one (`reproduce.py`).

Usage: python benchmarks/remake.py [--list]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grids
import reproduce

from flwr_kd.results import files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU_SCRIPT = "gpu"
SCRIPTS = {
    path.stem.replace("_", "-"): path.stem
    for path in sorted((ROOT / "benchmarks").glob("*.sh"))
    if path.stem != GPU_SCRIPT
}
"""Shell scripts, by what their results' names begin with; each writes a folder of results."""
PROGRAMS = {
    "accuracy": ["accuracy.py", "--group", "papers", "--out"],
    "aggregation.json": ["aggregation.py", "--out"],
    "baselines": ["accuracy.py", "--group", "baselines", "--out"],
    "bytes.json": ["bytes.py", "--out"],
    "clipping.json": ["clipping.py", "--out"],
    "distill.json": ["distill.py", "--out"],
    "ktpfl.json": ["ktpfl.py", "--out"],
    "load.json": ["load.py", "--nodes", "8", "--out"],
    "model-store.json": ["model_store.py", "--out"],
    "overhead.json": ["overhead.py", "--json"],
    "refine.json": ["refine.py", "--out"],
    "robustness": ["robustness.py", "--out"],
    "scale.json": ["scale.py", "--out"],
    "search-baselines.json": ["search.py", "--out"],
    "sgd": ["accuracy.py", "--group", "sgd", "--out"],
    "slim.json": ["slim.py", "--out"],
    "targets-ktpfl.json": ["ktpfl_targets.py", "--out"],
}
"""Programs, by the result that each writes. `load.py --before` needs an earlier version beside this one."""
TABLES = reproduce.RESULTS.name
GRIDS_PROGRAM = "grids.py"
PROGRAMS |= {f"grid-{name}.json": [GRIDS_PROGRAM, name, "--out"] for name in grids.GRIDS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what would be run")
    options = parser.parse_args()
    wanted = missing()
    print("\n".join(f"to run: {name}" for name in wanted) or "every benchmark has a result")
    for name in () if options.list else wanted:
        if name in PROGRAMS:
            call([sys.executable, *PROGRAMS[name], str(RESULTS / name)])
        else:
            folder = ROOT / "runs" / name
            call(["bash", f"{SCRIPTS[name]}.sh", str(folder)])
            for result in sorted(folder.glob(f"*/{files.FILE_NAME}")):
                shutil.copyfile(result, RESULTS / f"{name}-{result.parent.name}.json")
    tables = reproduce.missing()
    print(
        "\n".join(f"to run: {TABLES}/{piece.name}" for piece in tables)
        or "every table of the papers has a result"
    )
    if tables and not options.list:
        call([sys.executable, f"{reproduce.__name__}.py"])


def missing() -> list[str]:
    """Return what has no result."""
    programs = [name for name in PROGRAMS if not (RESULTS / name).exists()]
    scripts = [name for name in SCRIPTS if not list(RESULTS.glob(f"{name}-*.json"))]
    return [*programs, *scripts]


def family(name: str) -> str | None:
    """Return what a result is made by; None if by nothing here."""
    if name in PROGRAMS or name == TABLES:
        return name
    return next((prefix for prefix in SCRIPTS if name.startswith(f"{prefix}-")), None)


def call(words: list[str]) -> None:
    """Run a benchmark in its folder, with this environment's commands."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, cwd=ROOT / "benchmarks", env=environment)


if __name__ == "__main__":
    main()
