"""pFedHN's hypernetwork in NumPy: backpropagation by hand, and each step of SGD written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class HyperNet:
    """h(v; φ) by the names of the library's arrays: ``hidden``, ``heads``, ``embeddings``."""

    def __init__(self, arrays: Mapping[str, Array], shapes: Sequence[tuple[int, ...]]) -> None:
        self.arrays = {name: value.astype(np.float64) for name, value in arrays.items()}
        self.shapes = list(shapes)
        self.momentum: dict[str, Array] = {}

    @property
    def layers(self) -> list[str]:
        later = sorted({int(name.split(".")[1]) for name in self.arrays if name.startswith("hidden.")} - {0})
        return ["hidden.0", *(f"hidden.{layer}.1" for layer in later)]

    def activations(self, client: int) -> list[Array]:
        """Return the input of each hidden layer, and last that of the heads."""
        inputs, value = [], self.arrays[f"embeddings.{client}"]
        for layer in self.layers:
            value = np.maximum(value, 0) if inputs else value
            inputs.append(value)
            value = self.arrays[f"{layer}.weight"] @ value + self.arrays[f"{layer}.bias"]
        return [*inputs, value]

    def produced(self, client: int) -> list[Array]:
        deep = self.activations(client)[-1]
        return [
            (self.arrays[f"heads.{j}.weight"] @ deep + self.arrays[f"heads.{j}.bias"]).reshape(shape)
            for j, shape in enumerate(self.shapes)
        ]

    def gradient(self, client: int, deltas: Sequence[Array]) -> dict[str, Array]:
        """Return Jᵀ Δ, by hand."""
        inputs = self.activations(client)
        found: dict[str, Array] = {}
        back = np.zeros_like(inputs[-1])
        for j, delta in enumerate(deltas):
            flat = delta.astype(np.float64).ravel()
            found[f"heads.{j}.weight"], found[f"heads.{j}.bias"] = np.outer(flat, inputs[-1]), flat
            back = back + self.arrays[f"heads.{j}.weight"].T @ flat
        for place in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[place]
            found[f"{layer}.weight"], found[f"{layer}.bias"] = np.outer(back, inputs[place]), back
            back = self.arrays[f"{layer}.weight"].T @ back
            if place:
                back = back * (inputs[place] > 0)
        found[f"embeddings.{client}"] = back
        return found

    def step(
        self,
        changes: Mapping[int, Sequence[Array]],
        *,
        rate: float,
        momentum: float,
        decay: float,
        clip: float,
    ) -> float:
        """Take one step on the mean over some clients; return the norm of the gradient before it was scaled."""
        total: dict[str, Array] = {}
        for client, deltas in changes.items():
            for name, value in self.gradient(client, deltas).items():
                total[name] = total.get(name, 0.0) + value / len(changes)
        norm = float(np.sqrt(sum(float((value**2).sum()) for value in total.values())))
        for name, value in total.items():
            moved = value * min(1.0, clip / norm) + decay * self.arrays[name]
            self.momentum[name] = momentum * self.momentum.get(name, 0.0) + moved
            self.arrays[name] = self.arrays[name] - rate * self.momentum[name]
        return norm
