"""Choose the sites to swap, check the swapped model for leaks, and measure the change in each site's output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from attnlens import requests
from attnlens.arguments import checked_name, public, switch, word
from attnlens.choices import PARTS, Part
from attnlens.errors import IdentityError, ModelError, TextError, UsageError
from attnlens.kernels import TIES, Kernel, parsed
from attnlens.kernels.attention import Route, attend, route, weights
from attnlens.kernels.lowrank import ALL
from attnlens.kernels.spelling import HeadShape
from attnlens.models import hooks, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.loading import Loaded
from attnlens.records import Call, Site, SiteSwap, Task
from attnlens.runs import checks
from attnlens.runs.feeding import convert_batch, evaluation_mode, require_model
from attnlens.runs.outputs import Variant


@dataclass
class SwapSetup:
    """A model, the kernels to swap in, and options for running the swapped model."""

    loaded: Loaded
    sites: tuple[Site, ...]  # all sites of the model
    swaps: hooks.Swaps  # the kernel and heads of each swapped site
    task: Task = "hidden"  # prediction task
    seed: int = 0
    path: Route = "auto"  # implementation of attention


TOLERANCE = hooks.IDENTITY_TOLERANCE
PADDING = 4  # maximum number of padding tokens whose content is changed
NO_ROWS = "the model returns no output per token"
MASKS = {"decoder_input_ids": "decoder_attention_mask", "input_ids": "attention_mask"}  # mask of each kind of ids


def refuse_random(setup: SwapSetup, inputs: Mapping[str, Tensor]) -> None:
    """Raise IdentityError if a user's kernel gives different outputs for the same inputs.

    The outputs are computed twice in one forward pass, because every pass starts with the same random state.
    """

    def visit(site: Site, call: Call) -> None:
        if (swap := setup.swaps.get(site)) is None:
            return
        part, name = call if swap.heads is None else call.select(swap.heads), swap.kernel.info.name
        once, again = (attend(part, swap.kernel, setup.path).double().nan_to_num() for _ in range(2))
        if (error := float((again - once).norm())) > TOLERANCE * float(once.norm()):
            difference = f"its outputs for the same input at {site.name} differ by {error / float(once.norm()):.1e}"
            remedy = "Draw random numbers from a torch.Generator with a fixed seed."
            raise IdentityError(f"Your kernel {name} is not deterministic: {difference}.", remedy)

    if all(swap.kernel.info.built_in for swap in setup.swaps.values()):
        return
    with torch.no_grad(), hooks.watch(setup.loaded.model, setup.sites, visit):
        hooks.forward(setup.loaded.model, inputs)


@dataclass(frozen=True)
class LeakTest:
    """Test whether a model's outputs under a new kernel depend on later tokens or on padding."""

    loaded: Loaded
    inputs: Mapping[str, Tensor]
    variant: Variant  # context in which the model has the new kernel
    seed: int
    user: str = ""  # name of the kernel if a user registered it; the remedy is then to correct the kernel

    def measure(self, sites: Sequence[Site]) -> dict[str, float | str]:
        """Return `causality_error` and `mask_error`; each is a number, or the reason if it can't be measured.

        Raise IdentityError if outputs depend on later tokens or on padding.
        """
        decodes = any(site.part == "decoder" for site in sites)
        causality: float | str = "every token of this model can attend to every other token"
        if decodes and not self.inputs.keys().isdisjoint(MASKS):
            causality = self.causality_error()
        left = decodes and "decoder_input_ids" not in self.inputs  # causality alone hides padding on the right
        return {"causality_error": causality, "mask_error": self.mask_error(left=left)}

    def causality_error(self) -> float | str:
        """Measure the relative change in the first half of each output sequence when the ids in the second half change.

        Return the reason if this can't be measured. Raise IdentityError if only the new kernel causes a change.
        """
        name = next(name for name in MASKS if name in self.inputs)
        ids = self.inputs[name]
        half = ids.shape[1] // 2
        changed = torch.cat([ids[:, :half], _draw_ids(self.loaded, ids[:, half:], self.seed)], 1)
        pair = self.inputs, {**self.inputs, name: changed}
        return self._check(pair, slice(0, half), "later tokens change", "leaks future tokens")

    def mask_error(self, *, left: bool) -> float | str:
        """Measure the relative change in outputs at real tokens when the padding before (`left`) or after them changes.

        Return the reason if this can't be measured. Raise IdentityError if only the new kernel causes a change.
        """
        if "attention_mask" not in self.inputs:
            return "the model does not support padding"
        if "input_ids" not in self.inputs or self.inputs["input_ids"].shape[1] < 2:
            return NO_ROWS
        pair = [_pad_randomly(self.loaded, self.inputs, self.seed + number, left=left) for number in (1, 2)]
        return self._check(pair, slice(None), "the padding's content changes", "attends to padding")

    def _check(self, pair: Sequence[Mapping[str, Tensor]], positions: slice, when: str, flaw: str) -> float | str:
        """Return the relative difference between the outputs for the inputs in `pair`, or the reason if it is unknown.

        Raise IdentityError if the difference is large only with the new kernel.
        """
        error = _relative_difference(self.loaded, pair, self.variant, positions)
        if error is None:
            return NO_ROWS
        if error <= TOLERANCE:
            return error
        original = _relative_difference(self.loaded, pair, nullcontext, positions)
        if original is not None and original > TOLERANCE:
            return f"even under the model's own kernel, the outputs change by {original:.1e} when {when}"
        kernel, remedy = "the new kernel", "so attnlens reports no numbers for it. Please report this as a bug."
        if self.user:
            kernel, remedy = (
                f"your kernel {self.user}",
                "but log k of a query and a key must not depend on other tokens.",
            )
        problem = f"With {kernel}, the outputs change by {error:.1e} when {when}."
        raise IdentityError(problem, f"The kernel {flaw}, {remedy}")


def _pad_randomly(loaded: Loaded, inputs: Mapping[str, Tensor], seed: int, *, left: bool) -> dict[str, Tensor]:
    """Replace the last tokens with random padding; if `left`, move the padding to the start and shift positions."""
    ids, mask = inputs["input_ids"].clone(), inputs["attention_mask"].clone()
    padding = min(PADDING, ids.shape[1] // 2)
    ids[:, -padding:] = _draw_ids(loaded, ids.new_full((len(ids), padding), -1), seed)
    mask[:, -padding:] = 0
    padded = {**inputs, "input_ids": ids, "attention_mask": mask}
    if left:  # inputs per token (token types, boxes on a page) are shifted along with the tokens
        padded |= {name: value.roll(padding, 1) for name, value in padded.items() if value.shape[:2] == ids.shape}
    if left and "position_ids" in signature(loaded.model.forward).parameters:
        padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return padded


def _relative_difference(
    loaded: Loaded, pair: Sequence[Mapping[str, Tensor]], variant: Variant, positions: slice
) -> float | None:
    """Compute the relative difference between the outputs for two inputs at the real tokens in `positions`.

    Return None if the model returns no output per token.
    """
    with torch.no_grad(), variant():
        results = [hooks.forward(loaded.model, inputs, output_hidden_states=True) for inputs in pair]
    name = next(name for name in MASKS if name in pair[0])
    shape, mask = pair[0][name].shape, pair[0].get(MASKS[name])
    original, new = (
        next((value for value in _output_tensors(result) if value.dim() > 2 and value.shape[:2] == shape), None)
        for result in results
    )
    if original is None or new is None:
        return None
    visible = slice(None) if mask is None else mask[:, positions].bool()
    a, b = (part[:, positions][visible].double() for part in (original, new))
    # NaN at the same places counts as equal: a kernel that diverges does not leak, and the loss shows that it diverges.
    same = torch.equal(a.nan_to_num(), b.nan_to_num())
    return 0.0 if same else float((a - b).norm() / a.norm().clamp_min(1e-30))  # a can be 0


def _output_tensors(result: ModelOutput) -> Iterator[Tensor]:
    """Yield the floating-point outputs, including nested outputs (CLIP's text model), and the last hidden states."""
    for name, value in result.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, ModelOutput):
            yield from _output_tensors(value)
        elif name in ("decoder_hidden_states", "hidden_states"):
            yield value[-1]


def _draw_ids(loaded: Loaded, like: Tensor, seed: int) -> Tensor:
    """Return random ids in the shape of `like`, with the placeholders in `like` (such as those of images) kept."""
    vocabulary, special = texts.vocabulary(loaded.model) or texts.CHARACTERS, texts.placeholder_ids(loaded.model)
    plain = torch.tensor([number for number in range(vocabulary) if number not in special])
    drawn = plain[torch.randint(len(plain), like.shape, generator=torch.Generator().manual_seed(seed))].to(like)
    return drawn.where(~torch.isin(like, like.new_tensor(sorted(special))), like)


@public
def replaced(
    model: PreTrainedModel | Loaded,
    kernel: str,
    *,
    layers: Sequence[int | str] | str | None = None,
    heads: Sequence[int] | None = None,
    part: Part | None = None,
    batch: Mapping[str, Tensor] | None = None,
    allow_signed: bool = False,
) -> AbstractContextManager[hooks.CallCounter]:
    """Replace attention with softmax(log k + mask) v, where k is the kernel, in forward passes inside a `with` block.

        with attnlens.replaced(model, "rbf:gamma=1", layers=[2, 3]):
            loss = model(**batch, labels=batch["input_ids"]).loss

    `layers`, `heads` and `part` (encoder, decoder, cross, vision, audio or text) select the attention to replace
    (None: all). A forward pass on `batch`, or by default on made-up inputs, finds the sites. Before the block,
    recomputing the model's own attention must reproduce the model's outputs, and a forward pass with the new kernel
    must succeed. The context manager yields a counter, whose `calls` maps each module's path to its number of calls.
    On exit, the model's own attention is restored.

    Raise UsageError for a kernel that cannot be parsed, needs calibration text or is undefined at a site, ModelError
    for attention that cannot be replaced, and IdentityError if recomputing the model's own attention changes the
    model's outputs or the kernel is not deterministic. On exit, raise ModelError if a replaced site was never called.
    """
    new = parsed(word("kernel", kernel), allow_signed=switch("allow_signed", allow_signed))
    if new.needs_fit:
        problem = f"{new.info.name} must be fitted to calibration text, but none is available here."
        raise UsageError(problem, "Use attnlens.swap_kernel(…, save=folder), then attnlens.load_swapped(folder).")
    layers, heads = requests.layer_list("layers", layers), requests.numbers("heads", heads)
    if part is not None:
        checked_name("part", part, PARTS)
    loaded = require_model(model)
    with evaluation_mode(loaded.model), torch.no_grad():
        if batch is None:
            try:
                inputs = texts.placeholder(loaded, 2, seed=0).batches[0].inputs
            except TextError as error:
                raise UsageError(error.problem, "Pass batch=, a dict of inputs for this model.") from None
        else:
            inputs = convert_batch(loaded.model, batch)
        survey = checks.survey_model(loaded, inputs)
        checks.require_identity(loaded, inputs)
        chosen = choose_sites(survey, [new], layers, heads, part)
        sites = tuple(each.site for each in survey.sites)
        swaps = {site: hooks.Replacement(new, its) for site, its in chosen.items()}
        with hooks.replace(loaded.model, sites, swaps):
            hooks.forward(loaded.model, inputs)
        refuse_random(SwapSetup(loaded, sites, swaps), inputs)
    return hooks.replace(loaded.model, sites, swaps)


def choose_sites(
    survey: hooks.Survey,
    kernels: Sequence[Kernel],
    layers: Sequence[int | str] | None,
    heads: Sequence[int] | None,
    part: Part | None,
) -> dict[Site, tuple[int, ...] | None]:
    """Map each chosen site to its chosen heads (None: all).

    Raise UsageError or ModelError if no site is chosen, or if a site can't be swapped.
    """
    heads_of = {each.site: each.call.query.shape[1] for each in survey.sites}
    checks.check_selection(layers, heads, survey.sites)
    chosen: dict[Site, tuple[int, ...] | None] = {}
    for site, count in heads_of.items():
        if site.is_among(layers) and part in (None, site.part):
            present = None if heads is None else tuple(head for head in heads if head < count)
            if present != ():  # a site with fewer heads than others can lack all requested heads
                chosen[site] = present
    if not chosen:
        parts = ", ".join(sorted({site.part for site in heads_of}))
        raise UsageError(
            "No attention sites selected.", f"Choose --part from: {parts}; or select other --layers or --heads."
        )
    for path, why in survey.missed.items():
        if why is not None and layers is None:
            last = max(int(each.site.layer_name.rpartition(".")[2]) for each in survey.sites)
            remedy = f"Swap only the supported sites: --layers 0-{last}."
            raise ModelError(f"{path} can't be swapped: {why}.", remedy)
    crossing = [site.name for site in chosen if site.part == "cross"]
    for kernel in kernels if crossing else ():
        if kernel.tie or kernel.filter or kernel.near or kernel.info.oracle or kernel.info.form == "output":
            where = f"in cross-attention ({crossing[0]}), where queries and keys belong to different sequences"
            raise UsageError(f"{kernel.spelling} is undefined {where}.", "Choose --part encoder or --part decoder.")
    return chosen


def head_shapes(site_calls: Sequence[SiteCall], chosen: Mapping[Site, tuple[int, ...] | None]) -> dict[Site, HeadShape]:
    """Return the shape of each chosen site's heads; `tokens` is the number of keys in the surveyed inputs."""
    shapes = {}
    for site, call in ((each.site, each.call) for each in site_calls if each.site in chosen):
        visible, heads = call.visible(), chosen[site] or range(call.query.shape[1])
        shapes[site] = HeadShape(
            heads=len(heads),
            head_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            tokens=call.key.shape[2],
            causal=visible is not None and not bool(visible.triu(1).any()),
        )
    return shapes


ROWS = 256  # number of attention rows computed at once
PRIMAL = (
    "Primal attention maps each token's own e- and r-scores to the output and does not read the values. With a causal "
    "mask, the scores are those of running means of queries and keys; without a mask, a token sees no other token "
    "(except through samples)."
)
CONSTANT = 1e-4  # largest relative standard deviation of the norms of equally long keys; at least 2 eps of the dtype


def measure_sites(setup: SwapSetup, inputs: Mapping[str, Tensor]) -> tuple[list[SiteSwap], list[str]]:
    """Compare each swapped site's outputs under the new and the original kernel; return records and notes."""
    records, counts, path = list[SiteSwap](), Counter[str](), setup.path

    def visit(site: Site, call: Call) -> None:
        if (swap := setup.swaps.get(site)) is None:
            return
        part = call if swap.heads is None else call.select(swap.heads)
        outputs = attend(part, hooks.OWN), attend(part, swap.kernel, path)
        original, new = (hooks.at_real_tokens(output, inputs).double() for output in outputs)
        error = float((new - original).norm() / original.norm())
        records.append(
            SiteSwap(
                site=site.name,
                layer=site.layer,
                part=site.part,
                heads=list(swap.heads or range(call.query.shape[1])),
                path=route(part, swap.kernel, path),
                output_error=error if math.isfinite(error) else None,
                off_simplex=_off_simplex(part, swap.kernel, inputs),
            )
        )
        counts.update(_special_properties(part, swap.kernel))

    with torch.no_grad(), hooks.watch(setup.loaded.model, setup.sites, visit):
        hooks.forward(setup.loaded.model, inputs)
    kernel = next(iter(setup.swaps.values())).kernel
    special = {name: f"{n} of {len(records)} sites" for name, n in counts.items() if n}
    return records, list(_describe_sites(kernel, special))


def _special_properties(call: Call, kernel: Kernel) -> dict[str, bool]:
    """Return, for each property that a note can mention, whether the site has this property."""
    norms, group = call.key.double().norm(dim=-1), int(kernel.parameters.get("group", 1))
    spread = max(CONSTANT, 2 * torch.finfo(call.key.dtype).eps)
    return {
        "capped": call.softcap is not None,
        "biased": call.bias is not None,
        "sinking": call.sinks is not None,
        "constant": bool((norms.std(-1) <= spread * norms.mean(-1)).all()),
        "uneven": group < ALL and len(set(call.key_heads)) % group > 0,
        "bounded": kernel.info.form == "output" and kernel.fitted["query_map"].shape[-1] < kernel.parameters["scores"],
    }


def _describe_sites(kernel: Kernel, special: Mapping[str, str]) -> Iterator[str]:
    """Yield notes for the report; `special` maps each property to where it applies, such as `3 of 4 sites`."""
    info = kernel.info
    if info.form == "output":
        yield PRIMAL
        if not special.keys().isdisjoint(("capped", "biased", "sinking")):
            yield "The model's softcap, position bias and sinks are not used."
        if "bounded" in special:
            bound = "head_dim or the number of samples" if kernel.parameters["samples"] else "head_dim"
            scores = f"Fewer than {kernel.parameters['scores']:.0f} scores are used at {special['bounded']}"
            yield f"{scores}: {bound} bounds their rank."
        return
    if "capped" in special:
        effect = "is applied to the capped scores" if info.form == "score" else "also replaces the cap"
        yield f"The model caps its scores (softcap) at {special['capped']}; the new kernel {effect}."
    if "biased" in special:
        yield f"The model adds a position bias at {special['biased']}; the bias is also added to log k."
    if "sinking" in special:
        effect = "there, terms of log k that depend only on the query do not cancel"
        yield f"The model has attention sinks at {special['sinking']}; {effect}."
    if "constant" in special and info.equal_lengths:
        where = f"{special['constant']} (QK-norm with unit gain)"
        yield f"All keys of a head have the same length at {where}; there, {info.name} is {info.equal_lengths}."
    if kernel.oracle:
        yield (
            "For analysis only: the kernel is computed from the logits of whole sequences of the evaluated text, so it "
            "cannot be used in a model."
        )
    elif info.caution:
        yield info.caution
    if kernel.tie is not None and TIES[kernel.tie].caution:
        yield TIES[kernel.tie].caution
    if "uneven" in special:
        yield f"The last latent has fewer key heads than `group` at {special['uneven']}."
    if kernel.signed:
        yield "The kernel can be negative: rows of its attention matrix are not probabilities."


def _off_simplex(call: Call, kernel: Kernel, inputs: Mapping[str, Tensor]) -> float | None:
    """Return the mean of Σ max(−w, 0) / Σ |w| over attention rows w of real tokens; None if NaN or undefined."""
    if kernel.info.form == "output":
        return None
    if not kernel.signed:
        return 0.0
    shares = []
    for start in range(0, call.query.shape[2], ROWS):
        rows = weights(call, kernel, slice(start, start + ROWS)).double()
        shares.append((-rows).clamp(min=0).sum(-1) / rows.abs().sum(-1))
    mean = float(hooks.at_real_tokens(torch.cat(shares, dim=-1).transpose(1, 2), inputs).mean())
    return None if math.isnan(mean) else mean
