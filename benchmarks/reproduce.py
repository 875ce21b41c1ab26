"""The papers' tables and figures, run one by one in their small versions: `flwr-kd reproduce NAME --scale small`.

Each piece is one experiment. Its runs are in runs/reproduce and go on where they were interrupted. What follows is
one JSON file in the folder of results: our numbers beside the printed ones, the verdicts, the controls, the costs.
The quickest pieces come first, and a figure of a table's runs comes after the table.

Usage: python benchmarks/reproduce.py [--list] [--only NAME,...] [--seeds 0,1,2] [--out FOLDER] [--data-dir FOLDER]
       [--again]

--list says what there is, with an estimate of the CPU minutes and whether there is a result. A piece takes at most
two hours of one core.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_kd.experiments.papers import estimate, library, rules
from flwr_kd.experiments.papers.schema import PaperExperiment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "papers"
RUNS = ROOT / "runs" / "reproduce"
"""Where `flwr-kd reproduce` keeps and finds a table's runs, if it is called in ROOT."""
LONGEST = 120
"""Most CPU minutes of a piece."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Piece:
    """One experiment.

    Attributes
    ----------
    name : str
        Such as ``fedhkd/table-1``.
    experiment : PaperExperiment
        In its small version where it has one.
    """

    name: str
    experiment: PaperExperiment

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]

    @property
    def file_name(self) -> str:
        return f"{self.name.replace('/', '-')}.json"

    @property
    def shares_runs(self) -> bool:
        """Whether its runs are those of other experiments."""
        return bool(self.experiment.runs_of or self.experiment.tables)

    @property
    def minutes(self) -> float | None:
        """CPU minutes of all seeds; none for what is computed, or follows from another's runs."""
        if not self.experiment.trained or self.shares_runs:
            return 0.0
        seconds = estimate.cost_of(self.experiment, self.experiment.run, len(SEEDS)).seconds
        return None if seconds is None else seconds / 60

    def command(self, seeds: str) -> list[str]:
        words = ["reproduce", self.name, "--seeds", seeds, "--scale", "small"]
        if self.experiment.trained:
            # In this process and thread, so that the seconds of a round are those of one core.
            words += ["--backend", "inline", "--device", "cpu"]
        return words


def pieces() -> list[Piece]:
    """Return all experiments that can be run here: those that train have a small version."""
    return [
        Piece(f"{paper.id}/{experiment.id}", rules.small_form(experiment) if experiment.small else experiment)
        for paper, experiment in library.every()
    ]


def ordered(found: list[Piece]) -> list[tuple[Piece, float | None]]:
    """Return pieces with their minutes, the quickest first; what follows from others' runs last."""
    timed = [(piece, piece.minutes) for piece in found]
    return sorted(timed, key=lambda each: (each[0].shares_runs, each[1] is None, each[1] or 0))


def missing(folder: Path = RESULTS) -> list[Piece]:
    """Return the pieces without a result."""
    return [piece for piece in pieces() if not (folder / piece.file_name).exists()]


def collect(piece: Piece, page: Path, folder: Path) -> None:
    """Copy what follows from a piece's runs into the folder of results, in fewer lines."""
    document: dict[str, Any] = json.loads(page.read_text(encoding="utf-8"))
    # The command that a reader has, not this program's call of it, and not where this machine has its data.
    words = ["flwr-kd", *shlex.split(document["command"])[1:]]
    if "--data-dir" in words:
        words[words.index("--data-dir") + 1] = "FOLDER"
    document["command"] = shlex.join(words)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (folder / piece.file_name).write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--only", help="names of experiments; by default those without a result")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--data-dir", help="folder of data files: 20 Newsgroups, for fedhead/table-3")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else None
    found = [piece for piece in pieces() if names is None or piece.name in names]
    if names and (unknown := sorted(set(names) - {piece.name for piece in found})):
        parser.error(f"unknown experiment {unknown[0]!r}")
    for piece, minutes in ordered(found):
        there = (options.out / piece.file_name).exists()
        if options.list:
            known = "time not known" if minutes is None else f"{minutes:6.1f} min"
            print(f"{piece.name:24} {piece.experiment.kind:10} {known}  {'done' if there else ''}".rstrip())
        elif options.again or not there:
            print(f"{piece.name}", flush=True)
            run(piece, options.seeds, options.out, options.data_dir)


def run(piece: Piece, seeds: str, folder: Path, data_dir: str | None = None) -> None:
    """Run a piece to its end, and collect what follows from it."""
    out = RUNS / piece.paper / f"{piece.experiment.runs_of or piece.experiment.id}-small"
    words = [*piece.command(seeds), *(["--data-dir", str(Path(data_dir).resolve())] if data_dir else [])]
    subprocess.run([sys.executable, "-m", "flwr_kd.cli", *words], check=True, cwd=ROOT)
    collect(piece, out / f"{piece.experiment.id}.json", folder)


if __name__ == "__main__":
    main()
