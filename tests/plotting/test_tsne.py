"""Maps of features."""

from __future__ import annotations

import numpy as np

from flwr_kd.plotting import tsne
from tests.plotting.examples import a_map, titles


def test_maps_have_a_panel_per_method_and_a_colour_per_class(comparison):
    drawn = tsne.figure(comparison, {"ktpfl": a_map(), "fedavg": a_map((3, 9))}, seed=1)
    assert titles(drawn) == ["ktpfl", "fedavg"]
    assert drawn.get_suptitle().replace("\n", " · ") == (
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
