"""Attacks whose attackers see what honest clients send: their formulas, and the grid that shows it to them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from scipy.stats import norm

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments.attacks import (
    ALittleIsEnough,
    Attack,
    AttackedGrid,
    ClassPrior,
    Crowd,
    InnerProduct,
    LossMaximizing,
    MaliciousClient,
    SignFlip,
    parse_attack,
)
from flwr_kd.experiments.attacks.malicious_client import ATTACKER
from flwr_kd.experiments.attacks.models import largest_unseen
from flwr_kd.experiments.errors import AttackError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.public_data.messages import SoftPredictions
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.strategies.fedgkt.messages import ClientFeatures
from flwr_kd.strategies.fedhkd import HyperKnowledge
from flwr_kd.strategies.fedproto import FedProtoClient
from flwr_kd.strategies.fedproto.messages import Prototypes
from flwr_kd.transport import flower_records
from flwr_kd.transport.local_grid import identify_process
from flwr_kd.transport.npy import as_record_array
from flwr_kd.transport.payload import PayloadError

NAMES = ("weight", "bn.running_var", "steps")
RECEIVED = [np.float32([1.0, 2.0, 3.0]), np.float32([1.0]), np.array(4)]
HONEST = [
    [np.float32([2.0, 0.0, 3.5]), np.float32([2.0]), np.array(5)],
    [np.float32([4.0, 1.0, 2.5]), np.float32([3.0]), np.array(6)],
    [np.float32([3.0, 5.0, 3.0]), np.float32([1.0]), np.array(7)],
]
OWN = [np.float32([9.0, 9.0, 9.0]), np.float32([9.0]), np.array(8)]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def crowd(attackers: int = 1, payloads: Iterable[bytes] = ()) -> Crowd:
    return Crowd(HONEST, list(payloads), attackers)


@pytest.mark.parametrize(("clients", "attackers"), [(50, 24), (50, 12), (10, 4), (11, 5), (7, 3)])
def test_the_papers_z(clients: int, attackers: int) -> None:
    """Algorithm 3: s supporters are needed for a majority, and z is where they lie beyond."""
    supporters = math.floor(clients / 2 + 1) - attackers
    honest = clients - attackers
    assert largest_unseen(clients, attackers) == pytest.approx(norm.ppf((honest - supporters) / honest))


def test_a_little_is_enough() -> None:
    for z in (0.5, 1.5):
        sent = ALittleIsEnough(z).models(OWN, RECEIVED, NAMES, rng(), crowd())
        for index in (0, 1):
            for place, value in enumerate(sent[index]):
                column = [float(model[index][place]) for model in HONEST]
                expected = statistics.fmean(column) - z * statistics.pstdev(column)
                assert value == pytest.approx(abs(expected) if index else expected, abs=1e-6)
        assert sent[2] == 8
        assert [array.dtype for array in sent] == [array.dtype for array in OWN]
    # Five clients of which two attack: the paper's z.
    by_paper = ALittleIsEnough().models(OWN, RECEIVED, NAMES, rng(), crowd(2))[0]
    given = ALittleIsEnough(largest_unseen(5, 2)).models(OWN, RECEIVED, NAMES, rng(), crowd(2))[0]
    assert np.array_equal(by_paper, given)


def test_inner_product_manipulation() -> None:
    updates = np.mean([np.float64(model[0]) - RECEIVED[0] for model in HONEST], axis=0)
    sent = InnerProduct(0.5).models(OWN, RECEIVED, NAMES, rng(), crowd())[0]
    assert sent == pytest.approx(RECEIVED[0] - 0.5 * updates)
    # By default the mean of all updates is the honest one turned over, less what the attackers take of it.
    attackers = 2
    sent = InnerProduct().models(OWN, RECEIVED, NAMES, rng(), crowd(attackers))[0]
    everyone = [model[0] for model in HONEST] + [sent] * attackers
    assert np.mean(everyone, axis=0) - RECEIVED[0] == pytest.approx(-updates * 3 / 5, abs=1e-6)
    # Where nothing was received, the mean itself is turned over.
    bare = InnerProduct(1.0).models(OWN, [], NAMES, rng(), crowd())[0]
    assert bare == pytest.approx(-np.mean([model[0] for model in HONEST], axis=0))


@pytest.mark.parametrize("attack", [ALittleIsEnough(1.0), InnerProduct(1.0)])
def test_nobody_to_see_leaves_the_honest_arrays(attack: Attack) -> None:
    for nobody in (None, Crowd([], [], 1)):
        sent = attack.models(OWN, RECEIVED, NAMES, rng(), nobody)
        assert all(np.array_equal(a, b) for a, b in zip(sent, OWN, strict=True))


def predictions(rows: list[list[float]], dtype: Any = np.float32) -> bytes:
    return SoftPredictions(np.array(rows, dtype=dtype)).to_bytes()


def test_sure_of_the_least_likely_class() -> None:
    others = [
        predictions([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]),
        predictions([[0.1, 0.9, 0.0], [0.5, 0.1, 0.4]]),
    ]
    own = predictions([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    sent = SoftPredictions.from_bytes(LossMaximizing().knowledge(own, 5, crowd(1, others)))
    assert sent.predictions.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    # Without others, the attacker's own predictions say what is least likely.
    alone = SoftPredictions.from_bytes(LossMaximizing().knowledge(own, 5))
    assert alone.predictions.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_codes_of_8_bits_are_probabilities() -> None:
    codes = [[255, 128, 0], [255, 0, 255]]
    sent = LossMaximizing().knowledge(predictions(codes, np.uint8), 5)  # type: ignore[arg-type]
    assert SoftPredictions.from_bytes(sent).predictions.tolist() == [[0, 0, 255], [0, 255, 0]]


def test_sure_of_the_least_similar_class() -> None:
    draw = np.random.default_rng(3)
    rows = [draw.dirichlet(np.ones(4), size=9) for _ in range(3)]
    others = [predictions(part.tolist()) for part in rows]
    sent = SoftPredictions.from_bytes(ClassPrior().knowledge(others[0], 5, crowd(1, others))).predictions
    mean = np.mean(rows, axis=0)
    for row, told in zip(mean, sent, strict=True):
        top = int(row.argmax())
        covariances = {
            other: float(
                np.mean((mean[:, top] - mean[:, top].mean()) * (mean[:, other] - mean[:, other].mean()))
            )
            for other in range(4)
            if other != top
        }
        assert told.tolist() == np.eye(4)[min(covariances, key=covariances.__getitem__)].tolist()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_an_imitation_is_the_first_honest_model_with_noise(share: float) -> None:
    attack = parse_attack(f"imitate:{share}")
    large = [[np.linspace(-1, k + 1, 4000, dtype=np.float32), np.array(k)] for k in range(3)]
    own = [np.ones(4000, np.float32), np.array(9)]
    sent = attack.models(own, [], ("weight", "steps"), rng(), Crowd(large, [], 2))
    noise = np.float64(sent[0]) - large[0][0]
    assert noise.std() == pytest.approx(share * large[0][0].std(), rel=0.05)
    assert abs(noise.mean()) < 0.1 * share
    assert sent[1] == 9
    alone = attack.models(own, [], ("weight", "steps"), rng(), Crowd([], [], 2))
    assert np.array_equal(alone[0], own[0])


def test_an_imitated_prediction_is_the_victims_with_some_of_a_wrong_class() -> None:
    others = [predictions([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]), predictions([[0.0, 1.0, 0.0]] * 2)]
    own = predictions([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    attack = parse_attack("imitate:0.2")
    told = SoftPredictions.from_bytes(attack.knowledge(own, 5, crowd(1, others))).predictions
    assert told == pytest.approx(np.float32([[0.48, 0.24, 0.28], [0.36, 0.16, 0.48]]))
    alone = SoftPredictions.from_bytes(attack.knowledge(own, 5)).predictions
    assert alone == pytest.approx(np.float32([[0.2, 0.0, 0.8], [0.8, 0.2, 0.0]]))
    codes = [predictions([[255, 51, 0]], np.uint8)]  # type: ignore[arg-type]
    own = predictions([[0, 0, 255]], np.uint8)  # type: ignore[arg-type]
    told = SoftPredictions.from_bytes(attack.knowledge(own, 5, crowd(1, codes))).predictions
    # 5/6, 1/6 and 0 become 4/6, 0.8/6 and 1.2/6.
    assert told.tolist() == [[255, 51, 76]]


def test_an_imitation_needs_a_victim_and_a_share() -> None:
    with pytest.raises(
        ConfigError, match="attack 'imitate' needs at least 1 honest client, got 3 attackers of 3"
    ):
        Experiment(clients=3, attack="imitate:0.5", attackers=3)
    for wrong in ("imitate", "imitate:0", "imitate:1.5", "imitate:x"):
        with pytest.raises(ConfigError, match=r"SHARE must be in \(0, 1\]"):
            parse_attack(wrong)
    kinds = ("fedavg", "fedmd", "fedproto", "fedgkt", "fedhkd")
    concerned = {name: parse_attack("imitate:0.5").concerns(registry.get(name).strategy) for name in kinds}
    assert concerned == {"fedavg": True, "fedmd": True, "fedproto": False, "fedgkt": False, "fedhkd": True}


def test_rows_of_classes_are_matched_by_class() -> None:
    def knowledge(classes: list[int], rows: list[list[float]]) -> HyperKnowledge:
        ones = np.ones((len(classes), 2), np.float32)
        return HyperKnowledge(np.array(classes), ones, np.float32(rows), np.ones(len(classes), np.int64))

    own = knowledge([0, 2], [[0.8, 0.15, 0.05], [0.1, 0.3, 0.6]])
    other = knowledge([1, 2], [[0.0, 1.0, 0.0], [0.3, 0.1, 0.6]])
    third = knowledge([2], [[0.5, 0.2, 0.3]])
    crowds = crowd(1, [other.to_bytes(), third.to_bytes()])
    told = HyperKnowledge.from_bytes(LossMaximizing().knowledge(own.to_bytes(), 9, crowds)).predictions
    # Class 0 is the attacker's own row, class 2 the mean of two.
    assert told.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


def test_logits_of_a_clients_own_samples() -> None:
    def features(logits: list[list[float]]) -> bytes:
        return ClientFeatures(
            index=np.array([1, 0]),
            features=np.ones((2, 2), np.float32),
            logits=np.float32(logits),
            labels=np.array([0, 2]),
            test_features=np.ones((1, 2), np.float32),
            test_labels=np.array([1]),
        ).to_bytes()

    own, other = features([[3, 1, 20], [0, -1, 5]]), features([[9, 9, -9], [9, 9, -9]])
    sent = ClientFeatures.from_bytes(LossMaximizing().knowledge(own, 2, crowd(1, [other])))
    assert sent.logits.tolist() == [[-20, 20, -20], [-20, 20, -20]]


@pytest.mark.parametrize(
    ("attack", "clients", "attackers", "text"),
    [
        ("alie", 10, 2, r"2 of 10 clients cannot hide behind a majority .*z is 0\.00\); give .* alie:1\.5"),
        ("alie:1", 3, 3, "attack 'alie' needs at least 1 honest client, got 3 attackers of 3"),
        ("ipm", 3, 3, "attack 'ipm' needs at least 1 honest client"),
    ],
)
def test_numbers_of_attackers_that_do_not_fit(attack: str, clients: int, attackers: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Experiment(clients=clients, attack=attack, attackers=attackers)
    Experiment(clients=10, attack="alie:1", attackers=2)
    Experiment(clients=10, attack="alie", attackers=4)


def test_one_class_leaves_nothing_to_be_sure_of() -> None:
    for spec in ("lma", "cpa"):
        with pytest.raises(ConfigError, match="need at least 2 classes, there are 1"):
            parse_attack(spec).check_classes(1)


class Shelf(Grid):
    """A grid that has the replies which a test puts on it."""

    def __init__(self) -> None:
        identify_process()
        self.ready: dict[str, Message] = {}
        self.broken: set[str] = set()
        self.sent: list[Message] = []

    def set_run(self, *args: Any, **options: Any) -> None: ...

    @property
    def run(self) -> Any:
        return "run"

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [1, 2, 3]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        if self.broken & set(ids):
            raise ValueError("garbage")
        return [self.ready.pop(message_id) for message_id in ids if message_id in self.ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        raise NotImplementedError


def train(node: int) -> Message:
    arrays = ArrayRecord({"0": as_record_array(RECEIVED[0])})
    config = {flower_records.NAMES: '["weight"]', flower_records.SEED: 1}
    return flower_records.train_message(node, arrays=arrays, config=config)


def reply_to(message: Message, values: Any, attacker: int | None = None) -> Message:
    metrics = {} if attacker is None else {ATTACKER: attacker}
    content = RecordDict(
        {
            "fitres.parameters": ArrayRecord({"0": as_record_array(values)}),
            "fitres.metrics": ConfigRecord({"loss": 0.5, **metrics}),
            "fitres.num_examples": MetricRecord({"num_examples": 4}),
        }
    )
    return Message(content, reply_to=message)


def test_attackers_reply_once_all_others_have() -> None:
    shelf = Shelf()
    grid = AttackedGrid(shelf, InnerProduct(1.0))
    first, second, attacker = messages = [train(node) for node in (1, 2, 3)]
    ids = list(grid.push_messages(messages))
    shelf.ready[ids[2]] = reply_to(attacker, np.float32([9, 9, 9]), attacker=7)
    shelf.ready[ids[0]] = reply_to(first, HONEST[0][0])
    assert list(grid.pull_messages([ids[2]])) == []
    (honest,) = grid.pull_messages([ids[0]])
    # The server empties what it has read.
    flower_records.forget(honest)
    assert list(grid.pull_messages([ids[2]])) == []
    shelf.ready[ids[1]] = reply_to(second, HONEST[1][0])
    (told,) = grid.pull_messages([ids[2]])
    read = flower_records.read_train_reply(told)
    mean = (HONEST[0][0] + HONEST[1][0]) / 2
    assert read.arrays[0] == pytest.approx(RECEIVED[0] - (mean - RECEIVED[0]))
    assert read.metrics == {"loss": 0.5}
    (honest,) = grid.pull_messages([ids[1]])
    assert flower_records.read_train_reply(honest).arrays[0].tolist() == HONEST[1][0].tolist()
    assert (grid.run, list(grid.get_node_ids())) == ("run", [1, 2, 3])


def test_what_cannot_be_read_concerns_its_client_only() -> None:
    shelf = Shelf()
    grid = AttackedGrid(shelf, InnerProduct(1.0))
    messages = [train(node) for node in (1, 2)]
    broken, attacker = grid.push_messages(messages)
    shelf.ready[attacker] = reply_to(messages[1], np.float32([9, 9, 9]), attacker=0)
    shelf.broken.add(broken)
    assert list(grid.pull_messages([attacker])) == []
    with pytest.raises(ValueError, match="garbage"):
        grid.pull_messages([broken])
    # An answer without the records of a reply is an answer.
    shelf.broken.clear()
    shelf.ready[broken] = Message(RecordDict(), reply_to=messages[0])
    (told,) = grid.pull_messages([attacker])
    assert flower_records.read_train_reply(told).arrays[0].tolist() == [9, 9, 9]
    with pytest.raises(PayloadError):
        flower_records.read_train_reply(next(iter(grid.pull_messages([broken]))))


def test_an_attack_that_fails_ends_the_run() -> None:
    class Broken(InnerProduct):
        def models(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("no honest client")

    shelf = Shelf()
    grid = AttackedGrid(shelf, Broken())
    question = train(1)
    (asked,) = grid.push_messages([question])
    shelf.ready[asked] = reply_to(question, np.float32([9, 9, 9]), attacker=0)
    # A server tries to fetch a reply several times.
    for _ in range(2):
        with pytest.raises(AttackError, match="the attack failed: no honest client"):
            grid.pull_messages([asked])
    for seen in (lambda: grid.push_messages([train(1)]), grid.check):
        with pytest.raises(AttackError, match="the attack failed: no honest client"):
            seen()


@pytest.mark.parametrize(
    "reason",
    [
        "{AttackError}:<'the attack failed: no honest client'>",
        "<class 'ray.exceptions.RayTaskError'>:<'ray::fit()\nTraceback ...\n"
        "flwr_kd.experiments.errors.AttackError: the attack failed: no honest client'>",
    ],
)
@pytest.mark.parametrize("attack", [SignFlip(), InnerProduct(1.0)])
def test_an_attack_that_fails_at_a_client_ends_the_run(attack: Attack, reason: str) -> None:
    shelf = Shelf()
    grid = AttackedGrid(shelf, attack)
    questions = [train(1), train(2)]
    first, second = grid.push_messages(questions)
    other = Error(2, "<class 'ValueError'>:<'no room'>")
    shelf.ready[first] = Message(other, reply_to=questions[0])
    (told,) = grid.pull_messages([first])
    assert told.error.reason == other.reason
    grid.check()
    text = reason.replace("{AttackError}", str(AttackError))
    shelf.ready[second] = Message(Error(2, text), reply_to=questions[1])
    assert len(list(grid.pull_messages([second]))) == 1
    with pytest.raises(AttackError, match=r"^the attack failed: no honest client$"):
        grid.push_messages([train(1)])


def test_other_messages_pass() -> None:
    shelf = Shelf()
    grid = AttackedGrid(shelf, InnerProduct(1.0))
    question = flower_records.properties_message(1, config={})
    (asked,) = grid.push_messages([question])
    shelf.ready[asked] = answer = Message(RecordDict(), reply_to=question)
    assert list(grid.pull_messages([asked])) == [answer]
    with pytest.raises(NotImplementedError, match="AttackedGrid pushes and pulls"):
        grid.send_and_receive([])


def test_attackers_of_a_client_of_theirs_mark_their_replies(make_blobs: Any, make_model: Any) -> None:
    context = Context(1, 17, {"partition-id": 3}, RecordDict(), {})
    client = FedAvgClient(make_model(), make_blobs(16, 0), context=context)
    start = [array.copy() for array in client.arrays(())]
    config: dict[str, Any] = {flower_records.SEED: 3, flower_records.ROUND: 1, "local-epochs": 1}
    _, _, metrics = MaliciousClient(client, "alie:1", partition=3).fit(start, config)
    assert metrics[ATTACKER] == 3


def test_a_claimed_count(make_blobs: Any, make_model: Any) -> None:
    context = Context(1, 17, {}, RecordDict(), {})
    client = MaliciousClient(FedProtoClient(make_model(), make_blobs(16, 0), context=context), "count:1000")
    assert client.get_properties({})["num-examples"] == 1000
    _, count, metrics = client.fit([], {flower_records.SEED: 3, flower_records.ROUND: 1, "local-epochs": 1})
    assert count == 1000
    payload = metrics["payload"]
    assert isinstance(payload, bytes)
    counts = Prototypes.from_bytes(payload).counts
    assert 900 < counts.sum() <= 1000


def test_swapped_prototypes() -> None:
    honest = HyperKnowledge(
        np.array([0, 1, 2]),
        np.float32([[1, 2], [3, 4], [5, 6]]),
        np.eye(3, dtype=np.float32),
        np.array([4, 4, 4]),
    )
    told = HyperKnowledge.from_bytes(parse_attack("prototype-swap").knowledge(honest.to_bytes(), 12))
    assert told.representations.tolist() == [[5, 6], [1, 2], [3, 4]]
    for name in ("classes", "predictions", "counts"):
        assert np.array_equal(getattr(told, name), getattr(honest, name))


def test_model_replacement() -> None:
    """With as many times as there are clients, the mean is the attacker's model if the others have converged."""
    sent = parse_attack("scale:3").models(OWN, RECEIVED, NAMES, rng())[0]
    assert np.mean([RECEIVED[0], RECEIVED[0], sent], axis=0) == pytest.approx(OWN[0])
    assert parse_attack("scale:3").models(OWN, [], NAMES, rng())[0].tolist() == [27, 27, 27]
