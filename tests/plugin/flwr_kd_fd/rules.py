"""What the shared checks of flwr-kd need to know of FD's payload."""

from __future__ import annotations

import numpy as np

from flwr_kd.rules import Example, Rules, infinite_fields, keep_rows, larger_than, replace_all, set_value


def _violations(payload, node, strategy, num_examples):
    classes, counts = payload.classes.tolist(), payload.counts.tolist()
    texts = infinite_fields(payload) + larger_than(65504, "logits", payload.logits)
    if classes != sorted(set(classes)) or not set(classes) <= set(range(node.num_classes)):
        texts.append(f"classes {classes}")
    if min(counts, default=1) < 1 or sum(counts) > num_examples < strategy.max_examples:
        texts.append(f"counts {counts}")
    if payload.logits.shape != (len(classes), node.num_classes):
        texts.append(f"shape {payload.logits.shape}")
    return texts


def _fill(arrays, node, strategy):
    arrays["counts"][:] = 1
    return {}, 50


RULES = Rules(
    _violations,
    _fill,
    (
        Example("a class beyond C", set_value("classes", -1, 4), "classes"),
        Example("a class twice", set_value("classes", 1, 0), "expected bits"),
        Example("a count of 0", set_value("counts", 0, 0), "counts"),
        Example("more samples than there are", set_value("counts", 0, 10**6), "logits of"),
        Example("NaN", set_value("logits", (0, 0), np.nan), "not finite"),
        Example("beyond float16", set_value("logits", (0, 0), 65520), "within"),
        Example("another C", replace_all("logits", np.zeros((4, 5))), "shape"),
        Example("float16's largest", lambda arrays, scalars: arrays["logits"].fill(65504)),
        Example("no classes", keep_rows(slice(0, 0))),
    ),
)
