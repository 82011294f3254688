"""Is what attnlens reads what the model computes? Its attention matrices are rebuilt two ways and compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import hooks, models, texts, weights
from attnlens.calls import public
from attnlens.errors import NotBilinearError
from attnlens.hooks import Reached
from attnlens.records import Coverage, QueryKey, Report, Settings, SiteCheck, Summary
from attnlens.run import arguments, checks
from attnlens.run.collect import environment, peak_memory, tool
from attnlens.run.inspect import Progress, silent

TOLERANCE = hooks.IDENTITY_TOLERANCE
"""Largest relative error of an attention matrix."""


@public
def doctor(
    model: str | PathLike[str] | models.Loaded = "demo",
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    progress: Progress = silent,
    **more: Unpack[arguments.Feeding],
) -> Report:
    """Site by site: ‖P − P_model‖/‖P_model‖, P from the captured queries and keys, and from weights × inputs.

    P_model are the attention probabilities that the model itself hands out under its own eager attention. The model is
    loaded in float64 (twice the memory; a loaded one is copied), so that an error is a misreading and not rounding;
    another `dtype` is honoured, and judged by the same tolerance. `more` are the options of `arguments.Feeding`.
    Raises UsageError for words that make no sense, TextError, and ModelError where the model can't be loaded or read.
    """
    start = time.perf_counter()
    loading = arguments.loading_of(more, model)
    asked = arguments.settings({"sequences": 2, **more}, layers=layers, heads=heads)
    files = arguments.words("text", more.get("text", ()))
    named = texts.read_each(files)
    loaded = _precise(model) if isinstance(model, models.Loaded) else models.load(model, **_with_dtype(loading))
    if loaded.model.dtype == torch.float64:
        hooks.allow_float64(loaded.model)
    arguments.refuse_text(loaded, files, asked.tokens)
    settings, inputs = _fed(arguments.of_model(asked, loaded), loaded, arguments.contents(named, loaded))
    report = _examined(loaded, settings, inputs, progress)
    return report.model_copy(update={"timings": {"doctor": time.perf_counter() - start}})


def _examined(loaded: models.Loaded, settings: Settings, inputs: dict[str, Tensor], progress: Progress) -> Report:
    """The report of the model on these inputs, but for its timings."""
    reached = checks.sites(loaded, inputs)
    checks.check_chosen(settings, reached)
    identity = hooks.identity_error(loaded.model, inputs)
    one = texts.placeholder(loaded, 1, settings.seed).batches[0].inputs
    found = check_sites(loaded.model, one, inputs, progress, layers=settings.layers, heads=settings.heads)
    heads = sum(check.heads for check in found)
    missed = checks.out_of_reach(loaded, reached)
    return Report(
        tool=tool(),
        command="doctor",
        model=loaded.info,
        settings=arguments.seen(settings, loaded, reached),
        environment=environment(),
        coverage=Coverage(sites=len(found), heads=heads, analysed=heads, skipped=missed),
        summary=Summary(identity_error=identity if identity == identity else None),
        doctor=found,
        peak_memory_bytes=peak_memory(),
    )


def _with_dtype(loading: models.Loading) -> models.Loading:
    return {"dtype": "float64", **loading}


def _precise(loaded: models.Loaded) -> models.Loaded:
    """The same model in float64, as a copy."""
    return replace(loaded, model=nn.Module.double(copy.deepcopy(loaded.model)))


def check_sites(
    model: PreTrainedModel,
    one: dict[str, Tensor],
    inputs: dict[str, Tensor],
    progress: Progress = silent,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[SiteCheck]:
    """Each site's check on `inputs`; `one` is a single token, from which the weights are read.

    Only those `layers` and `heads` are looked at; a site that has none of the heads is left out.
    """
    own = own_probabilities(model, inputs)
    pairs = [
        (first, found, chosen)
        for first, found in zip(hooks.survey(model, one), hooks.survey(model, inputs), strict=True)
        if (layers is None or found.site.layer in layers)
        and (chosen := [head for head in range(found.call.query.shape[1]) if heads is None or head in heads])
    ]
    every = weights.factors(model, [first for first, _, _ in pairs], [found for _, found, _ in pairs])
    results = []
    for done, ((_, found, chosen), factors) in enumerate(zip(pairs, every, strict=True)):
        progress("doctor", done, len(pairs))
        results.append(_check(found, factors, own.get((found.site.path, found.site.ordinal)), chosen))
    progress("doctor", len(pairs), len(pairs))
    return results


def own_probabilities(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    """The attention probabilities that each attention module returns under the model's own eager attention.

    By path and ordinal; a module that hands none out has no entry.
    """
    found: dict[tuple[str, int], Tensor] = {}
    calls: dict[str, int] = {}

    def remember(path: str) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            ordinal = calls[path] = calls.get(path, -1) + 1
            parts = output if isinstance(output, tuple) else ()
            matrices = [part for part in parts if isinstance(part, Tensor) and part.dim() == 4]
            if matrices:
                found[path, ordinal] = matrices[-1]  # T5 hands out its position bias first

        return hook

    handles = [
        module.register_forward_hook(remember(path))
        for path, module in model.named_modules()
        if hooks.is_attention(module)
    ]
    try:
        with torch.no_grad(), hooks.implementation(model, "eager"):
            hooks.forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _fed(
    asked: Settings, loaded: models.Loaded, contents: Sequence[texts.Content]
) -> tuple[Settings, dict[str, Tensor]]:
    """The sequences as one batch, or a stand-in where the model has no tokenizer (its identity is proven without)."""
    tokens, sequences = asked.tokens or 2, asked.sequences or 1
    if loaded.tokenizer is None and loaded.kind in ("text", "seq2seq"):
        found = texts.placeholder(loaded, tokens, asked.seed, sequences=sequences)
    else:
        # what is compared is arithmetic, which is the same on a text that the model does not know
        known: arguments.Feeding = {"allow_foreign_text": True, "batch_size": sequences}
        found = texts.batches(loaded, contents, arguments.cut_of(asked, known))
    return arguments.fed(asked, found, loaded), found.batches[0].inputs


def _check(
    found: Reached, factors: weights.Factors | NotBilinearError, own: Tensor | None, heads: Sequence[int]
) -> SiteCheck:
    """Both errors of one site's heads, or the reason why one is missing."""
    query_key = found.call.query_key(found.site).select(heads)
    errors: list[float | None] = [None, None]
    reason = factors.problem if isinstance(factors, NotBilinearError) else None
    if own is None:
        reason = "the module does not hand out its attention probabilities"
    elif not bool(own[:, heads].isfinite().all()):
        reason = "the model's own attention probabilities are not finite"
    else:
        errors[0] = _error(query_key, own[:, heads])
        if not isinstance(factors, NotBilinearError):
            errors[1] = _error(from_weights(found, factors).select(heads), own[:, heads])
    return SiteCheck(
        site=found.site.name,
        part=found.site.part,
        heads=len(heads),
        route="none" if isinstance(factors, NotBilinearError) else factors.route,
        tokens_error=errors[0],
        weights_error=errors[1],
        reason=reason,
        passed=errors[0] is not None and all(error is None or error <= TOLERANCE for error in errors),
    )


def from_weights(found: Reached, factors: weights.Factors) -> QueryKey:
    """The site's queries and keys rebuilt as (x W_Q + b_Q) R(i) from the module's inputs x.

    Under QK-norm the per-token length, which W_Q does not carry, is taken from the captured queries and keys.
    """
    captured = found.call.query_key(found.site)
    x = found.arguments[found.input_name].double()
    y = x if found.other is None else found.arguments[found.other].double()
    rebuilt = []
    for inputs, factor, bias, seen in (
        (x, factors.maps.query, factors.maps.query_bias, captured.query),
        (y, factors.maps.key, factors.maps.key_bias, captured.key),
    ):
        part = torch.einsum("btd,hdk->bhtk", inputs, factor) + bias[:, None]
        if factors.rotation is not None:
            part = factors.rotation.turned(part)
        if factors.qk_norm:
            part = nn.functional.normalize(part, dim=-1) * seen.norm(dim=-1, keepdim=True)
        rebuilt.append(part)
    return replace(captured, query=rebuilt[0], key=rebuilt[1])


def _error(query_key: QueryKey, own: Tensor) -> float:
    """‖P − P_model‖ / ‖P_model‖ over the queries that may see something."""
    ours, theirs = query_key.attention, own.double()
    if query_key.allowed is not None:
        seeing = query_key.allowed.any(-1, keepdim=True)
        ours, theirs = ours * seeing, theirs * seeing
    return float((ours - theirs).norm() / theirs.norm())


def sound(report: Report) -> bool:
    """Whether every site of a doctor's report passed, and the model's own outputs were reproduced."""
    identity = report.summary.identity_error
    return identity is not None and identity <= TOLERANCE and all(check.passed for check in report.doctor)
