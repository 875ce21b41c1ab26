"""Headless Chromium, driven by Selenium: Debian's packages chromium and chromium-driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1400,1000",
    # Every host but this machine is unknown.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
MISSING = [name for name, place in PROGRAMS.items() if place is None]
needs_chromium = pytest.mark.skipif(
    bool(MISSING),
    reason=f"{' and '.join(MISSING)} not found: apt-get install chromium chromium-driver",
)


@contextmanager
def browser(profile: Path, *arguments: str) -> Iterator[Any]:
    """Yield a WebDriver with a fresh profile; it ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAMS["chromium"]
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(PROGRAMS["chromedriver"]))
    try:
        driver.set_page_load_timeout(240)
        yield driver
    finally:
        driver.quit()


def console(driver: Any) -> list[str]:
    """Return what the page's console says: errors, warnings, and what the policy of the page refused."""
    return [entry["message"] for entry in driver.get_log("browser")]
