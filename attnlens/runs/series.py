"""Find a model's checkpoints, order them, and measure their heads on one text."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import quantiles
from typing import Any

from pydantic import BaseModel, ConfigDict

from attnlens import requests
from attnlens.analyzers import registry
from attnlens.analyzers.registry import Analyzer, Gathering
from attnlens.arguments import public
from attnlens.choices import SHOWN
from attnlens.errors import ModelError, UsageError
from attnlens.files import sha256, with_home
from attnlens.models import loading, texts
from attnlens.models.loading.adapters import find_adapter
from attnlens.models.loading.configs import has_tokenizer, sizes
from attnlens.models.loading.locate import DEMO, Location, find, read_json
from attnlens.models.loading.placement import device_of
from attnlens.models.texts.targets import feed, task_of
from attnlens.records import Coverage, Curve, Experiment, File, Measure, Null, Report, Settings, Skipped, Trajectory
from attnlens.requests import CheckpointsRequest, reading, takes
from attnlens.requests.run_options import SharedRequest
from attnlens.runs import checks, feeding
from attnlens.runs.checks import no_loss
from attnlens.runs.differences import mean_loss
from attnlens.runs.inspect.assembly import compute
from attnlens.runs.inspect.inspection import PreparedRun, survey
from attnlens.runs.progress import INTERRUPTED, Interrupted, Progress, silent, telling
from attnlens.runs.provenance import code_of, report_of
from attnlens.runs.store import Store, key_of, versions
from attnlens.runs.work import Compute, WorkPlan, run_units

OTHER_FILES = ("*.json", "*.txt", "*.model", "*.py", "*.jinja")
"""Files next to the weights that also determine the results: configs, tokenizers, a model's own code."""


def digest_of(place: Location) -> str:
    """Compute a hash of a checkpoint's weights and of the other files that determine its results."""
    others = (path for pattern in OTHER_FILES for path in place.folder.glob(pattern))
    files = sorted({*place.weights, *others} if place.form != "gguf" else place.weights)
    return key_of({path.name: sha256(path) for path in files if path.is_file()})


def series_report(
    names: Mapping[str, str],
    readings: Mapping[str, CheckpointReading],
    timings: Mapping[str, float],
    missing: Mapping[str, str],
) -> Report:
    """Build the report of a series from the readings of its units; the other units have a reason, or none yet.

    `names` maps units to checkpoints. Raise ModelError if the checkpoints differ in their heads.
    """
    done = list(readings.values())
    heads = [{(head.layer, head.head, head.part) for head in reading.report.heads} for reading in done]
    for other, other_heads in zip(done, heads, strict=True):
        if other_heads != heads[0]:
            raise ModelError(
                f"The checkpoints have different shapes: {done[0].name} has {len(heads[0])} heads, "
                f"{other.name} has {len(other_heads)}.",
                "Give checkpoints of one model.",
            )
    unread = [
        Skipped(site=name, reason=missing.get(unit, INTERRUPTED))
        for unit, name in names.items()
        if unit not in readings
    ]
    files = [
        File(name=f"{reading.name}/{file.name}", sha256=file.sha256)
        for reading in done
        for file in reading.report.model.files
    ]
    last = done[-1].report
    return report_of(
        "converge",
        "experiments",
        model=last.model.model_copy(update={"files": files}),
        settings=last.settings,
        coverage=_coverage(done, unread),
        experiments=[training(done)],
        timings=dict(timings),
    )


def _coverage(done: Sequence[CheckpointReading], unread: Sequence[Skipped]) -> Coverage:
    """Combine coverages: heads analysed at every checkpoint, what is missing at any, and checkpoints not read."""
    coverages = [reading.report.coverage for reading in done]
    missing = [  # a gap that not all checkpoints share names its checkpoint
        entry
        if all(entry in coverage.skipped for coverage in coverages)
        else entry.model_copy(update={"reason": f"in {reading.name}, {entry.reason}"})
        for reading in done
        for entry in reading.report.coverage.skipped
    ]
    distinct = [entry for number, entry in enumerate(missing) if entry not in missing[:number]]
    sources = dict.fromkeys(source for coverage in coverages for source in coverage.without)
    return Coverage(
        sites=coverages[-1].sites,
        heads=coverages[-1].heads,
        analysed=min(coverage.analysed for coverage in coverages),
        without={source: max(coverage.without.get(source, 0) for coverage in coverages) for source in sources},
        skipped=[*distinct, *unread],
    )


class CheckpointReading(BaseModel):
    """Results of one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Readable name of the checkpoint."""
    step: int | None
    """Training step in its name; None if there is none."""
    report: Report
    """Report of `inspect`."""
    loss: float | None
    """Loss on the same text in nats per predicted token."""
    no_loss: str | None = None
    """Reason for a missing loss."""
    complete: bool = True
    """True if every part of it could be read."""


def training(done: Sequence[CheckpointReading]) -> Experiment:
    """Build one experiment from the readings: trajectories of heads, and medians and quartiles over heads."""
    by_step = all(reading.step is not None for reading in done)
    steps = [float(reading.step or 0) if by_step else float(n) for n, reading in enumerate(done)]
    heads = [{(head.layer, head.head): head for head in reading.report.heads} for reading in done]
    names = list(dict.fromkeys(name for reading in done for name in reading.report.measure_names()))
    curves, trajectories = dict[str, Curve](), list[Trajectory]()
    losses = [reading.loss for reading in done]
    if any(loss is not None for loss in losses):
        curves["loss"] = Curve(steps=steps, median=losses, quantity="nats per token")
    for name in names:
        columns = [{place: head.measures[name] for place, head in at.items() if name in head.measures} for at in heads]
        measures = [measure for column in columns for measure in column.values()]
        numbers = any(measure.value is not None for measure in measures)
        if numbers and all(measure.label is None for measure in measures):
            nulls = [reading.report.summary.median_nulls.get(name) for reading in done]
            curves |= _curves(name, steps, columns, nulls)
            trajectories += _trajectories(name, columns)
    final = {name: curve.median[-1] for name, curve in curves.items() if curve.null_of is None}
    return Experiment(
        name="training",
        question="How do the heads change while the model is trained?",
        settings={"checkpoints": [reading.name for reading in done], "steps": [*steps]},
        final={"loss": None, **final},
        reasons={
            name: (done[-1].no_loss if name == "loss" else None) or "no head has a value at the last checkpoint"
            for name, value in {"loss": None, **final}.items()
            if value is None
        },
        axis="training step" if by_step else "checkpoint",
        curves=curves,
        trajectories=trajectories,
    )


HeadMeasures = dict[tuple[int, int], Measure]
"""Values of one measure at one checkpoint, by (layer, head)."""


def _curves(
    name: str, steps: list[float], columns: Sequence[HeadMeasures], nulls: Sequence[Null | None]
) -> Iterator[tuple[str, Curve]]:
    """Yield median and quartiles over heads, and if known the median expected by chance, ± one standard deviation."""
    values = [[measure.value for measure in column.values() if measure.value is not None] for column in columns]
    low, middle, high = (list(column) for column in zip(*map(_quartiles, values), strict=True))
    yield name, Curve(steps=steps, median=middle, low=low, high=high)
    if any(null is not None for null in nulls):
        chance = [
            (None,) * 3 if null is None else (null.mean - null.sd, null.mean, null.mean + null.sd) for null in nulls
        ]
        low, middle, high = (list(column) for column in zip(*chance, strict=True))
        yield f"{name}: null", Curve(steps=steps, median=middle, low=low, high=high, null_of=name)


def _quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def _trajectories(name: str, columns: Sequence[HeadMeasures]) -> Iterator[Trajectory]:
    for layer, head in sorted({place for column in columns for place in column}):
        measures = [column.get((layer, head)) for column in columns]
        values = [None if measure is None else measure.value for measure in measures]
        errors = [None if measure is None else measure.se for measure in measures]
        known = any(error is not None for error in errors)
        yield Trajectory(layer=layer, head=head, measure=name, values=values, se=errors if known else None)


STEP = re.compile(r"step[-_=]?(\d+)|(\d+)$", re.IGNORECASE)
"""Pattern of a training step: the number after «step», else the last one (`step1000-tokens2B`, `checkpoint-500`)."""


@dataclass(frozen=True)
class Checkpoint:
    """One model of a series."""

    name: str  # readable name: the folder's name, or the revision
    model: str  # name as `load` takes it
    revision: str | None  # of a hub model
    place: Location  # location of its files
    step: int | None  # training step in its name; None if there is none


def of_demo() -> list[str]:
    """Return the checkpoints included in attnlens, and the trained model itself."""
    return [*sorted(str(folder) for folder in (DEMO / "checkpoints").iterdir()), "demo"]


def step_of(name: str) -> int | None:
    """Parse the training step in a name; None if there is none."""
    if name == "demo":
        return int(read_json(DEMO / "training.json")["steps"])
    match = STEP.search(Path(name).name)
    return int(match.group(1) or match.group(2)) if match else None


def refuse_different(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise ModelError if two checkpoints differ in architecture or shape, as far as their configs show.

    A GGUF file has no config; its heads are compared when it is read.
    """
    first, first_shape = checkpoints[0], _shape(checkpoints[0].place.config)
    for other in checkpoints[1:]:
        shape = _shape(other.place.config)
        differences = ", ".join(
            f"{field} is {value} in {first.name}, but {shape[field]} in {other.name}"
            for field, value in first_shape.items()
            if field in shape and value != shape[field]
        )
        if differences:
            raise ModelError(f"The checkpoints have different shapes: {differences}.", "Give checkpoints of one model.")


def _shape(config: dict[str, Any]) -> dict[str, object]:
    """Return what checkpoints of one model have in common."""
    return {name: config[name] for name in ("model_type", "architectures") if name in config} | dict(sizes(config))


def find_checkpoints(
    names: Sequence[str] | None, revisions: Sequence[str], load_options: dict[str, Any]
) -> list[Checkpoint]:
    """Find the checkpoints, ordered by step, or as named if steps are missing or equal.

    `names` None, or `demo` alone, are the checkpoints of the demo model. Raise UsageError for fewer than two, for
    duplicates, and for revisions of several models.
    """
    if names is not None and not names:
        raise UsageError("checkpoints=[] names none.", "Give at least two, or omit the option to use those of demo.")
    if revisions and (names is None or len(names) != 1):
        raise UsageError(
            "--revisions requires a single hub model.",
            "Give one hub model, e.g.: attnlens converge MODEL --revisions step1,step2",
        )
    places: list[tuple[str, str | None]]
    if revisions and names:
        places = [(names[0], revision) for revision in revisions]
    else:
        places = [(name, None) for name in (of_demo() if names is None or list(names) == ["demo"] else names)]
    offline, pickle = load_options.get("offline", False), load_options.get("allow_pickle", False)
    checkpoints: list[Checkpoint] = []
    for model, revision in places:
        place = find(model, revision, offline=offline, allow_pickle=pickle)
        name = revision or model.partition("@")[2] or Path(model.rstrip("/\\")).name
        checkpoints.append(Checkpoint(name, model, revision, place, step_of(revision or model)))
    if len(checkpoints) < 2:
        raise UsageError(
            "A series needs at least two checkpoints.",
            "Give at least two with --checkpoints, e.g. --checkpoints step-100 step-200, or with --revisions.",
        )
    files = [(each.place.folder, each.place.file) for each in checkpoints]
    for number, checkpoint in enumerate(checkpoints):
        if files[number] in files[:number]:
            raise UsageError(f"Duplicate checkpoint: {checkpoint.name}.", "Give each checkpoint once.")
    steps = [each.step for each in checkpoints]
    if None in steps or len(set(steps)) < len(steps):
        return [replace(each, step=None) for each in checkpoints]
    return sorted(checkpoints, key=lambda each: each.step or 0)


READ = ("text", "pairs", "image", "audio", "adapter")
"""Options that name files whose content affects the results."""


@public
@takes(CheckpointsRequest)
def converge_checkpoints(
    checkpoints: requests.Words | None = None,
    *,
    revisions: requests.Words = (),
    head: tuple[int, int] | str | None = None,
    progress: Progress = silent,
    request: CheckpointsRequest,
) -> Report:
    """Measure every head against the training step, in one experiment with the heads' trajectories.

    `checkpoints` are folders, files or hub ids (None, or `demo` alone: those of the demo model), or one hub model with
    several `revisions`. Steps are the numbers in the names (`step-00030`, `checkpoint-500`), else 0, 1, 2 … as given.
    By default, the analyzers of `inspect` run, and `selection` with its own `select`.
    One tokenizer, the last one found, splits the same text for all. `head` = (layer, head), or `3.7`, restricts the
    series to it.
    Finished units are kept as in `inspect`, and the
    same call resumes from them. Raise UsageError, ModelError (a checkpoint is missing, or shapes differ),
    TextError, and Interrupted, which contains the finished checkpoints.
    """
    report, clear_work = follow(checkpoints, request, revisions=revisions, head=head, progress=progress)
    clear_work()
    return report


def follow(
    checkpoints: requests.Words | None,
    request: CheckpointsRequest,
    *,
    revisions: requests.Words = (),
    head: tuple[int, int] | str | None = None,
    progress: Progress = silent,
) -> tuple[Report, Callable[[], None]]:
    """Return the report, and a function to call once it is written, which removes the finished units."""
    series = prepare(checkpoints, revisions, head, progress, request)
    series.plan.check(request.text)
    return series.run()


def prepare(
    checkpoints: requests.Words | None,
    revisions: requests.Words,
    head: tuple[int, int] | str | None,
    progress: Progress,
    request: CheckpointsRequest,
) -> Series:
    """Prepare the requested series: find its checkpoints and read its texts."""
    unnarrowed, request = request, request.with_options(**requests.one_head(head, request.layers, request.heads))
    load_options = feeding.load_options(request, None)
    usual = [
        each.name
        for each in registry.list_analyzers()
        if (each.by_default or each.name == SHOWN) and request.source in ("both", each.source)
    ]
    wanted = request.analyzers or list(dict.fromkeys(usual))
    analyzers, requested = reading.choose_analyzers(reading.settings(request), wanted, request.select, None)
    reading.refuse_unread(request, requested.source)
    names = None if checkpoints is None else requests.words("checkpoints", checkpoints)
    ordered = find_checkpoints(names, requests.words("revisions", revisions), load_options)
    refuse_different(ordered)
    contents = texts.read_each(reading.files(request), offline=request.offline)
    if requested.source != "weights" and not contents:
        contents = texts.sample(ordered[-1].model)
    cut = feeding.cut_of(requested, request)
    words = (names, requests.words("revisions", revisions), head, unnarrowed)
    return Series(ordered, requested, analyzers, contents, cut, progress, load_options, request, words)


Words = tuple[Sequence[str] | None, Sequence[str], tuple[int, int] | str | None, CheckpointsRequest]
"""Checkpoints, revisions, head and options, as passed to another process."""


@dataclass
class Series:
    """One run over the checkpoints."""

    checkpoints: list[Checkpoint]
    requested: Settings
    analyzers: list[Analyzer | Gathering]
    contents: Sequence[texts.Content]
    cut: texts.Cut
    progress: Progress
    load_options: dict[str, Any]
    request: CheckpointsRequest
    words: Words
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def plan(self) -> WorkPlan:
        """Plan of where its units are kept and who reads them."""
        return WorkPlan.of(self.request)

    @cached_property
    def units(self) -> dict[str, Checkpoint]:
        """Checkpoints by the names of their units: a readable name and a hash of the files."""
        return {f"{each.name} {digest_of(each.place)}": each for each in self.checkpoints}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that determine the results of the units."""
        left_out = {*SharedRequest.model_fields, *READ}
        files = [with_home(os.fspath(path)) for path in (*self.cut.image, *self.cut.audio)]
        adapter, offline = self.request.adapter, self.request.offline
        place = None if adapter is None else find_adapter(os.fspath(adapter), offline=offline)
        of_adapter = [] if place is None else [path for path in place.folder.glob("*") if path.is_file()]
        return {
            "command": "converge",
            "versions": versions(),
            "options": {name: str(value) for name, value in sorted(self.request) if name not in left_out},
            "content": key_of(
                {
                    "texts": [(each.name, each.text) for each in self.contents],
                    "fed": [sha256(path) for path in files if path.is_file()],
                    "adapter": [None if place is None else place.revision, *map(sha256, sorted(of_adapter))],
                    "device": str(device_of(self.request.device)),
                    "code": [code_of(each).hex() for each in self.analyzers],
                }
            ),
            "checkpoints": list(self.units),
        }

    @cached_property
    def store(self) -> Store | None:
        """Store of the units, if any."""
        return self.plan.store(self.facts)

    def run(self) -> tuple[Report, Callable[[], None]]:
        """Read the checkpoints; return the report, and a function that removes the finished units afterwards."""
        plan = self.plan
        count = len(self.units) if plan.shard is None else len(list(self.units)[plan.shard[0] - 1 :: plan.shard[1]])
        tell = telling(self.progress, "checkpoints", count)
        outcome = run_units(
            list(self.units),
            self.read_unit,
            plan,
            self.store,
            elsewhere=(open_in_worker, self.words),
            tell=lambda _name: tell(1),
            usable=lambda value: bool(value["complete"]),
        )
        readings = {name: CheckpointReading.model_validate(value) for name, value in outcome.values.items()}
        if not readings:
            raise KeyboardInterrupt
        names = {unit: each.name for unit, each in self.units.items()}
        report = series_report(names, readings, self.timings, outcome.missing)
        if outcome.stopped:
            raise Interrupted(report)
        complete = not outcome.missing and all(reading.complete for reading in readings.values())
        return report, self.store.clear if self.store is not None and complete else lambda: None

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """Tokenizer that replaces those of all checkpoints, or the reason why there is none."""
        if not self.contents:
            return {}
        last = next((each for each in reversed(self.checkpoints) if has_tokenizer(each.place)), None)
        if last is None:
            return {"tokenizer": None, "tokenizer_problem": "no checkpoint has tokenizer files"}
        loaded = self._load(last)
        return {"tokenizer": loaded.tokenizer, "tokenizer_problem": loaded.tokenizer_problem}

    def _load(self, checkpoint: Checkpoint) -> loading.Loaded:
        options = {**self.load_options, "revision": checkpoint.revision}
        return loading.load(checkpoint.model, **options)

    def read_unit(self, name: str) -> dict[str, Any]:
        """Read one checkpoint; its parts are kept until it is finished."""
        checkpoint, start = self.units[name], time.perf_counter()

        def notify(stage: str, done: int, total: int) -> None:
            self.progress(f"{checkpoint.name}, {stage}", done, total)

        loaded = replace(self._load(checkpoint), **self.tokenizer)
        settings = feeding.of_model(self.requested, loaded)
        parts = None if self.store is None else self.store.inside(name)
        try:
            run = PreparedRun(loaded, settings, self.analyzers, self.contents, self.cut, notify)
            outcome = compute(survey(run), store=parts)
        except ModelError as error:
            raise ModelError(f"{checkpoint.name}: {error.problem}", error.remedy) from None
        loss = self._loss(loaded, settings)
        value, why = (None, loss) if isinstance(loss, str) else (loss, None)
        self.timings[checkpoint.name] = time.perf_counter() - start
        return CheckpointReading(
            name=checkpoint.name,
            step=checkpoint.step,
            report=outcome.report,
            loss=value,
            no_loss=why,
            complete=outcome.complete,
        ).model_dump()

    def _loss(self, loaded: loading.Loaded, settings: Settings) -> float | str:
        """Return the model's loss on the same text in nats per predicted token, or why it is unknown."""
        if not self.contents:
            return "it requires a text, but only weights were read"
        if task_of(loaded.model) not in ("causal", "masked"):
            return "the model does not predict tokens"
        if loaded.tokenizer is None:
            return f"it requires a text, which cannot be tokenized: {loaded.tokenizer_problem}"
        inputs = texts.batches(loaded, self.contents, self.cut)
        task = checks.task_on(loaded, inputs.batches[0].inputs)
        if task == "hidden":
            return "the model can attend to the tokens that it predicts"
        if task == "masked" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
            return "the tokenizer has no mask token"
        if lacking := no_loss(loaded, texts.first(inputs.batches[0].inputs, 2), task):
            return lacking[1]
        loss = mean_loss(loaded.model, feed(loaded, inputs, task, settings.seed), task)
        return "it is NaN, or the text contains nothing to predict" if loss is None else loss


def open_in_worker(
    checkpoints: tuple[str, ...] | None,
    revisions: tuple[str, ...],
    head: tuple[int, int] | str | None,
    request: CheckpointsRequest,
) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same series in another process: return its facts, and the function that reads its checkpoints."""
    series = prepare(checkpoints, revisions, head, silent, request)
    return series.facts, series.read_unit
