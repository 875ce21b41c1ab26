"""Bars per client: what a bar, its line and its label are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from flwr_kd.plotting.clients import figure
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RoundResult, RunResult
from tests.plotting.examples import CONFIG, a_comparison


def a_run(method, seed, accuracies, **others):
    clients = {str(key): {"local_accuracy": value, **others} for key, value in enumerate(accuracies)}
    return RunResult(method, seed, (RoundResult(1, 0.5, None, None, 1, 1, 1.0, 2, 0, clients=clients),))


def heights(axes):
    return [[bar.get_height() for bar in container] for container in axes.containers if container.patches]


def bars(axes):
    return [container[0] for container in axes.containers if hasattr(container, "patches")]


def test_a_bar_is_the_mean_over_seeds_with_its_interval():
    result = a_comparison(
        a_run("fedavg", 0, [0.2, 0.6]), a_run("fedavg", 1, [0.4, 0.6]), a_run("fedproto", 0, [0.5, 0.7])
    )
    drawn = figure([result])
    (axes,) = drawn.axes
    np.testing.assert_allclose(sorted(bar.get_height() for bar in bars(axes)), [30, 50, 60, 70])
    first = next(
        bar for bar in axes.containers if hasattr(bar, "patches") and bar.patches[0].get_height() < 31
    )
    # t = 12.706 with one degree of freedom; the standard error of 20 and 40 is 10.
    np.testing.assert_allclose(
        first.errorbar.lines[2][0].get_segments()[0][:, 1], [30 - 127.06, 30 + 127.06], atol=0.01
    )
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "0"]
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["fedavg", "fedproto"]
    assert (
        drawn.get_suptitle().replace("\n", " · ").endswith("seeds 0, 1 · last round · mean and 95 % interval")
    )
    # Bars of one client stand beside each other.
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars(axes))
    assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(edges))


def test_results_of_one_data_set_are_averaged_and_others_are_panels():
    results = [
        a_comparison(a_run("fedgkt", 0, [value]), config={**CONFIG, "dataset": name, "partition": form})
        for name, form, value in (
            ("digits", "dirichlet:1", 0.2), ("digits", "dirichlet:3", 0.4), ("mnist", "dirichlet:1", 0.9)
        )
    ]  # fmt: skip
    drawn = figure(results)
    assert [axes.get_title() for axes in drawn.axes] == ["digits", "mnist"]
    np.testing.assert_allclose([bars(axes)[0].get_height() for axes in drawn.axes], [30, 90])
    assert "mean over dirichlet:1, dirichlet:3" in drawn.get_suptitle().replace("\n", " · ")


@pytest.mark.parametrize(
    ("other", "lacking"),
    [
        (("fedproto", 0, [0.2, 0.3]), "fedgkt, seed 0, client 0"),
        (("fedgkt", 1, [0.2, 0.3]), "fedgkt, seed 0, client 0"),
        (("fedgkt", 0, [0.2]), "fedgkt, seed 0, client 1"),
    ],
)
def test_bars_are_means_over_what_all_results_have(other, lacking):
    results = [
        a_comparison(a_run(*run), config={**CONFIG, "partition": form})
        for form, run in (("dirichlet:1", ("fedgkt", 0, [0.2, 0.3])), ("dirichlet:3", other))
    ]
    with pytest.raises(ResultError, match=f"local accuracy of {lacking}: draw them one by one"):
        figure(results)


def test_clients_are_named_by_their_models_where_these_differ():
    config = {**CONFIG, "model": {"fedgkt": "resnet2, resnet4"}}
    result = a_comparison(a_run("fedgkt", 0, [0.1, 0.2, 0.3, 0.6]), config=config)
    labels = [tick.get_text() for tick in figure([result]).axes[0].get_xticklabels()]
    assert labels == ["3\nresnet4", "2\nresnet2", "1\nresnet4", "0\nresnet2"]
    axes = figure([result], by_model=True).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["resnet2", "resnet4"]
    np.testing.assert_allclose([bar.get_height() for bar in bars(axes)], [20, 40])
    with pytest.raises(ResultError, match="does not say which model each client of fedavg has"):
        figure([a_comparison(a_run("fedavg", 0, [0.5]))], by_model=True)


def test_methods_without_the_metric_are_named():
    result = a_comparison(a_run("fedavg", 0, [0.5], local_top5=0.9), a_run("fedmd", 0, [0.5]))
    axes = figure([result], metric="local-top5").axes[0]
    assert axes.get_xlabel() == "client\nnot measured: fedmd"
    assert axes.get_ylabel() == "local top-5 (%)"
    with pytest.raises(ResultError, match="no client has 'loss' in the last round; kept are local_accuracy"):
        figure([result], metric="loss")


def test_clients_that_are_better_off_than_alone_are_counted_below():
    runs = [a_run("fedavg", 0, [0.2, 0.6]), a_run("fedavg", 1, [0.4, 0.6]), a_run("fedproto", 0, [0.1, 0.2])]
    (axes,) = figure([a_comparison(*runs)]).axes
    assert "better off" not in axes.get_xlabel()
    alone = [a_run("alone", 0, [0.1, 0.7]), a_run("alone", 1, [0.1, 0.1])]
    (axes,) = figure([a_comparison(*runs, *alone)]).axes
    assert axes.get_xlabel().splitlines() == [
        "client, sorted by fedavg",
        "clients better off than alone: fedavg 75 %, fedproto 0 %",
    ]


def test_many_methods_have_a_legend_that_fits():
    names = [f"method-{index}" for index in range(40)]
    drawn = figure([a_comparison(*(a_run(name, 0, [0.25, 0.75]) for name in names))])
    drawn.canvas.draw()
    renderer = drawn.canvas.get_renderer()
    legend = drawn.legends[0].get_window_extent(renderer)
    assert 0 <= legend.y0 < legend.y1 <= drawn.bbox.y1
    assert legend.x1 <= drawn.bbox.x1
    assert not legend.overlaps(drawn.axes[0].get_tightbbox(renderer))
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars(drawn.axes[0])}
    assert len(looks) == len(names)


def test_a_client_with_another_model_for_each_method_is_one_client():
    config = {**CONFIG, "model": {"fedgkt": "resnet2, resnet4", "fedavg": "mlp"}}
    result = a_comparison(a_run("fedgkt", 0, [0.1, 0.2]), a_run("fedavg", 0, [0.3, 0.4]), config=config)
    assert [tick.get_text() for tick in figure([result]).axes[0].get_xticklabels()] == ["1", "0"]


def test_clients_stand_in_the_order_of_the_first_method_and_models_in_their_own():
    config = {**CONFIG, "model": "mlp,lenet,cnn"}
    result = a_comparison(
        a_run("fedavg", 0, [0.2, 0.9, 0.5]), a_run("fedmd", 0, [0.8, 0.1, 0.4, 0.7]), config=config
    )
    axes = figure([result]).axes[0]
    labels = [tick.get_text().split("\n")[0] for tick in axes.get_xticklabels()]
    assert labels == ["1", "2", "0", "3"]
    np.testing.assert_allclose(
        [bar.get_height() for bar in sorted(bars(axes), key=lambda bar: bar.get_x())],
        [90, 10, 50, 40, 20, 80, 70],
    )
    by_model = figure([result], by_model=True).axes[0]
    assert [tick.get_text() for tick in by_model.get_xticklabels()] == ["cnn", "lenet", "mlp"]


def test_a_row_of_its_own_name_stands_at_its_own_model():
    named = replace(a_run("fedproto", 0, [0.5, 0.5]), label="big")
    result = a_comparison(a_run("fedproto", 0, [0.2, 0.2]), named)
    result.config["model"] = {"fedproto": "mlp", "big": "lenet"}
    axes = figure([result], by_model=True).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["lenet", "mlp"]
