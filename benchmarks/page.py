"""Measure the size of the page, the time to write it, and the time until it is interactive in a browser.

python benchmarks/page.py [--quick] [--runs N]

The reports contain random numbers: 12 × 12 or 80 × 64 heads with 20 measures and two curves of 128 steps, and the
attention of one head on 512 tokens. "interactive" is domContentLoadedEventEnd of the navigation, when the script has
run; the other rows are the time from a choice to the next frame. Chromium is headless, and the file is local. Without
Chromium and Selenium only the sizes are measured.
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
from attnlens.report.report import Report

SHAPES = {(12, 12): 2_000_000, (80, 64): 8_000_000}
"""Layers and heads → largest size of the page in bytes."""
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
    """Print one row per shape and measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small report once: does it still run?")
    parser.add_argument("--runs", type=int, default=5, help="openings of each page")
    options = parser.parse_args()
    print(f"{'heads':8} {'what':20} {'measured':>12} {'allowed':>10} ratio")
    for (layers, heads), limit in list(SHAPES.items())[: 1 if options.quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            start = time.perf_counter()
            path.write_text(export.WRITERS["html"](build_report(layers, heads)))
            shape, size = f"{layers}×{heads}", path.stat().st_size
            print(f"{shape:8} {'bytes':20} {size:12,} {limit:10,} {size / limit:.2f}")
            print(f"{shape:8} {'written in':20} {time.perf_counter() - start:10.2f} s")
            for what, seconds in time_page(path, 1 if options.quick else options.runs):
                allowed = f"{1:8.2f} s {seconds:.2f}" if what == "interactive" else ""
                print(f"{shape:8} {what:20} {seconds:10.3f} s {allowed}", flush=True)


def build_report(layers: int, heads: int) -> Report:
    """Build a report of this shape, with an error for half of the measures and a null for the others."""
    random = np.random.default_rng(0)
    return Report(
        kind="inspection",
        tool=Tool(version="0"),
        command="inspect",
        model=ModelInfo(id="random", architecture="Random", parameters=1),
        settings=Settings(source="weights"),
        environment=Environment(python="", torch="", transformers="", platform=""),
        coverage=Coverage(sites=layers, heads=layers * heads, analysed=layers * heads),
        heads=[_draw_head(random, layer, head) for layer in range(layers) for head in range(heads)],
        inspection=InspectionBody(attention=[_draw_attention(random)]),
    )


def _draw_attention(random: np.random.Generator) -> AttentionRows:
    """Draw the eight largest attention weights of each of the first head's 512 tokens."""
    keys = [sorted(random.choice(query + 1, min(8, query + 1), replace=False).tolist()) for query in range(TOKENS)]
    return AttentionRows(
        **{"site": "layers.0", "layer": 0, "head": 0, "kv_head": 0, "part": "decoder", "sequence": 0},
        keys=keys,
        weights=[random.dirichlet(np.ones(len(row))).tolist() for row in keys],
        rest=[0.0] * TOKENS,
        sentence=Sentence(sequence=0, keys=[f"token{place}" for place in range(TOKENS)]),
    )


def _draw_head(random: np.random.Generator, layer: int, head: int) -> Head:
    values = random.standard_normal(MEASURES)
    falling = np.exp(-np.arange(STEPS) * random.uniform(0.01, 0.1))
    return Head(
        **{"site": f"layers.{layer}", "layer": layer, "head": head, "kv_head": head, "part": "decoder"},
        measures={f"weights.measure{n}": _build_measure(float(value), n) for n, value in enumerate(values)},
        curves={f"weights.curve{n}": (falling * random.uniform(1, 2, STEPS)).tolist() for n in range(2)},
    )


def _build_measure(value: float, number: int) -> Measure:
    if number % 2:
        return Measure(value=value, se=abs(value) / 9, n=32)
    return Measure(value=value, n=1, null=Null(mean=value / 7, sd=abs(value) / 5))


def time_page(path: Path, runs: int) -> Iterator[tuple[str, float]]:
    """Yield the median seconds until the page is interactive, and until each choice is drawn."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return
    from selenium import webdriver

    browser = _start_browser(webdriver)
    try:
        times: dict[str, list[float]] = {}
        for _ in range(runs):
            browser.get(path.as_uri())
            times.setdefault("interactive", []).append(browser.execute_script(INTERACTIVE) / 1000)
            for action, choice in CHOICES.items():
                times.setdefault(action, []).append(browser.execute_async_script(DRAWN.replace("{}", choice)) / 1000)
    finally:
        browser.quit()
    yield from ((action, statistics.median(seconds)) for action, seconds in times.items())


def _start_browser(webdriver: Any) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


if __name__ == "__main__":
    main()
