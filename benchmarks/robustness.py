"""What lying clients cost each method, and what a robust mean saves: 10 clients of which some attack, digits.

Local training and models are those of accuracy.py. An attack that changes nothing of what a method's clients send
is left out, and so is a defence that a method does not have. Each run that is done is kept: the program goes on
where it was. A file holds one method's runs.

Usage: python benchmarks/robustness.py --out FOLDER [--methods NAME,...] [--attackers N] [--seeds 0,1,2]
           [--data digits|fashion-mnist] [--further] [--imitate] [--few]
           (--further: all other attacks as well; --imitate: only imitation, in files of its own; --few: of the
           defences, only multi-Krum and the medians of knowledge or of both)
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import accuracy
from accuracy import RATES, SETTINGS_OF

from flwr_kd import registry
from flwr_kd.experiments.attacks import parse_attack
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.experiments.runner import run
from flwr_kd.files import write_atomically
from flwr_kd.registry import Method
from flwr_kd.results.provenance import versions

CLIENTS, ROUNDS, PARTITION = 10, 10, "inner-dirichlet:0.5"
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits"},
    "fashion-mnist": {"dataset": "fashion-mnist", "limit": 1500, "test_limit": 1000, "model": "lenet"},
}
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
IMITATION = ("none", "imitate:0.5")
"""What methods meet whose weights choose whom a client learns from."""
FURTHER = (LABELS, "scale:10", "ipm", "nan", "payload", "cpa", "count:100000")


class Defence(NamedTuple):
    """How models and knowledge are averaged."""

    models: str = "mean"
    knowledge: str = "mean"


BOUND = Defence("norm-bound:1")
"""The defence of a method that averages no models, and learns from updates."""


def defences(attackers: int) -> tuple[Defence, ...]:
    """Return the defences, which know how many clients attack, as their papers assume.

    Krum needs 2F + 3 clients, and a trimmed mean someone in the middle.
    """
    share, honest = f"trimmed-mean:{attackers / CLIENTS:g}", CLIENTS - attackers
    krum = (Defence(f"multi-krum:{attackers}:{honest}"),) if 2 * attackers + 3 <= CLIENTS else ()
    return (
        Defence(),
        Defence("median"),
        Defence(share),
        *krum,
        Defence(knowledge="median"),
        Defence("median", "median"),
    )


def few_defences(attackers: int) -> tuple[Defence, ...]:
    """Return the plain mean, the best rule for models where it can be had, and the medians."""
    best = [d for d in defences(attackers) if d.models.startswith("multi-krum")] or [Defence("median")]
    return (Defence(), *best, Defence(knowledge="median"), Defence("median", "median"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, a file per method")
    parser.add_argument("--methods", default=",".join(registry.methods()))
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--further", action="store_true", help="all other attacks as well")
    parser.add_argument("--imitate", action="store_true", help="only imitation, in files of its own")
    parser.add_argument("--few", action="store_true", help="only multi-Krum and medians")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.methods.split(","):
        kind = options.further, options.imitate, options.few
        study = Study(registry.get(name), options.data, options.attackers, *kind)
        measure(study, [int(seed) for seed in options.seeds.split(",")], options.out)


class Study(NamedTuple):
    """A method, its data, the number of attackers, and which attacks and defences there are."""

    method: Method
    data: str = "digits"
    attackers: int = 2
    further: bool = False
    imitate: bool = False
    few: bool = False

    @property
    def file_name(self) -> str:
        """The result's name."""
        data = "" if self.data == "digits" else f"-{self.data}"
        return f"{self.method.name}{data}-{self.attackers}{'-imitate' if self.imitate else ''}.json"

    @property
    def attacks(self) -> list[str]:
        """The attacks, and none."""
        if self.imitate:
            return list(IMITATION)
        return attacks_of(self.method) + (further_of(self.method) if self.further else [])

    @property
    def defences(self) -> list[Defence]:
        """The defences, as far as the method has them."""
        strategy = self.method.strategy
        models, knowledge = strategy.averages_models, strategy.averages_knowledge
        if strategy.bounds_updates:
            return [Defence(), BOUND]
        known = few_defences(self.attackers) if self.few else defences(self.attackers)
        return [
            defence
            for defence in known
            if (models or defence.models == "mean") and (knowledge or defence.knowledge == "mean")
        ]


def measure(study: Study, seeds: list[int], folder: Path) -> None:
    """Run what is missing of a study, and write its file after each run."""
    path = folder / study.file_name
    rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {(row["attack"], row["models"], row["knowledge"], row["seed"]) for row in rows}
    for seed in seeds:
        for attack, defence in cases(study):
            if (attack, *defence, seed) in done:
                continue
            print(f"{path.stem}: {attack}, {'/'.join(defence)}, seed {seed}", file=sys.stderr, flush=True)
            rows.append(measured(study, attack, defence, seed))
            document = {
                "versions": versions(),
                "attackers": study.attackers,
                "data": study.data,
                "runs": rows,
            }
            write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o644)


def cases(study: Study) -> Iterator[tuple[str, Defence]]:
    """Yield the attacks that change what a method's clients send, beside none, each with the defences it has."""
    yield from itertools.product(study.attacks, study.defences)


def attacks_of(method: Method) -> list[str]:
    """Return the attacks that all methods meet, as far as they change what the clients send, beside none."""
    strategy = method.strategy
    fields = {name for kind in strategy.reply_payloads.values() for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    knowledge = next((attack for field, attack in ON_KNOWLEDGE.items() if field in fields), None)
    attacks = ["none", *(ON_MODELS if strategy.reply_arrays else ())]
    return attacks + ([knowledge] if knowledge else [] if strategy.reply_arrays else [LABELS])


def further_of(method: Method) -> list[str]:
    """Return the other attacks that change something."""
    known = attacks_of(method)
    return [a for a in FURTHER if a not in known and parse_attack(a).concerns(method.strategy)]


def measured(study: Study, attack: str, defence: Defence, seed: int) -> dict[str, Any]:
    """Return the last round's accuracies: the global model's, and the mean of the honest clients' own."""
    honest = attack == "none"
    entry = accuracy.entry(
        study.method.name, RATES.get(study.data, "0.001"), SETTINGS_OF.get(study.method.name, ())
    )
    attacked = Experiment(
        partition=PARTITION, clients=CLIENTS, rounds=ROUNDS, seed=seed, backend="inline", workers=1, device="cpu",
        attack=None if honest else attack, attackers=0 if honest else study.attackers,
        aggregation=defence.models, knowledge_aggregation=defence.knowledge,
        public_limit=1000, **DATA[study.data] | ({} if entry.model is None else {"model": entry.model}),
    )  # fmt: skip
    # Without an attack as well the mean is over those that are honest in the others.
    liars = attacker_ids(Experiment(clients=CLIENTS, seed=seed, attack=LABELS, attackers=study.attackers))
    row: dict[str, Any] = {
        "attack": attack,
        "models": defence.models,
        "knowledge": defence.knowledge,
        "seed": seed,
    }
    try:
        last = run(study.method, attacked, entry.config).rounds[-1]
    except SimulationError as error:
        return {**row, "error": str(error)}
    own = [
        told["local_accuracy"]
        for client, told in sorted(last.clients.items(), key=lambda item: int(item[0]))
        if int(client) not in liars
    ]
    return {
        **row,
        "global_accuracy": last.global_accuracy,
        "server_accuracy": last.server_accuracy,
        "honest_accuracy": statistics.fmean(own) if own else None,
        # Of the first honest client, which imitation has for its victim.
        "victim_accuracy": own[0] if own else None,
        "participants": last.participants,
    }


if __name__ == "__main__":
    main()
