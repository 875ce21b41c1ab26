"""Models with a buffer of -inf, such as an attention mask: the same numbers as without it, in every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd.server.aggregation import RunningMean
from flwr_kd.server.records import HandshakeError, KDResult
from flwr_kd.testing import federation as small
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import ArrayTemplate
from tests.server.federations import METHODS

MASK = torch.nn.Transformer.generate_square_subsequent_mask(3)


def masked(*args: Any, **kwargs: Any) -> torch.nn.Module:
    model = plain(*args, **kwargs)
    model.register_buffer("mask", MASK.clone())
    return model


plain = small.small_model


def rounds(result: KDResult) -> list[Any]:
    return [(r.failures, r.local_accuracy, r.train_loss, r.clients) for r in result.rounds]


# FedGen's variant sends heads only, and refuses a model whose extractor has such a buffer.
@pytest.mark.first_variant
@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedgen-head"])
def test_a_mask_changes_no_number(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {"fraction_train": 0.75, "seed": 1}
    _, expected = small.Federation(name).run(rounds=2, **options)
    monkeypatch.setattr(small, "small_model", masked)
    fed = small.Federation(name)
    with small.quiet() as lines:
        _, result = fed.run(rounds=2, checkpoint_dir=tmp_path, **options)
        # What is written is read again.
        fed.run(rounds=3, checkpoint_dir=tmp_path, resume=True, **options)
    assert [line for line in lines if "finite" in line] == []
    assert rounds(result) == rounds(expected)
    arrays = {key: array.numpy() for key, array in result.arrays.items()}
    assert all(np.array_equal(arrays[key], array.numpy()) for key, array in expected.arrays.items())
    assert not arrays or np.array_equal(arrays["mask"], MASK.numpy())


def test_a_mask_that_the_server_does_not_know_is_refused_before_round_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    initial = small.Federation("ktpfl-weights").strategy().template.record([])
    monkeypatch.setattr(small, "small_model", masked)
    fed = small.Federation("ktpfl-weights")
    monkeypatch.setattr(fed, "initial", lambda: initial)
    with pytest.raises(HandshakeError, match=r"array 'mask' .* not finite.*persistent=False"):
        fed.run(rounds=1)


INF = np.float32([0.0, -np.inf])


def test_only_the_servers_own_values_may_be_infinite() -> None:
    template = ArrayTemplate.of_ndarrays({"mask": INF, "weight": np.zeros(2, np.float32)})
    weight = np.float32([1, 2])
    assert np.array_equal(template.check([np.float64(INF), weight])[0], INF)
    for wrong in ([0, np.inf], [-np.inf, -np.inf], [0, 1.0], [0, np.nan], [np.nan, -np.inf]):
        with pytest.raises(
            PayloadError, match="'mask' has values that are not finite, or not those of the server"
        ):
            template.check([np.float32(wrong), weight])
    with pytest.raises(PayloadError, match="'weight' has values that are not finite"):
        template.check([INF, INF])
    finite = template.finite([INF, weight])
    assert [array.tolist() for array in finite] == [[0, 0], [1, 2]]
    assert [array.tolist() for array in template.restored(finite)] == [INF.tolist(), [1, 2]]
    assert ArrayTemplate.from_json(template.to_json()) == template
    assert ArrayTemplate.from_json(template.to_json()).not_finite == ("mask",)


@pytest.mark.parametrize("weights", [[1, 2], [0, 2], [2, 0], [0, 0]])
def test_a_mean_keeps_infinite_values(weights: list[float]) -> None:
    mean = RunningMean()
    for value, weight in zip((1.0, 4.0), weights, strict=True):
        mean.add([np.float32([value, -np.inf, np.inf])], weight)
    share = weights[1] / sum(weights) if sum(weights) else 0.5
    assert np.allclose(mean.result()[0], [1 + 3 * share, -np.inf, np.inf])
