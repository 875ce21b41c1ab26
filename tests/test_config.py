"""Hyper-parameters: types, ranges, names, and the way over the wire."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_kd.checks import ConfigError
from flwr_kd.config import MethodConfig, StepDecayConfig, hyper
from flwr_kd.learning.batches import into_batches
from flwr_kd.strategies.feddf import PFedDFConfig
from flwr_kd.strategies.fedhead import FedHEADConfig
from flwr_kd.text import unknown_name

repeatable = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    temperature: float = hyper(0.5, "softens", gt=0, le=10)
    share: float = hyper(0.25, "part", ge=0, lt=1)
    steps: int = hyper(3, "number", ge=0, le=5)
    weighted: bool = hyper(True, "weights by samples")
    mode: str = hyper("mean", "how", choices=("mean", "sum"))
    name: str = hyper("", "free text")


floats = {"allow_nan": False, "allow_infinity": False}
configs = st.builds(
    Config,
    local_epochs=st.integers(1, 10**9),
    learning_rate=st.floats(0, exclude_min=True, **floats),
    lr_decay=st.floats(0, 1, exclude_min=True),
    momentum=st.floats(0, 1, exclude_max=True),
    optimizer=st.sampled_from(["adam", "sgd"]),
    temperature=st.floats(0, 10, exclude_min=True),
    share=st.floats(0, 1, exclude_max=True),
    steps=st.integers(0, 5),
    weighted=st.booleans(),
    mode=st.sampled_from(["mean", "sum"]),
    name=st.text(st.characters(codec="utf-8"), max_size=8).map(str.strip),
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"temperature": 0.0}, "temperature must be > 0 and <= 10, got 0.0"),
        ({"temperature": 10.5}, "temperature must be > 0 and <= 10, got 10.5"),
        ({"temperature": float("nan")}, "temperature must be finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite, got inf"),
        ({"temperature": 10**400}, "temperature must be finite, got a whole number beyond float's range"),
        ({"temperature": "1"}, "temperature must be of type float, got '1'"),
        ({"temperature": True}, "temperature must be of type float, got True"),
        ({"temperature": None}, "temperature must be of type float, got None"),
        ({"share": 1.0}, "share must be >= 0 and < 1, got 1.0"),
        ({"share": -1e-9}, "share must be >= 0 and < 1, got -1e-09"),
        ({"steps": 6}, "steps must be >= 0 and <= 5, got 6"),
        ({"steps": -1}, "steps must be >= 0 and <= 5, got -1"),
        ({"steps": 2.0}, "steps must be of type int, got 2.0"),
        ({"steps": True}, "steps must be of type int, got True"),
        ({"weighted": 1}, "weighted must be of type bool, got 1"),
        ({"weighted": "yes"}, "weighted must be of type bool, got 'yes'"),
        ({"mode": "max"}, "mode must be one of mean, sum, got 'max'"),
        ({"name": 3}, "name must be of type str, got 3"),
        ({"local_epochs": 0}, "local-epochs must be >= 1, got 0"),
        ({"batch_size": 0}, "batch-size must be >= 1, got 0"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of adam, sgd, got 'lbfgs'"),
        ({"learning_rate": 0}, "learning-rate must be > 0, got 0.0"),
        ({"lr_decay": 1.5}, "lr-decay must be > 0 and <= 1, got 1.5"),
        ({"lr_decay_every": 0}, "lr-decay-every must be >= 1, got 0"),
        ({"momentum": 1.0}, "momentum must be >= 0 and < 1, got 1.0"),
        ({"weight_decay": -1.0}, "weight-decay must be >= 0, got -1.0"),
    ],
)
def test_bad_value(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**changes)
    assert str(caught.value) == text
    with pytest.raises(ConfigError) as caught:
        Config.from_wire({name.replace("_", "-"): value for name, value in changes.items()})
    assert str(caught.value) == text


def test_bounds_themselves() -> None:
    config = Config(temperature=10.0, share=0.0, steps=0, lr_decay=1.0, momentum=0.0, local_epochs=1)
    assert (config.temperature, config.share, config.steps) == (10.0, 0.0, 0)
    assert Config(steps=5).steps == 5


def test_a_whole_number_for_a_float() -> None:
    config = Config(temperature=2)
    assert config.temperature == 2.0
    assert type(config.temperature) is float
    assert type(Config.from_mapping({"temperature": 2}).temperature) is float


def test_frozen_and_equal_by_value() -> None:
    assert Config(steps=2) == Config(steps=2) != Config(steps=3)
    with pytest.raises(FrozenInstanceError):
        Config().steps = 4  # type: ignore[misc]


def test_field_types_of_classes_are_kept_apart() -> None:
    assert "temperature" not in MethodConfig.field_types()
    assert Config.field_types()["weighted"] is bool
    assert Config.field_types()["local_epochs"] is int


class TestNames:
    def test_both_spellings(self) -> None:
        assert Config.from_mapping({"local-epochs": 2, "batch_size": 7}) == Config(
            local_epochs=2, batch_size=7
        )

    def test_unknown_name_with_the_nearest(self) -> None:
        for build in (
            lambda: Config.from_mapping({"temprature": 1.0}),
            lambda: Config.from_texts(["temprature=1.0"]),
        ):
            with pytest.raises(ConfigError) as caught:
                build()
            text = str(caught.value)
            assert text.startswith(
                "unknown hyper-parameter 'temprature' (did you mean 'temperature'?); valid: local-epochs, "
            )
            assert text.endswith("temperature, share, steps, weighted, mode, name")

    def test_nothing_near(self) -> None:
        assert (
            unknown_name("method", "zzz", ["fedavg", "fedhkd"])
            == "unknown method 'zzz'; valid: fedavg, fedhkd"
        )

    def test_inner_names_are_not_hyper_parameters(self) -> None:
        with pytest.raises(ConfigError, match="unknown hyper-parameter '-types'"):
            Config.from_mapping({"_types": {}})


class TestTexts:
    def test_each_type(self) -> None:
        given_ = [
            "temperature=1e-1",
            " steps = 4 ",
            "weighted=false",
            "mode=sum",
            "name=a=b",
            "local_epochs=2",
        ]
        expected = Config(temperature=0.1, steps=4, weighted=False, mode="sum", name="a=b", local_epochs=2)
        assert Config.from_texts(given_) == expected
        assert Config.from_texts([]) == Config()

    @pytest.mark.parametrize(
        ("text", "value"), [("true", True), ("YES", True), ("1", True), ("No", False), ("0", False)]
    )
    def test_bools(self, text: str, value: bool) -> None:
        assert Config.from_texts([f"weighted={text}"]).weighted is value

    def test_the_last_one_wins(self) -> None:
        assert Config.from_texts(["steps=1", "steps=2"]).steps == 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("steps", "'steps' is not of the form name=value"),
            ("steps=two", "steps must be of type int, got 'two'"),
            ("steps=2.5", "steps must be of type int, got '2.5'"),
            ("steps=9", "steps must be >= 0 and <= 5, got 9"),
            ("temperature=warm", "temperature must be of type float, got 'warm'"),
            ("temperature=nan", "temperature must be finite, got nan"),
            ("weighted=maybe", "weighted must be true or false, got 'maybe'"),
            ("mode=", "mode must be one of mean, sum, got ''"),
        ],
    )
    def test_bad_text(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            Config.from_texts([text])
        assert str(caught.value) == message

    def test_fixed_by_the_method(self) -> None:
        assert Config.from_texts(["share=0.5"], steps=1) == Config(share=0.5, steps=1)
        with pytest.raises(ConfigError, match=r"^steps is fixed at 1 by this method, got 2$"):
            Config.from_texts(["steps=2"], steps=1)
        with pytest.raises(ConfigError, match=r"^local-epochs is fixed at 1 by this method, got 2$"):
            Config.from_texts(["local_epochs=2"], local_epochs=1)

    @repeatable
    @given(config=configs)
    def test_what_is_shown_can_be_set(self, config: Config) -> None:
        assert Config.from_texts(f"{name}={value}" for name, value in config.to_wire().items()) == config


class TestWire:
    @repeatable
    @given(config=configs)
    def test_round_trip_in_flowers_config(self, config: Config) -> None:
        record = ConfigRecord({**config.to_wire(), "server-round": 3, "phase": "train", "payload": b"x"})
        assert Config.from_wire(record) == config

    def test_names_are_in_kebab_case(self) -> None:
        wire = Config().to_wire()
        assert wire["lr-decay-every"] == 10
        assert not any("_" in name for name in wire)
        assert len(wire) == len(Config.field_types())

    def test_what_is_missing_has_its_default(self) -> None:
        assert Config.from_wire({"steps": 1, "unknown": 5}) == Config(steps=1)

    @pytest.mark.parametrize("value", [True, 1.0, [1], "1"])
    def test_equal_values_of_another_type_are_refused_after_one_that_fits(self, value: Any) -> None:
        assert Config.from_wire({"steps": 1}) == Config.from_wire({"steps": 1})
        with pytest.raises(ConfigError, match="steps must be of type int"):
            Config.from_wire({"steps": value})

    def test_help_covers_every_field(self) -> None:
        rows = {name: (kind, default, text) for name, kind, default, text in Config.help()}
        assert set(rows) == set(Config().to_wire())
        assert rows["temperature"] == ("float", 0.5, "softens (> 0 and <= 10)")
        assert rows["mode"] == ("str", "mean", "how (one of mean, sum)")
        assert rows["weighted"] == ("bool", True, "weights by samples")


class TestLearningRate:
    def test_halves_after_every_period(self) -> None:
        config = MethodConfig(learning_rate=0.8, lr_decay=0.5, lr_decay_every=2)
        assert [config.learning_rate_at(r) for r in range(1, 8)] == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.1]

    def test_no_decay(self) -> None:
        assert MethodConfig(lr_decay=1.0, lr_decay_every=1).learning_rate_at(1000) == 1e-3

    @repeatable
    @given(config=configs, server_round=st.integers(1, 500))
    def test_never_rises(self, config: Config, server_round: int) -> None:
        now, after = config.learning_rate_at(server_round), config.learning_rate_at(server_round + 1)
        assert 0 <= after <= now <= config.learning_rate_at(1) == config.learning_rate


@pytest.mark.parametrize("size", range(1, 12))
def test_batches_are_counted_as_they_are_made(size: int) -> None:
    for samples in range(40):
        counted = StepDecayConfig(batch_size=size).batches(samples)
        assert counted == len(into_batches(torch.arange(samples), size))


def test_planned_steps_of_the_phases() -> None:
    assert StepDecayConfig(local_epochs=3, batch_size=4).planned_steps("train", 10) == 9
    fedhead = FedHEADConfig(local_epochs=3, sector_epochs=5, batch_size=4, validation_share=0.2)
    assert [fedhead.planned_steps(phase, 10) for phase in ("train", "distill", "distill-again")] == [
        9,
        10,
        10,
    ]
    pfeddf = PFedDFConfig(local_epochs=3, finetune_epochs=2, batch_size=4)
    assert [pfeddf.planned_steps(phase, 10) for phase in ("train", "finetune")] == [9, 6]
