"""Public samples of several inputs: as a message, and refused where the message is not what a client expects."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from token_models import texts

from flwr_kd.inputs import NamedInputs
from flwr_kd.public_data.messages import (
    PublicNamedSamples,
    PublicNamedSamplesTargets,
    count_of,
    pack_named,
    unpack_named,
    with_targets,
)
from flwr_kd.transport.payload import PayloadError


def inputs(size: int = 3) -> NamedInputs:
    generator = torch.Generator().manual_seed(0)
    return NamedInputs(
        {
            "ids": torch.randint(0, 2**40, (size, 5), generator=generator),
            "values": torch.randn(size, 2, 3, generator=generator),
            "flags": torch.tensor([[True], [False], [True]])[:size],
            "number": torch.arange(size, dtype=torch.int32),
        }
    )


def test_there_and_back() -> None:
    sent = inputs()
    message = PublicNamedSamples.from_bytes(pack_named(sent).to_bytes())
    assert count_of(message) == 3
    received = unpack_named(message, sent)
    assert list(received.keys()) == list(sent.keys())
    for name in sent.keys():  # noqa: SIM118
        assert received[name].dtype == sent[name].dtype
        assert torch.equal(received[name], sent[name])


def test_with_targets() -> None:
    targets = np.full((3, 2), 0.5, dtype=np.float32)
    message = with_targets(pack_named(inputs()), targets)
    assert isinstance(message, PublicNamedSamplesTargets)
    received = PublicNamedSamplesTargets.from_bytes(message.to_bytes(), dims={"C": 2})
    assert torch.equal(unpack_named(received, inputs())["ids"], inputs()["ids"])


def test_a_sample_costs_its_own_bytes() -> None:
    small, large = (len(pack_named(texts(n, 0).tensors[0]).to_bytes()) for n in (10, 30))
    assert large - small == 20 * 2 * 6 * 8


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "{}",
        "[]",
        "[[]]",
        '[["a", "object", [1]]]',
        '[["a", "int64", [-1]]]',
        '[["a", "int64", [1.0]]]',
        '[["a", "int64", [true]]]',
        '[["a", "int64", 1]]',
        '[[1, "int64", [1]]]',
        '[["a", "int32", [1]], ["a", "int32", [1]]]',
        "[" * 100_000,
    ],
)
def test_refuses_a_layout_that_is_none(layout: str) -> None:
    with pytest.raises(PayloadError, match=r"the layout must be a list of \[name, dtype, shape\]"):
        PublicNamedSamples(np.zeros((1, 8), dtype=np.uint8), layout)


def test_refuses_a_layout_of_other_bytes() -> None:
    layout = json.dumps([["a", "int64", [2]]])
    with pytest.raises(PayloadError, match="a sample has 8 bytes, by the layout 16 are expected"):
        PublicNamedSamples(np.zeros((1, 8), dtype=np.uint8), layout)


@pytest.mark.parametrize(
    "like",
    [
        {"ids": torch.ones(1, 5)},
        {name: inputs()[name] for name in ("ids", "values", "flags")},
        {**{name: inputs()[name] for name in ("ids", "values", "flags")}, "return_dict": torch.ones(3)},
        {**{name: inputs()[name] for name in ("ids", "values", "number")}, "flags": torch.ones(3, 1)},
    ],
)
def test_refuses_other_names_and_kinds_than_the_clients(like: dict[str, Any]) -> None:
    with pytest.raises(PayloadError, match=r"this client's model takes"):
        unpack_named(pack_named(inputs()), NamedInputs(like))


def test_lengths_may_differ_from_the_clients() -> None:
    like = NamedInputs({"ids": torch.ones(1, 99, dtype=torch.int64)})
    sent = NamedInputs({"ids": torch.ones(2, 5, dtype=torch.int64)})
    assert unpack_named(pack_named(sent), like)["ids"].shape == (2, 5)


def test_refuses_numbers_that_are_not_finite() -> None:
    values = NamedInputs({"v": torch.tensor([[1.0], [torch.inf]])})
    with pytest.raises(PayloadError, match="the input 'v' has values that are not finite"):
        unpack_named(pack_named(values), values)
