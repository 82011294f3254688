"""Measures of a model's heads over its checkpoints, on one text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

from attnlens import models, registry, requests, texts
from attnlens.arguments import public
from attnlens.choices import SHOWN
from attnlens.errors import ModelError, UsageError
from attnlens.records import Coverage, File, Head, Report, Settings, Skipped
from attnlens.registry import Analyzer, Gathering
from attnlens.requests import reading
from attnlens.run import checks, feeding
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.run.inspect.work import kept_units
from attnlens.run.outcomes.differences import mean_loss
from attnlens.run.progress import Interrupted, Progress, silent
from attnlens.run.provenance import report_of
from attnlens.run.training.checkpoints import Checkpoint, named, of_demo, refuse_different, revised, with_tokenizer
from attnlens.run.training.trajectories import CheckpointReading, training
from attnlens.texts.targets import feed, task_of


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
    return Series(found, asked, chosen, contents, cut, progress, loading, given).run()


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
    kept: Mapping[str, Any]
    """Where finished units are kept, among the options."""
    timings: dict[str, float] = field(default_factory=dict)
    written: list[Callable[[], None]] = field(default_factory=list)
    """What removes the finished units of each checkpoint, which nobody needs when all are done."""

    def run(self) -> Report:
        """Checkpoint by checkpoint; an interruption keeps those that are finished."""
        done: list[CheckpointReading] = []
        total = len(self.checkpoints)
        try:
            reader = self._reader()
            for number, checkpoint in enumerate(self.checkpoints):
                self.progress("checkpoints", number, total)
                start = time.perf_counter()
                done.append(self._read(checkpoint, reader))
                _refuse_other_heads(done[0], done[-1])
                self.timings[checkpoint.name] = time.perf_counter() - start
            self.progress("checkpoints", total, total)
            for clear in self.written:
                clear()
        except KeyboardInterrupt:
            if not done:
                raise KeyboardInterrupt from None
            raise Interrupted(self._report(done)) from None
        return self._report(done)

    def _reader(self) -> dict[str, Any]:
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

    def _read(self, checkpoint: Checkpoint, reader: dict[str, Any]) -> CheckpointReading:
        loaded = replace(self._load(checkpoint), **reader)
        settings = feeding.of_model(self.asked, loaded)
        collector = Collector(self.asked.heads)
        inspection = Inspection(loaded, settings, self.analyzers, collector, partial(self._told, checkpoint), {})
        try:
            frame = inspection.framed(self.contents, self.cut)
            units = kept_units(self.kept, frame, inspection.read_unit)
            report = inspection.finished_from(frame, units)
        except ModelError as error:
            raise ModelError(f"{checkpoint.name}: {error.problem}", error.remedy) from None
        loss = self._loss(loaded, settings)
        self.written.append(partial(units.clear, frame))
        return CheckpointReading(checkpoint, report, *((None, loss) if isinstance(loss, str) else (loss, None)))

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
        loss = mean_loss(loaded.model, feed(loaded, fed, task, settings.seed), task)
        return "it is not a number, or the text holds nothing to predict" if loss is None else loss

    def _report(self, done: list[CheckpointReading]) -> Report:
        last = done[-1].report
        files = [
            File(name=f"{reading.checkpoint.name}/{file.name}", sha256=file.sha256)
            for reading in done
            for file in reading.report.model.files
        ]
        return report_of(
            "converge",
            model=last.model.model_copy(update={"files": files}),
            settings=last.settings,
            coverage=_coverage(done, self.checkpoints),
            experiments=[training(done)],
            timings=self.timings,
        )


def _coverage(done: Sequence[CheckpointReading], asked: Sequence[Checkpoint]) -> Coverage:
    """Heads that were analysed at every checkpoint; what is missing at any; checkpoints that were not reached."""
    found = [reading.report.coverage for reading in done]
    missing = [entry for reading in done for entry in _missing(reading, found)]
    distinct = [entry for number, entry in enumerate(missing) if entry not in missing[:number]]
    late = [Skipped(site=one.name, reason="the run was interrupted") for one in asked[len(done) :]]
    sources = dict.fromkeys(source for coverage in found for source in coverage.without)
    return Coverage(
        sites=found[-1].sites,
        heads=found[-1].heads,
        analysed=min(coverage.analysed for coverage in found),
        without={source: max(coverage.without.get(source, 0) for coverage in found) for source in sources},
        skipped=distinct + late,
    )


def _missing(reading: CheckpointReading, every: Sequence[Coverage]) -> Iterator[Skipped]:
    """What one checkpoint lacks; what others don't lack names it."""
    for entry in reading.report.coverage.skipped:
        everywhere = all(entry in coverage.skipped for coverage in every)
        reason = entry.reason if everywhere else f"in {reading.checkpoint.name}, {entry.reason}"
        yield entry.model_copy(update={"reason": reason})


def _refuse_other_heads(first: CheckpointReading, other: CheckpointReading) -> None:
    """Raise ModelError where two checkpoints don't have the same heads, which a config need not tell."""
    own, its = (_heads(reading.report.heads) for reading in (first, other))
    if own != its:
        raise ModelError(
            f"The checkpoints are of different shapes: {first.checkpoint.name} has {len(own)} heads, "
            f"{other.checkpoint.name} has {len(its)}.",
            "Give checkpoints of one model.",
        )


def _heads(heads: Sequence[Head]) -> set[tuple[int, int, str]]:
    return {(head.layer, head.head, head.part) for head in heads}
