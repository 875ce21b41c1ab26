"""Each table and figure of the papers can be started by whoever has its data: small files of its format show it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import ExperimentOptions
from flwr_kd.experiments.comparison import Entry
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.papers import library, report, reproduction
from flwr_kd.experiments.papers.paper import Paper
from flwr_kd.experiments.papers.reproduction import Job, Reproduction
from flwr_kd.experiments.papers.schema import PaperExperiment
from flwr_kd.experiments.run_form import Values
from tests.data.small_files import WRITERS

EACH = 12
"""Training samples of each class."""
TRAINED = [
    pytest.param(paper, each, id=f"{paper.id}/{each.id}")
    for paper, each in library.every()
    if each.trained and not each.runs_of
]
COMPUTED = [
    pytest.param(paper, each, id=f"{paper.id}/{each.id}")
    for paper, each in library.every()
    if not each.trained
]
QUICK = {
    **dict.fromkeys(
        ("local_epochs", "sector_epochs", "server_epochs", "finetune_epochs", "distill_epochs"), 1
    ),
    **dict.fromkeys(
        ("warmup_epochs", "local_steps", "generator_epochs", "generator_steps", "server_batches"), 1
    ),
    **{"public_samples": 8, "batch_size": 8, "public_batch_size": 8, "synthetic_samples": 10},
}
MODELS = {"lenet,alexnet,resnet18,shufflenet": "lenet,mlp", "bilstm": "bilstm", "mlp4": "mlp4"}
PARTITIONS = {"ktpfl-1": "ktpfl-1:3", "ktpfl-2": "ktpfl-2:3"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        for write in WRITERS.values():
            write(folder, EACH, patch)
        yield str(folder)


def smaller(job: Job, folder: Path, rows: slice = slice(None)) -> Job:
    """Return the same comparison with two clients, small models and one epoch."""
    options = job.options
    model = options.model or ""
    split = model.startswith("resnet2,")
    changed = replace(
        options,
        clients=2,
        rounds=1,
        fraction_train=1.0,
        limit=60 if options.limit else None,
        model="resnet2,resnet4" if split else MODELS.get(model, "mlp"),
        feature_dim=None,
        imbalance=2 if options.imbalance else None,
        attackers=min(1, options.attackers),
        partition=PARTITIONS.get(options.partition.partition(":")[0], options.partition),
        public_limit=12,
        **({"hold_back": 12} if options.hold_back else {}),
        backend="inline",
        device="cpu",
    )
    entries = tuple(quick(entry) for entry in job.entries[rows])
    return Job(job.cells, changed, entries, folder / job.folder.name)


def quick(entry: Entry) -> Entry:
    known = entry.config.field_types()
    values = {name: value for name, value in QUICK.items() if name in known and getattr(entry.config, name)}
    changes = {name: value for name, value in values.items() if name not in entry.method.fixed}
    return replace(entry, config=replace(entry.config, **changes))


def by_data(chosen: Reproduction) -> list[Job]:
    """Return a job of each data set and kind of partition."""
    found: dict[Any, Job] = {}
    for job in chosen.jobs:
        kind = job.options.partition.partition(":")[0]
        found.setdefault((job.options.dataset, kind, job.options.merge_test), job)
    return list(found.values())


def started(paper: Paper, experiment: PaperExperiment, data_dir: str, folder: Path, rows: slice) -> None:
    chosen = reproduction.prepare(f"{paper.id}/{experiment.id}", settings={"data_dir": data_dir}, seeds=[0])
    assert {cell.id for job in chosen.jobs for cell in job.cells} == {cell.id for cell in experiment.run}
    jobs = tuple(smaller(job, folder, rows) for job in by_data(chosen))
    changed = replace(chosen, jobs=jobs if rows == slice(None) else jobs[:1], folder=folder)
    assert reproduction.run(changed) == {}
    made = report.report(changed)
    text = report.write(made).read_text()
    for job in changed.jobs:
        for entry in job.entries:
            assert f"| `{entry.name}` |" in text or f"| {job.cells[0].id} |" in text
    measured = {
        row for cell in made.grid for values in cell.values.values() for row, seeds in values.items() if seeds
    }
    if experiment.kind in ("accuracy", "sweep", "curve"):
        # Each row has the numbers that the paper prints of it.
        assert measured == {entry.name for job in changed.jobs for entry in job.entries}


@pytest.mark.parametrize(("paper", "experiment"), TRAINED)
def test_each_table_starts(paper: Paper, experiment: PaperExperiment, data_dir: str, tmp_path: Path) -> None:
    """The paper's own method and the first one, on the first data set."""
    last = len(experiment.methods) - 1
    started(paper, experiment, data_dir, tmp_path, slice(0, last + 1, max(1, last)))


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "experiment"), TRAINED)
def test_each_table_starts_with_each_method_and_data_set(
    paper: Paper, experiment: PaperExperiment, data_dir: str, tmp_path: Path
) -> None:
    started(paper, experiment, data_dir, tmp_path, slice(None))


@functools.lru_cache(maxsize=1)
def models() -> dict[tuple[Any, ...], ExperimentOptions]:
    """Return an experiment for each model and data set of all papers' cells."""
    found = {}
    for paper, experiment in library.every():
        if experiment.trained:
            for job in reproduction.prepare(f"{paper.id}/{experiment.id}").jobs:
                options = job.options
                key = options.dataset, options.model, options.feature_dim, options.image_size, options.classes
                found.setdefault(key, options)
    return found


@pytest.mark.parametrize("options", [pytest.param(o, id=f"{k[0]}-{k[1]}") for k, o in models().items()])
def test_each_papers_model_takes_its_data(options: ExperimentOptions, data_dir: str) -> None:
    import torch

    changed = replace(options, data_dir=data_dir, limit=None, client_samples=None, hold_back=None)
    experiment = Experiment.from_options(changed, 0)
    from flwr_kd.experiments.data import bundle_of

    bundle = bundle_of(experiment)
    samples = bundle.train.x[:2]
    for index, _ in enumerate(experiment.models):
        model = experiment.build_model(index).eval()
        with torch.no_grad():
            assert model(samples).shape == (2, bundle.num_classes)


@pytest.mark.parametrize(("paper", "experiment"), COMPUTED)
def test_each_table_without_training_is_computed(
    paper: Paper, experiment: PaperExperiment, data_dir: str, tmp_path: Path
) -> None:
    settings: Values = {"data_dir": data_dir}
    chosen = reproduction.prepare(f"{paper.id}/{experiment.id}", out=tmp_path, settings=settings)
    made = report.report(chosen, settings=settings)
    assert made.not_run == {}
    text = report.write(made).read_text()
    assert text.startswith(f"# {paper.id}/{experiment.id}: ")
    if experiment.kind == "partition":
        assert set(made.class_counts) == {cell.id for cell in experiment.run}
        for cell in experiment.run:
            assert len(made.class_counts[cell.id]) == int({**experiment.settings, **cell.settings}["clients"])
        assert report.draw(made) is not None
    elif experiment.kind != "derived":
        assert made.quantities
        assert any(each.ours is not None for each in made.quantities)
