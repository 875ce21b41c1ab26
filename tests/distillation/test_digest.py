"""The digest of public samples."""

from __future__ import annotations

import torch
from items import Items
from public_rounds import X, Y, digest
from torch.utils.data import DataLoader, TensorDataset

from flwr_kd.data import ArrayDataset


class TestDigest:
    def test_it_is_of_inputs_in_their_order(self) -> None:
        mine = digest(TensorDataset(X, Y))
        assert len(mine) == 64
        assert mine == digest(TensorDataset(X.clone(), Y))
        others = {
            "labels": TensorDataset(X, Y.flip(0)),
            "no labels": TensorDataset(X),
            "items": Items([(x, 0) for x in X]),
            "inputs alone": Items(list(X)),
            "dicts": Items([{"image": x, "label": "cat"} for x in X]),
            "loader": DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, drop_last=True),
            "array": ArrayDataset(X, Y),
            "strides": TensorDataset(X.transpose(2, 3).contiguous().transpose(2, 3), Y),
        }
        for name, source in others.items():
            assert digest(source) == mine, name

    def test_whatever_differs(self) -> None:
        moved = X.clone()
        moved[7, 0, 1, 2] = torch.nextafter(moved[7, 0, 1, 2], torch.tensor(9.0))
        swapped = X.clone()
        swapped[[3, 4]] = X[[4, 3]]
        actual = [
            digest(TensorDataset(x))
            for x in (
                X, moved, swapped, X.flip(0), X[:-1], torch.cat([X, X[:1]]), X.double(), X.half(), -X,
                X.reshape(-1, 1, 4, 2), X.reshape(-1, 8), X.reshape(-1, 1, 1, 4), X.view(torch.int32), X[:0],
            )
        ]  # fmt: skip
        assert len(set(actual)) == len(actual)

    def test_more_samples_than_a_batch(self) -> None:
        x = torch.arange(1000.0)[:, None]
        other = x.clone()
        other[999] = 0
        assert digest(TensorDataset(x)) != digest(TensorDataset(other))
        assert digest(TensorDataset(x)) == digest(DataLoader(TensorDataset(x), batch_size=7))

    def test_zero_and_minus_zero(self) -> None:
        """Equal to the last bit is what counts."""
        assert digest(TensorDataset(torch.zeros(2, 3))) != digest(TensorDataset(-torch.zeros(2, 3)))

    def test_integers_and_single_numbers(self) -> None:
        images = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
        assert digest(TensorDataset(images)) != digest(TensorDataset(images.to(torch.int8)))
        assert digest(TensorDataset(torch.arange(3.0))) != digest(TensorDataset(torch.arange(3.0)[:, None]))
