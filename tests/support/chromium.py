"""Headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import axe_core_python
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
MISSING = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with chromedriver on this machine")
AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
FAULTS = """
const [options, done] = arguments;
const serious = ({impact}) => ["serious", "critical"].includes(impact);
const described = ({impact, id, nodes}) => [impact, id, nodes[0].html];
axe.run(document, options).then(({violations}) => done(violations.filter(serious).map(described)));
"""


def needed(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that takes long and needs the browser."""
    return pytest.mark.full(MISSING(test))


def started() -> webdriver.Chrome:
    """Start a browser that keeps the logs of pages."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    # no sandbox: CI runs as root in a container, and the pages are ours
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


def sized(browser: webdriver.Chrome, width: int) -> None:
    """Set the width of the page in pixels."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def opened(browser: webdriver.Chrome, path: Path, fragment: str = "") -> None:
    """Load the page and wait until its script has run: for a large page on a busy core, `get` can return earlier."""
    browser.get("about:blank")
    browser.get(f"{path.as_uri()}#{fragment}")
    ready = lambda _: browser.execute_script("return document.documentElement.dataset.ready") == "yes"  # noqa: E731
    WebDriverWait(browser, 30).until(ready, "the page's script did not run to its end")


def logged(browser: webdriver.Chrome) -> list[str]:
    """Return what the pages logged since the last call: errors, and what their policy refused."""
    return [str(entry["message"]) for entry in browser.get_log("browser")]


def faults(browser: webdriver.Chrome) -> list[Any]:
    """Return the serious accessibility faults that axe finds in the page as shown."""
    browser.execute_script(AXE.read_text())
    return list(browser.execute_async_script(FAULTS, {"resultTypes": ["violations"]}))
