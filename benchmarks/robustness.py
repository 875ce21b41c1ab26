"""What lying clients cost each method, and what a robust mean saves: 10 clients of which some attack, digits.

An attack that changes nothing of what a method's clients send is left out, and so is a defence that a method does
not have. Each run that is done is kept: the program goes on where it was. A file holds one method's runs.

Usage: python benchmarks/robustness.py --out FOLDER [--methods NAME,...] [--attackers N] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flwr_kd import registry
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.experiments.runner import run
from flwr_kd.files import write_atomically
from flwr_kd.registry import Method
from flwr_kd.results.provenance import versions

CLIENTS, ROUNDS, PARTITION = 10, 10, "inner-dirichlet:0.5"
ON_MODELS = ("sign-flip:20", "gaussian:10", "alie:1.5")
ON_KNOWLEDGE = {
    "predictions": "lma",
    "logits": "lma",
    "prototypes": "prototype-swap",
    "scores": "label-flip:permute",
}
"""One attack on knowledge, by the first of these fields that a method's clients send."""
LABELS = "label-flip:permute"
"""The attack on methods whose clients send neither models nor such fields."""


class Defence(NamedTuple):
    """How models and knowledge are averaged."""

    models: str = "mean"
    knowledge: str = "mean"


def defences(attackers: int) -> tuple[Defence, ...]:
    """Return the defences, which know how many clients attack, as their papers assume."""
    share, honest = f"trimmed-mean:{attackers / CLIENTS:g}", CLIENTS - attackers
    return (
        Defence(),
        Defence("median"),
        Defence(share),
        Defence(f"multi-krum:{attackers}:{honest}"),
        Defence(knowledge="median"),
        Defence("median", "median"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, a file per method")
    parser.add_argument("--methods", default=",".join(registry.methods()))
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.methods.split(","):
        measure(
            registry.get(name),
            options.attackers,
            [int(seed) for seed in options.seeds.split(",")],
            options.out,
        )


def measure(method: Method, attackers: int, seeds: list[int], folder: Path) -> None:
    """Run what is missing of a method, and write its file after each run."""
    path = folder / f"{method.name}-{attackers}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {(row["attack"], row["models"], row["knowledge"], row["seed"]) for row in rows}
    for seed in seeds:
        for attack, defence in cases(method, attackers):
            if (attack, *defence, seed) in done:
                continue
            print(f"{method.name}: {attack}, {'/'.join(defence)}, seed {seed}", file=sys.stderr, flush=True)
            rows.append(measured(method, attack, defence, attackers, seed))
            document = {"versions": versions(), "attackers": attackers, "runs": rows}
            write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o644)


def cases(method: Method, attackers: int) -> Iterator[tuple[str, Defence]]:
    """Yield the attacks that change what a method's clients send, beside none, each with the defences it has."""
    strategy = method.strategy
    fields = {name for kind in strategy.reply_payloads.values() for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    attacks = ["none", *(ON_MODELS if strategy.reply_arrays else ())]
    knowledge = next((attack for field, attack in ON_KNOWLEDGE.items() if field in fields), None)
    attacks += [knowledge] if knowledge else [] if strategy.reply_arrays else [LABELS]
    for attack in attacks:
        for defence in defences(attackers):
            if defence.models != "mean" and not strategy.averages_models:
                continue
            if defence.knowledge != "mean" and not strategy.averages_knowledge:
                continue
            yield attack, defence


def measured(method: Method, attack: str, defence: Defence, attackers: int, seed: int) -> dict[str, Any]:
    """Return the last round's accuracies: the global model's, and the mean of the honest clients' own."""
    attacked = Experiment(
        partition=PARTITION, clients=CLIENTS, rounds=ROUNDS, seed=seed, backend="inline", workers=1, device="cpu",
        attack=None if attack == "none" else attack, attackers=0 if attack == "none" else attackers,
        aggregation=defence.models, knowledge_aggregation=defence.knowledge,
    )  # fmt: skip
    # Without an attack as well the mean is over those that are honest in the others.
    liars = attacker_ids(Experiment(clients=CLIENTS, seed=seed, attack=LABELS, attackers=attackers))
    row: dict[str, Any] = {
        "attack": attack,
        "models": defence.models,
        "knowledge": defence.knowledge,
        "seed": seed,
    }
    try:
        last = run(method, attacked).rounds[-1]
    except SimulationError as error:
        return {**row, "error": str(error)}
    own = [told["local_accuracy"] for client, told in last.clients.items() if int(client) not in liars]
    return {
        **row,
        "global_accuracy": last.global_accuracy,
        "server_accuracy": last.server_accuracy,
        "honest_accuracy": statistics.fmean(own) if own else None,
        "participants": last.participants,
    }


if __name__ == "__main__":
    main()
