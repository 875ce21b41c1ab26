"""The curves: what is drawn is what was measured."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_kd.plotting.curves import figure, plot
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RoundResult, RunResult
from tests.plotting.examples import a_comparison, a_run


def test_lines_are_means_and_bands_one_std(comparison):
    left, right = figure(comparison).axes
    assert [len(axes.lines) for axes in (left, right)] == [2, 1]
    np.testing.assert_allclose(left.lines[0].get_xydata(), [[1, 30], [2, 50], [3, 70]])
    np.testing.assert_allclose(right.lines[0].get_ydata(), [20, 30, 60])
    band = left.collections[1].get_paths()[0].vertices
    std = 100 * np.std([0.7, 0.9], ddof=1)
    at_end = band[band[:, 0] == 3][:, 1]
    assert at_end.min() == pytest.approx(80 - std)
    assert at_end.max() == pytest.approx(80 + std)
    assert left.lines[0].get_color() == right.lines[0].get_color() != left.lines[1].get_color()


def test_methods_without_a_global_model_are_named_not_drawn(comparison):
    left, right = figure(comparison).axes
    assert left.get_xlabel() == "round"
    assert right.get_xlabel() == "round\nno global model: ktpfl"
    assert right.get_ylabel() == "global accuracy (%)"


def test_a_server_s_own_model_takes_the_place_of_a_global_one_that_nobody_has():
    def run(method, server):
        rounds = tuple(
            RoundResult(number, 0.5, None, None, 1, 1, 1.0, 2, 0, server_accuracy=value)
            for number, value in enumerate(server, start=1)
        )
        return RunResult(method, 0, rounds)

    right = figure(a_comparison(run("fedgkt", [0.2, 0.4]), run("fedproto", [None, None]))).axes[1]
    assert right.get_ylabel() == "server accuracy (%)"
    np.testing.assert_allclose(right.lines[0].get_ydata(), [20, 40])
    assert right.get_xlabel() == "round\nnot measured: fedproto"
    mixed = figure(a_comparison(run("fedgkt", [0.2, 0.4]), a_run("fedavg", 0, [0.1, 0.2], [0.3, 0.4])))
    assert mixed.axes[1].get_ylabel() == "global accuracy (%)"


def test_the_accuracies_that_are_named_have_a_panel_each():
    rounds = tuple(
        RoundResult(number, 0.5, None, None, 1, 1, 1.0, 2, 0, common_accuracy=value, local_top5=0.9)
        for number, value in enumerate([None, 0.25, 0.5, None], start=1)
    )
    comparison = a_comparison(RunResult("fedproto", 0, rounds), a_run("fedavg", 0, [0.1], [0.3]))
    names = ["common-accuracy", "local_accuracy", "global-accuracy", "local-top5"]
    drawn = figure(comparison, names).axes
    titles = [axes.get_ylabel() for axes in drawn]
    assert titles == ["common accuracy (%)", "local accuracy (%)", "global accuracy (%)", "local top-5 (%)"]
    # The last row may have fewer panels than the one above it.
    drawn[0].figure.canvas.draw()
    assert all(any(tick.label1.get_visible() for tick in axes.xaxis.get_major_ticks()) for axes in drawn)
    # The line connects the rounds in which it was measured.
    np.testing.assert_allclose(drawn[0].lines[0].get_xydata(), [[2, 25], [3, 50]])
    assert drawn[0].get_xlabel() == "round\nnot measured: fedavg"
    assert drawn[2].get_xlabel() == "round\nno global model: fedproto"
    with pytest.raises(ResultError, match="common-top5 was not measured in any run"):
        figure(comparison, ["common-top5"])
    with pytest.raises(ResultError, match=r"unknown accuracy 'common'.*valid: local-accuracy, "):
        figure(comparison, ["common"])


def test_common_accuracy_is_drawn_where_there_is_no_local_one():
    rounds = (RoundResult(1, None, 0.5, None, 1, 1, 1.0, 2, 0, common_accuracy=0.25),)
    drawn = figure(a_comparison(RunResult("fedavg", 0, rounds))).axes
    assert [axes.get_ylabel() for axes in drawn] == ["common accuracy (%)", "global accuracy (%)"]


def test_local_accuracy_is_that_of_the_clients_that_took_part_in_each_round():
    clients = {"0": {"local_accuracy": 0.8}, "1": {"local_accuracy": 0.2}}
    rounds = (
        RoundResult(1, 0.6, None, None, 1, 1, 1.0, 1, 0, available=2),
        RoundResult(2, 0.5, None, None, 1, 1, 1.0, 1, 0, available=2, clients=clients, received=("1",)),
    )
    left = figure(a_comparison(RunResult("fedavg", 0, rounds))).axes[0]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [60, 80])
    assert "own models and test splits; 1 of 2 clients took part" in [text.get_text() for text in left.texts]


def test_title_and_legend(comparison):
    drawn = figure(comparison)
    assert drawn.get_suptitle() == "digits · inner-dirichlet:0.1 · 10 clients · seeds 0, 1 · mean ± std"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["fedavg", "ktpfl"]


def test_nothing_overlaps_or_is_clipped():
    names = ["fedavg", "feddkc-similarity", *(f"method-{index}" for index in range(20))]
    runs = (a_run(name, seed, [0.2, 0.9], [0.2, 0.7]) for name in names for seed in range(3))
    drawn = figure(a_comparison(*runs))
    drawn.canvas.draw()
    renderer = drawn.canvas.get_renderer()
    page = drawn.bbox
    left, right = (axes.get_tightbbox(renderer) for axes in drawn.axes)
    legend = drawn.legends[0].get_window_extent(renderer)
    heading = drawn._suptitle.get_window_extent(renderer)
    assert left.x1 <= right.x0
    assert right.x1 <= legend.x0
    assert max(left.y1, right.y1) <= heading.y0
    for box in (left, right, legend, heading):
        assert box.x0 >= page.x0
        assert box.x1 <= page.x1
        assert box.y0 >= page.y0
        assert box.y1 <= page.y1
    styles = {(line.get_color(), line.get_linestyle()) for line in drawn.axes[0].lines}
    assert len(styles) == len(names)


def test_missing_rounds_are_bridged_and_seeds_may_differ():
    left, right = figure(
        a_comparison(
            a_run("fedavg", 0, [0.1, 0.2, 0.3], [None, 0.2, None]),
            a_run("fedavg", 1, [0.3], [None]),
        )
    ).axes
    np.testing.assert_allclose(left.lines[0].get_xydata(), [[1, 20], [2, 20], [3, 30]])
    assert set(left.collections[0].get_paths()[0].vertices[:, 0]) == {1}
    np.testing.assert_allclose(right.lines[0].get_xydata(), [[2, 20]])
    assert not right.collections


def test_without_a_global_model_there_is_no_empty_panel():
    drawn = figure(a_comparison(a_run("ktpfl", 0, [0.5])))
    assert drawn.get_suptitle().replace("\n", " · ").endswith("10 clients · seed 0")
    (axes,) = drawn.axes
    assert axes.get_xlabel() == "round\nno method here has a global model"
    low, high = axes.get_ylim()
    assert high - low >= 10
    assert axes.lines[0].get_marker() == "o"


def test_lines_that_coincide_are_seen_and_named():
    values = {"fedavg": [0.5, 0.6], "fedprox": [0.5, 0.6], "fedhkd": [0.5, 0.7], "feddf": [0.501, 0.601]}
    (axes,) = figure(a_comparison(*(a_run(name, 0, curve) for name, curve in values.items()))).axes
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths[0] > widths[1] > widths[3] == widths[2]
    assert axes.lines[0].get_markersize() > axes.lines[1].get_markersize()
    assert axes.get_xlabel().splitlines()[1] == "one line (within 0.2 points): fedavg, fedprox, feddf"


def test_lines_that_coincide_for_a_part_are_seen_and_not_named():
    """The one below is wider. Lines that only cross are not."""
    together = a_run("fedhkd", 0, [0.25, 0.5, 0.75, 0.75], [0.25] * 4)
    crossing = a_run("fedproto", 0, [0.5, 0.5, 0.25, 0.5], [0.5] * 4)
    drawn = figure(a_comparison(a_run("fedavg", 0, [0.5, 0.625, 0.75, 0.75], [0.75] * 4), together, crossing))
    below, above, alone = (line.get_linewidth() for line in drawn.axes[0].lines)
    assert below > above == alone
    assert drawn.axes[0].get_xlabel() == "round"


@pytest.mark.parametrize(("shift", "shared"), [(0.0, True), (0.6, False)])
def test_panels_share_a_scale_unless_each_would_be_half_empty(shift, shared):
    curve = [0.1, 0.2, 0.3]
    run = a_run("fedavg", 0, [value + shift for value in curve], curve)
    left, right = (axes.get_ylim() for axes in figure(a_comparison(run)).axes)
    assert (left == right) == shared
    assert right[1] < 60


def test_the_scale_stays_within_what_an_accuracy_can_be():
    left = figure(a_comparison(a_run("m", 0, [0.0, 1.0]), a_run("m", 1, [0.01, 0.7]))).axes[0]
    low, high = left.get_ylim()
    assert low >= -2
    assert high <= 102
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() >= 0
    assert band.max() <= 100


def test_png(tmp_path, comparison):
    path = plot(comparison, tmp_path / "new" / "curves.png")
    assert path == tmp_path / "new" / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(path)
    assert pixels.shape[:2] == (690, 1650)
    assert pixels[..., :3].std() > 0.01
    before = path.read_bytes()
    plot(comparison, path)
    assert path.read_bytes() == before


def test_dollars_and_unknown_config_are_plain_text(tmp_path):
    config = {"dataset": "csv:$x_{", "partition": None}
    run = a_run("m$^", 0, [0.5])
    drawn = figure(a_comparison(run, a_run("n", 0, [0.5], [0.5]), config=config))
    assert drawn.get_suptitle() == "csv:$x_{ · seed 0"
    plot(a_comparison(run, a_run("n", 0, [0.5], [0.5]), config=config), tmp_path / "a.png")
    many = a_comparison(*(a_run("m", seed, [0.5]) for seed in range(40)), config={})
    assert figure(many).get_suptitle() == "40 seeds · mean ± std"


def test_nothing_to_plot(tmp_path):
    with pytest.raises(ResultError, match="runs is empty"):
        plot(a_comparison(), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def with_costs(method, seed, losses, megabytes, seconds=1.0):
    rounds = tuple(
        RoundResult(number, 0.1 * number, None, loss, up * 10**6, 10**6, seconds, 2, 0)
        for number, (loss, up) in enumerate(zip(losses, megabytes, strict=True), start=1)
    )
    return RunResult(method, seed, rounds)


def test_over_bytes_and_seconds_a_place_is_what_all_rounds_so_far_have_cost():
    comparison = a_comparison(
        with_costs("fedavg", 0, [2.0, 1.0], [1, 1]),
        with_costs("fedavg", 1, [2.0, 1.0], [3, 5], seconds=3.0),
        with_costs("fedmd", 0, [2.0, 1.0], [0, 0]),
    )
    (axes,) = figure(comparison, ["local-accuracy"], over="bytes").axes
    # Up and down: 2 and 4 MB with seed 0, 4 and 10 with seed 1.
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[3, 10], [7, 20]])
    np.testing.assert_allclose(axes.lines[1].get_xydata(), [[1, 10], [2, 20]])
    assert axes.get_xlabel().replace("\n", " ") == "MB of all rounds so far, all clients, up and down"
    (axes,) = figure(comparison, ["local-accuracy"], over="seconds").axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [2, 4])
    assert axes.get_xlabel() == "seconds of all rounds so far"
    with pytest.raises(ResultError, match=r"unknown over 'byte' .*valid: rounds, bytes, seconds"):
        figure(comparison, over="byte")


def test_the_training_loss_is_drawn_in_its_own_unit():
    comparison = a_comparison(
        with_costs("fedavg", 0, [220.0, 1.0], [1, 1]),
        with_costs("fedavg", 1, [420.0, 3.0], [1, 1]),
        with_costs("fedmd", 0, [320.0, 2.1], [1, 1]),
    )
    left, right = figure(comparison, ["local-accuracy", "training-loss"]).axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("local accuracy (%)", "training loss")
    np.testing.assert_allclose(right.lines[0].get_ydata(), [320, 2])
    assert right.collections[0].get_paths()[0].vertices[:, 1].max() > 400
    assert right.get_ylim()[1] > 320 > 102 >= left.get_ylim()[1]
    # The lines differ by 0.1, which is less than a line's width where losses range over 318.
    assert "one line" in right.get_xlabel()
    none = a_comparison(a_run("fedavg", 0, [0.1, 0.2]))
    with pytest.raises(ResultError, match="training-loss was not measured in any run"):
        figure(none, ["train_loss"])
