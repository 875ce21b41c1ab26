"""Rounds that each method takes to reach a share of a reference method's last accuracy, as in FedHyb's Table 2.

The paper does not say of what its 70 to 100 % are; here they are of the reference's own accuracy in its last round,
by seed. Usage: python benchmarks/rounds_to.py RESULT_DIR [--reference fedavg]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from flwr_kd.results import files

SHARES = (0.7, 0.8, 0.9, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--reference", default="fedavg")
    options = parser.parse_args()
    by_method = files.load(options.result).by_method()
    last = {run.seed: run.last["global_accuracy"] for run in by_method[options.reference]}
    print("| method | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    print("|---|" + "---|" * len(SHARES))
    for method, runs in by_method.items():
        cells = []
        for share in SHARES:
            numbers = [run.rounds_to(share * (last[run.seed] or 0.0)) for run in runs]
            reached = [number for number in numbers if number is not None]
            missing = "" if len(reached) == len(numbers) else f" ({len(reached)} of {len(numbers)} seeds)"
            cells.append(f"{statistics.fmean(reached):.2f}{missing}" if reached else "–")
        print(f"| `{method}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
