"""Compare recomputed attention matrices with the model's own, and verify a report by recomputing heads."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.arguments import public
from attnlens.checks.judging import build_breach
from attnlens.errors import FAILURES, ModelError, UnreadableError, UsageError
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import SiteCall
from attnlens.records import Check, Coverage, Head, QueryKey, Settings, Site, SiteCheck, Skipped, Summary, Verdict
from attnlens.report.report import Report
from attnlens.requests import DoctorRequest, reading, takes
from attnlens.runs import checks, feeding
from attnlens.runs.backends import check_backends
from attnlens.runs.inspect.pipeline import inspect
from attnlens.runs.progress import Progress, silent, start_stage
from attnlens.runs.provenance import assemble_report

WEIGHTS_TOLERANCE = 1e-6
"""Relative tolerance of weights.*, computed in float64 from the same weights and written with nine digits. BLAS
libraries sum in different orders, which changes ill-conditioned measures (small eigenvalues) in more than one digit."""
SMALLEST = 1e-6  # smallest divisor of a relative deviation: a share that is 0 up to rounding has no correct digits


@public
def recompute(report: Report, model: str, heads: int, *, progress: Progress = silent, **more: Any) -> list[Check]:
    """Check that the model's files match the report, and recompute all measures of `heads` random heads.

    Return a check of the files, a check of the architecture and, if the architecture agrees, a check of each measure.
    Each call draws heads anew, so that they can't be predicted. weights.* may differ by WEIGHTS_TOLERANCE, all other
    measures by √ε (ε: machine epsilon of the model's type), relative to the larger value. `more` are options of
    `inspect` that a report does not contain: the text, and options of `load`. Raise UsageError if the report has no
    heads or was computed on a different text.
    """
    if report.command != "inspect" or not report.heads:
        problem = f"The report of `{report.command}` has no heads that can be recomputed."
        raise UsageError(problem, "Give a report of `inspect`.")
    load_options = {name: more.pop(name) for name in list(more) if name in feeding.LOADED}
    loaded = loading.load(model, **{"dtype": report.settings.dtype, **load_options})
    hashes = [sorted(file.sha256 for file in info.files) for info in (report.model, loaded.info)]
    kinds = [(info.architecture, info.parameters) for info in (report.model, loaded.info)]
    shape = f"{report.model.architecture} with {report.model.parameters} parameters, as in the report"
    files = _recomputed_check("model.files", "SHA-256 of every file as in the report", hashes[0] == hashes[1])
    kind = _recomputed_check("model", shape, kinds[0] == kinds[1])
    if not kind.passed:
        return [files, kind]
    drawn = random.SystemRandom().sample(report.heads, min(heads, len(report.heads)))
    where = {
        "layers": [*{report.model.layer_name(head.layer) for head in drawn}],
        "heads": sorted({head.head for head in drawn}),
    }
    again = inspect(loaded, progress=progress, **{**feeding.recorded_options(report.settings), **more, **where})
    text, other_text = (None if each.settings.text is None else each.settings.text.sha256 for each in (report, again))
    if text != other_text:
        problem = f"The report's text has SHA-256 {text}, but the given text has {other_text}."
        raise UsageError(problem, "Give the text of the report with --text.")
    recomputed = {(head.site, head.head): head for head in again.heads}
    # half of the digits of the model's type, because rounding adds up over layers
    tolerance = torch.finfo(loaded.model.dtype).eps ** 0.5
    pairs = [(head, recomputed.get((head.site, head.head))) for head in drawn]
    names = dict.fromkeys([*report.measure_names(), *again.measure_names()])
    return [files, kind, *(_compare_measure(name, pairs, tolerance) for name in names)]


def _compare_measure(name: str, pairs: Sequence[tuple[Head, Head | None]], tolerance: float) -> Check:
    """Check that one measure is reproduced in all heads; list the heads that differ, largest deviation first."""
    bound = WEIGHTS_TOLERANCE if name.startswith("weights.") else tolerance
    deviations = []
    for head, recomputed in pairs:
        measures = [None if side is None else side.measures.get(name) for side in (head, recomputed)]
        old, new = (None if measure is None else measure.value for measure in measures)
        if old is None or new is None:
            deviation = float(old is not new)
        else:
            deviation = abs(old - new) / max(abs(old), abs(new), SMALLEST)
        if deviation > bound:
            deviations.append((deviation, build_breach(head, new, old)))
    breaches = [each for _, each in sorted(deviations, key=lambda pair: pair[0], reverse=True)]
    check = _recomputed_check(name, "value as in the report", not breaches)
    return check.model_copy(update={"heads": len(pairs), "breaches": breaches})


def _recomputed_check(subject: str, wanted: str, passed: bool) -> Check:
    rule = f"{subject}: recomputed {wanted}"
    return Check(id=f"recompute: {subject}", rule=rule, subject=subject, wanted=wanted, passed=passed)


TOLERANCE = hooks.IDENTITY_TOLERANCE  # largest relative error of an attention matrix
EAGER_TOLERANCE = 1e-3
"""Relative difference in outputs above which eager attention counts as a different computation: rounding in float32
causes much less, a different mask or scale much more."""


@public
@takes(DoctorRequest)
def doctor(
    model: str | PathLike[str] | loading.Loaded = "demo", *, progress: Progress = silent, request: DoctorRequest
) -> Report:
    """Compare recomputed attention P with the model's own, site by site: ‖P − P_model‖/‖P_model‖.

    P is computed twice: from captured queries and keys, and from weights × inputs. P_model contains the attention
    probabilities that the model itself returns with eager attention. The model is loaded in float64 (a loaded model is
    copied), which takes twice the memory, so that errors are not due to rounding. Float32 is used if float64 fails, or
    if recomputed attention differs only in float64; the tolerance is the same. Attention backends and masks are also
    tested. Raise UsageError for invalid arguments, TextError for an invalid text, and ModelError if the model can't be
    loaded or analysed.
    """
    start = time.perf_counter()
    load_options = {"dtype": request.dtype, **feeding.load_options(request, model)}
    requested = reading.settings(request)
    named = texts.read_each(files := reading.files(request), offline=request.offline)
    if isinstance(model, loading.Loaded):
        loaded = replace(model, model=nn.Module.double(copy.deepcopy(model.model)))
    else:
        loaded = loading.load(model, **load_options)
    if loaded.model.dtype == torch.float64:
        hooks.allow_float64(loaded.model)
    feeding.refuse_text(loaded, files, requested.length)
    settings = feeding.add_model_settings(requested, loaded)
    # without a tokenizer, use placeholder ids: any input suffices for the comparison
    batches = texts.placeholder(loaded, settings.length or 2, settings.seed, sequences=settings.windows or 1)
    if loaded.tokenizer is not None or texts.reads_noise(loaded):
        # compare only one image, because images do not share a pass; any text suffices
        one_pass = {"image": request.image[:1], "audio": request.audio[:1], "batch_size": settings.windows or 1}
        cut = feeding.build_cut(settings, request.with_options(**one_pass, allow_foreign_text=True))
        batches = texts.batches(loaded, named or texts.sample(loaded.info.id), cut)
    settings = feeding.describe_input(settings, batches, loaded)
    settings = settings.model_copy(update={"windows": batches.batches[0].size})
    inputs = batches.batches[0].inputs
    report = _diagnose(loaded, settings, inputs, progress)
    read = time.perf_counter()
    inputs = hooks.as_dtype(inputs, loaded.model.dtype)  # `_diagnose` can have converted the model to float32
    backends, notes = check_backends(loaded, inputs, request)
    if notes:
        settings = report.settings.model_copy(update={"notes": [*report.settings.notes, *notes]})
        report = report.model_copy(update={"settings": settings})
    times = {"doctor": read - start, "backends": time.perf_counter() - read}
    return report.model_copy(update={"backends": backends, "timings": times})


def _diagnose(loaded: loading.Loaded, settings: Settings, inputs: dict[str, Tensor], progress: Progress) -> Report:
    """Check the model's attention and outputs; repeat in float32 if float64 fails or recomputed attention differs.

    Return the result in float32 if float64 fails, or if attention differs only in float64 (EoMT). The model then stays
    in float32.
    """
    if loaded.model.dtype != torch.float64:
        return _examine(loaded, settings, inputs, progress)
    report: Report | None = None
    try:
        report = _examine(loaded, settings, inputs, progress)
        changed = report.summary.identity_error
        # `changed` is None if weights are not finite
        if changed is None or changed <= TOLERANCE or report.summary.verdict != "differs":
            return report
        why = f"recomputed attention changes the outputs by {changed:.1e}."
    except ModelError as error:
        why = error.problem
    note = f"Computed in float32 (whose rounding counts as error) because of a problem in float64: {why}"
    single = replace(loaded, model=nn.Module.float(loaded.model))
    notes = settings.model_copy(update={"notes": [*settings.notes, note], "dtype": "float32"})
    again = _examine(single, notes, hooks.as_dtype(inputs, torch.float32), progress)
    if report is not None and again.summary.verdict == "differs":  # the cause is not float64
        nn.Module.double(loaded.model)
        return report
    return again


def _examine(loaded: loading.Loaded, settings: Settings, inputs: dict[str, Tensor], progress: Progress) -> Report:
    """Check the model's attention and outputs on `inputs`; return a report without timings and backends."""
    survey = checks.survey_model(loaded, inputs)
    site_calls = survey.sites
    checks.check_selection(settings.layers, settings.heads, site_calls)
    checks.refuse_initialised(loaded, inputs, checks.measure_attention_inputs)
    identity = checks.measure_identity_error(loaded, inputs)
    if not identity <= TOLERANCE and not loading.nonfinite_tensors(loaded.model):
        checks.refuse_unsteady(loaded, inputs)
    first = checks.survey_ids(loaded, site_calls, 1, settings.seed)
    results = check_sites(
        loaded.model, first, site_calls, inputs, progress, layers=settings.layers, heads=settings.heads
    )
    coverage = _coverage(results, checks.list_skipped(loaded, survey))
    # rounding that explains the error of a site also explains a change of the outputs
    sound = identity <= TOLERANCE or any(check.rounding is not None for check in results)
    sound = sound and all(check.passed for check in results)
    verdict: Verdict = "differs" if not sound else "agrees" if coverage.complete else "partly checked"
    known, reasons = not math.isnan(identity), dict[str, str]()
    if not known and (overflow := checks.describe_overflow(loaded.model.dtype, site_calls)):
        reasons["identity_error"] = overflow
    return assemble_report(
        "doctor",
        "doctor",
        model=loaded.info.model_copy(update={"layer_names": checks.layer_names(each.site for each in site_calls)}),
        settings=feeding.record_length(settings, loaded, site_calls),
        coverage=coverage,
        summary=Summary(identity_error=identity if known else None, verdict=verdict, reasons=reasons),
        doctor=results,
    )


def _coverage(results: Sequence[SiteCheck], missed: Sequence[Skipped]) -> Coverage:
    """Summarise the coverage. A head is analysed if its recomputed attention was compared with the model's."""
    heads = sum(check.heads for check in results)
    analysed = heads - sum(check.heads for check in results if check.verdict == "not checked")
    skipped, without = list[Skipped](), dict[str, int]()
    for source in ("tokens", "weights"):
        lacking = [check for check in results if getattr(check, f"{source}_error") is None]
        skipped += [Skipped(site=check.site, measure=source, reason=check.reason or "") for check in lacking]
        if count := sum(check.heads for check in lacking) - (heads - analysed):
            without[source] = count
    return Coverage(sites=len(results), heads=heads, analysed=analysed, without=without, skipped=[*skipped, *missed])


def check_sites(
    model: PreTrainedModel,
    first: Sequence[SiteCall],
    site_calls: Sequence[SiteCall],
    inputs: dict[str, Tensor],
    progress: Progress = silent,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
) -> list[SiteCheck]:
    """Check the attention of the chosen layers and heads; `first` contains the same sites' calls on one token."""
    probabilities = collect_probabilities(model, inputs, site_calls)
    pairs = [
        (single, each, chosen)
        for single, each in zip(first, site_calls, strict=True)
        if each.site.is_among(layers)
        and (chosen := [head for head in range(each.call.query.shape[1]) if heads is None or head in heads])
    ]
    all_factors = weights.factors(model, [single for single, _, _ in pairs], [each for _, each, _ in pairs])
    results, add_steps = list[SiteCheck](), start_stage(progress, "doctor", len(pairs))
    for (_, each, chosen), factors in zip(pairs, all_factors, strict=True):
        rounded = any(result.rounding is not None for result in results)
        results.append(_check(each, factors, probabilities[each.site], chosen, rounded=rounded))
        add_steps(1)
    return results


def collect_probabilities(
    model: PreTrainedModel, inputs: dict[str, Tensor], site_calls: Sequence[SiteCall]
) -> dict[Site, Tensor | str]:
    """Return each site's attention probabilities from the model's own eager attention, or why they are unknown.

    Probabilities are also unknown if the model's default attention differs from eager attention (PaliGemma's SDPA is
    not causal).
    """
    captured: dict[Site, Tensor] = {}
    why = "the module applies no softmax to its scores and returns no attention probabilities"
    try:
        difference = hooks.difference(model, inputs, hooks.collect_weights(model, site_calls, captured))
        # 16 ε: the rounding of a few layers in half precision
        if not difference <= max(EAGER_TOLERANCE, 16 * torch.finfo(model.dtype).eps):
            size = f"transformers' eager attention changes this model's outputs by {difference:.1e}"
            overflow = checks.describe_overflow(model.dtype, site_calls) if math.isnan(difference) else None
            why = overflow or f"{size}, so eager attention matrices are not comparable"
            captured = {}
    except FAILURES as error:
        why = f"the model can't run under transformers' eager attention ({loading.first_line(error)})"
        captured = {}
    return dict.fromkeys((each.site for each in site_calls), why) | captured


def _check(
    site_call: SiteCall,
    factors: weights.Factors | UnreadableError,
    probabilities: Tensor | str,
    heads: Sequence[int],
    *,
    rounded: bool,
) -> SiteCheck:
    """Compare a site's attention, recomputed from tokens and from weights, with the model's own probabilities.

    If the probabilities are unknown, `probabilities` is the reason. `rounded` is True if rounding at an earlier site
    changed this site's inputs.
    """
    errors, rebuilt = dict[str, float](), dict[str, QueryKey]()
    reason = factors.problem if isinstance(factors, UnreadableError) else None
    if isinstance(probabilities, str):
        reason = probabilities
    elif not bool(probabilities[:, heads].isfinite().all()):
        reason = "the model's own attention probabilities are not finite"
    else:
        rebuilt["tokens"] = site_call.call.query_key(site_call.site)
        if not isinstance(factors, UnreadableError):
            rebuilt["weights"] = weights.rebuild(site_call, factors)
        for source, query_key in rebuilt.items():
            errors[source] = _error(query_key.select(heads), probabilities[:, heads])
    wrong = {source: error for source, error in errors.items() if not error <= TOLERANCE}
    causes = [
        _explain_rounding(rebuilt[source].select(heads), probabilities[:, heads], error, rounded=rounded)
        for source, error in wrong.items()
        if not isinstance(probabilities, str)
    ]
    passed = all(causes)
    if causes and passed:
        reason = reason or causes[0]
    return SiteCheck(
        site=site_call.site.name,
        part=site_call.site.part,
        heads=len(heads),
        route="none" if isinstance(factors, UnreadableError) else factors.route,
        tokens_error=errors.get("tokens"),
        weights_error=errors.get("weights"),
        reason=reason,
        rounding=max(wrong.values()) if wrong and passed else None,
        passed=passed,
        verdict=("not checked", "partly checked", "agrees")[len(errors)] if passed else "differs",
    )


def _explain_rounding(query_key: QueryKey, probabilities: Tensor, error: float, *, rounded: bool) -> str:
    """Describe the model's own rounding of scores if it explains the error; otherwise return an empty string.

    For a float64 model without sinks, softmax in float32 must give the model's probabilities. For other models, and if
    an earlier site's rounding changed the inputs (`rounded`), the error must be at most twice the rounding of the
    largest score.
    """
    most, text = checks.bound_rounding(query_key, probabilities.dtype)
    explained = error <= most
    if probabilities.dtype == torch.float64 and query_key.sinks is None and not rounded:
        logits = query_key.logits
        if query_key.allowed is not None:
            logits = logits.masked_fill(~query_key.allowed, -math.inf)
        explained = _deviation(logits.float().softmax(-1), query_key.allowed, probabilities) <= TOLERANCE
    if not explained:
        return ""
    return f"the model's own {text}: its attention weights are off by {error:.1e}; attnlens computes them in float64"


def _error(query_key: QueryKey, probabilities: Tensor) -> float:
    """Compute ‖P − P_model‖ / ‖P_model‖ over queries that see a key; P is recomputed from `query_key`."""
    # rows that sum to 1 up to rounding leave nothing for a sink: the model applies it after the softmax (GraniteSWA)
    if query_key.sinks is not None and bool((probabilities.double().sum(-1) - 1).abs().max() <= TOLERANCE):
        query_key = replace(query_key, sinks=None)
    return _deviation(query_key.attention, query_key.allowed, probabilities)


def _deviation(rebuilt: Tensor, allowed: Tensor | None, probabilities: Tensor) -> float:
    """Compute ‖rebuilt − probabilities‖ / ‖probabilities‖ over the queries that see at least one key."""
    rebuilt, probabilities = rebuilt.double(), probabilities.double()
    if allowed is not None:
        sees_key = allowed.any(-1, keepdim=True)
        rebuilt, probabilities = rebuilt.nan_to_num() * sees_key, probabilities * sees_key
    return float((rebuilt - probabilities).norm() / probabilities.norm())
