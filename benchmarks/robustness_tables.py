"""The tables of docs/robustness.md, from the results of robustness.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from robustness import IMITATION, Defence, Study, attacks_of

from flwr_kd import registry

GOAL = 0.05
"""How far the best defence may stay behind the method without attackers."""
KINDS = {"global_accuracy": "global", "server_accuracy": "server", "honest_accuracy": "local"}
PERSONAL = ("fedavg-ft", "per-fedavg", "per-fedavg-hf", "pfedme")
"""Methods whose global model is where clients' own models begin: these are what is looked at."""
Cell = list[float]
Cells = Mapping[tuple[str, Defence], Cell]


def measured(folder: Path, attackers: int, data: str = "digits") -> dict[str, tuple[str, Cells]]:
    """Return by method the kind of accuracy, and its values by attack and defence.

    The kind is the first one that the method has: of the global model, of the server's, of the honest clients' own.
    Of methods that make personal models of a global one it is the last.
    A run that ended without a usable round counts as 0.
    """
    found = {}
    for name in registry.methods():
        path = folder / Study(registry.get(name), data, attackers).file_name
        if not path.exists():
            continue
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        kinds = ["honest_accuracy"] if name in PERSONAL else list(KINDS)
        kind = next(kind for kind in kinds if any(run.get(kind) is not None for run in runs))
        cells: dict[tuple[str, Defence], Cell] = {}
        for run in runs:
            cell = cells.setdefault((run["attack"], Defence(run["models"], run["knowledge"])), [])
            cell.append(run.get(kind) or 0.0)
        found[name] = (kind, cells)
    return found


def summary(folder: Path, attackers: int, data: str = "digits") -> tuple[Sequence[str], list[list[str]]]:
    """Return header and rows: a method's accuracy, what attacks leave of it, and its best defence.

    Attacks are those that all methods meet, so that the worst of them is the worst of as many in each row.
    """
    header = [
        "method",
        "accuracy",
        "no attack",
        "worst attack",
        "best defence",
        "worst attack then",
        "cost without attack",
    ]
    rows = []
    for name, (kind, cells) in measured(folder, attackers, data).items():
        plain = Defence()
        attacks = [attack for attack in attacks_of(registry.get(name)) if attack != "none"]
        kept = {defence for attack, defence in cells if attack == "none"}

        def mean(attack: str, defence: Defence, cells: Cells = cells) -> float:
            return statistics.fmean(cells[attack, defence])

        def worst(
            defence: Defence, attacks: Sequence[str] = attacks, cells: Cells = cells
        ) -> tuple[float, str]:
            return min((statistics.fmean(cells[attack, defence]), attack) for attack in attacks)

        if not attacks or any((attack, defence) not in cells for attack in attacks for defence in kept):
            continue
        # One seed of a defence says little beside three without it.
        seeds = len(cells["none", plain])
        kept = {d for d in kept if all(len(cells[attack, d]) >= seeds for attack in ["none", *attacks])}
        if not kept:  # More seeds are under way.
            continue
        best = max(sorted(kept), key=lambda defence: worst(defence)[0])
        free, (left, attack), (saved, then) = mean("none", plain), worst(plain), worst(best)
        behind = "" if saved >= free - GOAL else "more than 5 points behind: "
        cost = f"{100 * (mean('none', best) - free):+.1f}".replace("-", "−")
        rows.append(
            [
                f"`{name}`",
                KINDS[kind],
                _percent(cells["none", plain]),
                f"{100 * left:.1f} (`{attack}`)",
                _named(best),
                f"{behind}{100 * saved:.1f} (`{then}`)",
                cost,
            ]
        )
    return header, rows


def details(
    folder: Path, attackers: int, data: str = "digits"
) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Return for each method its name, a header of defences, and a row per attack."""
    tables = []
    for name, (_, cells) in measured(folder, attackers, data).items():
        defences = list(dict.fromkeys(defence for _, defence in cells))
        attacks = list(dict.fromkeys(attack for attack, _ in cells))
        rows = [
            [
                attack if attack == "none" else f"`{attack}`",
                *(_percent(cells.get((attack, d), [])) for d in defences),
            ]
            for attack in attacks
        ]
        tables.append((name, ["attack", *map(_named, defences)], rows))
    return tables


def imitation(folder: Path, attackers: int) -> tuple[Sequence[str], list[list[str]]]:
    """Return header and rows: local accuracies of honest clients and of the one that is imitated, by defence."""
    header = ["method", "defence", *(f"{who}, {of}" for who in ("honest", "victim") for of in IMITATION)]
    header = [text.replace("none", "no attack") for text in header]
    rows = []
    for name in registry.methods():
        path = folder / Study(registry.get(name), attackers=attackers, imitate=True).file_name
        if not path.exists():
            continue
        cells: dict[Defence, dict[tuple[str, str], Cell]] = {}
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            cell = cells.setdefault(Defence(run["models"], run["knowledge"]), {})
            for who in ("honest", "victim"):
                cell.setdefault((who, run["attack"]), []).append(run.get(f"{who}_accuracy") or 0.0)
        for defence, cell in cells.items():
            told = [_percent(cell.get((who, of), [])) for who in ("honest", "victim") for of in IMITATION]
            rows.append([f"`{name}`", _named(defence), *told])
    return header, rows


def _named(defence: Defence) -> str:
    if defence == Defence():
        return "mean"
    if defence.knowledge == "mean":
        return f"`{defence.models}`"
    return f"knowledge `{defence.knowledge}`" if defence.models == "mean" else f"`{defence.models}` of both"


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"
