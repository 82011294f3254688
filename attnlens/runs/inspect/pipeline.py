"""Measure a model's attention heads from weights and real text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnlens.arguments import public
from attnlens.choices import ATTENTION
from attnlens.errors import FAILURES, ModelError, TextError, TooLargeError
from attnlens.maths.linalg.long import LONG
from attnlens.models import hooks, loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.loading.building import quiet
from attnlens.records import Settings, Site, Skipped
from attnlens.report.report import Report
from attnlens.requests import InspectRequest, reading, takes
from attnlens.runs import checks, feeding
from attnlens.runs.feeding import evaluation_mode, refuse_work, wrap_model
from attnlens.runs.inspect.inspection import Inspection, PreparedRun, SiteFactors, WorkUnit, merge_skipped
from attnlens.runs.inspect.results import Results
from attnlens.runs.inspect.sequences import refuse_many_rows
from attnlens.runs.progress import Interrupted, Progress, silent, time_stage
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, Compute, WorkerSetup, WorkPlan, run_units

TOO_LARGE = "The weights were read from their files, layer by layer, because the model does not fit into memory."
BY_HAND = "the module has its own attention code, which can only be traced in a loaded model"
ALL = "parts of the run"  # stage under which the progress over all units is reported
Model = str | PathLike[str] | loading.Loaded | PreTrainedModel  # name or path of a model, or a model in memory


@public
@takes(InspectRequest)
def inspect(
    model: str | PathLike[str] | loading.Loaded | PreTrainedModel = "demo",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    request: InspectRequest,
) -> Report:
    """Measure the symmetry, definiteness and spectrum of each attention head, from weights and from real text.

    `model` is a hub id, folder, file, `demo`, a result of `load`, or a transformers model in memory with its
    `tokenizer` (without a tokenizer, only weights are analysed); a model in memory is not changed. Measures are
    computed in float64; tokens.* have standard errors, weights.* have null distributions. `select` is an option of the
    analyzer `selection`: `top-p:0.9` selects the fewest tokens with 90 % of the attention. Raise ModelError, TextError,
    UsageError, IdentityError, and Interrupted, which contains the results so far.
    """
    report, clear_work = run_inspect(model, request, tokenizer, progress)
    clear_work()
    return report


def run_inspect(
    model: Model, request: InspectRequest, tokenizer: PreTrainedTokenizerBase | None = None, progress: Progress = silent
) -> tuple[Report, Callable[[], None]]:
    """Inspect a model; return the report, and a function to call once the report is written.

    The function removes the stored units, unless a unit failed.
    """
    plan, named = WorkPlan.of(request), isinstance(model, str | PathLike)
    if named:
        plan.check(request.text)
    else:
        refuse_work(request)
    run = prepare(model, request, tokenizer, progress)
    with evaluation_mode(run.loaded.model):
        inspection = survey(run)
        store = plan.store(inspection.facts) if named else None
        # whether the model fits into memory is decided here, once for all processes
        worker_setup = open_in_worker, (model, request.with_options(from_files=inspection.loaded.deferred is not None))
        report, results = compute(inspection, plan, store, worker_setup)
    return report, store.clear if store is not None and not results.missing else lambda: None


def open_in_worker(model: str | PathLike[str], request: InspectRequest) -> tuple[Mapping[str, object], Compute]:
    """Prepare an inspection in a worker process; return the facts and the function that computes a unit."""
    run = prepare(model, request)
    run.loaded.model.train(False)
    inspection = survey(run)
    return inspection.facts, inspection.read_unit


def prepare(
    model: Model, request: InspectRequest, tokenizer: PreTrainedTokenizerBase | None = None, progress: Progress = silent
) -> PreparedRun:
    """Read the texts and load the model.

    If the model exceeds memory, leave the weights in their files if only weights are analysed and there is no
    adapter; otherwise raise TooLargeError.
    """
    subject = wrap_model(model, tokenizer)
    load_options = feeding.load_options(request, subject)
    adapted = request.adapter is not None or (isinstance(subject, loading.Loaded) and subject.adapter is not None)
    settings, files = reading.settings(request), reading.files(request)
    chosen = request.analyzers, request.select, request.show
    analyzers, settings = reading.choose_analyzers(settings, *chosen, adapted=adapted)
    reading.refuse_unread(request, settings.source)
    named = texts.read_each(files, offline=request.offline)
    start = time.perf_counter()
    try:
        loaded = subject if isinstance(subject, loading.Loaded) else loading.load(subject, **load_options)
    except TooLargeError:
        if settings.source != "weights" or request.adapter is not None or isinstance(subject, loading.Loaded):
            raise
        loaded = loading.load(subject, **load_options | {"from_files": True})
        settings = settings.model_copy(update={"notes": [*settings.notes, TOO_LARGE]})
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, files, settings.length)
    settings = feeding.add_model_settings(settings, loaded)
    contents = (named or texts.sample(loaded.info.id)) if settings.source != "weights" else ()
    cut = feeding.build_cut(settings, request)
    return PreparedRun(loaded, settings, analyzers, contents, cut, progress, timings, request.show)


def compute(
    inspection: Inspection,
    plan: WorkPlan = NOTHING_KEPT,
    store: Store | None = None,
    worker_setup: WorkerSetup | None = None,
) -> tuple[Report, Results]:
    """Compute the units; return the report and the results. Raise ModelError if no head could be analysed.

    If interrupted, raise Interrupted with a report of the results so far, or KeyboardInterrupt if there are none.
    """
    names = list(inspection.units)
    report_unit = report_stages(
        inspection.progress, {name: inspection.units[name] for name in plan.select_units(names)}
    )
    outcome = run_units(names, inspection.read_unit, plan, store, worker_setup=worker_setup, report_unit=report_unit)
    results = Results(inspection, outcome.values, outcome.missing, outcome.stopped)
    if not any(head.measures for head in results.heads):
        if outcome.stopped:
            raise KeyboardInterrupt
        reason = results.skipped[0].reason
        raise ModelError(f"No head could be analysed: {reason}.", "Choose another model, source or layers.")
    report = results.build_report()
    if outcome.stopped:
        raise Interrupted(report)
    return report, results


def report_stages(progress: Progress, units: Mapping[str, WorkUnit]) -> Callable[[str], None]:
    """Report the start of the first stage and, if there are several stages, of the run.

    Return a function to call with the name of each finished unit.
    """
    totals, done = Counter[str](), Counter[str]()
    for unit in units.values():
        totals[unit.stage] += unit.size
    stages = list(totals)
    if len(stages) > 1:
        totals[ALL] = len(units)

    def report(stage: str, steps: int) -> None:
        if stage in totals:
            done[stage] += steps
            progress(stage, done[stage], totals[stage])

    def report_unit(name: str) -> None:
        report(ALL, 1)  # first, because plain output prints only one line
        report(units[name].stage, units[name].size)

    for stage in (*stages[:1], ALL):
        report(stage, 0)
    return report_unit


def survey(run: PreparedRun, factors: dict[Site, SiteFactors] | None = None) -> Inspection:
    """Cut the texts, find the sites, and verify recomputed attention unless the weights are left in their files.

    If `factors` is not None, the inspection's units store the factors of each site's weights in this dictionary.
    """
    settings, inputs, no_text = _cut_inputs(run)
    run = replace(run, settings=settings)
    loaded, weights_model = run.loaded, run.weights_model
    with time_stage(run.timings, "survey"), quiet() if weights_model.deferred is not None else nullcontext():
        sample = texts.placeholder(loaded, settings.length or 2, settings.seed).batches[0].inputs
        result = checks.survey_model(loaded, sample) if loaded.deferred is None else survey_shapes(loaded, sample)
        identity_error, skipped = None, list[Skipped]()
        if loaded.deferred is None:  # a model in its files can't run; its sites are verified when they are read
            # one long sequence is sufficient, and its predictions alone take gigabytes
            long = any(each.call.query.shape[2] * each.call.key.shape[2] > LONG for each in result.sites)
            probe = sample if inputs is None else texts.first(inputs.batches[0].inputs, 1 if long else 2)
            identity_error, broken = checks.prove_identity(loaded, probe)
            if broken is not None:
                why = f"{broken} contains NaN or Inf, so the model's outputs cannot be verified"
                skipped.append(Skipped(site=broken, reason=why))
        checks.refuse_initialised(weights_model, sample, checks.measure_attention_inputs)
        if inputs is not None and feeding.predicts_text(loaded):
            lacking = checks.explain_missing_loss(weights_model, sample, "causal")
            skipped += [] if lacking is None else [Skipped(site=lacking[0], measure=feeding.LOSS, reason=lacking[1])]
        checks.check_selection(settings.layers, settings.heads, result.sites)
        run = replace(run, settings=feeding.record_length(settings, loaded, result.sites))
        site_calls = [each for each in result.sites if each.site.is_among(settings.layers)]
        if run.show == ATTENTION:
            refuse_many_rows(site_calls, settings.heads)
        if no_text:
            skipped += [Skipped(site=each.site.name, measure="tokens", reason=no_text) for each in site_calls]
        for entry in checks.list_skipped(loaded, result):
            unseen = loaded.deferred is not None and entry.reason == hooks.UNTRACED
            skipped.append(Skipped(site=entry.site, reason=BY_HAND if unseen else entry.reason))
        inspection = inspect_sites(run, result.sites, site_calls, inputs)
        return replace(inspection, skipped=merge_skipped(skipped), identity_error=identity_error, factors=factors)


def inspect_sites(
    run: PreparedRun, all_sites: Sequence[SiteCall], site_calls: Sequence[SiteCall], inputs: texts.Batches | None
) -> Inspection:
    """Build the inspection of `site_calls` in a verified model; record calls of all sites on inputs without media."""
    loaded, settings, sites = run.weights_model, run.settings, all_sites
    if loaded is not run.loaded:
        sample = texts.placeholder(loaded, settings.length or 2, settings.seed).batches[0].inputs
        shapes = survey_shapes(loaded, sample)
        calls, others = ([(each.site.path, each.site.ordinal) for each in part] for part in (all_sites, shapes.sites))
        if calls != others:
            raise ModelError(
                "On the meta device, which has no weights, the model runs different attention modules.",
                "Omit --device spread.",
            )
        sites = [replace(other, site=each.site) for each, other in zip(all_sites, shapes.sites, strict=True)]
    one_token, window = checks.survey_without_media(loaded, sites, settings.length or 2, settings.seed)
    return Inspection(
        **vars(run), calls=all_sites, one_token=one_token, window=window, site_calls=site_calls, inputs=inputs
    )


def _cut_inputs(run: PreparedRun) -> tuple[Settings, texts.Batches | None, str | None]:
    """Cut the texts; return settings, batches (None: no text is read), and the reason if text can't be read."""
    loaded, settings, cut = run.loaded, run.settings, run.cut
    without_input = settings.model_copy(update=dict.fromkeys(("windows", "pack", "placement", "intervals")))
    if not run.contents or not any(analyzer.source == "tokens" for analyzer in run.analyzers):
        return without_input, None, None
    try:
        batches = texts.batches(loaded, run.contents, cut)
    except TextError as error:
        readable = loaded.tokenizer is not None or not texts.reads_text(loaded) or cut.image or cut.audio
        if readable or settings.source == "tokens":
            raise
        return without_input, None, error.problem
    feeding.build_design(settings, batches)  # raises UsageError for too few texts
    return feeding.describe_input(settings, batches, loaded), batches, None


def survey_shapes(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Survey:
    """Find the attention sites of a model on the meta device, which has no weights.

    Raise ModelError if the forward pass needs actual values, or if attention bypasses transformers' interface.
    """
    remedy = "Load the whole model: omit --device, and use a machine with enough memory."
    problem = f"{loaded.info.id} can't be analysed from its files alone: "
    try:
        result = hooks.run_survey(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else loading.first_line(error)
        raise ModelError(f"{problem}its forward pass depends on actual values ({first}).", remedy) from error
    if any(each.site.traced for each in result.sites):
        raise ModelError(f"{problem}{BY_HAND}.", remedy)
    return result
