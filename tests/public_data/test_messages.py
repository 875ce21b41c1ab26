"""Messages on public data: packing, checks and sizes."""

from __future__ import annotations

from typing import Any

import coefficients
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from public_rounds import distributions, every_precision

from flwr_kd.public_data.config import PRECISIONS
from flwr_kd.public_data.messages import (
    PublicRows,
    PublicRowsTargets,
    PublicSamples,
    PublicSamplesTargets,
    SoftPredictions,
    pack_predictions,
    unpack_predictions,
)
from flwr_kd.transport.payload import Payload, PayloadError

repeatable = settings(max_examples=60, deadline=None, derandomize=True)


class TestPacking:
    @repeatable
    @given(
        st.integers(0, 99), st.integers(1, 6), st.integers(2, 12), st.sampled_from([0.05, 1.0, 10.0, 1000.0]),
        st.sampled_from(PRECISIONS),
    )  # fmt: skip
    def test_there_and_back(
        self, seed: int, rows: int, classes: int, temperature: float, precision: str
    ) -> None:
        p = distributions(seed, rows, classes, temperature)
        packed = pack_predictions(torch.from_numpy(p).float(), precision)
        assert packed.dtype.name == precision
        assert packed.shape == p.shape
        SoftPredictions(packed)  # is one
        if precision == "uint8":
            assert (np.abs(packed - coefficients.codes(p)) <= 0.5 + 1e-4).all()
        actual = unpack_predictions(packed)
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual, coefficients.unpacked(packed), rtol=1e-6)
        assert (np.abs(actual.numpy() - p) <= coefficients.error_bound(p, precision)).all()
        np.testing.assert_allclose(actual.sum(dim=1), 1, atol=1e-6)

    @pytest.mark.parametrize("classes", [2, 10, 1000])
    def test_flat_distributions_keep_their_differences(self, classes: int) -> None:
        """At T = 10 probabilities differ in the second digit: in 255 steps of 1 nothing would be left."""
        p = distributions(0, 20, classes, 100.0)
        actual = unpack_predictions(pack_predictions(torch.from_numpy(p).float(), "uint8")).numpy()
        assert np.corrcoef((actual - 1 / classes).ravel(), (p - 1 / classes).ravel())[0, 1] > 0.99

    def test_certainty(self) -> None:
        p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-38]])
        for precision in PRECISIONS:
            actual = unpack_predictions(pack_predictions(p, precision))
            np.testing.assert_allclose(actual, p, atol=1e-7)

    def test_unknown_precisions(self) -> None:
        with pytest.raises(ValueError, match=r"precision must be one of float32, float16, uint8, got 'int8'"):
            pack_predictions(torch.ones(1, 1), "int8")

    def test_nothing_at_all(self) -> None:
        for precision in PRECISIONS:
            packed = np.zeros((0, 3), dtype=precision)
            SoftPredictions(packed)
            assert unpack_predictions(packed).shape == (0, 3)

    @every_precision
    def test_targets_do_not_change_what_they_are_made_of(self, precision: str) -> None:
        p = torch.tensor([[0.6, 0.3, 0.1]])
        pack_predictions(p, precision)[:] = 0
        assert precision == "float32" or p.tolist() == torch.tensor([[0.6, 0.3, 0.1]]).tolist()


NO_DISTRIBUTIONS: dict[str, tuple[Any, str]] = {
    "negative": (np.float32([[1.5, -0.5, 0.0]]), r"must be in \[0, 1\], got -0.5..1.5"),
    "slightly negative": (np.float32([[1.0, -1e-3, 1e-3]]), r"must be in \[0, 1\]"),
    "more than one": (np.float32([[0.6, 0.5, 0.0]]), r"rows must sum to 1 within 0.02, got 1.1..1.1"),
    "less than one": (np.float16([[0.3, 0.3, 0.3]]), r"rows must sum to 1 within 0.02"),
    "zeros": (np.zeros((1, 3), dtype=np.float32), r"rows must sum to 1 within 0.02, got 0..0"),
    "one row of several": (np.float32([[1, 0, 0], [0.5, 0.5, 0.5]]), r"rows must sum to 1 .*got 1..1.5"),
    "large": (np.float32([[3e38, 0, 0]]), r"must be in \[0, 1\]"),
    "large cancelling": (np.float16([[6e4, -6e4, 1]]), r"must be in \[0, 1\]"),
    "nan": (np.float32([[np.nan, 0.5, 0.5]]), r"1 values that are not finite"),
    "infinite": (np.float16([[np.inf, 0, 0]]), r"1 values that are not finite"),
    "codes below 255": (np.uint8([[254, 1, 0]]), r"each row's largest code must be 255"),
    "codes of nothing": (np.uint8([[255, 0, 0], [0, 0, 0]]), r"each row's largest code must be 255"),
    "no classes": (np.zeros((1, 0), dtype=np.uint8), r"each row's largest code must be 255"),
    "float64": (np.float64([[1, 0, 0]]), r"dtype float64, expected float32 or float16 or uint8"),
    "int8": (np.int8([[1, 0, 0]]), r"dtype int8"),
    "one axis": (np.float32([1, 0, 0]), r"shape \[3\], expected \[K, C\]"),
}


class TestMessages:
    @pytest.mark.parametrize("kind", NO_DISTRIBUTIONS)
    def test_what_are_no_distributions(self, kind: str) -> None:
        values, text = NO_DISTRIBUTIONS[kind]
        with pytest.raises(PayloadError, match=text):
            SoftPredictions(values)

    @pytest.mark.parametrize(
        "values", [np.float32([[0.99, 0, 0]]), np.float32([[0.5, 0.515, 0]]), np.float16([[1.01, 0, 0]])]
    )
    def test_rounding_is_allowed(self, values: Any) -> None:
        assert SoftPredictions(values).predictions is values

    def test_sizes_belong_together(self) -> None:
        rows = np.arange(3)
        with pytest.raises(PayloadError, match=r"'targets' has shape \[2, 3\], expected \[K=3, C\]"):
            PublicRowsTargets(rows=rows, targets=np.ones((2, 3), dtype=np.float32))
        with pytest.raises(PayloadError, match=r"'targets' has shape \[2, 3\], expected \[K=3, C\]"):
            PublicSamplesTargets(samples=np.zeros((3, 2)), targets=np.ones((2, 3), dtype=np.float32))
        with pytest.raises(PayloadError, match=r"dtype int32, expected int64"):
            PublicRows(rows=rows.astype(np.int32), digest="a")

    @pytest.mark.parametrize(
        "message",
        [
            PublicRows(np.array([1, 5]), "abc"),
            PublicSamples(np.arange(12, dtype=np.uint8).reshape(2, 1, 6)),
            PublicRowsTargets(np.array([1, 5]), np.eye(2, dtype=np.float16)),
            PublicSamplesTargets(np.arange(2.0), np.eye(2, dtype=np.float32)),
            SoftPredictions(np.eye(2, dtype=np.uint8) * np.uint8(255)),
        ],
        ids=lambda message: type(message).__name__,
    )
    def test_round_trip(self, message: Payload) -> None:
        assert type(message).from_bytes(message.to_bytes()) == message

    def test_names_differ(self) -> None:
        kinds = (PublicRows, PublicSamples, PublicRowsTargets, PublicSamplesTargets, SoftPredictions)
        assert len({kind.schema for kind in kinds}) == 5
        example: dict[str, Any] = {
            "rows": np.arange(9), "samples": np.zeros((9, 40)), "digest": "a",
            "targets": np.ones((9, 40), dtype=np.float32),
            "predictions": np.full((9, 40), 1 / 40, dtype=np.float32),
        }  # fmt: skip
        for kind in kinds:
            names = kind.__dataclass_fields__
            message = kind(**{name: value for name, value in example.items() if name in names})
            with pytest.raises(PayloadError, match=r"more than max_payload_bytes .*smaller public-samples"):
                message.to_bytes(max_bytes=1)
