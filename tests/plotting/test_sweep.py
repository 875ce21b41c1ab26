"""Sweeps: which setting is on the axis, and that marks and bars are means and intervals."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_kd.plotting.sweep import figure, settings_that_vary
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RoundResult, RunResult
from tests.plotting.examples import CONFIG


def a_run(method, seed, accuracy, *, local=0.5, label="", **hyper):
    rounds = (RoundResult(1, local, accuracy, None, 1, 1, 1.0, 2, 0),)
    return RunResult(
        method, seed, rounds, {name.replace("_", "-"): value for name, value in hyper.items()}, [], label
    )


def a_result(*runs, **config):
    return Comparison({**CONFIG, "rounds": 7, "model": "cnn", **config}, {}, "", runs)


def by_partition(values, methods=("fedavg",)):
    return [
        a_result(
            *(a_run(name, seed, value + seed / 10) for name in methods for seed in (0, 1)), partition=form
        )
        for form, value in values.items()
    ]


def lines(axes):
    return [container.lines[0] for container in axes.containers]


def test_marks_are_means_over_seeds_and_bars_their_intervals():
    drawn = figure(by_partition({"dirichlet:1": 0.5, "dirichlet:0.5": 0.2}))
    (axes,) = drawn.axes
    (line,) = lines(axes)
    np.testing.assert_allclose(line.get_xydata(), [[0.5, 25], [1, 55]])
    (bars,) = axes.containers[0].lines[2]
    # t = 12.706 with one degree of freedom; the standard error of 20 and 30 is 5.
    np.testing.assert_allclose(bars.get_segments()[0][:, 1], [25 - 63.53, 25 + 63.53], atol=0.01)
    assert axes.get_xlabel() == "partition: dirichlet"
    assert axes.get_ylabel() == "global accuracy (%)"
    assert drawn.get_suptitle().replace("\n", " · ") == (
        "digits · 10 clients · 7 rounds · cnn · seeds 0, 1 · last round · mean and 95 % interval"
    )
    assert axes.get_xscale() == "linear"


def test_an_axis_over_two_decades_is_logarithmic_and_others_are_categories():
    wide = figure(by_partition({f"inner-dirichlet:{alpha}": 0.5 for alpha in (0.1, 1, 10)})).axes[0]
    assert wide.get_xscale() == "log"
    mixed = figure(by_partition({"iid": 0.5, "dirichlet:2": 0.4, "ktpfl-1": 0.3})).axes[0]
    assert [tick.get_text() for tick in mixed.get_xticklabels()] == ["dirichlet:2", "iid", "ktpfl-1"]
    assert mixed.get_xlabel() == "partition"
    np.testing.assert_allclose(lines(mixed)[0].get_ydata(), [45, 55, 35])


def test_settings_that_vary_together_are_one():
    results = [
        a_result(a_run("fedavg", 0, 0.5), clients=count, limit=500 * count, seeds=[0], backend=str(count))
        for count in (10, 20, 50)
    ]
    assert settings_that_vary(results) == ["clients", "limit"]
    assert figure(results).axes[0].get_xlabel() == "clients"
    assert figure(results, along="limit").axes[0].get_xlabel() == "limit"


def test_hyper_parameters_of_one_result_are_an_axis():
    runs = [a_run("ktpfl", 0, rho, label=f"rho {rho}", rho=rho) for rho in (0.1, 0.3)]
    axes = figure([a_result(*runs, a_run("fedavg", 0, 0.7, learning_rate=1.0))]).axes[0]
    assert axes.get_xlabel() == "rho"
    tuned, constant = lines(axes)
    np.testing.assert_allclose(tuned.get_xydata(), [[0.1, 10], [0.3, 30]])
    # A method without the hyper-parameter is a line beside it.
    np.testing.assert_allclose(constant.get_xydata(), [[0.1, 70], [0.3, 70]])


def test_further_hyper_parameters_are_lines():
    runs = [
        a_run("ktpfl", 0, rho * rate, label=f"{rho} {rate}", rho=rho, rate=rate)
        for rho in (0.1, 0.3)
        for rate in (1.0, 2.0)
    ]
    with pytest.raises(ResultError, match='vary, rho and rate: choose one for the axis, such as along="rho"'):
        figure([a_result(*runs)])
    drawn = figure([a_result(*runs)], along="rho")
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["ktpfl rate=1", "ktpfl rate=2"]


def test_clients_that_train_alone_are_no_setting_of_a_method():
    """Their row is a method's without knowledge."""
    alone = a_run("fedproto", 0, 0.2, label="alone", proto_weight=0.0)
    proto = a_run("fedproto", 0, 0.4, proto_weight=0.05)
    other = a_run("fedavg", 0, 0.7)
    assert settings_that_vary([a_result(alone, proto, other)]) == []
    with pytest.raises(ResultError, match="no setting varies"):
        figure([a_result(alone, proto, other)])
    swept = a_run("fedproto", 0, 0.6, label="more", proto_weight=0.5)
    drawn = figure([a_result(alone, proto, swept)])
    assert drawn.axes[0].get_xlabel() == "proto-weight"
    beside, tuned = lines(drawn.axes[0])
    np.testing.assert_allclose(beside.get_xydata(), [[0.05, 20], [0.5, 20]])
    np.testing.assert_allclose(tuned.get_xydata(), [[0.05, 40], [0.5, 60]])
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["alone", "fedproto"]
    by_option = figure([a_result(alone, proto, partition=form) for form in ("dirichlet:1", "dirichlet:2")])
    assert [line.get_xydata()[:, 0].tolist() for line in lines(by_option.axes[0])] == [[1, 2], [1, 2]]


def test_attacks_are_panels_that_share_the_results_without_attackers():
    results = [
        a_result(a_run("fedavg", 0, 0.5 - count / 10), attack=attack, attackers=count)
        for attack in ("nan", "label-flip")
        for count in (1, 2)
    ]
    drawn = figure([*results, a_result(a_run("fedavg", 0, 0.5), attack=None, attackers=0)], along="attackers")
    assert [axes.get_title() for axes in drawn.axes] == ["attack nan", "attack label-flip"]
    for axes in drawn.axes:
        np.testing.assert_allclose(lines(axes)[0].get_xydata(), [[0, 50], [1, 40], [2, 30]])


def test_coinciding_and_unmeasured_methods_are_named():
    results = by_partition({"dirichlet:1": 0.5, "dirichlet:2": 0.6}, methods=("fedavg", "fedprox"))
    results[0] = a_result(*results[0].runs, a_run("fedmd", 0, None), partition="dirichlet:1")
    drawn = figure(results)
    notes = drawn.axes[0].get_xlabel().splitlines()[1:]
    assert notes == ["within 0.2 points everywhere: fedavg, fedprox", "no global accuracy: fedmd"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["fedavg", "fedprox"]
    # They stand beside each other.
    first, second = (line.get_transform().transform([1, 50])[0] for line in lines(drawn.axes[0]))
    assert second - first == pytest.approx(5 / 72 * drawn.dpi)


def test_without_a_global_model_local_accuracy_is_drawn():
    results = [
        a_result(a_run("fedmd", 0, None, local=0.4), partition=form) for form in ("iid", "dirichlet:1")
    ]
    axes = figure(results).axes[0]
    assert axes.get_ylabel() == "local accuracy (%)"
    low, high = axes.get_ylim()
    assert high - low >= 10
    with pytest.raises(ResultError, match="no run has a global_accuracy in its last round"):
        figure(results, metric="global-accuracy")


def test_what_a_sweep_refuses():
    one = a_result(a_run("fedavg", 0, 0.5))
    with pytest.raises(ResultError, match="no setting varies: name several results"):
        figure([one])
    with pytest.raises(ResultError, match="runs is empty"):
        figure([])
    two = by_partition({"iid": 0.5, "dirichlet:1": 0.4})
    with pytest.raises(ResultError, match="along must be a setting that varies, partition, got 'clients'"):
        figure(two, along="clients")
    with pytest.raises(ResultError, match=r"metric must be one of global_accuracy, .* got 'loss'"):
        figure(two, metric="loss")
    with pytest.raises(
        ResultError, match="two runs of fedavg have partition 'iid' and seed 0: leave one out"
    ):
        figure([*two, two[0]])


def test_clients_that_train_alone_with_each_value_are_one_line():
    runs = [
        a_run(method, 0, None, local=share, label=f"{name}, learning-rate={rate}", learning_rate=rate, **more)
        for name, method, more in (("alone", "fedproto", {"proto_weight": 0.0}), ("fedavg", "fedavg", {}))
        for rate, share in ((1.0, 0.2 + (name == "fedavg") / 4), (2.0, 0.4))
    ]
    drawn = figure([a_result(*runs)])
    assert drawn.axes[0].get_xlabel() == "learning-rate"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["alone", "fedavg"]
    for line, first in zip(lines(drawn.axes[0]), (20, 45), strict=True):
        np.testing.assert_allclose(line.get_xydata(), [[1, first], [2, 40]])


def test_rows_with_other_models_are_lines():
    results = [
        a_result(
            a_run("fedproto", 0, 0.2),
            a_run("fedproto", 0, 0.4, label="big"),
            partition=form,
            model={"fedproto": "mlp", "big": "lenet"},
        )
        for form in ("dirichlet:1", "dirichlet:2")
    ]
    assert [text.get_text() for text in figure(results).legends[0].get_texts()] == ["fedproto", "big"]


def test_common_accuracy_is_drawn_where_there_is_no_other():
    round_ = RoundResult(1, None, None, None, 1, 1, 1.0, 2, 0, common_accuracy=0.5)
    results = [a_result(RunResult("fedmd", 0, (round_,)), clients=count) for count in (2, 3)]
    assert figure(results).axes[0].get_ylabel() == "common accuracy (%)"
