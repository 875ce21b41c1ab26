"""``flwr-kd reproduce``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_kd.experiments.papers import estimate, library
from tests.cli.commands import Command, is_a_picture

TABLE = """
id = "figure-1"
kind = "picture"
title = "A map"
claim = "Features are apart."
source = "section 2"
unit = "none"
metric = "t-SNE"
methods = ["fedavg", "fedhkd"]

[measures]
map = "tsne"

[settings]
dataset = "digits"
clients = 2
rounds = 1
limit = 150

[hyperparameters]
fedhkd = { noise = "none" }

[[run]]
id = "iid"
settings = { partition = "iid" }
[[run]]
id = "skewed"
settings = { partition = "dirichlet:0.1" }

[[expect]]
claim = "the map has islands"
kind = "text"
source = "stated"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "paper.toml").write_text('id = "mine"\ntitle = "A Paper"\nauthors = "Somebody"\n')
    (folder / "figure-1.toml").write_text(TABLE)
    monkeypatch.setattr(library, "folders", lambda: [folder])
    library.papers.cache_clear()
    yield
    library.papers.cache_clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "seconds_per_sample", lambda *args: 0.001)


def test_the_list_names_each_experiment_with_its_claim_data_and_cost(command: Command, timed: None) -> None:
    code, out, err = command("reproduce")
    assert (code, err) == (0, "")
    for paper, experiment in library.every():
        assert f"  {paper.id}/{experiment.id} " in out
        assert experiment.claim.split()[0] in out
    (line,) = (each for each in out.splitlines() if each.startswith("  fedhkd/table-2 "))
    assert "accuracy" in line
    assert "–cifar10" in line
    # 9 methods, 3 seeds, 10 clients, 50 rounds, 5 epochs: of 375 samples 6 batches, of 549 9, in two cells each.
    assert f"{9 * 3 * 10 * 50 * 5 * (6 + 9) * 2 / 1e6:.2g} M steps" in line


def test_a_few_steps_of_a_model_are_timed() -> None:
    size = estimate.SIZES["digits"]
    seconds = estimate.seconds_per_sample("mlp", size)
    assert seconds is not None
    assert seconds > 0
    # The second call does not measure again.
    assert estimate.seconds_per_sample("mlp", size) == seconds
    assert estimate.seconds_per_sample("bilstm", size) is None
    assert estimate.seconds_per_sample("mlp", None) is None


def test_an_experiment_is_run_and_drawn(command: Command, tmp_path: Path, mine: None) -> None:
    options = ("--only", "iid", "--seeds", "1", "--backend", "inline", "--device", "cpu", "--out", "o")
    code, out, err = command("reproduce", "mine/figure-1", *options, "--dry-run")
    assert (code, err) == (0, "")
    assert "iid: " in out
    assert "fedhkd: noise=none" in out
    assert "skewed" not in out
    assert not (tmp_path / "o").exists()
    code, out, err = command("reproduce", "mine/figure-1", *options)
    assert (code, err) == (0, "")
    assert "to be judged by reading: the map has islands" in out
    assert f"page: {tmp_path / 'o' / 'figure-1.md'}" in out
    assert "flwr-kd reproduce mine/figure-1 --only iid" in (tmp_path / "o" / "figure-1.md").read_text()
    assert is_a_picture(tmp_path / "o" / "iid" / "tsne.png")
    # It goes on: what is finished is not run again.
    code, out, err = command("reproduce", "mine/figure-1", *options)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mine/figure-2",), "unknown experiment 'mine/figure-2' (did you mean 'mine/figure-1'?)"),
        (("mine/figure-1", "--scale", "tiny"), "scale must be one of paper, small, got 'tiny'"),
        (("mine/figure-1", "--scale", "small"), "figure-1 has no small version"),
        (("mine/figure-1", "--only", "mnist"), "no cell of mine/figure-1 has all of mnist"),
        (("mine/figure-1", "--seeds", "a"), "seeds must be whole numbers from 0"),
    ],
)
def test_a_mistake_is_one_line(command: Command, mine: None, words: tuple[str, ...], message: str) -> None:
    code, _, err = command("reproduce", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert message in err


def test_an_experiments_file_is_a_file_of_settings(command: Command, tmp_path: Path, mine: None) -> None:
    file = str(tmp_path / "experiments" / "figure-1.toml")
    options = ("--seeds", "1", "--backend", "inline", "--device", "cpu", "--no-arrays", "--out", "o")
    assert command("compare", "--config", file, *options).code == 0
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["iid", "skewed"]
