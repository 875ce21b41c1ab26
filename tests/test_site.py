"""The documentation site: it builds without a warning, has every public name, and its search works in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import browser, console, needs_chromium

pytest.importorskip("sphinx", reason="the documentation needs its extra: pip install '.[docs]'")
ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.program,
    pytest.mark.xdist_group("site"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built with warnings as errors, and without a network for links to other projects."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-b", "html"]
    environment = {name: value for name, value in os.environ.items() if name != "READTHEDOCS"}
    for name in ("http_proxy", "https_proxy"):
        environment |= {name: "http://127.0.0.1:9", name.upper(): "http://127.0.0.1:9"}
    done = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), ".", str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_there_is_a_page_for_each_guide_method_notebook_and_app(site: Path) -> None:
    sources = [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("strategies/*/README.md"),
        *ROOT.glob("apps/*/README.md"),
        *ROOT.glob("notebooks/*.ipynb"),
    ]
    assert len(sources) > 30
    missing = [
        source for source in sources if not (site / source.relative_to(ROOT)).with_suffix(".html").is_file()
    ]
    assert missing == []


def test_every_public_name_is_in_the_reference(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import api_pages

    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    there = {line.split(" ")[0] for line in lines}
    public = {
        f"{module.__name__}.{name}"
        for module in api_pages.modules()
        for name in api_pages.public_names(module)
    }
    assert {"flwr_kd.server.strategy.KDStrategy", "flwr_kd.strategies.fedhkd.client.FedHKDClient"} <= public
    assert len(public) > 500
    assert public - there == set()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Formulas are MathML, so that MathJax is not needed."""
    loaded = re.compile(r'<(?:script|img|link|iframe)[^>]* (?:src|href)="(?:https?:)?//([^"]+)"')
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) > 50
    assert {(name, place) for name, text in pages.items() for place in loaded.findall(text)} == set()
    assert "<math" in pages["flwr_kd.strategies.fedproto.html"]


@needs_chromium
def test_the_search_finds_fedhkd_and_pages_have_no_errors(address: str, tmp_path: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    with browser(tmp_path / "profile") as driver:
        driver.get(f"{address}/search.html?q=FedHKD")
        found = WebDriverWait(driver, 60).until(
            lambda page: page.find_elements(
                "css selector", "ul.search li a[href*='strategies/fedhkd/README']"
            )
        )
        assert "FedHKD" in found[0].text
        for page in (
            "docs/index",
            "strategies/fedhkd/README",
            "docs/api/flwr_kd.strategies.fedproto",
            "notebooks/quickstart",
        ):
            driver.get(f"{address}/{page}.html")
            assert driver.find_element("tag name", "h1").text
        assert driver.find_elements("css selector", ".cell_output")
        assert console(driver) == []
