"""An app's ``pyproject.toml``: every setting with its default and a comment."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flwr_kd.app_files.traits import HyperParameter, Traits
from flwr_kd.experiments.options import ExperimentOptions

if TYPE_CHECKING:
    from flwr_kd.app_files.project import AppProject

__all__ = ["FLOWER", "FLOWER_TARGET", "project_file"]

FLOWER = "flwr>=1.40,<2"
"""Versions of Flower that this package allows."""
FLOWER_TARGET = "1.42.0"
"""The version for which apps are written, and with which they are tested."""
_WIDTH = 116

Block = tuple[str, Mapping[str, Any]]
"""A comment, and the settings below it."""


def project_file(project: AppProject) -> str:
    """Return the text of ``pyproject.toml``, in version 1 of Flower's format."""
    traits = project.traits
    needed = " and ".join(["flwr-kd", *traits.plugins])
    note = f"Only what every package index has. The SuperLink and each SuperNode also need {needed}: see README.md."
    head = f"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {_toml(project.name)}
version = "0.1.0"
description = {_toml(project.description)}
license = {{ file = "LICENSE" }}
requires-python = ">=3.11"
{_comment(note)}
dependencies = [{_toml(FLOWER)}]

[tool.hatch.build.targets.wheel]
packages = [{_toml(project.package)}]

[tool.flwr.app]
publisher = {_toml(project.publisher)}
fab-format-version = 1
flwr-version-target = {_toml(FLOWER_TARGET)}

[tool.flwr.app.components]
serverapp = "{project.package}.server_app:app"
clientapp = "{project.package}.client_app:app"

[tool.flwr.app.config]
"""
    parts = [_run(traits), _own_data(traits), _data_set(traits), _methods(traits), _public_data(traits)]
    texts = ["\n".join(_lines(blocks)) for blocks in parts if blocks]
    return head + "\n\n".join([*texts, "\n".join(_hyper_parameters(traits))]) + "\n"


def _run(traits: Traits) -> list[Block]:
    rules = {
        **({"aggregation": "mean"} if traits.averages_models else {}),
        **({"knowledge-aggregation": "mean"} if traits.averages_knowledge else {}),
    }
    what = " and ".join(
        [
            *(["clients' models"] if traits.averages_models else []),
            *(["clients' knowledge"] if traits.averages_knowledge else []),
        ]
    )
    return [
        ("", {"num-server-rounds": 10}),
        ("Number of SuperNodes that round 1 waits for.", {"min-nodes": 2}),
        (
            "A round with fewer usable replies than min-train-nodes is void. max-void-rounds void rounds in a row "
            "end the run.",
            {"min-train-nodes": 1, "max-void-rounds": 3},
        ),
        ("Share of the clients that is drawn per round.", {"fraction-train": 1.0}),
        (
            "Largest sample count that is accepted as a client's weight; 0: 10 times the median of the clients.",
            {"max-examples": 0},
        ),
        *([(f"How the server averages {what}: mean, or a robust rule.", rules)] if rules else []),
        ("Seconds that a phase waits for replies.", {"timeout": 3600.0}),
        ("Seed of the partition, the initial weights, the batches and the drawn clients.", {"seed": 0}),
        (
            "Rounds after which models are also measured on the common test set, and a global one on the clients' "
            "own data: never, last or every:N.",
            {"measure": "last"},
        ),
        (
            "Cores on which the server computes; 0 is all of them. The numbers do not depend on it.",
            {"cores": 0},
        ),
        (
            "Absolute paths at the server, for the result (empty: a folder of its own in ~/flwr-kd/runs; none: no "
            "result) and for the state after each round. resume continues from that state.",
            {"out": "", "checkpoint-dir": "", "resume": False},
        ),
        (
            "Trackers that the server writes to: tensorboard[:DIR], mlflow[:URI], wandb[:PROJECT], separated by "
            "commas.",
            {"log": ""},
        ),
        (
            "In a simulation: noise that protects clients comes from the seed, for equal runs. A SuperNode follows "
            "its own node config instead.",
            {"reproducible-noise": False},
        ),
    ]


def _own_data(traits: Traits) -> list[Block]:
    test = "Absolute path at the server of test data for the model that it measures."
    return [
        (
            "With classes, each SuperNode has its own data (data-path in its node config). classes are label "
            'names, separated by commas. input-shape is "1x28x28" (channels, height, width) for images, and "16" '
            "for a table with 16 columns.",
            {"classes": "", "input-shape": ""},
        ),
        *([(test, {"test-path": ""})] if traits.measures_model else []),
    ]


def _data_set(traits: Traits) -> list[Block]:
    several = (
        "Several names, separated by commas, are given to the clients in turn."
        if traits.heterogeneous
        else ""
    )
    data = ExperimentOptions()
    return [
        (
            "Without classes, a data set is divided among the SuperNodes. A limit of 0 keeps all samples.",
            {
                "dataset": data.dataset,
                "data-dir": "",
                "partition": data.partition,
                "limit": 0,
                "test-limit": 0,
            },
        ),
        (
            "Share of each client's part that is its test split; with 0 it trains on all, and there is no local "
            "accuracy.",
            {"test-fraction": data.test_fraction},
        ),
        ("Ratio of the largest to the smallest class; 0 keeps all samples.", {"imbalance": 0.0}),
        (several, {"model": traits.model}),
    ]


def _methods(traits: Traits) -> list[Block]:
    if len(traits.methods) == 1:
        return []
    names = [method.name for method in traits.methods]
    return [(f"One of {', '.join(names)}.", {"method": names[0]})]


def _public_data(traits: Traits) -> list[Block]:
    if not traits.public_at & {"server", "clients"}:
        return []
    return [
        (
            "Public data: a data set's name; empty is the default for dataset. With classes: an image set's name, "
            "or the absolute path of a folder or a csv file.",
            {"public": "", "public-limit": ExperimentOptions().public_limit},
        )
    ]


def _hyper_parameters(traits: Traits) -> Iterator[str]:
    names = ", ".join(method.name for method in traits.methods)
    text = f"Hyper-parameters of {names}."
    if len(traits.methods) > 1:
        text += " A value that a method fixes replaces the value here."
    yield from [_comment(text), ""]
    for each in traits.hyper_parameters:
        yield _comment(_explained(each))
        yield f"{each.name} = {_toml(each.default)}"


def _explained(each: HyperParameter) -> str:
    return each.help + (f" [{', '.join(each.methods)}]" if each.methods else "")


def _lines(blocks: list[Block]) -> Iterator[str]:
    for comment, values in blocks:
        if comment:
            yield _comment(comment)
        for name, value in values.items():
            yield f"{name} = {_toml(value)}"


def _comment(text: str) -> str:
    return "\n".join(
        f"# {line}"
        for line in textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    )


def _toml(value: bool | int | float | str) -> str:
    """Return a value as TOML has it; JSON writes texts and truth values in the same way.

    >>> _toml(1e-05), _toml(True), _toml("a")
    ('1e-05', 'true', '"a"')
    """
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
