"""Chooses the sites that a swap replaces, and makes the change at each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from attnlens import requests
from attnlens.arguments import checked_name, public, switch, word
from attnlens.choices import Part
from attnlens.errors import IdentityError, ModelError, TextError, UsageError
from attnlens.kernels import TIES, Kernel, parsed
from attnlens.kernels.attention import Route, attend, route, weights
from attnlens.kernels.lowrank import ALL
from attnlens.models import hooks, texts
from attnlens.models.hooks import Reached
from attnlens.models.loading import Loaded
from attnlens.records import PARTS, Call, Site, SiteSwap, Skipped
from attnlens.runs import checks
from attnlens.runs.in_memory import at_rest, held_model, tensors
from attnlens.runs.outputs import Variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = hooks.IDENTITY_TOLERANCE
PADDING = 4
"""Tokens of padding that are changed."""
IDS = ("decoder_input_ids", "input_ids")
NO_ROWS = "the model hands out nothing token by token"
EVERY = "every token of this model may see every other"
MASKS = {"decoder_input_ids": "decoder_attention_mask", "input_ids": "attention_mask"}


def leaks(
    loaded: Loaded, sites: Sequence[Site], inputs: Mapping[str, Tensor], variant: Variant, seed: int
) -> dict[str, Any]:
    """Measure causality and mask errors, with the `reasons` why one does not apply; raises IdentityError."""
    decodes = any(site.part == "decoder" for site in sites)
    found: dict[str, float | str] = {"causality_error": EVERY}
    if decodes and any(name in inputs for name in IDS):
        found["causality_error"] = causality_error(loaded, inputs, variant, seed)
    # Padding on the right of a causal sequence is hidden by causality alone.
    left = decodes and "decoder_input_ids" not in inputs
    found["mask_error"] = mask_error(loaded, inputs, variant, seed, left=left)
    reasons = {name: error for name, error in found.items() if isinstance(error, str)}
    return found | dict.fromkeys(reasons) | {"reasons": reasons}


def causality_error(loaded: Loaded, inputs: Mapping[str, Tensor], variant: Variant, seed: int) -> float | str:
    """‖changed − own‖ / ‖own‖ of the outputs in the first half of each sequence when the ids of the second half change.

    For a model whose self-attention (or whose decoder's) is causal; the reason why there is none where no output has a
    row a token, or the model itself shows it. Raises IdentityError above 1e-5.
    """
    name = next(name for name in IDS if name in inputs)
    ids = inputs[name]
    half = ids.shape[1] // 2
    other = torch.cat([ids[:, :half], _random_ids(loaded, ids[:, half:], seed)], 1)
    pair = {**inputs, name: ids}, {**inputs, name: other}
    return _judged(
        lambda kernel: _difference(loaded, *pair, kernel, slice(0, half)),
        variant,
        "later tokens change",
        "The kernel lets the future leak; attnlens gives no numbers for it. Please report it.",
    )


def mask_error(loaded: Loaded, inputs: Mapping[str, Tensor], variant: Variant, seed: int, *, left: bool) -> float | str:
    """The same at real tokens, when a few tokens of padding before (`left`) or behind each sequence change.

    There is none where the model takes no mask that says what is padding.

    Raises IdentityError above 1e-5.
    """
    name = "input_ids"
    if name not in inputs or MASKS[name] not in inputs or inputs[name].shape[1] < 2:
        return NO_ROWS if MASKS[name] in inputs else "the model takes no padding"
    pair = _padded(loaded, inputs, seed + 1, left=left), _padded(loaded, inputs, seed + 2, left=left)
    return _judged(
        lambda kernel: _difference(loaded, *pair, kernel),
        variant,
        "the padding's content changes",
        "The kernel looks at padding; attnlens gives no numbers for it. Please report it.",
    )


def _judged(measure: Callable[[Variant], float | None], variant: Variant, when: str, remedy: str) -> float | str:
    """Return the error, or why there is none; raises IdentityError above 1e-5 unless the model itself has it."""
    error = measure(variant)
    if error is None:
        return NO_ROWS
    if error <= TOLERANCE:
        return error
    own = measure(nullcontext)
    if own is not None and own > TOLERANCE:
        return f"under its own kernel too, the model's outputs change by {own:.1e} when {when}"
    raise IdentityError(f"Under the new kernel outputs change by {error:.1e} when {when}.", remedy)


def _padded(loaded: Loaded, inputs: Mapping[str, Tensor], seed: int, *, left: bool) -> dict[str, Tensor]:
    """The beginning of each sequence with random padding at one side; real tokens keep their positions."""
    name = "input_ids"
    padding = min(PADDING, inputs[name].shape[1] // 2)
    ids, mask = inputs[name][:, :-padding], inputs[MASKS[name]][:, :-padding]
    fill = _random_ids(loaded, ids.new_full((len(ids), padding), -1), seed)
    nothing = torch.zeros_like(fill).to(mask)
    parts = ([fill, ids], [nothing, mask]) if left else ([ids, fill], [mask, nothing])
    # what goes with each token (its type, its place on a page) moves with it
    beside = {key: value for key, value in inputs.items() if value.shape[:2] == inputs[name].shape}
    found = {**inputs, **{key: value.roll(padding * left, 1) for key, value in beside.items()}}
    found |= {name: torch.cat(parts[0], 1), MASKS[name]: torch.cat(parts[1], 1)}
    if left and "position_ids" in signature(loaded.model.forward).parameters:
        found["position_ids"] = (found[MASKS[name]].cumsum(1) - 1).clamp_min(0)
    return found


def _difference(
    loaded: Loaded,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    variant: Variant,
    positions: slice = slice(None),
) -> float | None:
    """The relative difference of the two inputs' outputs at these positions; padding is left out."""
    with torch.no_grad(), variant():
        results = [hooks.forward(loaded.model, inputs, output_hidden_states=True) for inputs in (first, second)]
    shape = next(first[name].shape for name in IDS if name in first)
    own, new = (
        next((value for value in _tensors(result) if value.dim() > 2 and value.shape[:2] == shape), None)
        for result in results
    )
    if own is None or new is None:
        return None
    mask = first.get(next(MASKS[name] for name in IDS if name in first))
    seen = slice(None) if mask is None else mask[:, positions].bool()
    a, b = (part[:, positions][seen].double() for part in (own, new))
    # Equal where both diverged alike: a kernel that gives NaN leaks nothing, and its loss will say so.
    same = torch.equal(a.nan_to_num(), b.nan_to_num())
    return 0.0 if same else float((a - b).norm() / a.norm().clamp_min(1e-30))


def _tensors(result: ModelOutput) -> Iterator[Tensor]:
    """Yield floating outputs and those of parts (CLIP's text side): first logits or states, a decoder's if seq2seq."""
    for name, value in result.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, ModelOutput):
            yield from _tensors(value)
        elif name in ("decoder_hidden_states", "hidden_states"):
            yield value[-1]


def _random_ids(loaded: Loaded, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    known = texts.vocabulary(loaded.model) or texts.CHARACTERS
    standing = texts.standing_ids(loaded.model)
    plain = torch.tensor([number for number in range(known) if number not in standing])
    drawn = plain[torch.randint(len(plain), like.shape, generator=generator)].to(like)
    return drawn.where(~torch.isin(like, like.new_tensor(sorted(standing))), like)


@public
def replaced(
    model: PreTrainedModel | Loaded,
    kernel: str,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    part: Part | None = None,
    batch: Mapping[str, Any] | None = None,
    allow_signed: bool = False,
) -> AbstractContextManager[hooks.CallCounter]:
    """Attention is softmax(log k + mask) v, with k of that spelling, in every forward pass inside the `with` block.

        with attnlens.replaced(model, "rbf:gamma=1", layers=[2, 3]):
            loss = model(**batch, labels=batch["input_ids"]).loss

    `layers`, `heads` and `part` (encoder, decoder, cross, or a tower) name the attention that is replaced, None all of
    it; the rest keeps the model's own kernel. The sites are found on made-up inputs, or on a `batch` of its own,
    which some models need. Before the block, the model must give the same outputs when its own attention is recomputed,
    and run with the new kernel. The block's value counts, in `calls`, how often each module was reached. At the end the
    model's own attention is back, after an exception too.

    Raises UsageError for a kernel that makes no sense, needs calibration text or has no meaning at a site, ModelError
    for attention out of reach, IdentityError; and at the end of the block ModelError where a site was never reached.
    """
    new = parsed(word("kernel", kernel), allow_signed=switch("allow_signed", allow_signed))
    if new.needs_fit:
        raise UsageError(
            f"{new.info.name} is fitted to calibration text, of which there is none here.",
            "Fit and save it with attnlens.swap_kernel(…, save=folder); attnlens.load_swapped(folder) runs it.",
        )
    layers, heads = requests.numbers("layers", layers), requests.numbers("heads", heads)
    if part is not None:
        checked_name("part", part, PARTS)
    loaded = held_model(model)
    with at_rest(loaded.model), torch.no_grad():
        if batch is None:
            try:
                inputs: Mapping[str, Tensor] = texts.placeholder(loaded, 2, seed=0).batches[0].inputs
            except TextError as error:
                raise UsageError(error.problem, "Give batch=, inputs of the model's own by name.") from None
        else:
            inputs = tensors(loaded.model, batch)
        survey = checks.surveyed(loaded, inputs, made_up=batch is None)
        checks.proven_whole(loaded, inputs)
        chosen = chosen_sites(survey.reached, layers, heads, part)
        idle_sites(survey, layers)  # refuses attention out of reach
        refuse_crossing(new, list(chosen))
        sites = tuple(found.site for found in survey.reached)
        swaps = {site: hooks.Replacement(new, its) for site, its in chosen.items()}
        with hooks.replace(loaded.model, sites, swaps):
            hooks.forward(loaded.model, inputs)
    return hooks.replace(loaded.model, sites, swaps)


def chosen_sites(
    reached: Sequence[Reached], layers: Sequence[int] | None, heads: Sequence[int] | None, part: Part | None
) -> dict[Site, tuple[int, ...] | None]:
    """Return these sites, each with its chosen heads (None: all); raises UsageError for missing ones or no site."""
    heads_of = {found.site: found.call.query.shape[1] for found in reached}
    checks.check_chosen(layers, heads, reached)
    sites = [site for site in heads_of if layers is None or site.layer in layers]
    sites = [site for site in sites if part in (None, site.part)]
    own = {site: None if heads is None else tuple(head for head in heads if head < heads_of[site]) for site in sites}
    # A site with fewer heads than the one that has most may have none of those asked for.
    found = {site: its for site, its in own.items() if its != ()}
    if not found:
        parts = ", ".join(sorted({site.part for site in heads_of}))
        raise UsageError(
            "No site is left to swap.", f"The model has the parts {parts}; widen --layers, --heads or --part."
        )
    return found


def idle_sites(survey: hooks.Surveyed, layers: Sequence[int] | None) -> list[Skipped]:
    """Return attention that the inputs skip; raises ModelError if all layers are swapped and one is out of reach."""
    missed = survey.missed
    outside = [(path, why) for path, why in missed.items() if why is not None]
    if outside and layers is None:
        raise ModelError(
            f"{outside[0][0]} can't be swapped: {outside[0][1]}.",
            f"Swap the {len(survey.reached)} sites within reach: --layers 0-{len(survey.reached) - 1}.",
        )
    return [Skipped(site=path, reason=checks.NOT_RUN) for path, why in missed.items() if why is None]


def refuse_crossing(kernel: Kernel, sites: Sequence[Site]) -> None:
    """Raise UsageError where the kernel has no meaning in a cross-attention among the sites."""
    crossing = next((site for site in sites if site.part == "cross"), None)
    placed = kernel.filter or kernel.near
    what, why = kernel.tie or (placed.modifier.name if placed else None), ""
    if kernel.info.form == "output":
        what, why = kernel.info.name, ": its e- and r-scores would belong to the tokens of two sequences"
    elif kernel.info.oracle is not None:
        what, why = kernel.info.name, ": no token has both a query and a key there"
    if crossing and what:
        raise UsageError(
            f"{what} has no meaning in cross-attention ({crossing.name}){why}.",
            "Choose --part encoder or --part decoder.",
        )


ROWS = 256
"""Rows of the attention matrix that are written out at once."""
PRIMAL = (
    "Primal attention maps each token's own e- and r-scores to the output and reads no values; where the mask is "
    "causal the scores are those of running means of queries and keys, without a mask a token sees no other (samples "
    "apart)."
)
CONSTANT = 1e-4
"""Relative spread of ‖k‖ below which keys have one length; more where the type rounds by more."""


@dataclass
class Local:
    """What one forward pass of the original model shows about a swap, site by site."""

    sites: list[SiteSwap] = field(default_factory=list)  # in the order of execution
    capped: int = 0
    biased: int = 0
    sinking: int = 0
    constant: int = 0  # at how many sites scores are capped, biased, compete with a sink, or keys have one length
    bounded: int = 0  # at how many sites there are fewer scores than asked for
    left: list[int] = field(default_factory=list)
    """How many key heads the last latent has, at each site where these are fewer than the others have."""
    beyond: list[int] = field(default_factory=list)
    """How many key heads there are, at each site with fewer than were to share a latent."""

    def count(self, call: Call, kernel: Kernel) -> None:
        """Note what is special about a site."""
        output = kernel.info.form == "output"
        self.bounded += output and kernel.fitted["query_map"].shape[-1] < kernel.parameters["scores"]
        key_heads = len(set(call.key_heads))
        self.left += [left] if (left := kernel.leaves(key_heads)) else []
        self.beyond += [key_heads] if key_heads < kernel.parameters.get("group", 1) < ALL else []
        self.capped += call.softcap is not None
        self.biased += call.bias is not None
        self.sinking += call.sinks is not None
        norms = call.key.double().norm(dim=-1)
        spread = max(CONSTANT, 2 * torch.finfo(call.key.dtype).eps)
        self.constant += bool((norms.std(-1) <= spread * norms.mean(-1)).all())

    def notes(self, kernel: Kernel) -> list[str]:
        """What a reader must know, one sentence each."""
        total = len(self.sites)
        if kernel.info.form == "output":
            notes = [PRIMAL]
            if self.capped or self.biased or self.sinking:
                notes.append("What the model adds to its scores (softcap, position bias, sinks) has no place in it.")
            if self.bounded:
                bounds = "head_dim or the number of samples" if kernel.parameters["samples"] else "head_dim"
                notes.append(
                    f"{kernel.parameters['scores']:.0f} scores were asked for; at {self.bounded} of {total} sites "
                    f"{bounds} bounds their rank, and there are no more."
                )
            return notes
        notes = []
        if self.capped:
            kept = "is read through the model's softcap" if kernel.info.form == "score" else "replaces it whole"
            notes.append(f"The model caps its scores at {self.capped} of {total} sites; the new kernel {kept}.")
        if self.biased:
            notes.append(f"The model adds a position bias at {self.biased} of {total} sites; it is added to log k too.")
        if self.sinking:
            notes.append(
                f"The model has attention sinks at {self.sinking} of {total} sites; log k keeps all its terms."
            )
        if self.constant and kernel.info.equal_lengths:
            notes.append(
                f"All keys of a head have one length at {self.constant} of {total} sites (QK-norm of unit gain): there "
                f"{kernel.info.name} is {kernel.info.equal_lengths}."
            )
        if kernel.oracle:
            notes.append(
                "An analysis: the parts that are kept are those of the evaluated text's own logits, each sequence seen "
                "as a whole. No model computes them."
            )
        elif kernel.info.caution:
            notes.append(kernel.info.caution)
        if kernel.tie is not None and TIES[kernel.tie].caution:
            notes.append(TIES[kernel.tie].caution)
        if self.left:
            notes.append(
                f"The groups do not divide the key heads at {len(self.left)} of {total} sites: the last latent there "
                f"has {_numbers(self.left)}."
            )
        if self.beyond:
            notes.append(
                f"group={kernel.parameters['group']:g} is more than the key heads at {len(self.beyond)} of {total} "
                f"sites ({_numbers(self.beyond)} there): all of them share one latent, as with group=all."
            )
        if kernel.signed:
            notes.append("The kernel can be negative: rows of its attention matrix are no probabilities.")
        return notes


def locally(
    loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps, inputs: Mapping[str, Tensor], path: Route
) -> Local:
    """Each site's own and new output on the original model's queries, keys and values, in one forward pass."""
    found = Local()

    def visit(site: Site, call: Call) -> None:
        if site not in swaps:
            return
        swap = swaps[site]
        part = call if swap.heads is None else call.select(swap.heads)
        both = attend(part, hooks.OWN), attend(part, swap.kernel, path)
        own, new = (hooks.at_real_tokens(output, inputs).double() for output in both)
        error = float((new - own).norm() / own.norm())
        heads = list(swap.heads or range(call.query.shape[1]))
        found.sites.append(
            SiteSwap(
                site=site.name,
                layer=site.layer,
                part=site.part,
                heads=heads,
                path=route(part, swap.kernel, path),
                output_error=error if error == error and error != float("inf") else None,
                off_simplex=_off_simplex(part, swap.kernel, inputs),
            )
        )
        found.count(part, swap.kernel)

    with torch.no_grad(), hooks.watch(loaded.model, sites, visit):
        hooks.forward(loaded.model, inputs)
    return found


def _numbers(found: Sequence[int]) -> str:
    """`1 or 2`: each once."""
    return " or ".join(map(str, sorted(set(found))))


def _off_simplex(call: Call, kernel: Kernel, inputs: Mapping[str, Tensor]) -> float | None:
    """Mean over real tokens' rows of Σ max(−w, 0) / Σ |w|; 0 for a positive kernel, None where a row is not finite and
    where there are no rows.
    """
    if kernel.info.form == "output":
        return None
    if not kernel.signed:
        return 0.0
    shares = []
    for start in range(0, call.query.shape[2], ROWS):
        rows = weights(call, kernel, slice(start, start + ROWS)).double()
        shares.append((-rows).clamp(min=0).sum(-1) / rows.abs().sum(-1))
    mean = float(hooks.at_real_tokens(torch.cat(shares, dim=-1).transpose(1, 2), inputs).mean())
    return mean if mean == mean else None
