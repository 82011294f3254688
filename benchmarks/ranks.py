"""Compare our latents with published methods that cache fewer numbers of each key, by perplexity on the same windows.

python benchmarks/ranks.py [--quick] [--models NAME ...] [--other FILE] [--json FILE]

All methods are fitted to the same calibration windows, and measured on other windows of the same texts and, with
--other, on a text of another kind. "kept" is the share of a key's numbers that is cached per token, equal in all heads
and layers. A rise is that of perplexity, with its 95 % interval over pairs of windows. The form marked `chosen` is our
form with the least rise, at half of the numbers, on further calibration windows; each text is measured with maps fitted
to the others, as in `--budget`. Peers: rank_peers.py.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import rank_peers
import subjects
import torch

from attnlens.kernels import Kernel, parsed
from attnlens.kernels.lowrank import OUTPUT
from attnlens.lab.ranks.bases import Basis, fit_forms, form_name, list_forms, with_parameters
from attnlens.lab.ranks.search import BudgetSearch, Losses, Sample, Trial, measure_losses, rise_of, split_by_text
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts import Content, Cut
from attnlens.models.texts.targets import Fed, feed
from attnlens.records import Rise, Site

MODELS = ("demo", "SmolLM2")
KEPT = {"50 %": 1 / 2, "25 %": 1 / 4, "33 %": 1 / 3, "75 %": 3 / 4}
"""Shares of a key's numbers, in the order of measurement."""
OURS = "ours "
TASK = "causal"


@dataclass(frozen=True)
class Row:
    """The rise of one method on one text; rises are shares of perplexity."""

    model: str
    text: str
    method: str
    kept: str
    numbers: int
    """Numbers cached of each key."""
    before: float
    """Perplexity."""
    after: float
    share: float
    low: float
    high: float
    by_text: dict[str, float]
    """The rise of each text alone."""
    chosen: bool = False


@dataclass(frozen=True)
class Evaluated:
    """Windows that no method was fitted on."""

    name: str
    fed: Sequence[Fed]
    names: Sequence[str]
    original: Losses
    """Losses of the unchanged model."""


class Subject:
    """One model with its calibration and evaluation windows."""

    def __init__(self, name: str, path: str, other: Sequence[Content], cut: Cut, evaluated: int) -> None:
        self.name, self.loaded = name, loading.load(path)
        self.contents = texts.sample(self.loaded.info.id)
        shown = texts.batches(self.loaded, self.contents, replace(cut, sequences=evaluated))
        self.fitting, self.choosing = (
            self.sample(texts.batches(self.loaded, self.contents, part, apart_from=shown))
            for part in (replace(cut, sequences=2 * cut.sequences, turn=(turn, 2)) for turn in range(2))
        )
        self.fed = feed(self.loaded, self.fitting.batches, TASK, 0)
        self.sites = tuple(capture.site for capture in hooks.survey(self.loaded.model, self.fed[0].inputs))
        swaps: dict[Site, hooks.Replacement] = {site: hooks.Replacement(parsed("rank:65536")) for site in self.sites}
        self.search = BudgetSearch(self.loaded, self.sites, swaps, TASK, progress=lambda _: None, unit="ppl")
        unlike = [texts.batches(self.loaded, [content], replace(cut, sequences=evaluated)) for content in other]
        self.texts = [self.evaluate("other windows", shown), *(self.evaluate(b.texts[0].name, b) for b in unlike)]

    def sample(self, batches: texts.Batches) -> Sample:
        """Build a sample with intervals over windows."""
        return Sample(batches, Design.of(batches.parts, "windows"))

    def evaluate(self, name: str, batches: texts.Batches) -> Evaluated:
        """Measure the losses of the unchanged model on these windows."""
        fed, sample = feed(self.loaded, batches, TASK, 0), self.sample(batches)
        return Evaluated(
            name, fed, list(dict.fromkeys(batches.parts)), measure_losses(self.loaded, fed, TASK, sample.design)
        )

    def fit_ways(self, names: Sequence[str]) -> dict[str, dict[Site, Basis]]:
        """Fit the directions of every selected peer and form of ours to the calibration windows."""
        reads = rank_peers.read_sites(self.loaded, self.sites, self.fed)
        self.forms = list_forms(self.loaded, self.search.swaps)
        self.forms += [with_parameters(form, metric=OUTPUT) for form in self.forms]
        self.forms = [form for form in self.forms if not names or name_form(form) in names]
        self.read = fit_forms(self.search, self.forms, split_by_text(self.fed, self.fitting), self.search.progress)
        peers = {
            name: {site: rank_peers.build_basis(peer, read) for site, read in reads.items()}
            for name, peer in rank_peers.PEERS.items()
            if not names or name in names
        }
        ours = {name_form(form): self.read[form.spelling][None] for form in self.forms}
        return peers | ours

    def find_chosen(self) -> str:
        """Return the form of least rise at half of the numbers, on windows used neither to fit nor to evaluate."""
        trial = Trial.of(self.search, self.choosing)
        rises: dict[str, float] = {}

        def rise(form: Kernel) -> float:
            self.search.use_form(self.read, form)
            tried = trial.rise([size // 2 for size in self.search.full_ranks])
            rises[name_form(form)] = math.inf if tried is None else tried.share
            return rises[name_form(form)]

        plain = [form for form in self.forms if form.parameters["metric"] != OUTPUT]
        best = with_parameters(min(plain or self.forms, key=rise), metric=OUTPUT)
        if plain and best in self.forms:
            rise(best)
        return min(rises, key=rises.__getitem__)

    def measure(self, method: str, bases: dict[Site, Basis], kept_share: str) -> Iterator[Row]:
        """Yield the rows of one method at one rank on every text."""
        numbers = int(KEPT[kept_share] * next(iter(bases.values())).latents.head_dim)
        ranks = {site: [numbers * len(group) for group in basis.groups] for site, basis in bases.items()}
        self.search.bases = bases
        with hooks.replace(self.loaded.model, self.sites, self.search.build_swaps(ranks)):
            after = [measure_losses(self.loaded, text.fed, TASK, text.original.design) for text in self.texts]
        for text, lost in zip(self.texts, after, strict=True):
            rise = rise_of(text.original, lost.means, text.names, 0, "ppl")
            yield build_row(self.name, text, method, kept_share, numbers, rise)


def name_form(form: Kernel) -> str:
    """Name a form by what differs from `rank:r`, as in `ours group=all,rotation=before`."""
    plain = ("group=1", "rotation=after", "metric=attention")
    words = [word for word in form_name(form).split(",") if word not in plain]
    return OURS + (",".join(words) or "per head")


def build_row(model: str, text: Evaluated, method: str, kept_share: str, numbers: int, rise: Rise | None) -> Row:
    """Build a row; all its numbers are infinite if the model diverged."""
    before = math.exp(text.original.mean)
    share, (low, high) = (math.inf, (math.inf, math.inf)) if rise is None else (rise.share, rise.ci95 or (0.0, 0.0))
    alone = {} if rise is None else dict(rise.by_text)
    return Row(model, text.name, method, kept_share, numbers, before, before * (1 + share), share, low, high, alone)


def main() -> None:
    """Print and write every method at every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, few windows, one rank: does it still run?")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: all)")
    parser.add_argument("--other", nargs="*", default=[], metavar="FILE", help="more texts to evaluate on")
    parser.add_argument("--kept", nargs="+", choices=KEPT, default=list(KEPT), help="shares of a key (default: all)")
    parser.add_argument(
        "--ways", nargs="+", default=[], metavar="NAME", help="methods by their printed names (default: all)"
    )
    parser.add_argument("--windows", type=int, default=48, help="calibration windows (default: 48)")
    parser.add_argument("--evaluated", type=int, default=24, help="windows of every evaluated text (default: 24)")
    parser.add_argument("--length", type=int, default=128, help="tokens per window (default: 128)")
    parser.add_argument("--json", metavar="FILE", help="write all rows here after each measurement")
    options = parser.parse_args()
    print(subjects.describe_machine())
    torch.set_num_threads(1)
    if options.quick:
        options.models, options.windows, options.evaluated, options.length = ("demo",), 6, 4, 64
    cut, rows = Cut(options.length, options.windows, batch_size=8, allow_foreign=True), list[Row]()
    other = list(texts.read_each(options.other) or [])
    for name, path in subjects.find_models(quick=options.quick).items():
        if name not in options.models:
            continue
        subject = Subject(name, path, other, cut, options.evaluated)
        for model_rows in measure_rows(subject, options.kept[:1] if options.quick else options.kept, options.ways):
            rows = [row for row in rows if row.model != name] + model_rows
            if options.json:
                asked = {key: value for key, value in vars(options).items() if key not in ("json", "other", "models")}
                digests = {
                    content.name: sha256(content.text.encode()).hexdigest() for content in (*subject.contents, *other)
                }
                subjects.write_json(options.json, {"asked": asked, "texts": digests, "rows": list(map(asdict, rows))})
        print_tables([row for row in rows if row.model == name])


def measure_rows(subject: Subject, shares_kept: Sequence[str], names: Sequence[str]) -> Iterator[list[Row]]:
    """Yield all rows so far after each method and rank."""
    sequences = subject.fitting.batches.sequences, subject.choosing.batches.sequences
    print(f"\n{subject.name}: fitted on {sequences[0]} windows, chosen on {sequences[1]} others", flush=True)
    rows = list[Row]()
    start = time.monotonic()
    ways = subject.fit_ways(names)
    print(f"fitted in {time.monotonic() - start:.0f} s", flush=True)
    for kept_share in shares_kept:
        for method, bases in ways.items():
            start = time.monotonic()
            fresh = list(subject.measure(method, bases, kept_share))
            rows += fresh
            shares = ", ".join(f"{100 * row.share:+.2f} %" for row in fresh)
            print(f"  {kept_share} {method}: {shares} ({time.monotonic() - start:.0f} s)", flush=True)
            yield rows
    chosen = subject.find_chosen() if subject.forms else ""
    print(f"  chosen: {chosen}", flush=True)
    yield [replace(row, chosen=row.method == chosen) for row in rows]


def print_tables(rows: Sequence[Row]) -> None:
    """Print a table for each text and rank, the smallest rise first."""
    for text in dict.fromkeys(row.text for row in rows):
        for kept_share in sorted(KEPT, reverse=True):
            group = sorted((r for r in rows if (r.text, r.kept) == (text, kept_share)), key=lambda row: row.share)
            if not group:
                continue
            print(f"\n{group[0].model}, {text}, keys kept {kept_share}: {group[0].numbers} numbers of each key", end="")
            print(f"; perplexity before {group[0].before:.2f}")
            for row in group:
                ends = f"[{100 * row.low:+.2f}, {100 * row.high:+.2f}]"
                mark = "  chosen" if row.chosen else ""
                print(f"  {row.method:50}{row.after:10.2f}{100 * row.share:+10.2f} % {ends:22}{mark}")
            print(f"  {format_verdict(group)}")


def format_verdict(rows: Sequence[Row]) -> str:
    """Format which method is best, and the ratio of the best peer's rise to that of the chosen form."""
    ours = next((row for row in rows if row.chosen), rows[0])
    peer = next(row for row in rows if not row.method.startswith(OURS))
    ratio = peer.share / ours.share if ours.share > 0 else math.nan
    return f"best: {rows[0].method}; best peer: {peer.method}, ratio of its rise to {ours.method}'s: {ratio:.2f}"


if __name__ == "__main__":
    main()
