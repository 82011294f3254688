"""Survey a model before it is measured: cut the texts, find the sites, and verify that they are read rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor

from attnlens.choices import ATTENTION
from attnlens.errors import FAILURES, ModelError, TextError
from attnlens.maths.linalg.long import LONG
from attnlens.models import hooks, loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.loading.deferred import mute_shape_errors
from attnlens.records import Settings, Site, Skipped
from attnlens.runs import checks, feeding
from attnlens.runs.inspect.inspection import Inspection, PreparedRun, SiteFactors, merge_skipped
from attnlens.runs.inspect.sequences import refuse_many_rows
from attnlens.runs.progress import time_stage

BY_HAND = "the module has its own attention code, which must be traced on actual values, so the model must be loaded"
"""Reason why a site of a meta-device model is not read."""


def survey(run: PreparedRun, factors: dict[Site, SiteFactors] | None = None) -> Inspection:
    """Cut the texts, find the model's sites, and verify that recomputed attention changes nothing.

    `factors` is filled with the factors of each site's weights when they are read. Raise ModelError, IdentityError,
    TextError and UsageError.
    """
    settings, inputs, no_text = _cut_inputs(run)
    run = replace(run, settings=settings)
    loaded, weights_model = run.loaded, run.weights_model
    with (
        time_stage(run.timings, "survey"),
        mute_shape_errors() if weights_model.deferred is not None else nullcontext(),
    ):
        sample = _draw_sample(loaded, settings)
        result = checks.survey_model(loaded, sample) if loaded.deferred is None else survey_shapes(loaded, sample)
        identity_error, skipped = _prove_identity(loaded, result.sites, sample, inputs)
        checks.refuse_initialised(weights_model, sample, checks.attention)
        if inputs is not None and feeding.predicts_text(loaded):
            lacking = checks.no_loss(weights_model, sample, "causal")
            skipped += [] if lacking is None else [Skipped(site=lacking[0], measure=feeding.LOSS, reason=lacking[1])]
        checks.check_chosen(settings.layers, settings.heads, result.sites)
        run = replace(run, settings=feeding.record_length(settings, loaded, result.sites))
        reached = [each for each in result.sites if settings.layers is None or each.site.layer in settings.layers]
        if run.show == ATTENTION:
            refuse_many_rows(reached, settings.heads)
        if no_text:
            skipped += [Skipped(site=each.site.name, measure="tokens", reason=no_text) for each in reached]
        for entry in checks.out_of_reach(loaded, result):
            unseen = loaded.deferred is not None and entry.reason == hooks.UNTRACED
            skipped.append(Skipped(site=entry.site, reason=BY_HAND if unseen else entry.reason))
        inspection = inspect_sites(run, result.sites, reached, inputs)
        return replace(inspection, skipped=merge_skipped(skipped), identity_error=identity_error, factors=factors)


def inspect_sites(
    run: PreparedRun, all_sites: Sequence[SiteCall], reached: Sequence[SiteCall], inputs: texts.Batches | None
) -> Inspection:
    """Return the inspection of the `reached` sites of a verified model, which all were also reached by text alone."""
    loaded, settings, sites = run.weights_model, run.settings, list(all_sites)
    if loaded is not run.loaded:
        sites = _match_sites(all_sites, survey_shapes(loaded, _draw_sample(loaded, settings)).sites, loaded)
    one_token = checks.of_one_token(loaded, sites, settings.seed)
    return Inspection(
        **vars(run),
        calls=all_sites,
        one_token=checks.text_alone(loaded, one_token, 1, settings.seed),
        window=checks.text_alone(loaded, sites, settings.length or 2, settings.seed),
        reached=reached,
        inputs=inputs,
    )


def _cut_inputs(run: PreparedRun) -> tuple[Settings, texts.Batches | None, str | None]:
    """Cut the texts into batches; return the settings that describe them, and why none are read if they should be.

    None are read for weights alone, or if both sources are read and no tokenizer exists.
    """
    loaded, settings, cut = run.loaded, run.settings, run.cut
    without_input = settings.model_copy(update=feeding.NOTHING_FED)
    if not run.contents or not any(analyzer.source == "tokens" for analyzer in run.analyzers):
        return without_input, None, None
    try:
        batches = texts.batches(loaded, run.contents, cut)
    except TextError as error:
        readable = loaded.tokenizer is not None or not texts.reads_text(loaded) or cut.image or cut.audio
        if readable or settings.source == "tokens":
            raise
        return without_input, None, error.problem
    feeding.design_of(settings, batches)  # refuses too few texts
    return feeding.describe_input(settings, batches, loaded), batches, None


def _draw_sample(loaded: loading.Loaded, settings: Settings) -> dict[str, Tensor]:
    """Return random ids as long as a window."""
    return texts.placeholder(loaded, settings.length or 2, settings.seed).batches[0].inputs


def _prove_identity(
    loaded: loading.Loaded, reached: Sequence[SiteCall], sample: Mapping[str, Tensor], inputs: texts.Batches | None
) -> tuple[float | None, list[Skipped]]:
    """Verify that recomputed attention changes nothing; with NaN in its weights, the model can't be compared.

    A model whose weights stay in their files can't run: each of its sites is verified when it is read.
    """
    if loaded.deferred is not None:
        return None, []
    # one long sequence is sufficient, and its predictions alone take gigabytes
    long = any(each.call.query.shape[2] * each.call.key.shape[2] > LONG for each in reached)
    probe = sample if inputs is None else texts.first(inputs.batches[0].inputs, 1 if long else 2)
    error, broken = checks.prove_identity(loaded, probe)
    if broken is None:
        return error, []
    return error, [
        Skipped(site=broken, reason=f"{broken} contains NaN or Inf, so the model's outputs cannot be verified")
    ]


def survey_shapes(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Survey:
    """Survey a model on the meta device (shapes only), whose attention all runs through transformers' interface."""
    remedy = "Omit --device files or spread: this architecture must be loaded."
    problem = f"{loaded.info.id} can't be analysed from its files alone: "
    try:
        result = hooks.run_survey(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else loading.first_line(error)
        raise ModelError(f"{problem}its forward pass depends on actual values ({first})", remedy) from error
    if any(each.site.traced for each in result.sites):
        raise ModelError(f"{problem}{BY_HAND}.", remedy)
    return result


def _match_sites(reached: Sequence[SiteCall], shapes: Sequence[SiteCall], loaded: loading.Loaded) -> list[SiteCall]:
    """Return the sites of the meta-device model under the names of the same sites in the model that ran."""
    by_call = {(each.site.path, each.site.ordinal): each for each in shapes}
    calls = [(each.site.path, each.site.ordinal) for each in reached]
    if list(by_call) != calls:
        raise ModelError(
            f"{loaded.info.id} runs attention that a pass without values does not reveal.", "Leave out --device spread."
        )
    return [replace(by_call[call], site=each.site) for call, each in zip(calls, reached, strict=True)]
