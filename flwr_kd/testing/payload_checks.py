"""Checks of payloads that decode and lie: the method's own rules must hold."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
from flwr.app import Message

from flwr_kd.rules import Change, Rules
from flwr_kd.seeding import derive_seed
from flwr_kd.testing import inside
from flwr_kd.testing.federation import quiet
from flwr_kd.testing.hostile_values import FLOATS, NUMBERS, WHOLE, NDArray
from flwr_kd.testing.outcomes import (
    Findings,
    check_dropped,
    check_valid,
    ensure,
    honest,
    hostile,
    knowing,
    node_of,
    outcome,
    payload_parts,
    sent_payload,
    without,
)
from flwr_kd.testing.payload_mutations import encode
from flwr_kd.testing.recording import CLIENTS, Case, Scene, recorded
from flwr_kd.testing.reply_parts import count_of
from flwr_kd.transport.payload import Payload

__all__ = ["broken_rules_are_named", "extremes_do_no_harm", "payloads_that_lie"]

LEAST_LIES = 40


def _first_scene(case: Case) -> Scene:
    """Return the first phase of round 2 whose replies have payloads."""
    scenes = recorded(case).scenes
    return next(
        scene for (r, phase), scene in scenes.items() if r == 2 and phase in scene.strategy.reply_payloads
    )


def _rules(case: Case) -> Rules:
    rules = case.rules
    ensure(
        rules is not None, "the registration names no rules_path", "rules for the payloads that clients send"
    )
    assert rules is not None
    return rules


# ---------------------------------------------------------------------- payloads drawn at random


def payloads_that_lie(case: Case, mutations: int, seed: int) -> None:
    """Check that a well-formed payload with other sizes, types or numbers is refused, or harms nobody else."""
    scene, rules = _first_scene(case), _rules(case)
    position, node = hostile(scene), node_of(scene)
    true = sent_payload(scene)
    reported = count_of(scene.answers[position])
    assert isinstance(reported, int)
    expected = outcome(scene, without(scene, position))
    findings, strategy = Findings(), copy.deepcopy(scene.strategy)
    accepted, count = 0, max(LEAST_LIES, mutations)
    for i in range(count):
        rng = random.Random(derive_seed(seed, "lie", str(case), i))
        data, claimed, what = _lie(rng, true, reported)
        inside.forget_warnings(strategy)
        reply = knowing(scene, data, claimed)
        with quiet() as lines:
            read = inside.read_reply(strategy, scene.phase, scene.messages[position], reply)
        check_dropped(lines, node, read, what, findings)
        if read is None:
            continue
        accepted += 1
        check_valid(read, strategy, scene.phase, rules, what, findings)
        replies: list[Message | None] = list(honest(scene))
        replies[position] = knowing(scene, data, claimed)
        try:
            result = outcome(scene, replies)
        except Exception as error:
            findings.add(f"{type(error).__name__}: {error}", what)
            continue
        for each in result.infinite:
            findings.add(f"not finite: {each}", what)
        if [used for used in result.used if used[0] != node.node_id] != expected.used:
            findings.add("the others' replies are not used", what)
    findings.none()
    ensure(accepted >= 5, f"{accepted} of {count} lies were used", "at least 5")


def _lie(rng: random.Random, true: Payload, reported: int) -> tuple[bytes, int, str]:
    """Return a payload of the same class, the sample count that is claimed with it, and what was changed."""
    arrays, scalars = payload_parts(true)
    letters: dict[str, int] = {}
    specs = {f.name: f.metadata["array"] for f in fields(true) if "array" in f.metadata}  # type: ignore[arg-type]
    for name, spec in specs.items():
        letters |= dict(zip(spec.shape, arrays[name].shape, strict=True))
    if rng.random() < 0.25 and letters:
        letter = rng.choice(sorted(letters))
        letters[letter] = rng.choice([0, 1, letters[letter] + 1, max(letters[letter] - 1, 0), 40])
    # Most are right but for one field or none: else the first check would stop nearly all.
    changed = [rng.choice(sorted(specs)) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    made = {}
    for name, spec in specs.items():
        value = np.resize(arrays[name], tuple(letters[letter] for letter in spec.shape))
        made[name] = _other_numbers(rng, value) if name in changed else value
    if scalars and rng.random() < 0.2:
        scalars[rng.choice(sorted(scalars))] = rng.choice(NUMBERS)
    rows = next(iter(letters.values()), 0)
    claimed = rng.choice([reported] * 4 + [0, 1, rows, reported + 1, 2**40, 2**53])
    return encode(type(true), made, scalars), claimed, ", ".join([*changed, str(letters), str(claimed)])


def _other_numbers(rng: random.Random, value: NDArray) -> NDArray:
    pool: Any = FLOATS if value.dtype.kind == "f" else WHOLE
    with np.errstate(all="ignore"):
        kind = np.float64 if value.dtype.kind == "f" else np.int64
        numbers = np.array(pool, dtype=object).astype(kind).astype(value.dtype)
    flat = value.copy().reshape(-1)
    match rng.choice(
        ["edit", "edit", "edit", "rows", "constant", "ascending", "descending", "random", "dtype"]
    ):
        case "edit" if flat.size:
            for _ in range(rng.randint(1, 3)):
                flat[rng.randrange(flat.size)] = rng.choice(list(numbers))
        case "rows" if len(value):
            flat = value[[rng.randrange(len(value)) for _ in range(len(value))]].reshape(-1)
        case "constant":
            flat[:] = rng.choice(list(numbers))
        case "ascending":
            flat = np.sort(flat)
        case "descending":
            flat = np.sort(flat)[::-1]
        case "random" if flat.size:
            drawn = numbers[[rng.randrange(len(numbers)) for _ in range(rng.randint(1, 20))]]
            flat = np.resize(drawn, value.size)
        case "dtype":
            with np.errstate(all="ignore"):
                flat = flat.astype(rng.choice(["f4", "f2", "f8", "i8", "i4", "u1", "?"]))
    return flat.reshape(value.shape)


# ---------------------------------------------------------------------- the method's own examples


def _changed(scene: Scene, change: Change) -> bytes:
    true = sent_payload(scene)
    arrays, scalars = payload_parts(true)
    arrays = {name: value.copy() for name, value in arrays.items()}
    change(arrays, scalars)
    return encode(type(true), arrays, scalars)


def broken_rules_are_named(case: Case) -> None:
    """Check that a payload that breaks one rule is dropped with one warning that names it."""
    scene, findings = _first_scene(case), Findings()
    message = scene.messages[hostile(scene)]
    for example in _rules(case).broken(case.variant):
        reply = knowing(scene, _changed(scene, example.change))
        with quiet() as lines:
            read = inside.read_reply(copy.deepcopy(scene.strategy), scene.phase, message, reply)
        if read is not None:
            findings.add(f"used: {example.name}", "the example must be dropped")
        elif len(lines) != 1 or not re.search(example.warning, lines[0]) or "unexpected" in lines[0]:
            findings.add(f"warnings of {example.name}: {lines}", f"one that matches {example.warning!r}")
    findings.none()


def extremes_do_no_harm(case: Case) -> None:
    """Check that payloads at the edge of the rules are used, and lead to finite numbers."""
    scene, findings = _first_scene(case), Findings()
    for example in _rules(case).harmless(case.variant):
        data = _changed(scene, example.change)
        replies: list[Message | None] = list(honest(scene))
        replies[hostile(scene)] = knowing(scene, data)
        result = outcome(scene, replies)
        if result.infinite or result.stats["participants"] != CLIENTS:
            findings.add(f"{result.stats}, not finite: {result.infinite}", example.name)
        if dropped := [line for line in result.lines if "dropped" in line]:
            findings.add(f"dropped: {dropped}", example.name)
        from_all = [
            knowing(replace(scene, messages=[message] * CLIENTS), _changed(scene, example.change))
            for message in scene.messages
        ]
        if bad := outcome(scene, from_all).infinite:
            findings.add(f"from all clients, not finite: {bad}", example.name)
    findings.none()
