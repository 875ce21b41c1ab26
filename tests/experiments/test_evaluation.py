"""Evaluation of the global model at the server, on the CPU and on a device."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ArrayRecord

from flwr_kd.data import Bundle, load
from flwr_kd.experiments.evaluation import evaluator
from flwr_kd.models import build_model
from flwr_kd.testing.synchronisations import DEVICE, CountingDevice, Counts


def test_global_accuracy_is_that_of_the_model_on_the_common_test_set() -> None:
    bundle = load("digits", seed=0, limit=150)
    model = build_model("resnet8", input_shape=bundle.input_shape, num_classes=10, seed=0)

    def build() -> torch.nn.Module:
        return build_model("resnet8", input_shape=bundle.input_shape, num_classes=10, seed=1)

    evaluate = evaluator(build, bundle, batch_size=100)
    arrays = ArrayRecord(model.state_dict())
    metrics, again = evaluate(1, arrays), evaluate(2, arrays)
    model.eval()
    with torch.no_grad():
        logits = model(bundle.test.x)
    assert metrics is not None
    assert metrics == again
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == bundle.test.y).float().mean()))
    expected = float(torch.nn.functional.cross_entropy(logits, bundle.test.y))
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    # Evaluated with as many threads as workers: the same to the last bit.
    for threads in (2, 3):
        assert evaluator(build, bundle, batch_size=20, threads=threads)(1, arrays) == evaluator(
            build, bundle, batch_size=20
        )(1, arrays)


def test_a_device_evaluates_with_one_wait_and_without_copies_of_samples() -> None:
    bundle = load("digits", seed=0, limit=150)

    def build() -> torch.nn.Module:
        return build_model("lenet", input_shape=bundle.input_shape, num_classes=10, seed=1)

    arrays = ArrayRecord(build().state_dict())
    expected = evaluator(build, bundle, batch_size=20)(1, arrays)
    with CountingDevice() as device:
        evaluate = evaluator(build, bundle, batch_size=20, threads=3, device=DEVICE)
        evaluate(1, arrays)
        before = device.counts
        assert evaluate(2, arrays) == expected
    # The sums of losses and correct answers come back together, and the model's arrays go there.
    assert device.counts - before == Counts(to_host=1, to_device=len(arrays))


def test_an_unknown_device_is_refused() -> None:
    bundle: Bundle = load("digits", seed=0, limit=150)
    with pytest.raises(ValueError, match="device must be auto, cpu"):
        evaluator(torch.nn.Identity, bundle, device="gpu")
