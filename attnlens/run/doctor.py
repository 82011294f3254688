"""Is what attnlens reads what the model computes? Its attention matrices are rebuilt two ways and compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import hooks, models, texts, weights
from attnlens.errors import NotBilinearError
from attnlens.hooks import Reached
from attnlens.records import Coverage, QueryKey, Report, Settings, SiteCheck, Skipped, Summary, Text
from attnlens.run.collect import environment, peak_memory, tool
from attnlens.run.inspect import Progress, silent

TOLERANCE = hooks.IDENTITY_TOLERANCE
"""Largest relative error of an attention matrix."""


def doctor(
    model: str = "demo",
    *,
    text: Sequence[str] = (),
    tokens: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    **loading: Unpack[models.Loading],
) -> Report:
    """Site by site: ‖P − P_model‖/‖P_model‖, P from the captured queries and keys, and from weights × inputs.

    P_model are the attention probabilities that the model itself hands out under its own eager attention. The model
    is loaded in float64 (twice the memory), so that an error is a misreading and not rounding.
    Raises ModelError where the model can't be loaded or reached.
    """
    start = time.perf_counter()
    content = texts.read_text(text)
    loaded = models.load(model, **(loading | {"dtype": "float64"}))
    hooks.allow_float64(loaded.model)
    window = texts.window_length(loaded.model, tokens)
    inputs, text_read = _inputs(loaded, content, window, seed)
    identity = hooks.identity_error(loaded.model, inputs)
    checks = check_sites(loaded.model, texts.placeholder(loaded, 1, seed).batches[0].inputs, inputs, progress)
    missed = [
        Skipped(site=path, reason="its attention is computed outside transformers' attention interface")
        for path in hooks.unreached(loaded.model, hooks.survey(loaded.model, inputs))
    ]
    heads = sum(check.heads for check in checks)
    return Report(
        tool=tool(),
        command="doctor",
        model=loaded.info,
        settings=Settings(seed=seed, device=str(loaded.model.device), dtype="float64", text=text_read, tokens=window),
        environment=environment(),
        coverage=Coverage(sites=len(checks), heads=heads, analysed=heads, skipped=missed),
        summary=Summary(identity_error=identity if identity == identity else None),
        doctor=checks,
        timings={"doctor": time.perf_counter() - start},
        peak_memory_bytes=peak_memory(),
    )


def check_sites(
    model: PreTrainedModel, one: dict[str, Tensor], inputs: dict[str, Tensor], progress: Progress = silent
) -> list[SiteCheck]:
    """Each site's check on `inputs`; `one` is a single token, from which the weights are read."""
    own = own_probabilities(model, inputs)
    first, reached = hooks.survey(model, one), hooks.survey(model, inputs)
    checks = []
    for done, (found, factors) in enumerate(zip(reached, weights.factors(model, first, reached), strict=True)):
        progress("doctor", done, len(reached))
        checks.append(_check(found, factors, own.get((found.site.path, found.site.ordinal))))
    progress("doctor", len(reached), len(reached))
    return checks


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


def _inputs(loaded: models.Loaded, content: texts.Content, tokens: int, seed: int) -> tuple[dict[str, Tensor], Text]:
    """Two sequences of text, or a stand-in where the model has no tokenizer (its identity can be proven without)."""
    if loaded.tokenizer is None and loaded.kind in ("text", "seq2seq"):
        found = texts.placeholder(loaded, tokens, seed, sequences=2)
    else:
        found = texts.batches(loaded, content, tokens=tokens, sequences=2, batch_size=2, seed=seed)
    return found.batches[0].inputs, found.text


def _check(found: Reached, factors: weights.Factors | NotBilinearError, own: Tensor | None) -> SiteCheck:
    """Both errors of one site, or the reason why one is missing."""
    query_key = found.call.query_key(found.site)
    errors: list[float | None] = [None, None]
    reason = factors.problem if isinstance(factors, NotBilinearError) else None
    if own is None:
        reason = "the module does not hand out its attention probabilities"
    elif not bool(own.isfinite().all()):
        reason = "the model's own attention probabilities are not finite"
    else:
        errors[0] = _error(query_key, own)
        if not isinstance(factors, NotBilinearError):
            errors[1] = _error(from_weights(found, factors), own)
    return SiteCheck(
        site=found.site.name,
        part=found.site.part,
        heads=len(query_key.heads),
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
            part = (part[:, :, :, None] @ factors.rotation[: part.shape[2]]).squeeze(-2)
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
