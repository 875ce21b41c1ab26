"""What a narrow pass costs: floating-point operations of slim sub-networks, as shares of the full pass.

Counted, and not timed: convolutions and matrix products of a forward pass in evaluation mode.

Usage: python benchmarks/slim.py [--out FILE]     (seconds on one core)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from flwr_kd.models import build_model, count_flops, make_slimmable
from flwr_kd.results.provenance import versions

MODELS = ("lenet", "cnn", "resnet8", "resnet18", "shufflenet")
SHAPES, CLASSES, BATCH = ((3, 32, 32), (1, 28, 28)), 10, 64
WIDTHS = (1.0, 0.75, 0.5, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/slim.json"), help="write the numbers as JSON (%(default)s)"
    )
    options = parser.parse_args()
    document: dict[str, Any] = {"versions": versions(), "classes": CLASSES, "batch": BATCH}
    document["models"] = [shares(name, shape) for shape in SHAPES for name in MODELS]
    print(f"{'model':<12}{'input':<12}{'MFLOPs/sample':>14}" + "".join(f"{width:>8}" for width in WIDTHS))
    for row in document["models"]:
        sides = "x".join(map(str, row["input_shape"]))
        numbers = "".join(f"{row['shares'][str(width)]:>8.1%}" for width in WIDTHS)
        print(f"{row['model']:<12}{sides:<12}{row['flops']['1.0'] / BATCH / 1e6:>14.2f}{numbers}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def shares(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    model = make_slimmable(build_model(name, input_shape=shape, num_classes=CLASSES, seed=0))
    x = torch.zeros(BATCH, *shape)
    flops = {width: count_flops(model, x, width) for width in WIDTHS}
    return {
        "model": name,
        "input_shape": list(shape),
        "flops": {str(width): count for width, count in flops.items()},
        "shares": {str(width): round(count / flops[1.0], 4) for width, count in flops.items()},
    }


if __name__ == "__main__":
    main()
