"""Measures of a model's heads over its checkpoints, on one text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Unpack

from attnlens import models, registry, requests, texts
from attnlens.arguments import public
from attnlens.choices import SHOWN
from attnlens.engines.readers import OTHERS, UnitReader, can_keep, check_work, is_elsewhere, read_units
from attnlens.errors import ModelError, UsageError
from attnlens.records import Report, Settings
from attnlens.registry import Analyzer, Gathering
from attnlens.requests import reading
from attnlens.requests.work_options import SharedRequest
from attnlens.run import checks, feeding
from attnlens.run.fingerprint import versions
from attnlens.run.initialised import no_loss
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.run.inspect.work import kept_units
from attnlens.run.outcomes.differences import mean_loss
from attnlens.run.progress import Interrupted, Progress, silent, telling
from attnlens.run.training.checkpoints import Checkpoint, named, of_demo, refuse_different, revised, with_tokenizer
from attnlens.run.training.kept import (
    CheckpointUnit,
    SeriesFrame,
    content_hash,
    digest_of,
    kept_checkpoints,
    series_report,
)
from attnlens.run.training.trajectories import CheckpointReading
from attnlens.texts.targets import feed, task_of
from attnlens.unit_files import work_root

READ = ("text", "pairs", "image", "audio", "adapter")
"""Options that name files whose content decides what is found."""


@public
def converge_checkpoints(
    checkpoints: requests.Words | None = None,
    *,
    revisions: requests.Words = (),
    head: tuple[int, int] | str | None = None,
    progress: Progress = silent,
    **more: Unpack[requests.CheckpointsRequest],
) -> Report:
    """Every measure of every head against the training step, in one experiment with the heads' trajectories.

    `checkpoints` are folders, files or hub ids (None, or `demo` alone: those of the demo model), or one hub model with
    several `revisions`. Steps are the numbers in the names (`step-00030`, `checkpoint-500`), else 0, 1, 2 … as given.
    Without `analyzers` those of `inspect` run and `selection` with them, under its own `select`.
    One tokenizer, the last one found, cuts the same text for all. `head` = (layer, head), or `3.7`, restricts the
    series to it.
    `more` are the options of `requests.CheckpointsRequest`. What is finished is kept as `inspect` keeps it, and the
    same call goes on from there. Raises UsageError, ModelError (one is missing, or they are of different shapes),
    TextError, and Interrupted, which carries the finished checkpoints.
    """
    report, written = followed(checkpoints, revisions=revisions, head=head, progress=progress, **more)
    written()
    return report


def followed(
    checkpoints: requests.Words | None = None,
    *,
    revisions: requests.Words = (),
    head: tuple[int, int] | str | None = None,
    progress: Progress = silent,
    **more: Unpack[requests.CheckpointsRequest],
) -> tuple[Report, Callable[[], None]]:
    """The report, and what is to be called when it is written: finished units are not needed any longer then."""
    series = prepared(checkpoints, revisions, head, progress, more)
    check_work(series.given)
    return series.run(), series.clear


def prepared(
    checkpoints: requests.Words | None,
    revisions: requests.Words,
    head: tuple[int, int] | str | None,
    progress: Progress,
    more: Mapping[str, Any],
) -> Series:
    """The series that was asked for, with its checkpoints found and its texts read."""
    one = requests.one_head(head, more.get("layers"), more.get("heads"))
    given = requests.checked(requests.CheckpointsRequest, {**more, **one})
    loading = feeding.loading_of(more, None)
    wanted = given["analyzers"] or _usual(given["source"])
    chosen, asked = reading.chosen(reading.settings(given), wanted, given["select"], None)
    reading.refuse_unread(given, asked.source)
    names = None if checkpoints is None else requests.words("checkpoints", checkpoints)
    found = _found(names, requests.words("revisions", revisions), loading)
    refuse_different(found)
    contents = texts.read_each(reading.files(given), offline=given["offline"])
    if asked.source != "weights" and not contents:
        contents = texts.sample(found[-1].model)
    cut = feeding.cut_of(asked, given)
    words = (names, list(requests.words("revisions", revisions)), head, dict(more))
    return Series(found, asked, chosen, contents, cut, progress, loading, given, words)


def _usual(source: str) -> list[str]:
    """The analyzers that run where none is named, and selection, as far as they read that source."""
    every = [found for found in registry.every_analyzer() if found.by_default or found.name == SHOWN]
    return list(dict.fromkeys(found.name for found in every if source in ("both", found.source)))


def _found(names: list[str] | None, revisions: list[str], loading: models.Loading) -> list[Checkpoint]:
    if names == []:
        raise UsageError("checkpoints=[] names none.", "Name two or more, or leave it out for those of demo.")
    if not revisions:
        return named(of_demo() if names is None or names == ["demo"] else names, loading)
    if names is None or len(names) != 1:
        raise UsageError(
            "Revisions belong to one model of the hub.",
            "Name one hub model, as in: attnlens converge MODEL --revisions step1,step2",
        )
    return revised(names[0], revisions, loading)


Words = tuple[list[str] | None, list[str], tuple[int, int] | str | None, dict[str, Any]]
"""Checkpoints, revisions, head and options, as another process is told them."""


@dataclass
class Series:
    """One run over the checkpoints."""

    checkpoints: list[Checkpoint]
    asked: Settings
    analyzers: list[Analyzer | Gathering]
    contents: Sequence[texts.Content]
    cut: texts.Cut
    progress: Progress
    loading: models.Loading
    given: Mapping[str, Any]
    """The options, checked."""
    words: Words
    timings: dict[str, float] = field(default_factory=dict)
    written: list[Callable[[], object]] = field(default_factory=list)
    """What removes the finished units of each checkpoint, which nobody needs when its reading is kept."""

    @cached_property
    def frame(self) -> SeriesFrame:
        """What is known before the first checkpoint is read."""
        return self.framed([digest_of(one.place) for one in self.checkpoints])

    def framed(self, digests: list[str]) -> SeriesFrame:
        """The same, where the checkpoints' files have these hashes."""
        left_out = {*requests.options(SharedRequest), *READ}
        adapter = self.given["adapter"]
        return SeriesFrame(
            versions=versions(),
            options={name: str(value) for name, value in sorted(self.given.items()) if name not in left_out},
            content=content_hash(self.contents, self.cut, self.analyzers, adapter),
            checkpoints=[one.name for one in self.checkpoints],
            digests=digests,
        )

    @cached_property
    def units(self) -> UnitReader[CheckpointUnit, CheckpointReading]:
        """Reads the checkpoints here or elsewhere."""
        if not can_keep(self.given["work"]):
            return UnitReader(self.read_unit)
        if not is_elsewhere(self.given):
            return kept_checkpoints(self, self.frame)
        job = partial(read_elsewhere, self.words, self.frame.digests, self.frame.key)
        return kept_checkpoints(self, self.frame, job)

    def run(self) -> Report:
        """Checkpoint by checkpoint; an interruption keeps those that are finished."""
        found: dict[CheckpointUnit, CheckpointReading] = {}
        mine = self.units.units(self.frame)
        if not mine:
            raise UsageError(
                f"The series has {len(self.checkpoints)} checkpoints, and shard {self.given['shard']} none of them.",
                "Take no more shards than checkpoints.",
            )
        missing = dict.fromkeys(set(self.frame.units) - set(mine), OTHERS)
        more = telling(self.progress, "checkpoints", len(mine))

        def tell(_unit: CheckpointUnit) -> None:
            self.drop()
            more(1)

        try:
            read_units(self.units, self.frame, found, missing, tell)
        except KeyboardInterrupt:
            if not found:
                raise KeyboardInterrupt from None
            raise Interrupted(series_report(self.frame, found, self.timings, missing)) from None
        if any(reading.lacking for reading in found.values()):
            self.units.lacking = True
        return series_report(self.frame, found, self.timings, missing, self.units.part(self.frame))

    def clear(self) -> None:
        """Remove what is kept, when the report is written."""
        self.units.clear(self.frame)

    def drop(self) -> None:
        """Remove the units of checkpoints whose readings are kept."""
        while self.written:
            self.written.pop()()

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """What reads the text for all, in the place of their own tokenizers; or why nothing does."""
        if not self.contents:
            return {}
        giver = with_tokenizer(self.checkpoints)
        if giver is None:
            return {"tokenizer": None, "tokenizer_problem": "no checkpoint has tokenizer files"}
        loaded = self._load(giver)
        return {"tokenizer": loaded.tokenizer, "tokenizer_problem": loaded.tokenizer_problem}

    def _load(self, checkpoint: Checkpoint) -> models.Loaded:
        options: models.Loading = {**self.loading, "revision": checkpoint.revision}
        return models.load(checkpoint.model, **options)

    def read_unit(self, unit: CheckpointUnit) -> CheckpointReading:
        """Read one checkpoint."""
        checkpoint, start = self.checkpoints[unit.place], time.perf_counter()
        found = self._read(checkpoint, self.tokenizer)
        self.timings[checkpoint.name] = time.perf_counter() - start
        return found

    def _inner(self) -> dict[str, Any]:
        """Where units of single checkpoints are kept: within what is kept of the series."""
        kept = can_keep(self.given["work"])
        return {**self.given} | ({"work": f"{work_root(self.given['work'])}/{self.frame.key}"} if kept else {})

    def _read(self, checkpoint: Checkpoint, reader: dict[str, Any]) -> CheckpointReading:
        loaded = replace(self._load(checkpoint), **reader)
        settings = feeding.of_model(self.asked, loaded)
        collector = Collector(self.asked.heads)
        inspection = Inspection(loaded, settings, self.analyzers, collector, partial(self._told, checkpoint), {})
        try:
            frame = inspection.framed(self.contents, self.cut)
            units = kept_units(self._inner(), frame, inspection.read_unit)
            report = inspection.finished_from(frame, units)
        except ModelError as error:
            raise ModelError(f"{checkpoint.name}: {error.problem}", error.remedy) from None
        loss = self._loss(loaded, settings)
        self.written.append(partial(units.clear, frame))
        found, why = (None, loss) if isinstance(loss, str) else (loss, None)
        name, step = checkpoint.name, checkpoint.step
        return CheckpointReading(name=name, step=step, report=report, loss=found, no_loss=why, lacking=units.lacking)

    def _told(self, checkpoint: Checkpoint, stage: str, done: int, total: int) -> None:
        self.progress(f"{checkpoint.name}, {stage}", done, total)

    def _loss(self, loaded: models.Loaded, settings: Settings) -> float | str:
        """What training has reached, on the same text, in nats per predicted token; or why that is not known."""
        if not self.contents:
            return "it is that of a text, and none was fed, for the weights alone were read"
        if task_of(loaded.model) not in ("causal", "masked"):
            return "the model predicts no tokens of a text"
        if loaded.tokenizer is None:
            return f"it is that of a text, and nothing reads it: {loaded.tokenizer_problem}"
        fed = texts.batches(loaded, self.contents, self.cut)
        task = checks.task_on(loaded, fed.batches[0].inputs)
        if task == "hidden":
            return "the model sees the tokens that it would predict"
        if task == "masked" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
            return "the tokenizer has no mask, behind which the model would guess"
        if lacking := no_loss(loaded, texts.first(fed.batches[0].inputs, 2), task):
            return lacking[1]
        loss = mean_loss(loaded.model, feed(loaded, fed, task, settings.seed), task)
        return "it is not a number, or the text holds nothing to predict" if loss is None else loss


_opened: dict[str, Series] = {}
"""In another process: the series of which it reads checkpoints."""


def read_elsewhere(words: Words, digests: list[str], run: str, name: str) -> None:
    """In another process: read the checkpoint of that name, and write its file.

    Raises ModelError where this process finds another checkpoint, text or program than the one that asked.
    """
    if run not in _opened:
        _opened.clear()
        _opened[run] = prepared(*words[:3], silent, words[3])
    series = _opened[run]
    frame = series.__dict__.setdefault("frame", series.framed(digests))
    unit = next(unit for unit in frame.units if unit.name == name)
    place = series.checkpoints[unit.place].place
    if frame.key != run or digest_of(place) != digests[unit.place]:
        raise ModelError(
            f"A worker finds other files, texts or versions than the run that it works for: {place.folder}.",
            "Give all of them the same.",
        )
    kept_checkpoints(series, frame).finished(unit)
    series.drop()
