"""Compare two models, or two saved reports, on the same windows, and test which heads changed."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.files import read_bytes, sha256
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading
from attnlens.records import Comparison, HeadChange, HeadId, Settings, Shift, Spread, Windows
from attnlens.report.report import Report, read_report
from attnlens.requests import CompareRequest, InspectRequest, Loading, takes
from attnlens.runs import feeding
from attnlens.runs.compare import significance
from attnlens.runs.compare.changes import Changes
from attnlens.runs.compare.diagnosis import describe_models, match_sites
from attnlens.runs.compare.sides import ComparedModel, Pairing
from attnlens.runs.compare.significance import ChangeTest, build_rows, field_values, is_category
from attnlens.runs.compare.stored import compare_stored
from attnlens.runs.feeding import evaluation_mode, wrap_model
from attnlens.runs.inspect.inspection import PreparedRun
from attnlens.runs.inspect.pipeline import compute, inspect, prepare, survey
from attnlens.runs.progress import Progress, silent
from attnlens.runs.provenance import assemble_report
from attnlens.runs.swap.saved import restore_saved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


UNPAIRED = (
    "Changes are not paired by window: standard errors assume two independent samples, and are too large if both sides "
    "read the same windows. Reports are paired if the --windows-csv file of each is in the report's folder."
)
UNROUNDED = "Reports contain no weights, so rounding is not taken into account; compare the models to include it."
NO_ROUNDING = "a report contains no weights, so the effect of rounding is unknown"
SAME = ("seed", "text", "noise", "windows", "length", "pack", "placement", "intervals", "select", "layers", "heads")
"""Settings that must be equal in both reports."""
AGAIN = "Create both reports with the same text and options, or compare the models directly."


def read_side(path: Path) -> Report:
    """Read a report and its --windows-csv file, if any. Raise UsageError if heads or windows can't be read."""
    report = read_report(path)
    remedy = "Give a report created with: attnlens inspect MODEL --json FILE"
    if report.kind != "inspection":
        raise UsageError(f"{path} is a report of kind {report.kind}, which does not describe a single model.", remedy)
    if not report.heads:
        raise UsageError(f"{path} contains no heads.", remedy)
    if report.windows_file is None:
        return report
    if Path(report.windows_file.name).name != report.windows_file.name:
        remedy = "Create the report again, with --json and --windows-csv in the same folder."
        raise UsageError(f"{path} refers to a windows file outside its folder.", remedy)
    file = path.parent / report.windows_file.name
    if not file.exists():
        return report
    if sha256(file) != report.windows_file.sha256:
        raise UsageError(f"{file} does not match its hash in {path.name}.", "Create both files again, in one run.")
    try:
        return report.with_windows(_read_windows(file, report))
    except (KeyError, ValueError, csv.Error):  # UnicodeDecodeError is a ValueError
        remedy = "Create the report again, with --json and --windows-csv."
        raise UsageError(f"{file} does not contain the windows of {path.name}.", remedy) from None


def _read_windows(path: Path, report: Report) -> Windows:
    content = read_bytes(path, UsageError, "Create the file again with --windows-csv.").decode()
    rows = list(csv.DictReader(io.StringIO(content)))
    windows = [(row["text"], int(row["window"])) for row in rows]
    numbers = {window: number for number, window in enumerate(dict.fromkeys(windows))}
    places = {(head.layer, head.head): place for place, head in enumerate(report.heads)}
    heads = torch.tensor([places[int(row["layer"]), int(row["head"])] for row in rows])
    cells = torch.tensor([numbers[window] for window in windows]), heads
    tables = {}
    for name in report.measure_names():
        values = torch.tensor([float(row.get(name) or math.nan) for row in rows], dtype=torch.float64)
        if not bool(values.isnan().all()):
            empty = torch.full((len(numbers), len(places)), math.nan, dtype=torch.float64)
            tables[name] = empty.index_put_(cells, values)
    return Windows(list(numbers), [{"layer": layer, "head": head} for layer, head in places], tables)


def refuse_other_settings(first: Settings, second: Settings) -> None:
    """Raise UsageError if two reports differ in a setting listed in SAME, or in their windows."""
    for name in SAME:
        values = [getattr(settings, name) for settings in (first, second)]
        value, other_value = (getattr(each, "sha256", each) for each in values)
        if value != other_value:
            raise UsageError(f"settings.{name} differs between the two sides: {value} and {other_value}.", AGAIN)
    windows, other_windows = ([(text.sha256, text.windows) for text in side.texts] for side in (first, second))
    if windows != other_windows:
        raise UsageError("The two sides were computed on different windows of the text (settings.texts).", AGAIN)


def compare_reports(first: Report, second: Report, fdr: float) -> Comparison:
    """Compare two reports by head, or only the distributions of measures if the heads differ.

    Raise UsageError if settings or windows differ.
    """
    refuse_other_settings(first.settings, second.settings)
    names = set(HeadId.model_fields)
    ids, other_ids = ([head.model_dump(include=names) for head in side.heads] for side in (first, second))
    if ids != other_ids:
        return compare_distributions(first, second, fdr)
    paired = first.windows is not None and second.windows is not None
    if paired and _numbered_windows(first) != _numbered_windows(second):
        raise UsageError("The --windows-csv files of the two sides list different windows.", AGAIN)
    tests = {name: _test_measure(first, second, name) for name in first.measure_names()}
    rows = build_rows((first.heads, second.heads), tests, fdr, NO_ROUNDING)
    dtypes = first.settings.dtype, second.settings.dtype
    notes = [UNROUNDED]
    if dtypes[0] != dtypes[1]:
        notes.insert(0, f"The models were run in {dtypes[0]} and {dtypes[1]}: rounding alone makes every head differ.")
    if not paired:
        notes.append(UNPAIRED)
    return Comparison(
        base=first.model,
        paired=paired,
        fdr=fdr,
        tests=sum(row.p is not None for row in rows),
        named=sum(row.named for row in rows),
        heads=[HeadChange(**fields, partner=fields["head"], reason=NO_ROUNDING) for fields in ids],
        rows=rows,
        notes=notes,
    )


def _numbered_windows(report: Report) -> list[tuple[object, int]]:
    """Return (text index, window index in the text) for each window: reports can name the same text differently."""
    places = {text.name: place for place, text in enumerate(report.settings.texts)}
    windows = [] if report.windows is None else report.windows.windows
    return [(places.get(name, name), number) for name, number in windows]


def _test_measure(first: Report, second: Report, name: str) -> ChangeTest | None:
    """Test the changes in a measure, paired by window if possible; None for categories and without standard errors."""
    heads = first.heads, second.heads
    if is_category(heads, name):
        return None
    names = [text.name for text in first.settings.texts for _ in text.windows]
    design = Design.of(names or [""] * (first.settings.windows or 0), first.settings.intervals)
    before, after = (None if side.windows is None else side.windows.values.get(name) for side in (first, second))
    if before is not None and after is not None:
        return significance.test_windows(after - before, design, None, first.settings.seed)
    errors = field_values(heads, name, "se")
    if bool(errors[0].isnan().all() | errors[1].isnan().all()):
        return None
    before, after = field_values(heads, name)
    error = (errors[0].square() + errors[1].square()).sqrt()
    return significance.test_unpaired(after - before, error, design.freedom)


def compare_distributions(first: Report, second: Report, fdr: float) -> Comparison:
    """Compare the quartiles of each common measure of two reports whose heads do not correspond."""
    spreads = [(name, _quartiles(first, name), _quartiles(second, name)) for name in first.measure_names()]
    shifts = [Shift(measure=name, before=a, after=b) for name, a, b in spreads if a is not None and b is not None]
    note = "The models have different sites or heads, which cannot be matched: only distributions are compared."
    return Comparison(base=first.model, paired=False, fdr=fdr, shifts=shifts, notes=[note])


def _quartiles(report: Report, name: str) -> Spread | None:
    """Compute a measure's quartiles over heads; None for categories, or if no head has a value."""
    measures = [head.measures[name] for head in report.heads if name in head.measures]
    values = [measure.value for measure in measures if measure.value is not None and measure.label is None]
    if not values:
        return None
    quartiles = tuple(np.quantile(values, (0.25, 0.5, 0.75)).tolist())
    return Spread(heads=len(values), quartiles=quartiles, median_se=report.summary.median_errors.get(name))


SECOND = ("revision", "adapter")  # options that apply to the second model only
OTHER_INPUT = (
    "The models receive different inputs for the same windows, because their tokenizers, window lengths or image sizes "
    "differ: only their weights are compared."
)
Model = str | PathLike[str] | loading.Loaded | PreTrainedModel
Side = Model | Report


@public
@takes(CompareRequest)
def compare(
    first: Side,
    second: Side,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    request: CompareRequest,
) -> Report:
    """Compare each head's measures in two models on the same windows: second − first, with standard error, p and q.

    Return the report of the second model, with `comparison` (records.Comparison). The null hypothesis of p is that
    sampling of windows and rounding of weights explain the change. q corrects p for all heads × measures (Benjamini
    and Hochberg); a change is significant if q ≤ `fdr`. Each side can also be a report of `inspect`, or its path. A
    model that is compared with a report is inspected with the report's settings. `tokenizer` applies to models in
    memory. Models are loaded in float32 unless `dtype` is given; `revision` and `adapter` apply to the second model.
    Raise the errors of `inspect`, and UsageError if both sides are the same model in memory, or if two reports differ
    in settings or windows.
    """
    start = time.perf_counter()
    options = {name: value for name, value in request.explicit().items() if name != "fdr"}
    subjects: list[Side] = [
        read_side(Path(side)) if isinstance(side, str | PathLike) and Path(side).suffix == ".json" else side
        for side in (first, second)
    ]
    if first is second and not isinstance(first, str | PathLike | Report):
        # both sides would be changed in place when rounding is drawn
        raise UsageError(
            "Both sides are the same model in memory.", "Give a copy (copy.deepcopy), or the folder's path."
        )
    option_sets = [_select_options(side, options, number) for number, side in enumerate(subjects)]
    models = [side for side in subjects if not isinstance(side, Report)]
    settings = next((side.settings for side in subjects if isinstance(side, Report)), None)
    if settings is not None:
        _refuse_ignored(subjects, options)
        recorded = feeding.recorded_options(settings)
        before, report = (
            side
            if isinstance(side, Report)
            else inspect(wrap_model(side, tokenizer), progress=progress, **recorded | side_options)
            for side, side_options in zip(subjects, option_sets, strict=True)
        )
        comparison = compare_reports(before, report, request.fdr)
    else:
        runs = _prepare_sides(models, option_sets, tokenizer, progress)
        with evaluation_mode(runs[0][0].loaded.model), evaluation_mode(runs[1][0].loaded.model):
            if any(run.loaded.deferred is not None for run, _ in runs):
                comparison, report = compare_files(runs[0][0], runs[1][0], request.fdr)
            else:
                sides = [ComparedModel.of(run, swaps) for run, swaps in runs]
                comparison, report = compare_models(sides[0], sides[1], request.fdr, progress), sides[1].report
        comparison = comparison.model_copy(update={"notes": [*runs[0][0].loaded.notes, *comparison.notes]})
    fields = {name: getattr(report, name) for name in ("model", "settings", "coverage", "heads", "summary")}
    timings = {"all": time.perf_counter() - start}
    return assemble_report("compare", "comparison", **fields, comparison=comparison, timings=timings)


def _refuse_ignored(subjects: Sequence[Side], options: Mapping[str, object]) -> None:
    """Raise UsageError for options that have no effect because they would apply only to reports."""
    reports = [isinstance(side, Report) for side in subjects]
    changed = [name for name, value in options.items() if value != CompareRequest.model_fields[name].default]
    ignored = [name for name in changed if all(reports) or (name in SECOND and reports[1])]
    if ignored and (ignored, options.get("dtype")) != (["dtype"], "float32"):
        names = ", ".join(ignored)
        raise UsageError(f"{names} would be ignored, because reports are not recomputed.", f"Omit {names}.")


def _select_options(subject: Side, options: Mapping[str, object], number: int) -> dict[str, Any]:
    """Return one side's options, without SECOND for the first side; models given by name default to float32."""
    selected = {name: value for name, value in options.items() if number or name not in SECOND}
    if isinstance(subject, str | PathLike):
        return {"dtype": "float32", **selected}
    selected.pop("dtype", None)
    return selected


def _prepare_sides(
    models: Sequence[Model],
    option_sets: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    progress: Progress,
) -> list[tuple[PreparedRun, hooks.Swaps]]:
    """Load both models with the same texts; return each with the replacement kernels that --save stored with it."""
    runs: list[tuple[PreparedRun, hooks.Swaps]] = []
    for subject, options in zip(models, option_sets, strict=True):
        swaps: hooks.Swaps = {}
        if isinstance(subject, str | PathLike) and (Path(subject).expanduser() / loading.SWAPPED).is_file():
            load_options = {name: options.pop(name) for name in list(options) if name in Loading.model_fields}
            subject, _, swaps = restore_saved(Path(subject).expanduser(), **load_options)
        side_tokenizer = None if isinstance(subject, str | PathLike | loading.Loaded) else tokenizer
        run = prepare(subject, InspectRequest(**options), side_tokenizer, progress)
        if runs:
            run = replace(run, contents=runs[0][0].contents)
        runs.append((run, swaps))
    return runs


def compare_files(first: PreparedRun, second: PreparedRun, fdr: float) -> tuple[Comparison, Report]:
    """Compare two models, at least one left in files; return the comparison and the second model's report."""
    sides = survey(first), survey(second)
    reports = compute(sides[0])[0], compute(sides[1])[0]
    shapes, other_shapes = ([(each.site.path, each.call.query.shape[1]) for each in side.site_calls] for side in sides)
    if shapes != other_shapes:
        comparison = compare_distributions(*reports, fdr)
        return comparison.model_copy(update=describe_models(sides, match_sites(sides), {})), reports[1]
    return compare_stored(sides, reports, fdr), reports[1]


def compare_models(first: ComparedModel, second: ComparedModel, fdr: float, progress: Progress) -> Comparison:
    """Compare two inspected models: by head if sites and numbers of heads agree, and on text if inputs also agree."""
    shapes, other_shapes = (
        [(each.site.path, each.site.ordinal, each.call.query.shape[1], each.call.group) for each in side.site_calls]
        for side in (first, second)
    )
    if shapes != other_shapes:  # masks may differ
        comparison = compare_distributions(first.report, second.report, fdr)
        sites = match_sites((first, second))
        return comparison.model_copy(update=describe_models((first, second), sites, {}))
    inputs, others = ([batch.inputs for batch in side.batches] for side in (first, second))
    if [batch.keys() for batch in inputs] == [batch.keys() for batch in others] and all(
        torch.equal(batch[name], other[name]) for batch, other in zip(inputs, others, strict=True) for name in batch
    ):
        return Changes(Pairing.of(first, second), fdr, progress).compare()
    comparison = Changes(Pairing.of(first.without_text(), second.without_text()), fdr, progress).compare()
    return comparison.model_copy(update={"notes": [OTHER_INPUT, *comparison.notes]})
