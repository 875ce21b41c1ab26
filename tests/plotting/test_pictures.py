"""The curves: what is drawn is what was measured, and the caller's matplotlib is left alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_kd.plotting import coefficients, landscape, samples, tsne
from flwr_kd.plotting.curves import figure, plot
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RoundResult, RunResult

CONFIG = {"dataset": "digits", "partition": "inner-dirichlet:0.1", "clients": 10}


def a_run(method, seed, local, overall=None):
    overall = overall or [None] * len(local)
    rounds = tuple(
        RoundResult(number, own, shared, None, 1, 1, 1.0, 2, 0)
        for number, (own, shared) in enumerate(zip(local, overall, strict=True), start=1)
    )
    return RunResult(method, seed, rounds)


def a_comparison(*runs, config=None):
    return Comparison(CONFIG if config is None else config, {}, "", runs)


@pytest.fixture
def comparison():
    return a_comparison(
        a_run("fedavg", 0, [0.2, 0.4, 0.6], [0.1, 0.3, 0.5]),
        a_run("fedavg", 1, [0.4, 0.6, 0.8], [0.3, 0.3, 0.7]),
        a_run("ktpfl", 0, [0.3, 0.5, 0.7]),
        a_run("ktpfl", 1, [0.3, 0.5, 0.9]),
    )


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


def test_title_and_legend(comparison):
    drawn = figure(comparison)
    assert drawn.get_suptitle() == "digits · inner-dirichlet:0.1 · 10 clients · seeds 0, 1 · mean ± std"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["fedavg", "ktpfl"]


def test_nothing_overlaps_or_is_clipped():
    names = ["fedavg", "feddkc-similarity", *(f"method-{index}" for index in range(20))]
    drawn = figure(a_comparison(*(a_run(name, seed, [0.2, 0.9]) for name in names for seed in range(3))))
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


def test_no_method_with_a_global_model():
    drawn = figure(a_comparison(a_run("ktpfl", 0, [0.5])))
    assert drawn.get_suptitle().endswith("10 clients · seed 0")
    right = drawn.axes[1]
    assert "no method here has a global model" in [text.get_text() for text in right.texts]
    assert right.get_xlabel() == "round"
    low, high = right.get_ylim()
    assert high - low >= 10
    assert drawn.axes[0].lines[0].get_marker() == "o"


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


def a_map(classes=(0, 3, 4), size=5):
    labels = np.repeat(classes, size)
    return np.random.default_rng(0).normal(size=(len(labels), 2)), labels


def titles(drawn):
    return [axes.get_title().strip() for axes in drawn.axes if axes.get_visible()]


def test_maps_have_a_panel_per_method_and_a_colour_per_class(comparison):
    drawn = tsne.figure(comparison, {"ktpfl": a_map(), "fedavg": a_map((3, 9))}, seed=1)
    assert titles(drawn) == ["ktpfl", "fedavg"]
    assert drawn.get_suptitle().replace("\n", " ") == (
        "digits · inner-dirichlet:0.1 · 10 clients · seed 1 · features of 10 to 15 samples of the common test set"
    )
    assert [axes.texts[0].get_text() for axes in drawn.axes] == [
        "global accuracy not measured", "global accuracy 70.00 %"
    ]  # fmt: skip
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [f"class {c}" for c in (0, 3, 4, 9)]
    points, labels = a_map()
    np.testing.assert_allclose(drawn.axes[0].collections[1].get_offsets(), points[labels == 3])
    colours = [each.get_facecolor()[0].tolist() for each in drawn.axes[0].collections[:3]]
    assert colours[1] == drawn.axes[1].collections[1].get_facecolor()[0].tolist()
    assert colours[0] != colours[1] != colours[2]


def test_landscapes_share_their_axes_and_show_the_flattest(comparison):
    x = np.linspace(-1, 1, 5)
    flat, steep = 0.5 + np.outer([1.0, 2.0, 3.0], x**2), 0.5 + np.outer([1e3, 1e4, 1e5], x**2)
    steep[0, -1], steep[1, 0] = np.inf, np.nan
    drawn = landscape.figure(comparison, x, {"fedavg": steep, "ktpfl": flat})
    left, right = drawn.axes
    assert titles(drawn) == ["fedavg", "ktpfl"]
    assert drawn.get_suptitle().endswith("seed 0 · loss in 3 directions")
    assert left.get_ylim() == right.get_ylim()
    low, high = right.get_ylim()
    assert 0 <= low < 0.5
    assert 2.5 < high < 12
    assert len(right.lines) == 4
    np.testing.assert_allclose(right.lines[-1].get_ydata(), 0.5 + 2 * x**2)
    assert np.isnan(left.lines[0].get_ydata()[-1])
    curves = figure(comparison).axes[0].lines
    assert [left.lines[0].get_color(), right.lines[0].get_color()] == [line.get_color() for line in curves]


def test_landscapes_without_a_finite_loss_or_without_a_difference(tmp_path, comparison):
    x = np.array([-1.0, 0.0, 1.0])
    landscape.plot(comparison, x, {"fedavg": np.full((2, 3), np.nan)}, tmp_path / "a.png")
    low, high = landscape.figure(comparison, x, {"fedavg": np.full((2, 3), 2.3)}).axes[0].get_ylim()
    assert high - low >= 0.1
    half = np.array([[1.0, 0.5, np.inf], [1.0, 0.5, np.inf], [1.0, 0.5, 2.0]])
    median = landscape.figure(comparison, x, {"fedavg": half}).axes[0].lines[-1].get_ydata()
    assert np.isnan(median[2])
    assert median[:2].tolist() == [1.0, 0.5]


def test_samples_have_a_row_per_class(comparison):
    images = np.zeros((3, 2, 1, 4, 5))
    for label in range(3):
        images[label] = label
    images[2, 1] = np.nan
    drawn = samples.figure(comparison, {"fedavg": images})
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "1", "2"]
    page = np.asarray(axes.images[0].get_array())
    assert page.shape == (3 * 5 + 1, 2 * 6 + 1, 3)
    for label, shade in enumerate((0.0, 0.5, 1.0)):
        row = 1 + label * 5
        assert np.allclose(page[row : row + 4, 1:6], shade)
        assert row - 0.5 < axes.get_yticks()[label] < row + 4
    assert np.allclose(page[11:15, 7:12], 0)
    assert np.allclose(page[0], 1)
    assert axes.get_xlabel() == ""


def test_of_many_samples_the_first_are_drawn(comparison):
    images = np.random.default_rng(0).random((25, 12, 3, 4, 4))
    images[0, 0, 0], images[0, 0, 1:] = 1, 0
    (axes,) = samples.figure(comparison, {"fedavg": images}).axes
    page = np.asarray(axes.images[0].get_array())
    assert page.shape == (20 * 5 + 1, 10 * 5 + 1, 3)
    assert page[1, 1].tolist() == [1, 0, 0]
    assert axes.get_xlabel() == "20 of 25 classes, 10 of 12 images of each"


def test_images_that_are_nearly_all_dark(comparison):
    images = np.zeros((1, 1, 1, 20, 20))
    images[..., 0, 0] = 1
    page = np.asarray(samples.figure(comparison, {"fedavg": images}).axes[0].images[0].get_array())
    assert (page[1, 1, 0], page[2, 2, 0]) == (1, 0)
    assert np.isfinite(
        np.asarray(samples.figure(comparison, {"fedavg": 0 * images}).axes[0].images[0].get_array())
    ).all()


def two_groups(clients, inside=1.5, diagonal=0.3):
    """Rows that sum to 1; the first half of the clients is one group."""
    group = np.arange(clients) < clients // 2
    matrix = np.where(group[:, None] == group, inside, 1.0)
    np.fill_diagonal(matrix, 0)
    matrix *= (1 - diagonal) / np.maximum(matrix.sum(axis=1, keepdims=True), 1e-9)
    np.fill_diagonal(matrix, diagonal)
    return matrix


def bars(drawn):
    return [axes.images[0].colorbar for axes in drawn.axes if axes.get_visible()]


def cells(axes):
    """The colours that are seen, [N, N, 4]."""
    image = axes.images[0]
    return image.to_rgba(image.get_array())


def test_groups_are_blocks_however_large_the_diagonal_is(comparison):
    matrix = two_groups(20, inside=1.1, diagonal=0.9)
    drawn = coefficients.figure(
        comparison, {"ktpfl": (matrix, np.arange(20)), "fedavg": (matrix.T, np.arange(20))}
    )
    left, right = drawn.axes
    np.testing.assert_array_equal(left.images[0].get_array(), matrix)
    np.testing.assert_array_equal(right.images[0].get_array(), matrix.T)
    assert (left.get_ylabel(), left.get_xlabel()) == ("client n", "weight of client m")
    assert left.get_ylim() == (19.5, -0.5)  # client 0 at the top
    assert left.get_aspect() == 1
    seen = cells(left)
    assert np.abs(seen[0, 1] - seen[0, 19]).max() > 0.5
    assert left.images[0].get_clim() == pytest.approx((matrix[0, 19], matrix[0, 1]))
    (bar, _) = bars(drawn)
    assert bar.extend == "max"
    assert bar.ax.get_ylabel() == "weight (diagonal clipped: 0.9)"
    assert titles(drawn) == ["ktpfl", "fedavg"]
    assert [axes.texts[0].get_text() for axes in drawn.axes] == [
        "local accuracy 70.00 %", "local accuracy 60.00 %"
    ]  # fmt: skip
    assert drawn.get_suptitle().endswith("seed 0 · knowledge coefficients")


def test_each_matrix_has_its_own_scale(comparison):
    bare = np.array([[-0.7, 0.3, 1.4], [0.4, 1.6, -0.2], [0.2, 0.1, 0.7]])
    low = np.array([[0.1, 0.45, 0.45], [0.4, 0.2, 0.4], [0.3, 0.3, 0.4]])
    drawn = coefficients.figure(comparison, {"ktpfl": (bare, np.arange(3)), "fedavg": (low, np.arange(3))})
    assert [axes.images[0].get_clim() for axes in drawn.axes] == [(-0.2, 1.4), (0.3, 0.45)]
    assert [(bar.extend, bar.ax.get_ylabel()) for bar in bars(drawn)] == [
        ("both", "weight (diagonal clipped: -0.7 to 1.6)"),
        ("min", "weight (diagonal clipped: 0.1 to 0.4)"),
    ]


@pytest.mark.parametrize(
    ("matrix", "limits"),
    [
        (np.full((20, 20), 0.05), (0, 0.1)),
        (np.full((3, 3), 1 / 3) + 1e-16 * np.arange(9).reshape(3, 3), (0, 2 / 3)),  # rounding is no pattern
        (np.ones((1, 1)), (0, 2)),
        (np.zeros((2, 2)), (0, 1)),
        (np.full((2, 2), -0.5), (-1, 0)),
        (np.eye(4), (0, 1)),
        (np.where(np.eye(4), 0.7, 0.1), (0.1, 0.7)),
    ],
    ids=["uniform", "rounding", "one client", "zero", "negative", "identity", "same off the diagonal"],
)
def test_matrices_without_a_difference_between_others(comparison, matrix, limits):
    drawn = coefficients.figure(comparison, {"ktpfl": (matrix, np.arange(len(matrix)))})
    assert drawn.axes[0].images[0].get_clim() == pytest.approx(limits)
    (bar,) = bars(drawn)
    assert (bar.extend, bar.ax.get_ylabel()) == ("neither", "weight")


@pytest.mark.parametrize(
    ("clients", "labels"),
    [
        ([4], ["4"]),
        ([0, 3, 12], ["0", "3", "12"]),
        (range(20), [str(each) for each in range(0, 20, 2)]),
        (range(100), [str(each) for each in range(0, 100, 10)]),
        (range(5, 105), ["5", "15", "25", "35", "45", "55", "65", "75", "85", "95"]),
        (range(1000), [str(each) for each in range(0, 1000, 100)]),
    ],
    ids=["1", "gaps", "20", "100", "three digits", "1000"],
)
def test_clients_are_named_as_far_as_their_names_fit(comparison, clients, labels):
    drawn = coefficients.figure(comparison, {"ktpfl": (two_groups(len(clients)), np.array(clients))})
    (axes,) = drawn.axes
    drawn.canvas.draw()
    renderer = drawn.canvas.get_renderer()
    for axis in (axes.xaxis, axes.yaxis):
        names = axis.get_ticklabels()
        assert [name.get_text() for name in names] == labels
        assert [list(clients)[int(at)] for at in axis.get_ticklocs()] == [int(label) for label in labels]
        boxes = [name.get_window_extent(renderer) for name in names]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_pictures_of_models_are_pngs_that_repeat(tmp_path):
    names = [f"m$^{index}" for index in range(5)]
    found = a_comparison(*(a_run(name, 0, [0.5], [0.5]) for name in names))
    x = np.linspace(-1, 1, 5)
    for write in (
        lambda path: tsne.plot(found, {name: a_map(range(30)) for name in names}, path),
        lambda path: landscape.plot(found, x, {name: np.ones((3, 1)) * x**2 for name in names}, path),
        lambda path: samples.plot(
            found, {name: np.random.default_rng(0).random((2, 2, 1, 4, 4)) for name in names}, path
        ),
        lambda path: coefficients.plot(
            found, {name: (two_groups(10), np.arange(10)) for name in names}, path
        ),
    ):
        path = write(tmp_path / "new" / "a.png")
        before = path.read_bytes()
        assert before.startswith(b"\x89PNG\r\n\x1a\n")
        assert imread(path)[..., :3].std() > 0.01
        assert write(path).read_bytes() == before


def test_no_panel_overlaps_another_or_its_heading(comparison):
    runs = [a_run(f"method-{index}", 0, [0.5], [0.5]) for index in range(4)]
    found, x = a_comparison(*runs), np.linspace(-1, 1, 5)
    names = [run.method for run in runs]
    for drawn in (
        tsne.figure(found, {name: a_map(range(30)) for name in names}),
        landscape.figure(found, x, {name: np.ones((3, 1)) * x**2 for name in names}),
        samples.figure(found, {name: np.zeros((20, 3, 1, 4, 4)) for name in names}),
        coefficients.figure(found, {name: (two_groups(100), np.arange(100)) for name in names}),
    ):
        drawn.canvas.draw()
        renderer = drawn.canvas.get_renderer()
        boxes = [axes.get_tightbbox(renderer) for axes in drawn.axes if axes.get_visible()]
        boxes += [drawn._suptitle.get_window_extent(renderer)]
        boxes += [legend.get_window_extent(renderer) for legend in drawn.legends]
        for index, box in enumerate(boxes):
            assert box.x0 >= 0
            assert box.y0 >= 0
            assert box.x1 <= drawn.bbox.x1
            assert box.y1 <= drawn.bbox.y1
            assert not any(box.overlaps(other) for other in boxes[:index])
        for axes in drawn.axes:
            name, accuracy = (text.get_window_extent(renderer) for text in (axes.title, axes.texts[0]))
            assert accuracy.y0 >= axes.get_window_extent(renderer).y1
            assert not axes.texts[0].get_text() or name.y1 > accuracy.y1


def test_what_the_pictures_of_models_refuse(comparison):
    with pytest.raises(ResultError, match="there is no method to draw"):
        tsne.figure(comparison, {})
    with pytest.raises(ResultError, match="the result has no run of fedhkd"):
        landscape.figure(comparison, np.arange(3), {"fedhkd": np.ones((1, 3))})
    with pytest.raises(ResultError, match="seed must be one of 0, 1, got 7"):
        tsne.figure(comparison, {"fedavg": a_map()}, seed=7)
    with pytest.raises(
        ResultError, match=r"images of fedavg must have the shape \[C, n, K, H, W\], got \[2, 3\]"
    ):
        samples.figure(comparison, {"fedavg": np.ones((2, 3))})
    for matrix, clients, found in (
        (np.ones((2, 3)), [0, 1], r"got \[2, 3\] for \[2\]"),
        (np.ones((2, 2)), [0, 1, 2], r"got \[2, 2\] for \[3\]"),
        (np.ones((0, 0)), [], r"got \[0, 0\] for \[0\]"),
        (np.full((1, 1), np.nan), [0], "must be finite"),
    ):
        with pytest.raises(ResultError, match=found):
            coefficients.figure(comparison, {"ktpfl": (matrix, np.array(clients))})


def test_the_caller_s_matplotlib_is_left_alone(tmp_path, comparison):
    """In a fresh process, since pyplot may be loaded here already.

    With a backend named: reading an unset one out of rcParams imports pyplot by itself.
    """
    source = tmp_path / "comparison.json"
    source.write_text(comparison.to_json())
    code = (
        "import sys, pathlib, matplotlib\n"
        "from flwr_kd.plotting.curves import plot\n"
        "from flwr_kd.results.files import load\n"
        "before = dict(matplotlib.rcParams)\n"
        "source = pathlib.Path(sys.argv[1])\n"
        "plot(load(source), source.with_suffix('.png'))\n"
        "assert dict(matplotlib.rcParams) == before\n"
        "assert matplotlib.get_backend() == 'svg'\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = os.environ | {"MPLBACKEND": "svg"}
    subprocess.run([sys.executable, "-c", code, str(source)], check=True, timeout=120, env=environment)
    assert source.with_suffix(".png").exists()


def test_importing_the_module_does_not_import_matplotlib():
    code = "import sys, flwr_kd.plotting\nassert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch, comparison):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'flwr-kd\[simulation\]'"):
        plot(comparison, tmp_path / "a.png")
