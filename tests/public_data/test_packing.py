"""Soft predictions in a message: errors of the precisions, against the oracle."""

from __future__ import annotations

import coefficients as oracle
import numpy as np
import pytest
import torch
from distributions import distributions, repeatable, same, seeds, tensor
from hypothesis import given
from hypothesis import strategies as st

from flwr_kd.public_data.messages import pack_predictions, unpack_predictions


class TestPacking:
    @repeatable
    @given(
        st.sampled_from(["float32", "float16", "uint8"]), st.integers(1, 5), st.integers(2, 12),
        st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]), seeds,
    )  # fmt: skip
    def test_errors_are_bounded(
        self, precision: str, samples: int, classes: int, scale: float, seed: int
    ) -> None:
        p = distributions(np.random.default_rng(seed), samples, classes, scale=scale)
        packed = pack_predictions(tensor(p, torch.float32), precision)
        assert packed.dtype == np.dtype(precision)
        assert packed.shape == (samples, classes)
        actual = unpack_predictions(packed)
        assert actual.dtype == torch.float32
        same(actual, oracle.unpacked(packed), atol=1e-7, rtol=1e-6)
        same(actual.double().sum(dim=1), 1.0, atol=1e-6)
        error = np.abs(actual.double().numpy() - p)
        assert (error <= oracle.error_bound(p, precision)).all()

    def test_bounds_are_not_idle(self) -> None:
        """Each precision costs more than the one before it, and the bounds are of the errors' size."""
        p = distributions(np.random.default_rng(0), 500, 10)
        errors = []
        for precision in ("float32", "float16", "uint8"):
            actual = unpack_predictions(pack_predictions(tensor(p, torch.float32), precision))
            share = np.abs(actual.double().numpy() - p) / oracle.error_bound(p, precision)
            assert 0.05 < share.max() <= 1
            errors.append(np.abs(actual.double().numpy() - p).max())
        assert errors[0] < 1e-6 < errors[1] < 3e-4 < errors[2] < 6e-3

    def test_codes(self) -> None:
        p = distributions(np.random.default_rng(1), 200, 10, scale=2.0).astype(np.float32)
        packed = pack_predictions(torch.from_numpy(p), "uint8")
        exact = oracle.codes(p)
        np.testing.assert_allclose(packed, exact, rtol=0, atol=0.5 + 1e-4)
        assert (packed.max(axis=1) == 255).all()
        assert np.array_equal(packed.argmax(axis=1), p.argmax(axis=1))

    def test_flat_predictions_keep_their_differences(self) -> None:
        """At T = 10 a row is nearly flat; codes are of the row's largest, so its small differences stay."""
        p = distributions(np.random.default_rng(2), 50, 100, scale=0.1).astype(np.float32)
        actual = unpack_predictions(pack_predictions(torch.from_numpy(p), "uint8")).numpy()
        assert np.corrcoef(actual.ravel(), p.ravel())[0, 1] > 0.999

    def test_floats_are_the_numbers_themselves(self) -> None:
        p = distributions(np.random.default_rng(3), 20, 10, scale=3.0).astype(np.float32)
        assert np.array_equal(pack_predictions(torch.from_numpy(p), "float32"), p)
        assert np.array_equal(pack_predictions(torch.from_numpy(p), "float16"), p.astype(np.float16))

    def test_certain_predictions(self) -> None:
        p = torch.eye(3)
        for precision in ("float32", "float16", "uint8"):
            assert torch.equal(unpack_predictions(pack_predictions(p, precision)), p)

    @pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("float16", 2), ("uint8", 1)])
    def test_bytes(self, precision: str, width: int) -> None:
        assert pack_predictions(torch.full((3000, 10), 0.1), precision).nbytes == 30_000 * width

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("precision", ["float32", "float16", "uint8"])
    def test_arrays_from_the_wire_stay(self, precision: str) -> None:
        """Received arrays are read-only, and packed ones are no view of the predictions."""
        p = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
        packed = np.frombuffer(pack_predictions(p, precision).tobytes(), dtype=precision).reshape(2, 3)
        before = packed.copy()
        unpack_predictions(packed).add_(1)
        assert np.array_equal(packed, before)
        assert p.tolist() == [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]

    def test_unknown_precision(self) -> None:
        with pytest.raises(ValueError, match="bfloat16"):
            pack_predictions(torch.eye(2), "bfloat16")
