"""A batch of several tensors by name, and how models are called with it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from token_models import Masked, tokens
from torch import Tensor, nn

from flwr_kd.checks import ConfigError, DataError
from flwr_kd.inputs import (
    NamedDataset,
    NamedInputs,
    call,
    changed,
    is_finite,
    joined,
    logits_of,
    one_tensor,
    shape_text,
)


def batch() -> NamedInputs:
    return NamedInputs({"ids": torch.arange(6).reshape(3, 2), "values": torch.tensor([[0.5], [1.5], [2.5]])})


class TestNamedInputs:
    def test_its_length_is_the_number_of_samples(self) -> None:
        assert len(batch()) == 3
        assert list(batch().keys()) == ["ids", "values"]

    @pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([1, 2]), torch.tensor([False, True, True])])
    def test_rows_are_taken_of_each_tensor(self, rows: slice | Tensor) -> None:
        part = batch()[rows]
        assert part["ids"].tolist() == [[2, 3], [4, 5]]
        assert part["values"].tolist() == [[1.5], [2.5]]

    def test_a_number_is_no_index(self) -> None:
        with pytest.raises(TypeError, match="a name, a slice or a tensor of rows, got int"):
            batch()[0]  # type: ignore[call-overload]

    def test_is_converted_as_tensors_are(self) -> None:
        converted = batch().to(torch.float64)
        assert {converted[name].dtype for name in ("ids", "values")} == {torch.float64}

    def test_size_device_and_text(self) -> None:
        assert batch().nbytes == 6 * 8 + 3 * 4
        assert batch().device == torch.device("cpu")
        assert repr(batch()) == "NamedInputs(ids [2], values [1])"

    def test_survives_pickle(self) -> None:
        copied = pickle.loads(pickle.dumps(batch()))
        assert torch.equal(copied["ids"], batch()["ids"])

    @pytest.mark.parametrize(
        ("tensors", "text"),
        [
            ({}, "at least one tensor"),
            ({"a": torch.ones(2), "b": torch.ones(3)}, "same number of samples, got {'a': 2, 'b': 3}"),
            ({"a": [1, 2]}, "'a' must be a tensor .* got list"),
            ({"a": torch.tensor(1)}, "'a' must be a tensor .* got a number"),
            ({1: torch.ones(2)}, "must be texts, got 1"),
        ],
    )
    def test_refuses_what_is_no_batch(self, tensors: dict[Any, Any], text: str) -> None:
        with pytest.raises(DataError, match=text):
            NamedInputs(tensors)


class TestNamedDataset:
    def test_items_are_rows(self) -> None:
        data = NamedDataset({"ids": torch.tensor([[1], [2]])}, torch.tensor([0, 1]))
        assert len(data) == 2
        assert data[1] == ({"ids": torch.tensor([2])}, torch.tensor(1))

    def test_without_labels_they_are_zeros(self) -> None:
        assert NamedDataset({"ids": torch.ones(2, 1)}).tensors[1].tolist() == [0, 0]

    def test_refuses_another_number_of_labels(self) -> None:
        with pytest.raises(DataError, match="got 2 and 3"):
            NamedDataset({"ids": torch.ones(2, 1)}, torch.zeros(3))


class TestCall:
    def test_a_model_gets_its_arguments_by_name(self) -> None:
        ids, mask, _ = tokens(4, 0)
        model = Masked()
        named = NamedInputs({"attention_mask": mask, "input_ids": ids})
        assert torch.equal(call(model, named), model(ids, mask))

    def test_a_model_of_one_input_gets_the_tensor(self) -> None:
        assert call(nn.ReLU(), torch.tensor([-1.0, 2.0])).tolist() == [0, 2]

    def test_names_that_the_model_does_not_take(self) -> None:
        with pytest.raises(
            TypeError, match=r"Linear does not take the inputs input_ids by name .* input_key="
        ):
            call(nn.Linear(2, 1), NamedInputs({"input_ids": torch.ones(1, 2)}))

    def test_an_error_of_the_model_itself_is_unchanged(self) -> None:
        class Wrong(nn.Module):
            def forward(self, ids: Tensor) -> Tensor:
                raise TypeError("its own")

        with pytest.raises(TypeError, match=r"^its own$"):
            call(Wrong(), NamedInputs({"ids": torch.ones(1, 2)}))


def test_logits_of_an_output() -> None:
    logits = torch.ones(1, 2)
    assert logits_of(SimpleNamespace(loss=None, logits=logits)) is logits
    assert logits_of(logits) is logits
    output = (logits,)
    assert logits_of(output) is output


def test_changed() -> None:
    assert changed(torch.ones(1), torch.neg).tolist() == [-1]  # type: ignore[union-attr]
    doubled = changed(batch(), lambda tensor: tensor * 2)
    assert doubled["values"].flatten().tolist() == [1, 3, 5]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_one_value_that_is_not_finite_is_found_in_any_tensor(wrong: float) -> None:
    assert is_finite(batch())
    assert is_finite(torch.ones(2))
    assert not is_finite(torch.tensor([1.0, wrong]))
    assert not is_finite(NamedInputs({"ids": torch.ones(2), "values": torch.tensor([1.0, wrong])}))


def test_joined() -> None:
    assert joined([torch.zeros(1), torch.ones(2)]).tolist() == [0, 1, 1]  # type: ignore[union-attr]
    both = joined([batch(), batch()[:1]])
    assert both["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    with pytest.raises(RuntimeError, match="size"):
        joined([torch.zeros(1, 2), torch.zeros(1, 3)])


def test_one_tensor() -> None:
    x = torch.ones(1)
    assert one_tensor(x, lambda _: pytest.fail("not asked")) is x
    with pytest.raises(ConfigError, match=r"^mine needs one, got named inputs \(ids \[2\], values \[1\]\)$"):
        one_tensor(batch(), lambda got: f"mine needs one, got {got}")


def test_shapes() -> None:
    assert shape_text(torch.zeros(5, 3, 2)) == "[3, 2]"
    assert shape_text(batch()) == "ids [2], values [1]"
