"""Rules as text."""

from __future__ import annotations

import pytest

from flwr_kd.checks import ConfigError
from flwr_kd.server.aggregation import RULES, Rule
from flwr_kd.wording import Interface, speaking

TEXTS = [
    "mean",
    "median",
    "trimmed-mean:0.2",
    "krum:1",
    "multi-krum:2:5",
    "geometric-median",
    "norm-bound:1.5",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_rule_is_what_its_text_says(text: str) -> None:
    rule = Rule.parse(text)
    assert str(rule) == text
    assert rule.name in RULES
    assert rule.is_mean == (text == "mean")


def test_each_rule_has_an_example_here() -> None:
    assert {text.partition(":")[0] for text in TEXTS} == set(RULES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bulyan", "aggregation must be one of mean, median, trimmed-mean:SHARE"),
        ("", "must be one of"),
        (None, "must be one of"),
        ("median:1", "must be one of"),
        ("krum", "krum:F"),
        ("krum:1:2", "must be one of"),
        ("krum:-1", "F of krum"),
        ("krum:1.5", "F of krum"),
        ("multi-krum:1:0", "M of multi-krum must be at least 1"),
        ("trimmed-mean:0.5", "SHARE of trimmed-mean"),
        ("trimmed-mean:-0.1", "SHARE of trimmed-mean"),
        ("trimmed-mean:nan", "aggregation"),
        ("norm-bound:0", "FACTOR of norm-bound"),
        ("norm-bound:inf", "aggregation"),
    ],
)
def test_what_is_no_rule_is_refused(text: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("text", "least", "clients"),
    [
        ("mean", 1, 1),
        ("median", 1, 1),
        ("trimmed-mean:0.4", 1, 1),
        ("krum:0", 3, 3),
        ("krum:2", 7, 7),
        ("multi-krum:2:9", 7, 11),
    ],
)
def test_a_rule_says_how_many_models_it_needs(text: str, least: int, clients: int) -> None:
    rule = Rule.parse(text)
    assert rule.least == least
    rule.check_clients(clients)
    if clients > 1:
        with (
            speaking(Interface.COMMAND),
            pytest.raises(ConfigError, match=f"--aggregation {text} needs at least {clients}"),
        ):
            rule.check_clients(clients - 1)


def test_of_fewer_models_all_but_the_malicious_are_kept() -> None:
    rule = Rule.parse("multi-krum:2:8")
    assert [rule.chosen_of(models) for models in (12, 10, 8, 7, 2)] == [8, 8, 6, 5, 1]
    assert Rule.parse("krum:2").chosen_of(8) == 1
