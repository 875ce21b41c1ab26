"""Writes the tables and pictures of the pages from the results in benchmarks/results; `make results` calls it.

A page has a table's place between ``<!-- results: NAME ... -->`` and ``<!-- end -->``. With ``--check`` nothing is
written, and the exit status is 1 where a page does not show what was measured.

Usage: python benchmarks/report.py [--check]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bytes as bytes_program
import grids
import model_store as model_store_program
import numpy as np
import overhead as overhead_program
import paper_tables
import remake
import robustness_tables
import scale as scale_program
from accuracy import BASELINES as BASELINES_ROWS
from accuracy import (
    BASELINES_PARTS,
    DIGITS,
    FASHION,
    LETTERS,
    PAPERS_PARTS,
    RATES,
    SETTINGS,
    SETTINGS_OF,
    SGD,
    TARGET,
    VARIANTS,
    has_own_models,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from flwr_kd import registry
from flwr_kd.plotting.style import palette
from flwr_kd.results import files, table
from flwr_kd.results.clients import ALONE
from flwr_kd.results.measures import Target
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.results.statistics import Difference, paired_difference

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"digits": "digits", "letters": "letters", "fashion-mnist": "Fashion-MNIST"}
IN_PICTURE = tuple(name for name, method in registry.methods().items() if "picture" in method.benchmarks)
SOURCE = "flwr-kd results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is old")
    options = parser.parse_args()
    old = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            old.append(str(page.relative_to(ROOT)))
            if not options.check:
                page.write_text(new, encoding="utf-8")
    for picture in PICTURES:
        if picture.carried() != picture.digest():
            old.append(str(picture.path.relative_to(ROOT)))
            if not options.check:
                picture.write()
    print("\n".join(f"{'old' if options.check else 'written'}: {name}" for name in old) or "all as measured")
    sys.exit(1 if options.check and old else 0)


def pages() -> list[Path]:
    patterns = ("README.md", "docs/*.md", "strategies/*/README.md")
    return [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]


def filled(text: str) -> str:
    """Return a page's text with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        name, *words = match[1].split()
        return f"<!-- results: {match[1]} -->\n\n{TABLES[name](*words)}\n\n<!-- end -->"

    return re.sub(r"<!-- results: (.+?) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


# ---------------------------------------------------------------------- tables


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


PARTS = {"accuracy": PAPERS_PARTS, "baselines": BASELINES_PARTS}
"""By folder of results, the parts that it may have."""


def measured(group: str) -> dict[str, dict[str, Any]]:
    """Return the parts of a folder of results that are there."""
    return {part: setting for part, setting in PARTS[group].items() if (RESULTS / group / part).exists()}


_read_once = functools.cache(files.load)


def loaded(part: str, group: str = "accuracy") -> Comparison:
    return _read_once(RESULTS / group / part)


def document(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def data_of(setting: Mapping[str, Any]) -> str:
    """Return a part's data set and partition."""
    return f"{NAMES[setting['dataset']]}, `{setting['partition']}`"


def percent(values: Sequence[float | None]) -> str:
    present = [100 * value for value in values if value is not None]
    if not present:
        return "–"
    return f"{statistics.fmean(present):.1f}" + (
        f" ± {statistics.stdev(present):.1f}" if len(present) > 1 else ""
    )


def significant(value: float) -> str:
    """Write two significant digits, or all of a larger number."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def to_target(runs: Sequence[RunResult]) -> tuple[str, str, str]:
    """Return rounds, MB and seconds to the target, each a mean over the seeds that reach it."""
    reached = []
    for run in runs:
        last, sent, seconds = run.to_target(Target(100 * TARGET)).values()
        if last is not None and sent is not None and seconds is not None:
            reached.append((last, sent / 1e6, seconds))
    if not reached:
        return "–", "–", "–"
    rounds, sent, seconds = (statistics.fmean(column) for column in zip(*reached, strict=True))
    some = "" if len(reached) == len(runs) else f" ({len(reached)} of {len(runs)})"
    return f"{rounds:.1f}{some}", f"{significant(sent)}{some}", significant(seconds)


def side_by_side(part: str) -> str:
    """Return the table of a part of the group `papers`: every row beside FedAvg, fine-tuned FedAvg and alone."""
    comparison = loaded(part)
    groups = comparison.by_method()
    better = {row["method"]: row["better_off"]["mean"] for row in comparison.summary()}
    rows = []
    for row, runs in groups.items():
        _, sent, seconds = to_target(runs)
        if row == ALONE:
            sent = "–"
        # A client with another model is not better off by what it has learnt.
        share = None if has_own_models(registry.get(runs[0].method)) else better[row]
        rows.append(
            [
                f"`{row}`",
                *against_fedavg(groups, row),
                "–" if share is None else f"{100 * share:.0f}",
                sent,
                seconds,
            ]
        )
    said = f"{accuracy_text([part])} {own_settings(list(groups))}".rstrip()
    return f"{markdown(HEADER, rows)}\n\n{said}{earlier_defaults(groups)} {made_with('accuracy', part)}"


LOCAL_TRAINING = dict(text.split("=") for text in SETTINGS)


TRAINED_ON = {
    "digits": f"digits: {DIGITS['rounds']} rounds of the MLP",
    "fashion-mnist": (
        f"Fashion-MNIST: {FASHION['rounds']} rounds of LeNet on {FASHION['limit']:,} training images and the whole "
        "test set"
    ),
}


def accuracy_text(parts: Collection[str]) -> str:
    """Say what all rows of some parts of the group `papers` share."""
    data = dict.fromkeys(PAPERS_PARTS[part]["dataset"] for part in parts)
    return (
        f"10 clients, {seeds_of(parts, 'accuracy')}; {'; '.join(TRAINED_ON[name] for name in data)} (FedGKT and "
        f"FedDKC have their own models); {LOCAL_TRAINING['local-epochs']} local epochs, batches of "
        f"{LOCAL_TRAINING['batch-size']}."
    )


def seeds_of(parts: Collection[str], group: str) -> str:
    """Say how many seeds each part of a folder of results has, those with most first."""
    by_number: dict[int, list[str]] = {}
    for part in parts:
        seeds = {run.seed for run in loaded(part, group).runs}
        by_number.setdefault(len(seeds), []).append(data_of(PARTS[group][part]))
    if len(by_number) == 1:
        return f"{next(iter(by_number))} seeds"
    *more, least = sorted(by_number, reverse=True)
    named = [f"{number} seeds on {' and '.join(by_number[number])}" for number in more]
    return ", ".join([*named, f"else {least}"])


def earlier_defaults(rows: Mapping[str, Sequence[RunResult]]) -> str:
    """Say which rows were measured with other values than today's defaults, beside those of the local training."""
    said = []
    for row, runs in rows.items():
        method = registry.get(runs[0].method)
        today = method.config().to_wire()
        own = {text.partition("=")[0] for text in (*SETTINGS_OF.get(row, ()), *VARIANTS.get(row, ("",))[1:])}
        chosen = {*LOCAL_TRAINING, *own, "learning-rate", "distill-learning-rate", *method.fixed}
        changed = [
            f"{name}={value}"
            for name, value in runs[0].hyperparameters.items()
            if name in today and name not in chosen and today[name] != value
        ]
        said += [f"`{row}`: `{' '.join(changed)}`."] if changed else []
    return " ".join([" Measured with earlier defaults:", *said]) if said else ""


def of_methods(*names: str) -> str:
    """Return the table of a method's page: its rows in all parts, beside FedAvg's."""
    rows = []
    shown: dict[str, list[RunResult]] = {}
    parts = measured("accuracy")
    for part, setting in parts.items():
        label = data_of(setting)
        groups = loaded(part).by_method()
        for method in dict.fromkeys(("fedavg", *names)):
            runs = shown[method] = groups[method]
            rows.append(
                [
                    label,
                    f"`{method}`",
                    *(
                        percent([run.last[f"{kind}_accuracy"] for run in runs])
                        for kind in ("local", "global")
                    ),
                    significant(
                        statistics.fmean(
                            (run.last["bytes_up"] or 0) + (run.last["bytes_down"] or 0) for run in runs
                        )
                        / 1e6
                    ),
                    *to_target(runs),
                ]
            )
    header = (
        "data, partition",
        "method",
        "local %",
        "global %",
        "MB/round",
        "rounds to 85 %",
        "MB to it",
        "s to it",
    )
    return (
        f"{markdown(header, rows)}\n\n{accuracy_text(parts)}{earlier_defaults(shown)} {made_with('accuracy')}"
    )


def local(run: RunResult) -> float | None:
    """Return the clients' own models' accuracy on their test splits in the last round."""
    return run.last["local_accuracy"]


def on_clients(run: RunResult) -> float | None:
    """Return the global model's accuracy on the clients' test splits, of a run whose clients adapted it."""
    return run.rounds[-1].accuracy_before


def globally(run: RunResult) -> float | None:
    """Return the global model's accuracy on the common test set in the last round."""
    return run.last["global_accuracy"]


def by_seed(runs: Sequence[RunResult], value: Callable[[RunResult], float | None]) -> dict[int, float | None]:
    return {run.seed: value(run) for run in runs}


def points(difference: Difference | None) -> str:
    """Write a difference in percentage points with its interval; bold where 0 is outside it."""
    if difference is None or difference.interval is None:
        return "–"
    low, high = (f"{100 * limit:+.1f}" for limit in difference.interval)
    text = f"{100 * difference.mean:+.1f} [{low}, {high}]".replace("-", "−")
    return f"**{text}**" if difference.decided else text


DIFFERENCES = (
    "local %",
    "over FedAvg's global model",
    "over FedAvg, fine-tuned",
    "global %",
    "over FedAvg",
)


HEADER = ("method", *DIFFERENCES, "better off than alone %", "MB to 85 %", "s to 85 %")


def against_fedavg(groups: dict[str, list[RunResult]], row: str) -> list[str]:
    """Return a row's accuracies, and its differences to FedAvg and to FedAvg with fine-tuning."""
    tuned = groups["fedavg-ft"]
    mine = by_seed(groups[row], local)
    whole = by_seed(groups[row], globally)
    reference = None if row in ("fedavg", "fedavg-ft") else by_seed(groups["fedavg"], globally)
    return [
        percent(list(mine.values())),
        points(paired_difference(mine, by_seed(tuned, on_clients))),
        "–" if row == "fedavg-ft" else points(paired_difference(mine, by_seed(tuned, local))),
        percent(list(whole.values())),
        "–" if reference is None else points(paired_difference(whole, reference)),
    ]


def baselines(part: str) -> str:
    """Return all rows of a part, beside FedAvg and FedAvg with fine-tuning."""
    groups = loaded(part, "baselines").by_method()
    rows = [[f"`{row}`", *against_fedavg(groups, row)] for row in groups]
    whole = percent(list(by_seed(groups["fedavg-ft"], on_clients).values()))
    rows.insert(0, ["FedAvg's global model", whole, *["–"] * (len(DIFFERENCES) - 1)])
    return markdown(("method", *DIFFERENCES), rows)


def baselines_of(*names: str) -> str:
    """Return the table of a method's page: its rows in all new parts, beside FedAvg with fine-tuning."""
    rows = []
    for part, setting in measured("baselines").items():
        groups = loaded(part, "baselines").by_method()
        label = data_of(setting)
        for name in dict.fromkeys(("fedavg", "fedavg-ft", *names)):
            if name in groups:
                rows.append([label, f"`{name}`", *against_fedavg(groups, name)])
    header = ("data, partition", "method", *DIFFERENCES)
    return f"{markdown(header, rows)}\n\n{baselines_text()} {own_settings(names)}".rstrip()


def own_settings(names: Sequence[str]) -> str:
    """Say which settings of the rows differ from the defaults beside those of the local training."""
    said = [f"`{name}`: `{' '.join(SETTINGS_OF[name])}`." for name in names if name in SETTINGS_OF]
    return " ".join(["Chosen on validation data:", *said]) if said else ""


def baselines_settings() -> str:
    """Say what all rows of the new parts share, and which have settings of their own."""
    names = [name for name in SETTINGS_OF if name in BASELINES_ROWS]
    return f"{baselines_text()} {own_settings(names)} {made_with('baselines')}"


def with_sgd() -> str:
    """Return what methods that fix plain SGD have beside fine-tuned FedAvg with plain SGD, in all parts."""
    rows = []
    for part, setting in BASELINES_PARTS.items():
        groups = loaded(part, "sgd").by_method()
        label = data_of(setting)
        reference = by_seed(groups[SGD[0]], local)
        for name in SGD:
            mine, whole = by_seed(groups[name], local), by_seed(groups[name], globally)
            difference = "–" if name == SGD[0] else points(paired_difference(mine, reference))
            rows.append(
                [label, f"`{name}`", percent(list(mine.values())), difference, percent(list(whole.values()))]
            )
    header = ("data, partition", "method", "local %", f"over `{SGD[0]}`", "global %")
    return f"{markdown(header, rows)}\n\n{own_settings(SGD)} {made_with('sgd')}"


def baselines_side_by_side() -> str:
    """Return the local accuracy of every row in all new parts."""
    parts = [loaded(part, "baselines").by_method() for part in measured("baselines")]
    header = [data_of(setting) for setting in measured("baselines").values()]
    first = [
        "FedAvg's global model",
        *(percent([*by_seed(p["fedavg-ft"], on_clients).values()]) for p in parts),
    ]
    names = [row for row in BASELINES_ROWS if any(row in part for part in parts)]
    rows = [
        [f"`{row}`", *(percent([*by_seed(part.get(row, []), local).values()]) for part in parts)]
        for row in names
    ]
    return f"{markdown(('method', *header), [first, *rows])}\n\n{made_with('baselines')}"


def baselines_text() -> str:
    """Say what all rows of the group `baselines` share."""
    return (
        f"10 clients, {seeds_of(measured('baselines'), 'baselines')}; {LETTERS['rounds']} rounds of the MLP "
        f"on all digits and on {LETTERS['limit']:,} letters; 5 local epochs of Adam (SGD where a method fixes it) "
        f"with a rate of {RATES['digits']} on digits and {RATES['letters']} on letters, batches of 32."
    )


def fedhkd_search() -> str:
    """Return FedHKD's global accuracy over FedAvg's by seed, for its weights, threshold and noise."""
    cells = document("grid-fedhkd")["cells"]

    reference = cells["fedavg"]["seeds"]

    def found(*setting: str) -> str:
        seeds = cells.get(grids.fedhkd_cell(*setting), {"seeds": {}})["seeds"]
        gains = [
            100 * (seeds[seed]["global_accuracy"] - reference[seed]["global_accuracy"])
            for seed in sorted(seeds)
        ]
        return " / ".join(f"{gain:+.1f}" for gain in gains).replace("-", "−") or "–"

    columns: dict[str, Callable[[str], tuple[str, str, str, str]]] = {
        "λ = γ, ν = 0.25": lambda weight: ("none", "0.25", weight, weight),
        "λ = γ, ν = 0.05": lambda weight: ("none", "0.05", weight, weight),
        "λ, γ = 0, ν = 0.05": lambda weight: ("none", "0.05", weight, "0"),
        "γ, λ = 0, ν = 0.05": lambda weight: ("none", "0.05", "0", weight),
        "λ = γ, ν = 0.25, noise": lambda weight: ("representations", "0.25", weight, weight),
        "λ = γ, ν = 0.05, noise": lambda weight: ("representations", "0.05", weight, weight),
    }
    rows = [[weight, *(found(*setting(weight)) for setting in columns.values())] for weight in grids.WEIGHTS]
    return f"{markdown(['weight', *columns], rows)}\n\n{made_with('grid-fedhkd')}"


def fedhkd_controls(metric: str) -> str:
    """Return what FedHKD has over FedAvg with settings of its search, and over the same without knowledge."""
    rows = []
    for alpha in grids.ALPHAS:
        cells = document(f"grid-fedhkd-controls-{alpha}")["cells"]
        by_cell = {
            name: {int(seed): run[metric] for seed, run in cell["seeds"].items()}
            for name, cell in cells.items()
        }
        for name in ("fedavg", "fedhkd", *grids.FOUND):
            others = ("fedavg", *(f"{name}-{control}" for control in grids.CONTROLS))
            over = [
                points(paired_difference(by_cell[name], by_cell[other]))
                if other in by_cell and other != name
                else "–"
                for other in others
            ]
            rows.append([alpha, f"`{name}`", percent([*by_cell[name].values()]), *over])
    header = ["α", "setting", f"{MEASURED_AS[metric]} %", "over `fedavg`"]
    header += [f"over {control} knowledge" for control in grids.CONTROLS]
    return f"{markdown(header, rows)}\n\n{made_with('grid-fedhkd-controls-0.1')}"


def overhead() -> str:
    """Rounds over those of a bare loop."""
    rows = [overhead_program.cells(row) for row in document("overhead")["rows"]]
    return markdown(
        overhead_program.HEADER, [[setting, f"`{method}`", *rest] for setting, method, *rest in rows]
    )


def shares() -> str:
    """Where the time of a round goes."""
    parts = overhead_program.PARTS
    rows = [
        [row["setting"], f"`{row['method']}`", *(f"{100 * row['parts'][part]:.1f}" for part in parts)]
        for row in document("overhead")["rows"]
        if "parts" in row
    ]
    return markdown(("setting", "method", *parts), rows)


def sizes() -> str:
    """Bytes of each method beside its paper's formula."""
    return markdown(bytes_program.HEADER, bytes_program.rows_for_page(document("bytes")))


def scale() -> str:
    return named(scale_program.sizes(document("scale")["runs"]))


def growth() -> str:
    return named(scale_program.growth(document("scale")["runs"]))


def model_store() -> str:
    """Return what a server needs that keeps a model for each client."""
    made = document("model-store")
    table = markdown(model_store_program.HEADER, model_store_program.rows_for_page(made["cases"]))
    return f"{table}\n\n{made['memory_mb']} MB of models are in memory. {made_with('model-store')}"


def refinement() -> str:
    """Return the speed of KKR and SKR beside a loop over rows."""
    speeds = document("refine")["speed"]
    ways = ("kkr_rows_per_second", "skr_rows_per_second", "loop_rows_per_second", "skr_over_loop")
    rows = [[f"{row['rows']:,} × {row['classes']}", *(f"{row[way]:,}" for way in ways)] for row in speeds]
    header = ("rows × classes", "KKR, rows/s", "SKR, rows/s", "loop with `brentq`, rows/s", "SKR over loop")
    return f"{markdown(header, rows)}\n\n{made_with('refine')}"


def matrix_step() -> str:
    """Return what KT-pFL's server needs for a round, beside two loops over pairs of clients."""

    def over(case: Mapping[str, Any], loop: str) -> str:
        return f"{case[loop]['products_are_times_as_fast']}" if loop in case else "–"

    rows = [
        [f"{case['clients']:,}", f"{1000 * case['seconds']:,.0f}", over(case, "loop"), over(case, "autograd")]
        for case in document("ktpfl")["steps"]
    ]
    header = ("clients", "milliseconds", "closed form, by a loop", "autograd, by a loop")
    return f"{markdown(header, rows)}\n\n{made_with('ktpfl')}"


def narrow() -> str:
    """Return the operations of narrow passes as shares of the full one, for images of 1×28×28."""
    models = [model for model in document("slim")["models"] if model["input_shape"] == [1, 28, 28]]
    rows = [
        [width, *(f"{100 * model['shares'][width]:.1f} %" for model in models)]
        for width in models[0]["shares"]
        if float(width) < 1
    ]
    header = ("width", *(f"`{model['model']}`" for model in models))
    return f"{markdown(header, rows)}\n\n{made_with('slim')}"


def held() -> str:
    """Return what a server holds in memory in a round, beside the size of all models."""
    made = document("load")
    peaks = {(row["method"], row["clients"]): row["peak_above_start"] for row in made["rows"]}
    methods = list(dict.fromkeys(method for method, _ in peaks))
    rows = [
        [
            str(clients),
            f"{clients * made['rows'][0]['model'] / 1e6:,.0f} MB",
            *(f"{peaks[method, clients] / 1e6:,.0f} MB" for method in methods),
        ]
        for clients in dict.fromkeys(clients for _, clients in peaks)
    ]
    header = ("clients", "all models", *(f"`{method}`" for method in methods))
    return f"{markdown(header, rows)}\n\n{made_with('load')}"


MEASURED_AS = {
    "global_accuracy": "global",
    "local_accuracy": "local",
    "trained_accuracy": "local, before the distillation",
    "common_accuracy": "common",
    "server_accuracy": "server",
    "test_accuracy": "global, test set",
    "lowest_accuracy": "lowest of a client after round 3",
}


def grid(name: str, *words: str) -> str:
    """Return a table of benchmarks/grids.py: a row per measured cell, in percent, with differences to the control.

    Differences are paired by seed, with 95 % intervals. The words are the columns' metrics, and cells where not all
    are shown.
    """
    made = document(f"grid-{name}")
    control, metrics = made["control"], [word for word in words if word in MEASURED_AS]
    shown = [word for word in words if word not in MEASURED_AS]
    cells = {cell: made["cells"][cell] for cell in shown or made["cells"]}
    labels = {metric: MEASURED_AS[metric] for metric in metrics}
    if any(cell["experiment"].get("validation") for cell in cells.values()):
        labels["global_accuracy"] = "global, validation data"

    def column(cell: str, metric: str) -> dict[int, float | None]:
        return {int(seed): run.get(metric) for seed, run in made["cells"][cell]["seeds"].items()}

    rows = []
    for cell, measured in cells.items():
        if not measured["seeds"]:
            continue
        row = [f"`{cell}`", str(len(measured["seeds"]))]
        for metric in metrics:
            values = column(cell, metric)
            over = "–" if cell == control else points(paired_difference(values, column(control, metric)))
            row += [percent(list(values.values())), over]
        rows.append(row)
    header = ["setting", "seeds"]
    header += [text for metric in metrics for text in (f"{labels[metric]} %", f"over `{control}`")]
    return f"{markdown(header, rows)}\n\n{made_with(f'grid-{name}')}"


def clipping(*rounds: str) -> str:
    """Return the share of elements beyond FedHKD's ζ in some rounds, by the extractor's last layer."""
    made: dict[str, list[dict[str, Any]]] = {}
    for row in document("clipping")["rows"]:
        made.setdefault(row["feature-layer"], []).append(row)
    lines = [
        [
            f"`{layer}`",
            *(percent([row["share"][int(number) - 1] for row in rows]) for number in rounds),
            percent([row["global_accuracy"] for row in rows]),
        ]
        for layer, rows in made.items()
    ]
    header = ("last layer", *(f"beyond ζ in round {number} %" for number in rounds), "global %")
    return f"{markdown(header, lines)}\n\n{made_with('clipping')}"


def named(lines: list[list[str]]) -> str:
    """Write a header and rows, the first cell of which is a method's name."""
    header, *rows = lines
    return markdown(header, [[f"`{name}`", *cells] for name, *cells in rows])


def made_with(name: str, *parts: str) -> str:
    """Say by which command, and with which versions, a result was measured.

    A name may also be that of a folder of results, of which the given parts count, or all.
    """
    single = RESULTS / f"{name}.json"
    paths = [single] if single.exists() else sorted((RESULTS / name).glob("*/result.json"))
    paths = [path for path in paths if not parts or path.parent.name in parts]
    versions = [json.loads(path.read_text(encoding="utf-8"))["versions"] for path in paths]

    def all_of(key: str) -> str:
        # A result that was extended names several commits.
        named = (value for row in versions if key in row for value in row[key].split(" and "))
        return " and ".join(sorted(set(named)))

    packages = ", ".join(
        f"{key} {all_of(key)}" for key in ("flwr-kd", "flwr", "torch", "ray", "numpy", "python")
    )
    commits = all_of("commit")
    commit = f" at commit `{commits.replace(' and ', '`, `')}`" if commits else ""
    machine = ", ".join(text for text in (all_of("machine"), all_of("processor")) if text)
    if cores := all_of("cores"):
        machine += f", {cores} cores"
    return f"Measured by `{command_of(name)}`{commit} with {packages}; {machine}."


def command_of(name: str) -> str:
    """Return the benchmark that makes a result."""
    family = remake.family(name if name in remake.PROGRAMS else f"{name}.json")
    if family in remake.PROGRAMS:
        program, *words = remake.PROGRAMS[family]
        name = f" {words[0]}" if program == remake.GRIDS_PROGRAM else ""
        return f"python benchmarks/{program}{name}"
    return f"benchmarks/{remake.SCRIPTS[str(family)]}.sh"


def printed(name: str) -> str:
    """Return the tables that a command prints at its end."""
    printed = []
    for part in table.fitting(files.load(RESULTS / f"{name}.json"), 80):
        written = io.StringIO()
        Console(file=written, width=80).print(part)
        printed.append("\n".join(line.rstrip() for line in written.getvalue().splitlines() if line.strip()))
    return "```text\n" + "\n\n".join(printed) + "\n```"


def robustness(attackers: str, data: str = "digits") -> str:
    """Return what attacks leave of each method, and what its best defence saves."""
    return markdown(*robustness_tables.summary(RESULTS / "robustness", int(attackers), data))


def robustness_imitation(attackers: str) -> str:
    """Return what an attacker costs that looks like a client."""
    return markdown(*robustness_tables.imitation(RESULTS / "robustness", int(attackers)))


def robustness_methods(attackers: str, data: str = "digits") -> str:
    """Return a table of attacks and defences for each method."""
    tables = robustness_tables.details(RESULTS / "robustness", int(attackers), data)
    return "\n\n".join(f"**`{name}`**\n\n{markdown(header, rows)}" for name, header, rows in tables)


def papers() -> str:
    """Return how many claims of each paper hold in what was run."""
    return markdown(*paper_tables.summary(RESULTS / "papers"))


def paper(name: str) -> str:
    """Return a paper's experiments: verdicts, ours beside the printed numbers, controls and costs."""
    return paper_tables.of_paper(RESULTS / "papers", name)


TABLES: dict[str, Callable[..., str]] = {
    "papers": papers,
    "paper": paper,
    "side-by-side": side_by_side,
    "methods": of_methods,
    "baselines": baselines,
    "baselines-of": baselines_of,
    "baselines-settings": baselines_settings,
    "baselines-side-by-side": baselines_side_by_side,
    "sgd": with_sgd,
    "search-fedhkd": fedhkd_search,
    "controls-fedhkd": fedhkd_controls,
    "overhead": overhead,
    "shares": shares,
    "sizes": sizes,
    "scale": scale,
    "growth": growth,
    "model-store": model_store,
    "refinement": refinement,
    "matrix-step": matrix_step,
    "narrow": narrow,
    "held": held,
    "grid": grid,
    "clipping": clipping,
    "made-with": made_with,
    "robustness": robustness,
    "robustness-imitation": robustness_imitation,
    "robustness-methods": robustness_methods,
    "printed": printed,
}


# ---------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Picture:
    """A picture of a page, which carries a digest of what it shows.

    Attributes
    ----------
    path : Path
        Its file.
    shown : callable
        Returns what it shows, as JSON can hold it.
    draw : callable
        Returns the figure.
    """

    path: Path
    shown: Callable[[], Any]
    draw: Callable[[], Figure]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.shown()).encode()).hexdigest()

    def carried(self) -> str | None:
        """Return the digest in the file, if there is one."""
        if not self.path.exists():
            return None
        with Image.open(self.path) as image:
            return str(image.info.get(SOURCE))

    def write(self) -> None:
        self.draw().savefig(self.path, format="png", metadata={SOURCE: self.digest(), "Software": None})


def shown_accuracy() -> list[Any]:
    return [
        (
            part,
            run.method,
            run.seed,
            [(result.local_accuracy, result.bytes_up, result.bytes_down) for result in run.rounds],
        )
        for part in ("digits-inner-dirichlet", "fashion-mnist-inner-dirichlet")
        for run in loaded(part).runs
        if run.name in IN_PICTURE
    ]


def draw_accuracy() -> Figure:
    """Draw local accuracy over what one client has sent and received."""
    figure = Figure(figsize=(10, 3.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    styles = palette(IN_PICTURE)
    for axes, part in zip(
        figure.subplots(1, 2), ("digits-inner-dirichlet", "fashion-mnist-inner-dirichlet"), strict=True
    ):
        comparison = loaded(part)
        for method, marker in zip(IN_PICTURE, itertools.cycle("o^sDvPX*"), strict=False):
            if method not in comparison.by_method():
                continue
            runs = comparison.by_method()[method]
            accuracy = 100 * np.array(
                [[result.local_accuracy for result in run.rounds] for run in runs], dtype=float
            )
            sent = np.cumsum(
                [[result.bytes_up + result.bytes_down for result in run.rounds] for run in runs], axis=1
            )
            x, y = sent.mean(axis=0) / comparison.config["clients"] / 1e6, accuracy.mean(axis=0)
            axes.plot(x, y, label=method, marker=marker, markersize=4, linewidth=1.3, **styles[method])
            if len(runs) > 1:
                spread = accuracy.std(axis=0, ddof=1)
                axes.fill_between(
                    x, y - spread, y + spread, color=styles[method]["color"], alpha=0.12, linewidth=0
                )
        axes.set_xscale("log")
        axes.set(xlabel="MB sent and received by a client", ylabel="local accuracy, %", ylim=(0, 100))
        data = {"digits": "digits, MLP, 20 rounds", "fashion-mnist": "Fashion-MNIST, LeNet, 10 rounds"}
        axes.set_title(data[comparison.config["dataset"]], fontsize=10)
        axes.grid(alpha=0.25, which="both", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(
        "10 clients, inner-dirichlet:0.1; a marker is a round, mean ± standard deviation over the seeds",
        fontsize=10,
    )
    return figure


SHOWN_TABLES = {
    "feddkc": "table-5",
    "fedhead": "table-2",
    "fedhkd": "table-1",
    "fedhyb": "table-1",
    "ktpfl": "table-1",
}
"""The table of each paper that its method's page shows."""


def of_table(paper: str, table: str) -> Picture:
    name = f"papers/{paper}-{table}"
    return Picture(
        ROOT / "strategies" / paper / "results.png",
        lambda: document(name)["cells"],
        lambda: paper_tables.figure(document(name)),
    )


PICTURES = (
    Picture(ROOT / "docs" / "accuracy.png", shown_accuracy, draw_accuracy),
    *(of_table(*names) for names in SHOWN_TABLES.items()),
)


if __name__ == "__main__":
    main()
