"""Attacks: their texts, what they change in labels, models and knowledge, and what they leave alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from items import Items
from torch.utils.data import DataLoader, TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.data import ArrayDataset
from flwr_kd.experiments.attacks import (
    ALittleIsEnough,
    Attack,
    ClaimedCount,
    ClassPrior,
    Gaussian,
    InnerProduct,
    LabelFlip,
    LossMaximizing,
    ModelReplacement,
    NotANumber,
    SignFlip,
    SwappedPrototypes,
    WrongKnowledge,
    parse_attack,
)
from flwr_kd.experiments.attacks.texts import ATTACKS
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.strategies.fedgkt.messages import ClientFeatures
from flwr_kd.strategies.fedhkd import HyperKnowledge
from flwr_kd.strategies.fedproto.messages import Prototypes
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import ArrayTemplate


def test_the_options_help_names_every_form() -> None:
    """It cannot be made from them, since the options are read without PyTorch."""
    (help,) = (each.metadata["help"] for each in fields(ExperimentOptions) if each.name == "attack")
    assert help.removeprefix("what malicious clients do: ").replace(" or ", ", ").split(", ") == list(ATTACKS)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("spec", "attack"),
    [
        ("label-flip", LabelFlip(0)),
        ("label-flip:3", LabelFlip(3)),
        ("label-flip:permute", LabelFlip(None)),
        ("gaussian:2", Gaussian(2.0)),
        ("sign-flip", SignFlip(1.0)),
        ("sign-flip:0.5", SignFlip(0.5)),
        ("nan", NotANumber()),
        ("scale:10", ModelReplacement(10.0)),
        ("alie", ALittleIsEnough(None)),
        ("alie:1.5", ALittleIsEnough(1.5)),
        ("ipm", InnerProduct(None)),
        ("ipm:0.5", InnerProduct(0.5)),
        ("prototype-swap", SwappedPrototypes()),
        ("lma", LossMaximizing()),
        ("cpa", ClassPrior()),
        ("count:5", ClaimedCount(5)),
        ("payload", WrongKnowledge(frozenset({"predictions", "prototypes", "counts"}))),
        ("payload:counts", WrongKnowledge(frozenset({"counts"}))),
    ],
)
def test_texts(spec: str, attack: Attack) -> None:
    assert parse_attack(spec) == attack


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("gausian:1", r"unknown attack 'gausian' \(did you mean 'gaussian'\?\); valid: label-flip, gaussian, "
         r"sign-flip, scale, alie, ipm, nan, payload, prototype-swap, lma, cpa, count, imitate, in the forms "
         r"label-flip\[:TARGET\], label-flip:permute, gaussian:SIGMA"),
        ("", "unknown attack ''"),
        (None, "attack must be one of label-flip.*, got None"),
        ("label-flip:", "attack 'label-flip:': TARGET, .* permute, must be a whole number from 0, got ''"),
        ("label-flip:-1", "TARGET, unless it is permute, must be a whole number from 0, got '-1'"),
        ("label-flip:1.5", "got '1.5'"),
        ("gaussian", "attack 'gaussian': SIGMA must be a finite number above 0, got ''"),
        ("gaussian:0", "SIGMA must be a finite number above 0, got '0'"),
        ("gaussian:nan", "SIGMA must be a finite number above 0, got 'nan'"),
        ("gaussian:big", "SIGMA must be a finite number above 0, got 'big'"),
        ("sign-flip:-2", "SCALE must be a finite number above 0, got '-2'"),
        ("sign-flip:inf", "SCALE must be a finite number above 0, got 'inf'"),
        ("nan:3", "attack 'nan:3': nan takes no value"),
        ("lma:", "attack 'lma:': lma takes no value"),
        ("scale", "attack 'scale': SCALE must be a finite number above 0, got ''"),
        ("alie:0", "attack 'alie:0': Z must be a finite number above 0, got '0'"),
        ("ipm:-1", "attack 'ipm:-1': EPSILON must be a finite number above 0, got '-1'"),
        ("count", "attack 'count': N must be a whole number from 1"),
        ("count:0", "attack 'count:0': N must be a whole number from 1"),
        ("payload:", "KIND must be one of predictions, prototypes, counts, got ''"),
        ("payload:weights", "KIND must be one of predictions, prototypes, counts, got 'weights'"),
    ],
)  # fmt: skip
def test_wrong_texts(spec: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_attack(spec)


def test_all_labels_become_the_target(make_blobs: Any) -> None:
    data = make_blobs(10, 0)
    before = data.y.clone()
    for attack, target in ((LabelFlip(), 0), (LabelFlip(3), 3)):
        flipped = attack.poison(data, 4, seed=5)
        assert type(flipped) is ArrayDataset
        assert flipped.x is data.x
        assert flipped.y.tolist() == [target] * 10
    assert torch.equal(data.y, before)


def test_a_permutation_has_no_fixed_point_and_is_the_attackers_own(make_blobs: Any) -> None:
    data = make_blobs(40, 0)
    permuted = [LabelFlip(None).poison(data, 4, seed=seed) for seed in range(100)]
    again = LabelFlip(None).poison(data, 4, seed=0)
    mappings = set()
    for flipped in permuted:
        assert isinstance(flipped, ArrayDataset)
        pairs = set(zip(data.y.tolist(), flipped.y.tolist(), strict=True))
        assert len(pairs) == 4
        assert {new for _, new in pairs} == {0, 1, 2, 3}
        assert all(old != new for old, new in pairs)
        mappings.add(tuple(sorted(pairs)))
    assert len(mappings) == 9  # all there are
    assert isinstance(again, ArrayDataset)
    assert isinstance(permuted[0], ArrayDataset)
    assert torch.equal(again.y, permuted[0].y)
    assert LabelFlip(None).mapping(2, seed=0).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("label", "new"),
    [
        (1, 2),
        (torch.tensor(1), torch.tensor(2)),
        (torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (np.int32(1), np.int32(2)),
        (np.array([1]), np.array([2])),
    ],
)
def test_a_view_keeps_the_labels_form(label: Any, new: Any) -> None:
    x = torch.zeros(3)
    (seen_x, seen), whole = (
        LabelFlip(2).poison(Items([kind(x, label)]), 4, 0)[0] for kind in (tuple2, dict2)
    )
    assert seen_x is x
    assert whole["x"] is x
    for each in (seen, whole["label"]):
        assert getattr(each, "dtype", int) == getattr(new, "dtype", int)
        assert np.shape(each) == np.shape(new)
        assert np.array_equal(each, new)


def tuple2(x: Any, y: Any) -> Any:
    return x, y


def dict2(x: Any, y: Any) -> Any:
    return {"x": x, "label": y}


def test_views_of_other_peoples_data(make_blobs: Any) -> None:
    blobs = make_blobs(10, 0)
    rows = {"image": blobs.x.tolist(), "label": blobs.y.tolist()}
    hugging = datasets.Dataset.from_dict(rows).with_format("torch")
    expected = LabelFlip(None).mapping(4, seed=1)[blobs.y.numpy()].tolist()
    for source in (TensorDataset(blobs.x, blobs.y), hugging, Items(list(blobs))):
        view = LabelFlip(None).poison(source, 4, seed=1)
        assert len(view) == 10  # type: ignore[arg-type]
        for each in (view, DataLoader(view, batch_size=3)):
            batches = list(Batches(each, num_classes=4).ordered(4))
            assert torch.cat([y for _, y in batches]).tolist() == expected
            assert torch.allclose(torch.cat([x for x, _ in batches]), blobs.x)
    named = Items([{"x": torch.zeros(2), "kind": 1, "label": 0}])
    assert LabelFlip(3).poison(named, 4, 0, label_key="kind")[0]["kind"] == 3


def test_labels_that_cannot_be_flipped(make_blobs: Any) -> None:
    data = make_blobs(10, 0)
    with pytest.raises(ConfigError, match=r"'label-flip:4': TARGET must be in 0..3, the classes, got 4"):
        LabelFlip(4).poison(data, 4, 0)
    with pytest.raises(ConfigError, match="'label-flip:permute' needs at least 2 classes, there are 1"):
        LabelFlip(None).check_classes(1)
    with pytest.raises(DatasetError, match=r"label 2 is not in 0\.\.1"):
        LabelFlip(1).poison(data, 2, 0)
    with pytest.raises(DatasetError, match="got a DataLoader; give the data set in it"):
        LabelFlip(1).poison(DataLoader(data), 4, 0)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="items must be pairs"):
        LabelFlip(1).poison(Items([3]), 4, 0)[0]
    with pytest.raises(DatasetError, match="name label_key"):
        LabelFlip(1).poison(Items([{"x": 1}]), 4, 0)[0]


@pytest.mark.parametrize("spec", ["gaussian:1", "sign-flip", "nan", "payload"])
def test_other_attacks_leave_the_data_alone(spec: str, make_blobs: Any) -> None:
    data = make_blobs(4, 0)
    assert parse_attack(spec).poison(data, 4, 0) is data
    parse_attack(spec).check_classes(1)


NAMES = ("weight", "bn.running_var", "bn.num_batches_tracked", "half", "scalar")


SENT = [
    np.float32([[1.0, -2.0], [0.5, 4.0]]),
    np.float32([0.1, 3.0]),
    np.array(7),
    np.float16([2.0, 1.0]),
    np.array(3.0),
]


RECEIVED = [
    np.float32([[0.0, 1.0], [0.5, 1.0]]),
    np.float32([1.0, 1.0]),
    np.array(5),
    np.float16([1.0, 1.0]),
    np.array(1.0),
]


def same_form(sent: list[np.ndarray]) -> None:
    assert [(a.dtype, a.shape) for a in sent] == [(a.dtype, a.shape) for a in SENT]
    assert sent[2] == 7


def test_sign_flip_reverses_the_update() -> None:
    sent = SignFlip().models(SENT, RECEIVED, NAMES, rng())
    same_form(sent)
    assert sent[0].tolist() == [[-1.0, 4.0], [0.5, -2.0]]
    assert sent[1].tolist() == pytest.approx([1.9, 1.0])  # 2 * 1 - 3 = -1 would be dropped
    assert sent[3].tolist() == [0.0, 1.0]
    assert float(sent[4]) == -1.0
    assert SignFlip(2.0).models(SENT, RECEIVED, NAMES, rng())[0].tolist() == [[-2.0, 7.0], [0.5, -5.0]]
    # FedHEAD's leaders get further models after the global one.
    assert np.array_equal(SignFlip().models(SENT, [*RECEIVED, *SENT], NAMES, rng())[0], sent[0])


@pytest.mark.parametrize("received", [[], [np.zeros(9)] * 5])
def test_sign_flip_negates_where_nothing_was_received(received: list[np.ndarray]) -> None:
    sent = SignFlip(3.0).models(SENT, received, NAMES, rng())
    same_form(sent)
    for i in (0, 3, 4):
        assert np.array_equal(sent[i], -SENT[i])
    assert np.array_equal(sent[1], SENT[1])


def test_noise_is_normal_and_leaves_whole_numbers() -> None:
    attack, draws = Gaussian(2.0), rng()
    same_form(attack.models(SENT, RECEIVED, NAMES, draws))
    large = [np.full((300, 300), 5.0, dtype=np.float32)]
    (noisy,) = attack.models(large, [], ("weight",), draws)
    assert noisy.mean() == pytest.approx(5.0, abs=0.03)
    assert noisy.std() == pytest.approx(2.0, abs=0.03)
    assert (noisy - 5 > 4).mean() == pytest.approx(0.0228, abs=0.003)
    # A variance becomes its absolute value; nothing else changes its sign.
    (variance,) = attack.models([np.zeros(1000)], [], ("bn.running_var",), rng())
    (plain,) = attack.models([np.zeros(1000)], [], (), rng())
    assert (plain < 0).any()
    assert np.array_equal(variance, np.abs(plain))
    for same in (attack.models(SENT, [], NAMES, rng()), attack.models(SENT, RECEIVED, NAMES, rng())):
        assert np.array_equal(same[0], attack.models(SENT, [], NAMES, rng())[0])


def test_nan_everywhere() -> None:
    sent = NotANumber().models(SENT, RECEIVED, NAMES, rng())
    same_form(sent)
    assert all(np.isnan(sent[i]).all() for i in (0, 1, 3, 4))
    assert NotANumber().knowledge(b"anything", 3) == b"anything"


@pytest.mark.parametrize("attack", [LabelFlip(), WrongKnowledge(), Gaussian(1), SignFlip(), NotANumber()])
def test_nothing_sent_is_nothing_corrupted(attack: Attack) -> None:
    assert attack.models([], RECEIVED, NAMES, rng()) == []
    if isinstance(attack, LabelFlip | WrongKnowledge):
        assert all(a is b for a, b in zip(attack.models(SENT, RECEIVED, NAMES, rng()), SENT, strict=True))


def test_a_negative_variance_is_refused() -> None:
    template = ArrayTemplate.of_ndarrays({"weight": np.zeros(2), "bn.running_var": np.ones(2)})
    fine = [np.array([-1.0, 1.0]), np.array([0.0, -0.0])]
    assert np.array_equal(template.check(fine)[0], fine[0])
    with pytest.raises(
        PayloadError, match=r"array 'bn.running_var' has negative values, down to -0.25; it holds variances"
    ):
        template.check([fine[0], np.array([1.0, -0.25])])


def hyper_knowledge() -> HyperKnowledge:
    return HyperKnowledge(
        classes=np.array([0, 2]),
        representations=np.float32([[1.0, -2.0, 0.0], [9000.0, 0.5, 1.0]]),
        predictions=np.float32([[0.7, 0.2, 0.1], [0.0, 0.25, 0.75]]),
        counts=np.array([6, 4]),
    )


def test_wrong_hyper_knowledge() -> None:
    honest = hyper_knowledge()
    sent = WrongKnowledge().knowledge(honest.to_bytes(), 12)
    wrong = HyperKnowledge.from_bytes(sent, dims={"C": 3, "D": 3})
    assert len(sent) == honest.nbytes
    assert np.array_equal(wrong.classes, honest.classes)
    assert np.array_equal(wrong.predictions, np.float32([[0.1, 0.7, 0.2], [0.75, 0.0, 0.25]]))
    assert wrong.representations.tolist() == [[-10.0, 20.0, 0.0], [-65504.0, -5.0, -10.0]]
    assert wrong.counts.tolist() == [1, 11]


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("predictions", "predictions"), ("prototypes", "representations"), ("counts", "counts")],
)
def test_one_kind_of_wrong_knowledge(kind: str, changed: str) -> None:
    honest = hyper_knowledge()
    wrong = HyperKnowledge.from_bytes(WrongKnowledge(frozenset({kind})).knowledge(honest.to_bytes(), 10))
    for name in ("classes", "representations", "predictions", "counts"):
        assert np.array_equal(getattr(wrong, name), getattr(honest, name)) == (name != changed)


def test_wrong_prototypes() -> None:
    honest = Prototypes(
        classes=np.array([1, 3]),
        prototypes=np.float32([[1, 2], [3, 4]]),
        counts=np.array([5, 6]),
        num_classes=4,
    )
    wrong = Prototypes.from_bytes(WrongKnowledge().knowledge(honest.to_bytes(), 11))
    assert wrong.prototypes.tolist() == [[-10.0, -20.0], [-30.0, -40.0]]
    assert wrong.counts.tolist() == [10, 1]
    assert wrong.num_classes == 4
    none = Prototypes(np.zeros(0, np.int64), np.zeros((0, 2), np.float32), np.zeros(0, np.int64), 4)
    assert Prototypes.from_bytes(WrongKnowledge().knowledge(none.to_bytes(), 11)) == none
    data = honest.to_bytes()
    assert WrongKnowledge(frozenset({"predictions"})).knowledge(data, 11) == data


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_wrong_features(dtype: Any) -> None:
    honest = ClientFeatures(
        index=np.array([1, 0]),
        features=np.array([[1.0, 60000.0], [-60000.0, 0.5]], dtype=dtype),
        logits=np.float32([[3, 1, 2], [0, -1, 5]]),
        labels=np.array([0, 2]),
        test_features=np.array([[1.0, 2.0]], dtype=dtype),
        test_labels=np.array([1]),
    )
    wrong = ClientFeatures.from_bytes(WrongKnowledge().knowledge(honest.to_bytes(), 2))
    assert wrong.features.dtype == dtype
    assert wrong.features.tolist() == [[-10.0, -65504.0], [65504.0, -5.0]]
    assert wrong.logits.tolist() == [[2, 3, 1], [5, 0, -1]]
    for name in ("index", "labels", "test_features", "test_labels"):
        assert np.array_equal(getattr(wrong, name), getattr(honest, name))


def test_whom_an_attack_concerns() -> None:
    def concerned(spec: str) -> set[str]:
        names = {
            name for name in registry.methods() if parse_attack(spec).concerns(registry.get(name).strategy)
        }
        return names & {"fedavg", "fedhyb", "fedproto", "fedgkt", "fedhkd"}

    assert concerned("label-flip") == {"fedavg", "fedhyb", "fedproto", "fedgkt", "fedhkd"}
    for spec in ("gaussian:1", "sign-flip", "nan"):
        assert concerned(spec) == {"fedavg", "fedhyb", "fedhkd"}
    assert concerned("payload") == {"fedproto", "fedgkt", "fedhkd"}
    assert concerned("payload:counts") == {"fedproto", "fedhkd"}
    assert concerned("payload:predictions") == {"fedgkt", "fedhkd"}
    assert concerned("prototype-swap") == {"fedproto", "fedhkd"}
    assert concerned("lma") == concerned("cpa") == {"fedgkt", "fedhkd"}
    assert concerned("alie") == concerned("ipm") == concerned("scale:2") == {"fedavg", "fedhyb", "fedhkd"}
