"""Compare rebuilt attention matrices with the model's own, and a report's heads with a second computation."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import requests
from attnlens.arguments import public
from attnlens.checks.judging import breach
from attnlens.errors import FAILURES, ModelError, UnreadableError, UsageError
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import Reached
from attnlens.records import (
    Check,
    Coverage,
    Head,
    QueryKey,
    Report,
    Settings,
    Site,
    SiteCheck,
    Skipped,
    Summary,
    Verdict,
)
from attnlens.requests import DoctorRequest, Loading, reading, takes
from attnlens.runs import checks, feeding
from attnlens.runs.checks import attention, refuse_initialised
from attnlens.runs.inspect.pipeline import inspect
from attnlens.runs.progress import Progress, silent
from attnlens.runs.provenance import report_of

EXACT = 1e-6
"""Relative tolerance of weights.*, computed in float64 from the same stored numbers; reports have nine digits."""


@public
def recompute(report: Report, model: str, heads: int, *, progress: Progress = silent, **more: Any) -> list[Check]:
    """Check that the model's files are the report's, and recompute `heads` random heads, measure by measure.

    The heads are drawn anew each time, so that a forger can't predict them. tokens.* may differ by √ε of the
    model's type, weights.* by EXACT, both relative to the larger value. `more` are options of `inspect` that a report
    does not contain: its text, and how the model is loaded. Raise UsageError for a report without heads, and for a text
    other than the report's.
    """
    count = min(requests.whole("recompute", heads, 1), len(report.heads))
    if report.command != "inspect" or not report.heads:
        raise UsageError(f"A report of {report.command} has no heads to recompute.", "Name one of attnlens inspect.")
    load_options = {name: more.pop(name) for name in list(more) if name in Loading.model_fields}
    loaded = loading.load(model, **{"dtype": report.settings.dtype, **load_options})
    hashes = [sorted(file.sha256 for file in info.files) for info in (report.model, loaded.info)]
    kinds = [(info.architecture, info.parameters) for info in (report.model, loaded.info)]
    shape = f"{report.model.architecture}, {report.model.parameters} parameters"
    first = [
        _recomputed_check("model.files", "the SHA-256 of every file as the report", passed=hashes[0] == hashes[1]),
        _recomputed_check("model", shape, passed=kinds[0] == kinds[1]),
    ]
    if not first[-1].passed:
        return first
    drawn = random.SystemRandom().sample(report.heads, count)
    where = {name: sorted({getattr(head, name[:-1]) for head in drawn}) for name in ("layers", "heads")}
    again = inspect(loaded, progress=progress, **{**feeding.recorded(report.settings), **more, **where})
    fed = [None if each.settings.text is None else each.settings.text.sha256 for each in (report, again)]
    if fed[0] != fed[1]:
        raise UsageError(
            f"The text is another: settings.text.sha256 is {fed[0]} in the report, and {fed[1]} here.",
            "Name the report's text with --text.",
        )
    recomputed = {(head.site, head.head): head for head in again.heads}
    tolerance = torch.finfo(loaded.model.dtype).eps ** 0.5
    pairs = [(head, recomputed.get((head.site, head.head))) for head in drawn]
    names = dict.fromkeys([*report.measure_names(), *again.measure_names()])
    return [*first, *(_measure(name, pairs, tolerance) for name in names)]


def _measure(name: str, pairs: Sequence[tuple[Head, Head | None]], tolerance: float) -> Check:
    """Check whether one measure is reproduced in all heads; list those that differ, the largest deviation first."""
    bound = EXACT if name.startswith("weights.") else tolerance
    values = [(head, *_values(head, again, name)) for head, again in pairs]
    off = [(_share(old, read), head, old, read) for head, old, read in values]
    worst = sorted((pair for pair in off if pair[0] > bound), key=lambda pair: pair[0], reverse=True)
    breaches = [breach(head, read, old) for _, head, old, read in worst]
    return _recomputed_check(name, "as the report", passed=not worst, heads=len(pairs), breaches=breaches)


def _recomputed_check(subject: str, wanted: str, **found: Any) -> Check:
    rule = f"{subject}: recomputed {wanted}"
    return Check(id=f"recompute: {subject}", rule=rule, subject=subject, wanted=wanted, **found)


def _values(head: Head, again: Head | None, name: str) -> tuple[float | None, float | None]:
    """Return the value in the report, and the recomputed one."""
    measures = (head.measures.get(name), None if again is None else again.measures.get(name))
    old, read = (None if measure is None else measure.value for measure in measures)
    return old, read


def _share(said: float | None, read: float | None) -> float:
    """Compute |a − b| / max(|a|, |b|, 10⁻⁶); 1 if one of the two has no value."""
    if said is None or read is None:
        return float(said is not read)
    return abs(said - read) / max(abs(said), abs(read), 1e-6)


TOLERANCE = hooks.IDENTITY_TOLERANCE
"""Largest relative error of an attention matrix."""
ANOTHER = 1e-3
"""Relative difference of outputs above which eager attention counts as a different computation, not as rounding."""

IN_FLOAT32 = "Computed in float32, whose rounding counts as error, since in float64: {}"


@public
@takes(DoctorRequest)
def doctor(
    model: str | PathLike[str] | loading.Loaded = "demo", *, progress: Progress = silent, request: DoctorRequest
) -> Report:
    """Compare attention site by site: ‖P − P_model‖/‖P_model‖, P from captured queries and keys, and weights × inputs.

    P_model are the attention probabilities that the model itself returns under its own eager attention. The model is
    loaded in float64 (twice the memory; a loaded one is copied), so that an error is a misreading rather than rounding;
    another `dtype` is respected, and judged by the same tolerance, and so is float32 if the model can't be read in
    float64. Raise UsageError for invalid arguments, TextError, and
    ModelError if the model can't be loaded or read.
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
    settings, inputs = _load_inputs(
        feeding.of_model(requested, loaded), request, loaded, feeding.contents(named, loaded)
    )
    report = _diagnose(loaded, settings, inputs, progress)
    return report.model_copy(update={"timings": {"doctor": time.perf_counter() - start}})


def _diagnose(loaded: loading.Loaded, settings: Settings, inputs: dict[str, Tensor], progress: Progress) -> Report:
    """Examine the model as loaded; in float32 if float64 fails or computes other attention (EoMT's own masks)."""
    if loaded.model.dtype != torch.float64:
        return _examine(loaded, settings, inputs, progress)
    try:
        report = _examine(loaded, settings, inputs, progress)
        changed = report.summary.identity_error
        if changed is None or changed <= TOLERANCE:  # None: weights are not finite
            return report
        why = f"recomputed attention changes the outputs by {changed:.1e}."
    except ModelError as error:
        why = error.problem
    single = replace(loaded, model=nn.Module.float(loaded.model))
    noted = settings.model_copy(update={"notes": [*settings.notes, IN_FLOAT32.format(why)], "dtype": "float32"})
    return _examine(single, noted, hooks.as_dtype(inputs, torch.float32), progress)


def _examine(loaded: loading.Loaded, settings: Settings, inputs: dict[str, Tensor], progress: Progress) -> Report:
    """Build the report of the model on these inputs, without its timings."""
    survey = checks.surveyed(loaded, inputs)
    reached = survey.reached
    checks.check_chosen(settings.layers, settings.heads, reached)
    refuse_initialised(loaded, inputs, attention)
    identity = checks.reproduced(loaded, inputs)
    if not identity <= TOLERANCE and not loading.nonfinite_tensors(loaded.model):
        checks.refuse_unsteady(loaded, inputs)
    first = checks.of_one_token(loaded, reached, settings.seed)
    results = check_sites(loaded.model, first, reached, inputs, progress, layers=settings.layers, heads=settings.heads)
    coverage = _coverage(results, checks.out_of_reach(loaded, survey))
    checked: Verdict = "agrees" if coverage.complete else "partly checked"
    sound = identity <= TOLERANCE and all(check.passed for check in results)
    return report_of(
        "doctor",
        "doctor",
        model=loaded.info,
        settings=feeding.seen(settings, loaded, reached),
        coverage=coverage,
        summary=Summary(
            identity_error=identity if identity == identity else None, verdict=checked if sound else "differs"
        ),
        doctor=results,
    )


def _coverage(found: Sequence[SiteCheck], missed: Sequence[Skipped]) -> Coverage:
    """Summarise the coverage: heads lacking both errors have no value, and those lacking one lack its source."""
    lacking = {
        "tokens": [check for check in found if check.tokens_error is None],
        "weights": [check for check in found if check.weights_error is None],
    }
    without = {source: sum(check.heads for check in checks) for source, checks in lacking.items()}
    skipped = [
        Skipped(site=check.site, measure=source, reason=check.reason or "")
        for source, checks in lacking.items()
        for check in checks
    ]
    heads = sum(check.heads for check in found)
    unchecked = sum(check.heads for check in found if check.verdict == "not checked")
    return Coverage(
        sites=len(found),
        heads=heads,
        analysed=heads - unchecked,
        without={source: count - unchecked for source, count in without.items() if count > unchecked},
        skipped=[*skipped, *missed],
    )


def check_sites(
    model: PreTrainedModel,
    first: Sequence[Reached],
    reached: Sequence[Reached],
    inputs: dict[str, Tensor],
    progress: Progress = silent,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[SiteCheck]:
    """Check each site as `reached` by `inputs`; `first` are the sites reached by one token, for reading weights.

    Only these `layers` and `heads` are checked; a site without any of the heads is left out.
    """
    probabilities = own_probabilities(model, inputs, reached)
    pairs = [
        (single, found, chosen)
        for single, found in zip(first, reached, strict=True)
        if (layers is None or found.site.layer in layers)
        and (chosen := [head for head in range(found.call.query.shape[1]) if heads is None or head in heads])
    ]
    all_factors = weights.factors(model, [single for single, _, _ in pairs], [found for _, found, _ in pairs])
    results = []
    for done, ((_, found, chosen), factors) in enumerate(zip(pairs, all_factors, strict=True)):
        progress("doctor", done, len(pairs))
        results.append(_check(found, factors, probabilities[found.site], chosen))
    progress("doctor", len(pairs), len(pairs))
    return results


def own_probabilities(
    model: PreTrainedModel, inputs: dict[str, Tensor], reached: Sequence[Reached]
) -> dict[Site, Tensor | str]:
    """Return the attention probabilities that each site's module computes under the model's own eager attention.

    A site may have a reason instead: not every module returns them or has a softmax of their shape, and the eager
    attention of a few models differs from the one that they use (PaliGemma's is causal, and its SDPA is not).
    """
    sites = [captured.site for captured in reached]
    captured: dict[Site, Tensor] = {}
    try:
        other = hooks.difference(model, inputs, hooks.handed_out(model, reached, captured))
    except FAILURES as error:
        why = f"the model can't run under transformers' eager attention ({loading.first_line(error)})"
        return dict.fromkeys(sites, why)
    if not other <= max(ANOTHER, 16 * torch.finfo(model.dtype).eps):
        why = f"transformers' eager attention changes this model's outputs by {other:.1e}, and hands out other matrices"
        return dict.fromkeys(sites, why)
    return (
        dict.fromkeys(sites, "the module has no softmax of these scores, and hands out no attention probabilities")
        | captured
    )


def _load_inputs(
    asked: Settings, request: DoctorRequest, loaded: loading.Loaded, contents: Sequence[texts.Content]
) -> tuple[Settings, dict[str, Tensor]]:
    """Return the sequences as one batch; placeholder ids without a tokenizer, since any input proves identity."""
    batches = texts.placeholder(loaded, asked.length or 2, asked.seed, sequences=asked.windows or 1)
    if loaded.tokenizer is not None or texts.reads_noise(loaded):
        # images share no pass, and only one is compared; any text is fine
        one_pass = {"image": request.image[:1], "audio": request.audio[:1], "batch_size": asked.windows or 1}
        cut = feeding.cut_of(asked, request.changed(**one_pass, allow_foreign_text=True))
        batches = texts.batches(loaded, contents, cut)
    update = {"windows": batches.batches[0].size}  # if images can't share a pass, only the first is compared
    return feeding.fed(asked, batches, loaded).model_copy(update=update), batches.batches[0].inputs


def _check(
    found: Reached, factors: weights.Factors | UnreadableError, own: Tensor | str, heads: Sequence[int]
) -> SiteCheck:
    """Compute both errors of one site's heads, or the reason for a missing one."""
    query_key = found.call.query_key(found.site).select(heads)
    errors: list[float | None] = [None, None]
    reason = factors.problem if isinstance(factors, UnreadableError) else None
    if isinstance(own, str):
        reason = own
    elif not bool(own[:, heads].isfinite().all()):
        reason = "the model's own attention probabilities are not finite"
    else:
        errors[0] = _error(query_key, own[:, heads])
        if not isinstance(factors, UnreadableError):
            errors[1] = _error(weights.rebuilt(found, factors).select(heads), own[:, heads])
    passed = all(error is None or error <= TOLERANCE for error in errors)
    checked = sum(error is not None for error in errors)
    return SiteCheck(
        site=found.site.name,
        part=found.site.part,
        heads=len(heads),
        route="none" if isinstance(factors, UnreadableError) else factors.route,
        tokens_error=errors[0],
        weights_error=errors[1],
        reason=reason,
        passed=passed,
        verdict=("not checked", "partly checked", "agrees")[checked] if passed else "differs",
    )


def _error(query_key: QueryKey, own: Tensor) -> float:
    """Compute ‖P − P_model‖ / ‖P_model‖ over the queries that see at least one key."""
    theirs = own.double()
    if query_key.sinks is not None and bool((theirs.sum(-1) - 1).abs().max() <= TOLERANCE):
        query_key = replace(query_key, sinks=None)  # the model applies them after its softmax (GraniteSWA)
    ours = query_key.attention
    if query_key.allowed is not None:
        seeing = query_key.allowed.any(-1, keepdim=True)
        ours, theirs = ours * seeing, theirs * seeing
    return float((ours - theirs).norm() / theirs.norm())
