"""Find a model's checkpoints, order them, and measure their heads on the same texts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import quantiles
from typing import Any, TypedDict

from attnlens import records, requests
from attnlens.analyzers import registry
from attnlens.arguments import public
from attnlens.choices import SHOWN
from attnlens.errors import ModelError, UsageError
from attnlens.files import sha256, with_home
from attnlens.models import loading, texts
from attnlens.models.loading.adapters import find_adapter
from attnlens.models.loading.configs import has_tokenizer, sizes
from attnlens.models.loading.locate import DEMO, Location, find, read_json
from attnlens.models.loading.placement import choose_device
from attnlens.models.texts.targets import feed, task_of
from attnlens.records import Coverage, Curve, Experiment, File, Measure, Settings, Skipped, Trajectory
from attnlens.report.report import Report
from attnlens.requests import CheckpointsRequest, reading, takes
from attnlens.requests.run_options import SharedRequest
from attnlens.runs import checks, feeding
from attnlens.runs.differences import mean_loss
from attnlens.runs.inspect.inspection import PreparedRun
from attnlens.runs.inspect.pipeline import compute, survey
from attnlens.runs.progress import INTERRUPTED, Interrupted, Progress, silent, start_stage, time_stage
from attnlens.runs.provenance import assemble_report, read_code
from attnlens.runs.store import Store, hash_json, versions
from attnlens.runs.work import Compute, WorkPlan, run_units


def hash_checkpoint(place: Location) -> str:
    """Hash a checkpoint's weights, configs, tokenizers and code (GGUF: only the weight files)."""
    patterns = ("*.json", "*.txt", "*.model", "*.py", "*.jinja")
    others = (path for pattern in patterns for path in place.folder.glob(pattern))
    files = sorted({*place.weights, *others} if place.form != "gguf" else place.weights)
    return hash_json({path.name: sha256(path) for path in files if path.is_file()})


class CheckpointReading(TypedDict):
    """Results of one checkpoint."""

    report: records.Report  # report of `inspect`
    loss: float | str  # loss on the run's text in nats per predicted token, or the reason if unknown
    complete: bool  # True if every part of the checkpoint could be read


def merge_coverages(names: Sequence[str], coverages: Sequence[Coverage], unread: Sequence[Skipped]) -> Coverage:
    """Merge the coverages of checkpoints, and list `unread` checkpoints among the skipped sites.

    Each count is the worst over checkpoints: the fewest analysed heads and, for each source, the most heads without
    values from this source.
    """
    missing: list[Skipped] = []
    for name, coverage in zip(names, coverages, strict=True):
        for entry in coverage.skipped:
            shared = all(entry in other.skipped for other in coverages)
            named = entry if shared else entry.model_copy(update={"reason": f"in {name}, {entry.reason}"})
            if named not in missing:
                missing.append(named)
    sources = dict.fromkeys(source for coverage in coverages for source in coverage.without)
    changed = {
        "analysed": min(coverage.analysed for coverage in coverages),
        "without": {source: max(coverage.without.get(source, 0) for coverage in coverages) for source in sources},
        "skipped": [*missing, *unread],
    }
    return coverages[-1].model_copy(update=changed)


def describe_training(checkpoints: Sequence[Checkpoint], readings: Sequence[CheckpointReading]) -> Experiment:
    """Build an experiment from the checkpoints' results: losses, quartiles over heads, and each head's trajectories."""
    by_step = all(each.step is not None for each in checkpoints)
    steps = [float(each.step or 0) if by_step else float(number) for number, each in enumerate(checkpoints)]
    reports = [reading["report"] for reading in readings]
    losses = [None if isinstance(reading["loss"], str) else reading["loss"] for reading in readings]
    curves, trajectories = dict[str, Curve](), list[Trajectory]()
    if any(loss is not None for loss in losses):
        curves["loss"] = Curve(steps=steps, median=losses, quantity="nats per token")
    for name in dict.fromkeys(name for report in reports for name in report.measure_names()):
        columns = [
            {(head.layer, head.head): head.measures[name] for head in report.heads if name in head.measures}
            for report in reports
        ]
        measures = [measure for column in columns for measure in column.values()]
        if all(measure.value is None for measure in measures) or any(measure.label is not None for measure in measures):
            continue
        curves[name] = _curve(map(_quartiles, columns), steps)
        nulls = [report.summary.median_nulls.get(name) for report in reports]
        if any(null is not None for null in nulls):
            chance = [(null.mean - null.sd, null.mean, null.mean + null.sd) if null else (None,) * 3 for null in nulls]
            curves[f"{name}: null"] = _curve(chance, steps, name)
        for layer, head in sorted({place for column in columns for place in column}):
            row = [column.get((layer, head)) for column in columns]
            values, errors = ([getattr(measure, field, None) for measure in row] for field in ("value", "se"))
            se = errors if any(error is not None for error in errors) else None
            trajectories.append(Trajectory(layer=layer, head=head, measure=name, values=values, se=se))
    final = {"loss": None} | {name: curve.median[-1] for name, curve in curves.items() if curve.null_of is None}
    reasons = {name: "no head has a value at the last checkpoint" for name, value in final.items() if value is None}
    if isinstance(why := readings[-1]["loss"], str):
        reasons["loss"] = why
    return Experiment(
        name="training",
        question="How do the heads change during training?",
        settings={"checkpoints": [each.name for each in checkpoints], "steps": [*steps]},
        final=final,
        reasons=reasons,
        axis="training step" if by_step else "checkpoint",
        curves=curves,
        trajectories=trajectories,
    )


Band = tuple[float | None, ...]  # lower quartile, median and upper quartile; for a null: mean − sd, mean and mean + sd


def _curve(bands: Iterable[Band], steps: list[float], null_of: str | None = None) -> Curve:
    low, middle, high = (list(column) for column in zip(*bands, strict=True))
    return Curve(steps=steps, median=middle, low=low, high=high, null_of=null_of)


def _quartiles(measures: Mapping[tuple[int, int], Measure]) -> Band:
    values = [measure.value for measure in measures.values() if measure.value is not None]
    if len(values) < 2:
        return (values[0] if values else None,) * 3
    return tuple(quantiles(values, n=4, method="inclusive"))


STEP = re.compile(r"step[-_=]?(\d+)|(\d+)$", re.IGNORECASE)  # as in `step1000-tokens2B` and `checkpoint-500`


@dataclass(frozen=True)
class Checkpoint:
    """One model of a series."""

    name: str  # folder name or revision
    model: str  # name as passed to `load`
    revision: str | None  # revision of a hub model
    place: Location  # location of the model's files
    step: int | None  # training step in the name; None if any step is missing or repeated


def demo_checkpoints() -> list[str]:
    """Return the folders of the demo model's checkpoints, and the name of the trained model, `demo`."""
    return [*sorted(str(folder) for folder in (DEMO / "checkpoints").iterdir()), "demo"]


def parse_step(name: str) -> int | None:
    """Return the training step in a checkpoint's name (`demo`: the last step); None if the name contains none."""
    if name == "demo":
        return int(read_json(DEMO / "training.json")["steps"])
    match = STEP.search(Path(name).name)
    return int(match.group(1) or match.group(2)) if match else None


def refuse_different(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise ModelError if two checkpoints' configs differ in architecture or sizes."""
    shapes = [
        {name: config.get(name) for name in ("model_type", "architectures")} | dict(sizes(config))
        for config in (each.place.config for each in checkpoints)
    ]
    for other, shape in zip(checkpoints, shapes, strict=True):
        for field, value in shapes[0].items():
            if None not in (value, shape.get(field)) and value != shape[field]:
                difference = f"{field} is {value} in {checkpoints[0].name}, but {shape[field]} in {other.name}"
                raise ModelError(f"The checkpoints differ: {difference}.", "Give checkpoints of the same model.")


def refuse_different_heads(names: Sequence[str], reports: Sequence[records.Report]) -> None:
    """Raise ModelError if two checkpoints have different heads."""
    sides = [
        (name, report.model, {(head.layer, head.head, head.part) for head in report.heads})
        for name, report in zip(names, reports, strict=True)
    ]
    for other in sides[1:]:
        for (name, model, heads), (other_name, _, other_heads) in ((sides[0], other), (other, sides[0])):
            if lacking := sorted(heads - other_heads):
                layer, head, part = lacking[0]
                where = f"head {model.layer_name(layer)}.{head} ({part})"
                problem = f"The checkpoints have different heads: {name} has {where}, but {other_name} lacks it."
                raise ModelError(problem, "Give checkpoints of the same model.")


def find_checkpoints(
    names: Sequence[str] | None, revisions: Sequence[str], offline: bool, allow_pickle: bool
) -> list[Checkpoint]:
    """Find the checkpoints (None: those of the demo model); sort them by step unless steps are missing or repeated.

    Raise UsageError if there are fewer than two checkpoints, if a checkpoint is repeated, or if `revisions` are given
    without a single model.
    """
    if revisions and (names is None or len(names) != 1):
        raise UsageError("--revisions requires a single hub model.", "Give one hub model and its revisions.")
    models = demo_checkpoints() if names is None or (list(names) == ["demo"] and not revisions) else names
    all_revisions: Sequence[str | None] = revisions or [None]
    checkpoints: list[Checkpoint] = []
    for model, revision in product(models, all_revisions):
        place = find(model, revision, offline=offline, allow_pickle=allow_pickle)
        name = revision or model.partition("@")[2] or Path(model.rstrip("/\\")).name
        if any((place.folder, place.file) == (each.place.folder, each.place.file) for each in checkpoints):
            raise UsageError(f"Duplicate checkpoint: {name}.", "Give each checkpoint once.")
        checkpoints.append(Checkpoint(name, model, revision, place, parse_step(revision or model)))
    if len(checkpoints) < 2:
        remedy = "Give two or more models with --checkpoints, or two or more names in --revisions: step10,step20."
        raise UsageError("A series needs at least two checkpoints.", remedy)
    steps = [each.step for each in checkpoints]
    if None in steps or len(set(steps)) < len(steps):
        return [replace(each, step=None) for each in checkpoints]
    return sorted(checkpoints, key=lambda each: each.step or 0)


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
    """Measure every head at each checkpoint; return a report whose one experiment contains the heads' trajectories.

    `checkpoints` are folders, files or hub ids (None, or `demo` alone: those of the demo model), or one hub model with
    several `revisions`. Training steps are the numbers in the names (`step-00030`, `checkpoint-500`); if a number is
    missing or repeated, checkpoints are numbered 0, 1, 2 … in the given order. By default, the default analyzers of
    `inspect` and the analyzer `selection` run. All checkpoints use the tokenizer of the last checkpoint that has one.
    `head`, as (layer, head) or `3.7`, selects one head. After an interruption, the same call reuses finished results.
    Raise UsageError or TextError for invalid arguments, ModelError if a checkpoint is missing or shapes differ, and
    Interrupted, which contains the finished checkpoints.
    """
    report, clear_work = run_series(checkpoints, request, revisions=revisions, head=head, progress=progress)
    clear_work()
    return report


def run_series(
    checkpoints: requests.Words | None,
    request: CheckpointsRequest,
    *,
    revisions: requests.Words = (),
    head: tuple[int, int] | str | None = None,
    progress: Progress = silent,
) -> tuple[Report, Callable[[], None]]:
    """Measure all checkpoints; return the report, and a function that removes the stored units of a complete run."""
    request = request.with_options(**requests.one_head(head, request.layers, request.heads))
    names = None if checkpoints is None else requests.words("checkpoints", checkpoints)
    return Series(names, requests.words("revisions", revisions), request, progress).run()


@dataclass(eq=False)
class Series:
    """A run over checkpoints. The constructor finds the checkpoints and reads the texts."""

    names: Sequence[str] | None  # models or checkpoints; None: the checkpoints of demo
    revisions: Sequence[str]  # revisions of a single hub model, or empty
    request: CheckpointsRequest
    progress: Progress = silent

    def __post_init__(self) -> None:
        request = self.request
        self.load_options = feeding.load_options(request, None)
        readable = [each for each in registry.list_analyzers() if request.source in ("both", each.source)]
        usual = dict.fromkeys(each.name for each in readable if each.by_default or each.name == SHOWN)
        names = request.analyzers or list(usual)
        self.analyzers, self.settings = reading.choose_analyzers(reading.settings(request), names, request.select, None)
        reading.refuse_unread(request, self.settings.source)
        self.checkpoints = find_checkpoints(self.names, self.revisions, request.offline, request.allow_pickle)
        refuse_different(self.checkpoints)
        self.contents: Sequence[texts.Content] = texts.read_each(reading.files(request), offline=request.offline)
        if self.settings.source != "weights" and not self.contents:
            self.contents = texts.sample(self.checkpoints[-1].model)
        self.cut = feeding.build_cut(self.settings, request)
        self.plan = WorkPlan.of(request)
        self.timings: dict[str, float] = {}

    @cached_property
    def units(self) -> dict[str, Checkpoint]:
        """Checkpoints keyed by unit name, which consists of the checkpoint's name and a hash of its files."""
        return {f"{each.name} {hash_checkpoint(each.place)}": each for each in self.checkpoints}

    @cached_property
    def facts(self) -> Mapping[str, object]:
        """Facts that determine the results of the units: options, inputs, code and versions."""
        # the facts contain hashes of these files instead of their names
        left_out = {*SharedRequest.model_fields, "text", "pairs", "image", "audio", "adapter"}
        files = [with_home(os.fspath(path)) for path in (*self.cut.image, *self.cut.audio)]
        adapter, offline = self.request.adapter, self.request.offline
        location = None if adapter is None else find_adapter(os.fspath(adapter), offline=offline)
        adapter_files = [] if location is None else [path for path in location.folder.glob("*") if path.is_file()]
        return {
            "command": "converge",
            "versions": versions(),
            "options": {name: str(value) for name, value in sorted(self.request) if name not in left_out},
            "texts": hash_json([(each.name, each.text) for each in self.contents]),
            "fed": [sha256(path) for path in files if path.is_file()],
            "adapter": [None if location is None else location.revision, *map(sha256, sorted(adapter_files))],
            "device": str(choose_device(self.request.device)),
            "code": [read_code(each).hex() for each in self.analyzers],
            "checkpoints": list(self.units),
        }

    @cached_property
    def store(self) -> Store | None:
        """Store of the finished units; None if units are not stored."""
        return self.plan.store(self.facts)

    def run(self) -> tuple[Report, Callable[[], None]]:
        """Measure the checkpoints; return the report, and a function that removes the stored units of a complete run.

        If interrupted, raise Interrupted with the finished part, or KeyboardInterrupt if no checkpoint is finished.
        """
        self.plan.check(self.request.text)
        units = list(self.units)
        add_steps = start_stage(self.progress, "checkpoints", len(self.plan.select_units(units)))
        outcome = run_units(
            units,
            self.read_unit,
            self.plan,
            self.store,
            worker_setup=(open_in_worker, (self.names, self.revisions, self.request)),
            report_unit=lambda _name: add_steps(1),
            usable=lambda value: value["complete"],
        )
        readings = outcome.values
        if not readings:
            raise KeyboardInterrupt
        report = self._build_report(readings, outcome.missing)
        if outcome.stopped:
            raise Interrupted(report)
        complete = not outcome.missing and all(reading["complete"] for reading in readings.values())
        return report, self.store.clear if self.store is not None and complete else lambda: None

    def _build_report(self, readings: Mapping[str, CheckpointReading], missing: Mapping[str, str]) -> Report:
        """Build the report; `missing` maps failed units to reasons. Raise ModelError if checkpoints differ in heads."""
        done, reports = [self.units[unit] for unit in readings], [reading["report"] for reading in readings.values()]
        names = [checkpoint.name for checkpoint in done]
        refuse_different_heads(names, reports)
        failed = {unit: missing.get(unit, INTERRUPTED) for unit in self.units if unit not in readings}
        unread = [Skipped(site=self.units[unit].name, reason=reason) for unit, reason in failed.items()]
        files = [
            File(name=f"{checkpoint.name}/{file.name}", sha256=file.sha256)
            for checkpoint, report in zip(done, reports, strict=True)
            for file in report.model.files
        ]
        return assemble_report(
            "converge",
            "experiments",
            model=reports[-1].model.model_copy(update={"files": files}),
            settings=reports[-1].settings,
            coverage=merge_coverages(names, [report.coverage for report in reports], unread),
            experiments=[describe_training(done, list(readings.values()))],
            timings=dict(self.timings),
        )

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """Tokenizer for all checkpoints, as fields of `Loaded`; empty if no text is read."""
        if not self.contents:
            return {}
        last = next((each for each in reversed(self.checkpoints) if has_tokenizer(each.place)), None)
        if last is None:
            return {"tokenizer": None, "tokenizer_problem": "no checkpoint has tokenizer files"}
        loaded = self._load(last)
        return {"tokenizer": loaded.tokenizer, "tokenizer_problem": loaded.tokenizer_problem}

    def _load(self, checkpoint: Checkpoint) -> loading.Loaded:
        return loading.load(checkpoint.model, **self.load_options | {"revision": checkpoint.revision})

    def read_unit(self, name: str) -> CheckpointReading:
        """Measure one checkpoint; store partial results until the checkpoint is finished."""
        checkpoint = self.units[name]

        def notify(stage: str, done: int, total: int) -> None:
            self.progress(f"{checkpoint.name}, {stage}", done, total)

        with time_stage(self.timings, checkpoint.name):
            loaded = replace(self._load(checkpoint), **self.tokenizer)
            settings = feeding.add_model_settings(self.settings, loaded)
            run = PreparedRun(loaded, settings, self.analyzers, self.contents, self.cut, notify)
            try:
                report, results = compute(survey(run), store=self.store and self.store.inside(name))
            except ModelError as error:
                raise ModelError(f"{checkpoint.name}: {error.problem}", error.remedy) from None
            loss = self._loss(loaded, settings)
        return {"report": report, "loss": loss, "complete": not results.missing}

    def _loss(self, loaded: loading.Loaded, settings: Settings) -> float | str:
        """Return the model's loss on the run's texts in nats per predicted token, or the reason why it is unknown."""
        if not self.contents:
            return "the loss requires a text, but only weights were read"
        if task_of(loaded.model) not in ("causal", "masked"):
            return "the model does not predict tokens"
        if loaded.tokenizer is None:
            return f"the text cannot be tokenized: {loaded.tokenizer_problem}"
        inputs = texts.batches(loaded, self.contents, self.cut)
        task = checks.find_task(loaded, inputs.batches[0].inputs)
        if task == "hidden":
            return "the model can attend to the tokens that it predicts"
        if task == "masked" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
            return "the tokenizer has no mask token"
        if lacking := checks.explain_missing_loss(loaded, texts.first(inputs.batches[0].inputs, 2), task):
            return lacking[1]
        loss = mean_loss(loaded.model, feed(loaded, inputs, task, settings.seed), task)
        return "the loss is NaN, or the text has nothing to predict" if loss is None else loss


def open_in_worker(
    names: tuple[str, ...] | None, revisions: tuple[str, ...], request: CheckpointsRequest
) -> tuple[Mapping[str, object], Compute]:
    """Prepare a series in a worker process; return the facts, and the function that measures a checkpoint."""
    series = Series(names, revisions, request)
    return series.facts, series.read_unit
