"""Writes the apps' files from the template of ``flwr-kd app``; `make pages` calls it.

A README stays as it is. With ``--check`` nothing is written, and the exit status is 1 if a file is not up to date.

Usage: python apps/remake.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flwr_kd import registry
from flwr_kd.app_files import AppProject

APPS = Path(__file__).resolve().parent
KEPT = ("README.md",)
"""Files that are written by hand."""


def project(name: str, methods: str, title: str, description: str) -> AppProject:
    return AppProject(
        name=name,
        methods=tuple(map(registry.get, methods.split())),
        title=title,
        description=description,
        publisher="flwr-kd",
        place=f"apps/{name}",
    )


PROJECTS = (
    project(
        "feddkc",
        "feddkc-kkr feddkc-skr",
        "FedDKC",
        "FedDKC: federated distillation whose server refines the clients' knowledge to one peak or entropy",
    ),
    project(
        "fedhead",
        "fedhead fedhead-plus",
        "FedHEAD and FedHEAD+",
        "FedHEAD: federated ensemble distillation inside sectors and, as FedHEAD+, at the server",
    ),
    project(
        "fedhkd",
        "fedhkd",
        "FedHKD",
        "FedHKD: federated learning with data-free hyper-knowledge distillation",
    ),
    project(
        "fedhyb",
        "fedhyb fedhyb-star fedhyb-1 fedhyb-2 fedhyb-3",
        "FedHyb, FedHyb* and the ablations",
        "FedHyb: self-distillation into slim sub-networks at the clients, ensemble distillation at the server",
    ),
    project(
        "ktpfl",
        "ktpfl sim-pfl topk-pfl fedmd",
        "KT-pFL, Sim-pFL, TopK-pFL and FedMD",
        "KT-pFL and related methods: clients with heterogeneous models learn from predictions of public data",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args()
    stale = update(write=not options.check)
    print(
        "\n".join(f"{'stale' if options.check else 'written'}: {name}" for name in stale) or "all up to date"
    )
    sys.exit(1 if options.check and stale else 0)


def update(*, write: bool) -> list[str]:
    """Return the files that are not up to date, and write them if asked."""
    stale = []
    for app in PROJECTS:
        for name, text in app.files().items():
            path = APPS / app.name / name
            if name not in KEPT and (not path.is_file() or path.read_text(encoding="utf-8") != text):
                stale.append(path.relative_to(APPS.parent).as_posix())
                if write:
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    main()
