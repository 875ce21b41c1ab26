"""Check of bytes: each message has the parts that the method's formula names, in their size plus a header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord

from flwr_kd.formulas import HEADERS, Sent, Situation
from flwr_kd.testing.federation import CLASSES, SHAPE, blobs, small_model
from flwr_kd.testing.measured_messages import MeasuringGrid, Note, sizes_of
from flwr_kd.testing.outcomes import ensure, equal
from flwr_kd.testing.recording import CLIENTS, Case

__all__ = ["bytes_are_those_of_the_formula"]

ROUNDS = 3


def bytes_are_those_of_the_formula(case: Case) -> None:
    """Check that three rounds send what the formula in the registration says, and at most a header beside it."""
    method = case.method
    ensure(method.sent, "the registration has no formula (sent)", "one Sent for each part of each message")
    federation = case.federation()
    plain = [*case.settings, *(f"{text.partition('=')[0]}=false" for text in method.simulated)]
    strategy = federation.strategy(*plain)
    grid = MeasuringGrid(federation.app(), CLIENTS)
    # As in a simulation, clients make their first model themselves if there is no global one.
    initial = case.initial() if strategy.sends_weights else ArrayRecord()
    result = strategy.start(grid, initial, num_rounds=ROUNDS)
    counts = [torch.bincount(blobs(24 + i, i).y, minlength=CLASSES).tolist() for i in range(CLIENTS)]
    public = 32 if method.public_at == "clients" else 0
    network = small_model(case.model)
    sizes = {
        (client, way): sizes_of(
            method, network, Situation(strategy.config, counts, client, way, public, SHAPE)
        )
        for client in range(CLIENTS)
        for way in ("down", "up")
    }
    for stats in result.rounds:
        number = stats.server_round
        notes = [note for note in grid.notes if note.round == number]
        ways = {way: sum(n.counted for n in notes if n.direction == way) for way in ("down", "up")}
        equal(f"bytes of round {number}", {"down": stats.bytes_down, "up": stats.bytes_up}, ways)
        parts = {(note.phase, note.direction, part) for note in notes for part in note.parts}
        expected = {(s.phase, s.direction, s.part) for s in method.sent if s.in_round(number, ROUNDS)}
        equal(f"phases, directions and parts that were sent in round {number}", parts, expected)
        _check_notes(notes, method.sent, sizes)


def _check_notes(
    notes: Sequence[Note], sent: Sequence[Sent], sizes: Mapping[tuple[int, str], Mapping[str, int]]
) -> None:
    for note in notes:
        for each in sent:
            if (each.phase, each.direction) == (note.phase, note.direction) and each.part in note.parts:
                letters = sizes[note.client, note.direction]
                formula = each.paper(letters) + sum(each.others(letters).values())
                most = HEADERS[each.part] * (note.arrays if each.part == "weights" else 1)
                header = note.parts[each.part] - formula
                ensure(
                    0 < header <= most,
                    f"{each.phase} {each.direction}, {each.part}: {note.parts[each.part]} bytes, by the formula "
                    f"{each.text} and what is beside it {formula}",
                    f"1 to {most} bytes more, of headers",
                )
