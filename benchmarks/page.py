"""How large the page is, how long it takes to write, and how soon a browser lets its reader explore it.

python benchmarks/page.py [--quick] [--runs N]

Reports of random numbers, 12 × 12 and 80 × 64 heads with 20 measures and two curves of 128 steps, and the attention of
one head on 512 tokens. Interactive is domContentLoadedEventEnd of the navigation, at which the script has run; below it
stands the time from a choice to the next frame after it. Chromium is headless, the file is local. Without Chromium and
Selenium the sizes alone are measured.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnlens.records import (
    AttentionRows,
    Coverage,
    Environment,
    Head,
    InspectionBody,
    Measure,
    ModelInfo,
    Null,
    Sentence,
    Settings,
    Tool,
)
from attnlens.report import export
from attnlens.report.export import Report

SHAPES = {(12, 12): 2_000_000, (80, 64): 8_000_000}
"""Layers and heads, and the bytes that the page may have."""
MEASURES, STEPS, TOKENS = 20, 128, 512
INTERACTIVE = "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
CHOICES = {
    "another measure": "change({measure: data.measures[7].name})",
    "another head": "change({head: keyOf(data.places.length - 1)})",
    "sorted": "change({sort: '-' + data.measures[3].name})",
    "filtered": "change({filter: 'head < 4'})",
    "scrolled": "element('rows').scrollTop = 4000",
    "512 tokens drawn": "change({head: '0.0'})",
    "a token looked at": "document.querySelector('.queries button[data-place=\"300\"]').focus()",
}
DRAWN = """
const done = arguments[0], start = performance.now();
{};
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""


def main() -> None:
    """Print a row a shape and measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small report once: does it still run?")
    parser.add_argument("--runs", type=int, default=5, help="how often each page is opened")
    wanted = parser.parse_args()
    print(f"{'heads':8} {'what':20} {'found':>12} {'allowed':>10} ratio")
    for (layers, heads), most in list(SHAPES.items())[: 1 if wanted.quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            start = time.perf_counter()
            path.write_text(export.WRITERS["html"](made(layers, heads)))
            shape, size = f"{layers}×{heads}", path.stat().st_size
            print(f"{shape:8} {'bytes':20} {size:12,} {most:10,} {size / most:.2f}")
            print(f"{shape:8} {'written in':20} {time.perf_counter() - start:10.2f} s")
            for what, seconds in opened(path, 1 if wanted.quick else wanted.runs):
                allowed = f"{1:8.2f} s {seconds:.2f}" if what == "interactive" else ""
                print(f"{shape:8} {what:20} {seconds:10.3f} s {allowed}", flush=True)


def made(layers: int, heads: int) -> Report:
    """A report of that shape with an error for half of the measures and a null for the others."""
    random = np.random.default_rng(0)
    return Report(
        kind="inspection",
        tool=Tool(version="0"),
        command="inspect",
        model=ModelInfo(id="random", architecture="Random", parameters=1),
        settings=Settings(source="weights"),
        environment=Environment(python="", torch="", transformers="", platform=""),
        coverage=Coverage(sites=layers, heads=layers * heads, analysed=layers * heads),
        heads=[_head(random, layer, head) for layer in range(layers) for head in range(heads)],
        inspection=InspectionBody(attention=[_rows(random)]),
    )


def _rows(random: np.random.Generator) -> AttentionRows:
    """The first head's eight largest weights of each of 512 tokens."""
    keys = [sorted(random.choice(query + 1, min(8, query + 1), replace=False).tolist()) for query in range(TOKENS)]
    return AttentionRows(
        **{"site": "layers.0", "layer": 0, "head": 0, "kv_head": 0, "part": "decoder", "sequence": 0},
        keys=keys,
        weights=[random.dirichlet(np.ones(len(row))).tolist() for row in keys],
        rest=[0.0] * TOKENS,
        sentence=Sentence(sequence=0, keys=[f"token{place}" for place in range(TOKENS)]),
    )


def _head(random: np.random.Generator, layer: int, head: int) -> Head:
    values = random.standard_normal(MEASURES)
    falling = np.exp(-np.arange(STEPS) * random.uniform(0.01, 0.1))
    return Head(
        **{"site": f"layers.{layer}", "layer": layer, "head": head, "kv_head": head, "part": "decoder"},
        measures={f"weights.measure{n}": _measure(float(value), n) for n, value in enumerate(values)},
        curves={f"weights.curve{n}": (falling * random.uniform(1, 2, STEPS)).tolist() for n in range(2)},
    )


def _measure(value: float, number: int) -> Measure:
    if number % 2:
        return Measure(value=value, se=abs(value) / 9, n=32)
    return Measure(value=value, n=1, null=Null(mean=value / 7, sd=abs(value) / 5))


def opened(path: Path, runs: int) -> Iterator[tuple[str, float]]:
    """Seconds until the page is interactive, and until each choice is drawn, in the median of the runs."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return
    from selenium import webdriver

    browser = _browser(webdriver)
    try:
        found: dict[str, list[float]] = {}
        for _ in range(runs):
            browser.get(path.as_uri())
            found.setdefault("interactive", []).append(browser.execute_script(INTERACTIVE) / 1000)
            for what, choice in CHOICES.items():
                found.setdefault(what, []).append(browser.execute_async_script(DRAWN.replace("{}", choice)) / 1000)
    finally:
        browser.quit()
    yield from ((what, statistics.median(seconds)) for what, seconds in found.items())


def _browser(webdriver: Any) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


if __name__ == "__main__":
    main()
