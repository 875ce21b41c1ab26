"""What all pictures share: files, panels, errors, and a caller whose matplotlib is left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_kd import registry
from flwr_kd.plotting import coefficients, landscape, samples, tsne
from flwr_kd.plotting.curves import plot
from flwr_kd.plotting.style import COLOURS, HATCHES, heading, palette, title_lines
from flwr_kd.results.errors import ResultError
from tests.plotting.examples import a_comparison, a_map, a_run, two_groups


@pytest.mark.long
def test_pictures_of_models_are_pngs_that_repeat(tmp_path):
    names = [f"m$^{index}" for index in range(5)]
    result = a_comparison(*(a_run(name, 0, [0.5], [0.5]) for name in names))
    x = np.linspace(-1, 1, 5)
    for write in (
        lambda path: tsne.plot(result, {name: a_map(range(30)) for name in names}, path),
        lambda path: landscape.plot(result, x, {name: np.ones((3, 1)) * x**2 for name in names}, path),
        lambda path: samples.plot(
            result, {name: np.random.default_rng(0).random((2, 2, 1, 4, 4)) for name in names}, path
        ),
        lambda path: coefficients.plot(
            result, {name: (two_groups(10), np.arange(10)) for name in names}, path
        ),
    ):
        path = write(tmp_path / "new" / "a.png")
        before = path.read_bytes()
        assert before.startswith(b"\x89PNG\r\n\x1a\n")
        assert imread(path)[..., :3].std() > 0.01
        assert write(path).read_bytes() == before


def test_no_panel_overlaps_another_or_its_heading(comparison):
    runs = [a_run(f"method-{index}", 0, [0.5], [0.5]) for index in range(4)]
    result, x = a_comparison(*runs), np.linspace(-1, 1, 5)
    names = [run.method for run in runs]
    for drawn in (
        tsne.figure(result, {name: a_map(range(30)) for name in names}),
        landscape.figure(result, x, {name: np.ones((3, 1)) * x**2 for name in names}),
        samples.figure(result, {name: np.zeros((20, 3, 1, 4, 4)) for name in names}),
        coefficients.figure(result, {name: (two_groups(100), np.arange(100)) for name in names}),
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


def test_all_methods_have_lines_and_bars_of_their_own():
    names = list(registry.methods())
    lines = {(style["color"], str(style["linestyle"])) for style in palette(names).values()}
    assert len(lines) == len(names) > 30
    assert len(COLOURS) * len(HATCHES) >= len(names)
    assert len(set(HATCHES)) == len(HATCHES)


def test_titles_are_broken_between_their_parts():
    parts = heading(
        {"dataset": "digits", "partition": "inner-dirichlet:0.1", "clients": 1, "rounds": 1}, [0, 1]
    )
    assert parts == ["digits", "inner-dirichlet:0.1", "1 client", "1 round", "seeds 0, 1"]
    assert title_lines(parts, 29) == ["digits · inner-dirichlet:0.1", "1 client · 1 round", "seeds 0, 1"]
    assert title_lines(["a part that is longer than a line", "b"], 20) == [
        "a part that is",
        "longer than a line",
        "b",
    ]


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
    for matrix, clients, message in (
        (np.ones((2, 3)), [0, 1], r"got \[2, 3\] for \[2\]"),
        (np.ones((2, 2)), [0, 1, 2], r"got \[2, 2\] for \[3\]"),
        (np.ones((0, 0)), [], r"got \[0, 0\] for \[0\]"),
        (np.full((1, 1), np.nan), [0], "must be finite"),
    ):
        with pytest.raises(ResultError, match=message):
            coefficients.figure(comparison, {"ktpfl": (matrix, np.array(clients))})


@pytest.mark.program
def test_the_caller_s_matplotlib_is_left_alone(tmp_path, comparison):
    """Runs in a new process, since this one may have loaded pyplot already.

    A backend is set, since reading rcParams without one imports pyplot.
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
    subprocess.run([sys.executable, "-c", code, str(source)], check=True, env=environment)
    assert source.with_suffix(".png").exists()


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch, comparison):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'flwr-kd\[simulation\]'"):
        plot(comparison, tmp_path / "a.png")
