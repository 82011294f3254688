"""Numbers cached of each key against perplexity: ours and published ways, on the same windows.

python benchmarks/ranks.py [--quick] [--models NAME ...] [--other FILE] [--json FILE]

All are fitted on the same calibration windows and measured on other windows of the same texts, and on a text of another
kind that nothing was fitted on, if one is given. "kept" is the share of a key's numbers that are cached of each token,
the same in every head and layer. A rise is that of perplexity, with its 95 % interval over pairs of windows. The form
marked `chosen` is the one of ours that costs least at half of the numbers on further calibration windows, each text
under maps fitted to the others, as `--budget` chooses. Peers: rank_peers.py.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import rank_peers
import subjects
import torch

from attnlens.files import write_atomically
from attnlens.kernels import Kernel, parsed
from attnlens.lab.ranks.bases import Basis, by_output, form_name, possible_forms
from attnlens.lab.ranks.search import Budgeting, Losses, Sample, Trial, by_text, losses, rise_of
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts import Content, Cut
from attnlens.models.texts.targets import Fed, feed
from attnlens.records import Rise, Site

MODELS = ("demo", "SmolLM2")
KEPT = {"50 %": 1 / 2, "25 %": 1 / 4, "33 %": 1 / 3, "75 %": 3 / 4}
"""Shares of a key's numbers, in the order in which they are measured."""
OURS = "ours "
TASK = "causal"


@dataclass(frozen=True)
class Row:
    """One way on one text; rises are shares of perplexity."""

    model: str
    text: str
    method: str
    kept: str
    numbers: int
    """Cached of each key."""
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
    """Windows that nothing was fitted on."""

    name: str
    fed: Sequence[Fed]
    names: Sequence[str]
    own: Losses
    """Of the model as it is."""


class Subject:
    """One model with its calibration and evaluation windows."""

    def __init__(self, name: str, place: str, other: Sequence[Content], cut: Cut, evaluated: int) -> None:
        self.name, self.loaded = name, loading.load(place)
        self.contents = texts.sample(self.loaded.info.id)
        shown = texts.batches(self.loaded, self.contents, replace(cut, sequences=evaluated))
        self.fitting, self.choosing = (
            self.sample(texts.batches(self.loaded, self.contents, part, apart_from=shown))
            for part in (replace(cut, sequences=2 * cut.sequences, turn=(turn, 2)) for turn in range(2))
        )
        self.fed = feed(self.loaded, self.fitting.batches, TASK, 0)
        self.sites = tuple(found.site for found in hooks.survey(self.loaded.model, self.fed[0].inputs))
        swaps: dict[Site, hooks.Replacement] = {site: hooks.Replacement(parsed("rank:65536")) for site in self.sites}
        self.search = Budgeting(self.loaded, self.sites, swaps, TASK, "auto", 0, lambda _: None, unit="ppl")
        unlike = [texts.batches(self.loaded, [one], replace(cut, sequences=evaluated)) for one in other]
        self.texts = [self.evaluated("other windows", shown), *(self.evaluated(b.texts[0].name, b) for b in unlike)]

    def sample(self, batches: texts.Batches) -> Sample:
        """With intervals over windows."""
        return Sample(batches, Design.of(batches.parts, "windows"))

    def evaluated(self, name: str, batches: texts.Batches) -> Evaluated:
        """With the loss of the model as it is."""
        fed, sample = feed(self.loaded, batches, TASK, 0), self.sample(batches)
        return Evaluated(name, fed, list(dict.fromkeys(batches.parts)), losses(self.loaded, fed, TASK, sample.design))

    def ways(self, wanted: Sequence[str]) -> dict[str, dict[Site, Basis]]:
        """The directions of every peer and of every form of ours that is wanted, fitted to the calibration windows."""
        reads = rank_peers.read_sites(self.loaded, self.sites, self.fed)
        self.forms = possible_forms(self.loaded, self.search.swaps)
        self.forms += [by_output(form) for form in self.forms]
        self.forms = [form for form in self.forms if not wanted or own_name(form) in wanted]
        self.read = self.search.fit(self.forms, by_text(self.fed, self.fitting))
        peers = {
            name: {site: rank_peers.basis(peer, read) for site, read in reads.items()}
            for name, peer in rank_peers.PEERS.items()
            if not wanted or name in wanted
        }
        own = {own_name(form): self.read.bases(form.spelling) for form in self.forms}
        return peers | own

    def chosen(self) -> str:
        """The form of least rise at half of the numbers on windows that neither fitted nor are evaluated."""
        trial = Trial.of(self.search, self.choosing)
        rises: dict[str, float] = {}

        def rise(form: Kernel) -> float:
            tried = self.search._try_form(self.read, form, trial)
            rises[own_name(form)] = math.inf if tried.rise is None else tried.rise.share
            return rises[own_name(form)]

        plain = [form for form in self.forms if form != by_output(form)]
        best = by_output(min(plain or self.forms, key=rise))
        if plain and best in self.forms:
            rise(best)
        return min(rises, key=rises.__getitem__)

    def rows(self, method: str, found: dict[Site, Basis], kept: str) -> Iterator[Row]:
        """One way at one rank on every text."""
        each = int(KEPT[kept] * next(iter(found.values())).latents.head_dim)
        ranks = {site: [each * len(group) for group in basis.groups] for site, basis in found.items()}
        self.search.bases = found
        with hooks.replace(self.loaded.model, self.sites, self.search.build_swaps(ranks)):
            after = [losses(self.loaded, text.fed, TASK, text.own.design) for text in self.texts]
        for text, lost in zip(self.texts, after, strict=True):
            rise = rise_of(text.own, lost.means, text.names, 0, "ppl")
            yield row(self.name, text, method, kept, each, rise)


def own_name(form: Kernel) -> str:
    """`ours group=all,rotation=before`: what differs from `rank:r`."""
    plain = ("group=1", "rotation=after", "metric=attention")
    words = [word for word in form_name(form).split(",") if word not in plain]
    return OURS + (",".join(words) or "per head")


def row(model: str, text: Evaluated, method: str, kept: str, numbers: int, rise: Rise | None) -> Row:
    """All infinite where the model diverged."""
    before = math.exp(text.own.mean)
    share, (low, high) = (math.inf, (math.inf, math.inf)) if rise is None else (rise.share, rise.ci95 or (0.0, 0.0))
    alone = {} if rise is None else dict(rise.by_text)
    return Row(model, text.name, method, kept, numbers, before, before * (1 + share), share, low, high, alone)


def main() -> None:
    """Print and write every way at every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, few windows, one rank: does it still run?")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: all)")
    parser.add_argument("--other", nargs="*", default=[], metavar="FILE", help="texts that nothing was fitted on")
    parser.add_argument("--kept", nargs="+", choices=KEPT, default=list(KEPT), help="shares of a key (default: all)")
    parser.add_argument("--ways", nargs="+", default=[], metavar="NAME", help="as they are printed (default: all)")
    parser.add_argument("--windows", type=int, default=48, help="calibration windows (default: 48)")
    parser.add_argument("--evaluated", type=int, default=24, help="windows of every evaluated text (default: 24)")
    parser.add_argument("--length", type=int, default=128, help="of a window (default: 128)")
    parser.add_argument("--json", metavar="FILE", help="write every row here, after each")
    asked = parser.parse_args()
    print(subjects.machine())
    torch.set_num_threads(1)
    if asked.quick:
        asked.models, asked.windows, asked.evaluated, asked.length = ("demo",), 6, 4, 64
    cut, found = Cut(asked.length, asked.windows, batch_size=8, allow_foreign=True), list[Row]()
    other = list(texts.read_each(asked.other) or [])
    for name, place in subjects.models(quick=asked.quick).items():
        if name not in asked.models:
            continue
        subject = Subject(name, place, other, cut, asked.evaluated)
        for rows in measured(subject, asked.kept[:1] if asked.quick else asked.kept, asked.ways):
            found = [one for one in found if one.model != name] + rows
            if asked.json:
                write(Path(asked.json), found, vars(asked), [*subject.contents, *other])
        told([one for one in found if one.model == name])


def measured(subject: Subject, every: Sequence[str], wanted: Sequence[str]) -> Iterator[list[Row]]:
    """All rows so far, after each way and rank."""
    sequences = subject.fitting.batches.sequences, subject.choosing.batches.sequences
    print(f"\n{subject.name}: fitted on {sequences[0]} windows, chosen on {sequences[1]} others", flush=True)
    rows = list[Row]()
    start = time.monotonic()
    ways = subject.ways(wanted)
    print(f"fitted in {time.monotonic() - start:.0f} s", flush=True)
    for kept in every:
        for method, found in ways.items():
            start = time.monotonic()
            fresh = list(subject.rows(method, found, kept))
            rows += fresh
            shares = ", ".join(f"{100 * one.share:+.2f} %" for one in fresh)
            print(f"  {kept} {method}: {shares} ({time.monotonic() - start:.0f} s)", flush=True)
            yield rows
    chosen = subject.chosen() if subject.forms else ""
    print(f"  chosen: {chosen}", flush=True)
    yield [replace(one, chosen=one.method == chosen) for one in rows]


def told(found: Sequence[Row]) -> None:
    """A table for each text and rank, the cheapest first."""
    for text in dict.fromkeys(one.text for one in found):
        for kept in sorted(KEPT, reverse=True):
            rows = sorted((r for r in found if (r.text, r.kept) == (text, kept)), key=lambda one: one.share)
            if not rows:
                continue
            print(f"\n{rows[0].model}, {text}, keys kept {kept}: {rows[0].numbers} numbers of each key", end="")
            print(f"; perplexity before {rows[0].before:.2f}")
            for one in rows:
                ends = f"[{100 * one.low:+.2f}, {100 * one.high:+.2f}]"
                mark = "  chosen" if one.chosen else ""
                print(f"  {one.method:50}{one.after:10.2f}{100 * one.share:+10.2f} % {ends:22}{mark}")
            print(f"  {verdict(rows)}")


def verdict(rows: Sequence[Row]) -> str:
    """Who is best, and the ratio of the best peer's rise to that of the form chosen."""
    own = next((one for one in rows if one.chosen), rows[0])
    peer = next(one for one in rows if not one.method.startswith(OURS))
    ratio = peer.share / own.share if own.share > 0 else math.nan
    return f"best: {rows[0].method}; best peer: {peer.method}, ratio of its rise to {own.method}'s: {ratio:.2f}"


def write(path: Path, found: Sequence[Row], asked: dict[str, object], contents: Sequence[Content]) -> None:
    """Every row as JSON, with what was asked for and the texts' digests."""
    shown = {name: value for name, value in asked.items() if name not in ("json", "other", "models")}
    digests = {content.name: sha256(content.text.encode()).hexdigest() for content in contents}
    body = ",\n  ".join(json.dumps(rounded(asdict(one)), ensure_ascii=False) for one in found)
    head = json.dumps({"asked": shown, "texts": digests}, ensure_ascii=False)[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{head}, "rows": [\n  {body}\n]}}\n'.encode())


def rounded(value: object) -> object:
    """Floats with six significant digits; null where the model diverged."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    main()
