"""The report in headless Chromium: no errors, values under the pointer and by the keyboard, highlighted methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_kd.report.page import write
from tests.browser import browser, console, needs_chromium
from tests.report.examples import HOSTILE, a_hostile_result, a_result

pytestmark = [needs_chromium, pytest.mark.program, pytest.mark.xdist_group("report-in-browser")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(driver: Any, tmp_path: Path) -> Any:
    results = {"a": a_result("iid"), "b": a_result("dirichlet:0.1", gain=0.2)}
    driver.get(write(results, tmp_path / "report.html").as_uri())
    return driver


def scroll_to(driver: Any, element: Any) -> None:
    """Scroll, and wait: the values vanish when the page scrolls, of which a slow browser tells late."""
    driver.execute_async_script(
        "arguments[0].scrollIntoView({block: 'center'});"
        "requestAnimationFrame(() => requestAnimationFrame(arguments[1]))",
        element,
    )


def under_pointer(driver: Any, figure: int, x: float, y: float) -> str:
    """Move the pointer to a place in a chart, in shares of its picture; return what the page then shows."""
    from selenium.webdriver import ActionChains

    picture = driver.find_elements("css selector", "figure.chart > svg")[figure]
    scroll_to(driver, picture)
    size = picture.rect
    moves = ActionChains(driver, duration=0)
    moves.move_to_element_with_offset(
        picture, (x - 0.5) * size["width"], (y - 0.5) * size["height"]
    ).perform()
    return text_of_pointer(driver)


def text_of_pointer(driver: Any) -> str:
    box = driver.find_element("id", "pointer")
    return " ".join(box.text.split()) if box.is_displayed() else ""


def place_of(driver: Any, title: str) -> int:
    captions = [caption.text for caption in driver.find_elements("css selector", "figcaption strong")]
    return captions.index(title)


def test_there_is_no_error_and_no_sideways_scrolling(opened: Any) -> None:
    assert console(opened) == []
    widths = opened.execute_script(
        "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
    )
    assert widths[0] <= widths[1]


def test_values_are_shown_under_the_pointer(opened: Any) -> None:
    # The first of three rounds is at the left: 0.2 below the last one's 60 % and 81 ± 1.41 %.
    curve = place_of(opened, "local accuracy – b")
    assert under_pointer(opened, curve, 0.12, 0.5) == "round 1 fedavg 40.00 ± 0.00 % fedproto 61.00 ± 1.41 %"
    assert under_pointer(opened, curve, 0.95, 0.5) == "round 3 fedavg 60.00 ± 0.00 % fedproto 81.00 ± 1.41 %"
    # Three rounds of 4 MB.
    costs = place_of(opened, "accuracy against megabytes – a")
    assert under_pointer(opened, costs, 0.97, 0.05) == "round 3 fedproto 12 MB, 71.00 %"
    clients = place_of(opened, "clients from the worst to the best – a")
    assert "fedavg 55.00 % (client 0, seed" in under_pointer(opened, clients, 0.1, 0.85)


def test_cells_of_the_map_of_classes_are_shown_under_the_pointer(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    cells = opened.find_elements("css selector", "svg[data-grid] rect.cell")
    scroll_to(opened, cells[1])
    ActionChains(opened, duration=0).move_to_element(cells[1]).perform()
    assert text_of_pointer(opened) == "client 0, class 2 training samples 7 all classes 12"


def test_values_are_read_by_the_keyboard(opened: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    ActionChains(opened, duration=0).move_to_element(opened.find_element("tag name", "h1")).perform()
    picture = opened.find_elements("css selector", "figure.chart > svg")[
        place_of(opened, "local accuracy – a")
    ]
    # The values vanish when the page scrolls, which it must not do between the keys.
    opened.execute_async_script(
        "arguments[0].focus(); requestAnimationFrame(() => requestAnimationFrame(arguments[1]))", picture
    )
    picture.send_keys(Keys.ARROW_RIGHT)
    assert text_of_pointer(opened).startswith("round 1 fedavg 40.00")
    picture.send_keys(Keys.ARROW_RIGHT)
    assert text_of_pointer(opened).startswith("round 2 fedavg 50.00")
    picture.send_keys(Keys.ESCAPE)
    assert text_of_pointer(opened) == ""


def test_a_pressed_method_is_highlighted(opened: Any) -> None:
    button = opened.find_element("css selector", '.legend button[data-name="fedproto"]')
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    faint = opened.find_elements("css selector", "svg .line.faint")
    assert {part.get_attribute("data-name") for part in faint} == {"fedavg"}
    curve = place_of(opened, "local accuracy – a")
    assert under_pointer(opened, curve, 0.95, 0.5) == "round 3 fedproto 71.00 ± 1.41 %"
    button.click()
    assert not opened.find_elements("css selector", ".faint")


def test_hostile_texts_run_nothing(driver: Any, tmp_path: Path) -> None:
    driver.get(write({HOSTILE: a_hostile_result()}, tmp_path / "report.html").as_uri())
    assert "<script>alert(1)</script>" in under_pointer(driver, 0, 0.5, 0.5)
    assert driver.find_elements("tag name", "img") == []
    assert console(driver) == []


def test_dark_mode_has_dark_paper(driver: Any, tmp_path: Path) -> None:
    driver.get(write({"a": a_result()}, tmp_path / "report.html").as_uri())

    def paper(scheme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return str(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))

    assert paper("dark") == "rgb(21, 23, 25)"
    assert paper("light") == "rgb(255, 255, 255)"
