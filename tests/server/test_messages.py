"""What is sent: payloads and configs for each node, counted bytes."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from flwr_kd.server.messages import Messages, PersonalRounds
from flwr_kd.server.records import Node, Outgoing, RoundStats, VoidRoundsError
from flwr_kd.strategies.fedavg import FedAvg
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient
from flwr_kd.transport.template import ArrayTemplate
from tests.server.federations import QUICK, Toy, events, initial, size_of


def test_every_node_gets_its_own_payload_and_config(toy: Any) -> None:
    grid, seen = toy()
    Toy().start(grid, ArrayRecord(), num_rounds=2)
    notes = [entry for entry in events(seen) if entry[1] == "tell"]
    assert len(notes) == 4
    for server_round, _, partition, owner, values in notes:
        assert owner == partition
        assert values == [10 * server_round * i for i in range(partition + 1)]
    for _, partition, config in (entry for entry in seen if entry[0] == "config"):
        assert config["spoken-to"] == partition


def test_bytes_are_those_that_were_sent(grid_of: Any) -> None:
    grid = grid_of(FedHKDClient)
    rounds: list[RoundStats] = []
    result = FedHKD(min_available_nodes=3, fraction_evaluate=0.7, on_round=rounds.append, **QUICK).start(
        grid, initial(), num_rounds=2
    )
    assert result.rounds == rounds
    where = {m.metadata.message_id: grid.partition(m.metadata.dst_node_id) for m in grid.sent}
    for stats in rounds:
        group = str(stats.server_round)
        down = dict.fromkeys(range(3), 0)
        up = dict.fromkeys(range(3), 0)
        for message in grid.sent:
            if message.metadata.group_id == group:
                down[where[message.metadata.message_id]] += size_of(message)
        for message, size in grid.came:
            if message.metadata.group_id == group and message.metadata.message_type == "train":
                up[where[message.metadata.reply_to_message_id]] += size
        assert stats.bytes_by_partition == {i: (down[i], up[i]) for i in range(3)}
        assert (stats.bytes_down, stats.bytes_up) == (sum(down.values()), sum(up.values()))
    weights = sum(len(a.data) for a in initial().values())
    assert rounds[0].bytes_down == 5 * weights  # three trained and two evaluated, with no knowledge yet
    assert rounds[1].bytes_down > 5 * weights
    # Models go down to those that train and that evaluate, and up from those that train; the rest is knowledge.
    assert rounds[0].bytes_knowledge == rounds[0].bytes_up - 3 * weights > 0
    assert rounds[1].bytes_knowledge == rounds[1].bytes_down + rounds[1].bytes_up - 8 * weights


def test_the_callers_records_are_not_changed(toy: Any, grid_of: Any) -> None:
    train, arrays = ConfigRecord({"my-option": 3, "phase": "mine"}), initial()
    before = dict(train), {n: a.data for n, a in arrays.items()}
    grid, seen = toy()
    Toy().start(grid, ArrayRecord(), num_rounds=2, train_config=train)
    configs = [config for kind, _, config in (e[:3] for e in seen) if kind == "config"]
    assert len(configs) == 16
    assert all(config["my-option"] == 3 for config in configs)
    assert {config["phase"] for config in configs} == {"ask", "tell", "close"}
    evaluate = ConfigRecord({"other": 1})
    real = grid_of()
    FedAvg(fraction_evaluate=1.0, **QUICK).start(
        real, arrays, num_rounds=2, train_config=train, evaluate_config=evaluate
    )
    assert (dict(train), {n: a.data for n, a in arrays.items()}) == before
    assert dict(evaluate) == {"other": 1}
    sent = [m.content.config_records["evaluateins.config"] for m in real.of_type("evaluate")]
    assert all(record["other"] == 1 and "my-option" not in record for record in sent)


def test_a_payload_over_the_limit_is_refused_at_the_sender(grid_of: Any, flower_log: list[str]) -> None:
    with pytest.raises(VoidRoundsError) as raised:
        FedHKD(max_payload_bytes=100, **QUICK).start(grid_of(FedHKDClient), initial(), num_rounds=1)
    result = raised.value.result
    assert result is not None
    assert (result.rounds[0].participants, result.rounds[0].failures) == (0, 3)
    assert {n: a.data for n, a in result.arrays.items()} == {n: a.data for n, a in initial().items()}
    assert "fedhkd.hyper-knowledge" in flower_log[0]
    assert "a smaller feature size D" in flower_log[0]


# ---------------------------------------------------------------------- without a run


def test_the_runs_own_scalars_win_over_the_callers() -> None:
    messages = Messages({"seed": 3, "batch-size": 8}, timeout=10.0, max_payload_bytes=100)
    config = messages.config("train", 2, ("b", "a"), {"seed": 9, "phase": "x", "mine": 1.5})
    assert config == {
        "seed": 3,
        "batch-size": 8,
        "mine": 1.5,
        "server-round": 2,
        "phase": "train",
        "array-names": '["b", "a"]',
    }


def test_what_a_client_must_know_of_its_personal_model() -> None:
    rounds, node = PersonalRounds(), Node(7, 1)
    assert rounds.ask(node, 1, first_phase=True, saved=0, whole=0) == known(0, 0, 0)
    rounds.trained[1] = 1
    assert rounds.ask(node, 1, first_phase=False, saved=0, whole=0) == known(1, 1, 0)
    # It was not drawn in rounds 2 and 3: a model of round 1 counts.
    assert rounds.ask(node, 4, first_phase=True, saved=3, whole=3) == known(1, 1, 3)
    # A server that was resumed after round 4 has not asked anyone yet.
    resumed = PersonalRounds(trained={1: 4}, resumed=4)
    # Round 5 is complete, and not written yet.
    asked = resumed.ask(node, 6, first_phase=True, saved=4, whole=5)
    assert asked == {**known(4, 4, 4), "whole-round": 5}


def known(trained: int, known_round: int, saved: int) -> dict[str, int]:
    return {"trained-round": trained, "known-round": known_round, "saved-round": saved}


def test_nodes_share_the_arrays_that_are_the_same_record_and_nothing_else() -> None:
    one, other = initial(), initial()
    nodes = [Node(number, number, 4, 4, (8,), ArrayTemplate.of(one)) for number in range(4)]
    outgoing = [Outgoing(node, arrays) for node, arrays in zip(nodes, (one, one, other, None), strict=True)]
    sent = Messages({"seed": 3}, 10.0, 10**6).train(
        "train",
        1,
        outgoing,
        RoundStats(1),
        names_of=lambda node: ("w",),
        personal=lambda node: {"trained-round": 0},
    )
    arrays = [message.content["fitins.parameters"] for message in sent]
    configs = [message.content["fitins.config"] for message in sent]
    assert arrays[0] is arrays[1] is not arrays[2]
    assert arrays[0] is not one
    assert not arrays[3]
    configs[0]["seed"] = 9
    assert [config["seed"] for config in configs] == [9, 3, 3, 3]
    # What differs from node to node is still checked by Flower.
    with pytest.raises(TypeError, match="valid type"):
        Messages({}, 10.0, 10**6).train(
            "train",
            1,
            outgoing,
            RoundStats(1),
            names_of=lambda node: (),
            personal=lambda node: {"x": object()},  # type: ignore[dict-item]
        )
