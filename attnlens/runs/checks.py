"""Check that a model runs, has all weights and requested heads, and keeps its outputs when attention is recomputed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.errors import FAILURES, IdentityError, ModelError, TextError, UsageError, is_memory
from attnlens.kernels.attention import attend
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import SiteCall
from attnlens.models.texts.targets import logits_of, of_text, output_options, states_of, tasks_of
from attnlens.models.trace import remove_hooks
from attnlens.records import Call, Conventions, QueryKey, Site, Skipped, Task
from attnlens.wording import group_pairs

Measurement = Callable[[PreTrainedModel, Mapping[str, Tensor]], Iterable[Tensor]]  # function that runs a model


def measure_attention_inputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the queries, keys and values of every attention computation as one flat list."""
    tensors: list[Tensor] = []

    def answer(call: Call) -> Tensor:
        tensors.extend((call.query, call.key, call.value))
        return attend(call, hooks.OWN, "eager")

    with hooks.answer_calls(model, answer):
        hooks.forward(model, inputs)
    return tensors


def measure_predictions(task: Task) -> Measurement:
    """Return a function that runs a model and returns [logits], or [hidden states] if the task is `hidden`."""

    def measure(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        result = hooks.forward(model, inputs, **output_options(task))
        return [states_of(result) if task == "hidden" else logits_of(result)]

    return measure


def refuse_initialised(loaded: loading.Loaded, inputs: Mapping[str, Tensor], measure: Measurement) -> None:
    """Raise ModelError if the result of `measure` can depend on a weight that the checkpoint lacks."""
    if random := find_random_weights(loaded, inputs, measure):
        problem = f"The checkpoint of {loaded.info.id} lacks {random[1]}, which would be initialised at random."
        raise ModelError(problem, "Use a complete checkpoint, or load the checkpoint with its original architecture.")


def explain_missing_loss(loaded: loading.Loaded, inputs: Mapping[str, Tensor], task: Task) -> tuple[str, str] | None:
    """Return the path of a module whose missing weight can affect predictions, and the reason why no loss is computed.

    Return None if predictions do not depend on any missing weight.
    """
    random = find_random_weights(loaded, inputs, measure_predictions(task))
    if random is None:
        return None
    module, name = random
    return module, f"the checkpoint lacks {name}, so the loss is undefined"


def find_random_weights(
    loaded: loading.Loaded, inputs: Mapping[str, Tensor], measure: Measurement
) -> tuple[str, str] | None:
    """Return (module path, name) of the first missing weight that can affect the result of `measure`, or None.

    The number of further such weights follows the name (`name and 3 more`). A weight is ignored only if it is a
    parameter without a gradient in a module that ran (BERT's pooler): an unused expert can run on other inputs.
    """
    lacking, parts = set(loaded.missing_keys), (loaded.model.named_parameters, loaded.model.named_buffers)
    missing = [name for part in parts for name, _ in part(remove_duplicate=False) if name in lacking]
    if not missing:
        return None
    parameters, ran = dict(loaded.model.named_parameters(remove_duplicate=False)), set[str]()
    leaves = {name: parameters[name].requires_grad_() for name in missing if name in parameters}
    owners = {path: loaded.model.get_submodule(path) for path in map(_owner, leaves)}
    handles = [module.register_forward_hook(lambda *_, path=path: ran.add(path)) for path, module in owners.items()]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    try:
        with remove_hooks(handles), torch.enable_grad():
            outputs = [output.sum() for output in measure(loaded.model, inputs) if output.requires_grad]
            if outputs:
                gradients = torch.autograd.grad(outputs, list(leaves.values()), allow_unused=True)
    finally:
        for leaf in leaves.values():
            leaf.requires_grad_(False)
    excused = {
        name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None and _owner(name) in ran
    }
    random = [name for name in missing if name not in excused]
    more = f" and {len(random) - 1} more" if len(random) > 1 else ""
    return (_owner(random[0]), random[0] + more) if random else None


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


LOOKS_AHEAD = 1e-4  # relative change above which predictions depend on a later token: well above float32 rounding
NOT_RUN = "it does not run on this input"


def survey_model(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Survey:
    """Find the attention sites in a pass on `inputs`. Raise ModelError if the model can't run on `inputs`."""
    try:
        return hooks.run_survey(loaded.model, inputs)
    except FAILURES:
        with _convert_errors(loaded, inputs), torch.no_grad():
            hooks.forward(loaded.model, inputs)
        raise


@contextmanager
def _convert_errors(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: convert errors of the model on `inputs` to ModelError, unless memory ran out."""
    try:
        yield
    except FAILURES as error:
        if is_memory(error):
            raise
        reason = f"{type(error).__name__}: {loading.first_line(error)}"
        remedy = "Try different or longer inputs, or check that config.json belongs to this model."
        raise ModelError(f"{loaded.info.id} can't run on {' and '.join(inputs)}: {reason}", remedy) from error


def survey_without_media(
    loaded: loading.Loaded, site_calls: Sequence[SiteCall], tokens: int, seed: int
) -> tuple[Sequence[SiteCall], Sequence[SiteCall]]:
    """Return the sites' calls on one token and on a window, both without media (images and sounds).

    If the model reads media, the window consists of `tokens` random ids; if not, the window's calls are `site_calls`.
    """
    one_token = survey_ids(loaded, site_calls, 1, seed)
    if not texts.media_of(loaded.model, loaded.folder).before:
        return one_token, site_calls
    one_token = survey_ids(loaded, one_token, 1, seed, bare=True)
    return one_token, survey_ids(loaded, site_calls, tokens, seed, bare=True)


def survey_ids(
    loaded: loading.Loaded, known: Sequence[SiteCall], tokens: int, seed: int, *, bare: bool = False
) -> Sequence[SiteCall]:
    """Return the calls of the `known` sites on a sequence of random ids (without media if `bare`).

    A site that does not run on these ids keeps its known call. If the model does not accept the ids, all sites keep
    their known calls.
    """
    try:
        inputs = texts.placeholder(loaded, tokens, seed, bare=bare).batches[0].inputs
        by_call = {(each.site.path, each.site.ordinal): each for each in survey_model(loaded, inputs).sites}
    except (ModelError, TextError):  # a model that needs more tokens (Canine's strides), or media (LXMERT)
        return known
    # a pass on ids does not show which sites are causal, so the known sites are kept
    return [replace(by_call.get((each.site.path, each.site.ordinal), each), site=each.site) for each in known]


def measure_identity_error(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> float:
    """Return the relative change in outputs when attention is recomputed. Raise ModelError if the model can't run."""
    weights = None if loaded.shapes is None else loaded.shapes.deferred
    precise: hooks.Precise | None = None if weights is None else lambda call: weights.whole(call.site.path)
    with _convert_errors(loaded, inputs):
        return hooks.identity_error(loaded.model, inputs, precise)


def prove_identity(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> tuple[float | None, str | None]:
    """Return (identity error, None); if the error is NaN, (None, the name of a weight that is not finite).

    Raise IdentityError if the error exceeds the tolerance, and ModelError if outputs overflow from finite weights.
    """
    error = measure_identity_error(loaded, inputs)
    if error <= hooks.IDENTITY_TOLERANCE:
        return error, None
    broken = loading.nonfinite_tensors(loaded.model)
    if math.isnan(error) and broken:
        return None, broken[0]
    refuse_unsteady(loaded, inputs)
    problem = f"Recomputing the attention of {loaded.info.id} changes its outputs by {error:.1e}."
    remedy = "Run `attnlens doctor` to find the sites that differ; attnlens reports no numbers for this model."
    raise IdentityError(problem, remedy)


def refuse_unsteady(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> None:
    """Raise ModelError if outputs are NaN, IdentityError if two passes differ. All weights must be finite."""
    error = hooks.repeat_error(loaded.model, inputs)
    if math.isnan(error):
        problem = f"{loaded.info.id} overflows: its outputs are NaN or Inf although its weights are finite."
        raise ModelError(problem, "Try --dtype float64; a model that also overflows in float64 cannot be measured.")
    if error > hooks.IDENTITY_TOLERANCE:
        problem = f"{loaded.info.id} is not deterministic: two passes over the same input differ by {error:.1e}."
        raise IdentityError(problem, "Choose a deterministic model: the attention of other models cannot be verified.")


def describe_overflow(dtype: torch.dtype, site_calls: Iterable[SiteCall]) -> str | None:
    """Return a description of the largest q·k if it overflows `dtype`; otherwise None."""
    limit = torch.finfo(dtype).max
    products = (each.call.query.double() @ each.call.paired_key.double().mT for each in site_calls)
    largest = max(float(product.abs().max()) for product in products)
    if not largest > limit:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"q·k reaches {largest:.1e}, which overflows {name} (largest number {limit:.0f})"


def bound_rounding(query_key: QueryKey, dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest relative error that rounding of a site's scores explains, and a description of the rounding.

    The bound is twice the rounding of the largest score. float64 counts as float32, in which softmax can run.
    """
    coarse, largest = torch.float32 if dtype == torch.float64 else dtype, query_key.largest_logit
    name = str(coarse).removeprefix("torch.")
    return 2 * torch.finfo(coarse).eps * largest, f"softmax rounds scores of up to {largest:.1e} to {name}"


def find_task(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> Task:
    """Return the model's most likely task, but not `causal` if its predictions see later tokens (PaliGemma)."""
    tasks = tasks_of(loaded.model)
    if tasks[0] != "causal":
        return tasks[0]
    # replace the last token of the first sequence, and compare the predictions at the tokens before it
    alone = texts.first(inputs, 1)
    ids = alone["input_ids"]
    last = int(alone.get("attention_mask", torch.ones_like(ids))[0].nonzero()[-1])
    other = ids.clone()
    other[0, last] = next(variant for variant in texts.plain_ids(loaded.model, 2) if variant != ids[0, last])
    with _convert_errors(loaded, inputs), torch.no_grad():
        results = [hooks.forward(loaded.model, {**alone, "input_ids": variant}) for variant in (ids, other)]
    before, after = (of_text(logits_of(result), ids, sees=True)[:, :last].double() for result in results)
    # not >=: predictions that are all 0 depend on nothing
    return tasks[1] if bool((before - after).norm() > LOOKS_AHEAD * before.norm()) else "causal"


def require_identity(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> float:
    """Return the identity error: the relative change in outputs when attention is recomputed.

    Raise the errors of `prove_identity`, and ModelError if a weight that is not finite makes the identity error NaN.
    """
    error, broken = prove_identity(loaded, inputs)
    if error is None:
        problem = f"{broken} contains NaN or Inf, so the model's outputs cannot be verified."
        raise ModelError(problem, "Repair the weights; `attnlens inspect` shows which heads are unaffected.")
    return error


def list_skipped(loaded: loading.Loaded, survey: hooks.Survey) -> list[Skipped]:
    """List attention modules that can't be read or did not run, and layers of the checkpoint that the config omits."""
    outside = [Skipped(site=path, reason=why or NOT_RUN) for path, why in survey.missed.items()]
    known = [f".{name}" for name, _ in loaded.model.named_parameters()]
    unused: Counter[str] = Counter()
    for name in loaded.unused_keys:
        if layer := re.match(r"(.*?\.)?\d+(?=\.)", name):
            # layer 0 has the same tensors, up to the name of an enclosing model; heads and buffers have no counterpart
            counterpart = f".{layer.group(1) or ''}0{name[layer.end() :]}"
            if any(counterpart.endswith(other) or other.endswith(counterpart) for other in known):
                unused[layer.group()] += 1
    why = f"the config omits layers of the checkpoint, whose {sum(unused.values())} tensors are unused"
    return outside + [Skipped(site=layer, reason=why) for layer in unused]


def check_selection(
    layers: Sequence[int | str] | None, heads: Sequence[int] | None, site_calls: Sequence[SiteCall]
) -> None:
    """Raise UsageError if the model lacks any of the chosen layers or heads."""
    for layer in layers or ():
        if not any(each.site.is_among([layer]) for each in site_calls):
            raise UsageError(f"The model lacks layer {layer}.", f"Choose from layers {_list_layers(site_calls)}.")
    most = max(each.call.query.shape[1] for each in site_calls)
    for head in heads or ():
        if not 0 <= head < most:
            raise UsageError(f"The model lacks head {head}.", f"Choose from heads 0 to {most - 1}.")


def layer_names(sites: Iterable[Site]) -> list[str]:
    """Return the layer name of each site of a model with several parts (encoder, decoder); otherwise []."""
    return [site.layer_name for site in sites if site.number is not None]


def _list_layers(site_calls: Sequence[SiteCall]) -> str:
    """Format the layers that can be chosen: `0 to 3`, or `encoder.0 to encoder.3 and decoder.0 to decoder.3`."""
    parts = group_pairs((None if each.site.number is None else each.site.part, each.site) for each in site_calls)
    ordered = [sorted(sites, key=lambda site: (site.number or 0, site.layer)) for sites in parts.values()]
    return " and ".join(f"{sites[0].layer_name} to {sites[-1].layer_name}" for sites in ordered)


def describe_conventions(site_calls: Sequence[SiteCall], site_traits: Sequence[weights.Traits]) -> Conventions:
    """Describe the properties of a model's attention that affect the interpretation of measures."""
    calls, traced = [each.call for each in site_calls], sum(each.site.traced for each in site_calls)
    biased = any(call.bias is not None for call in calls)
    untested = "absolute" if len(site_traits) == len(site_calls) else "unknown"
    added = "content–position" if any(call.relative for call in calls) else "bias" if biased else untested
    notes = {
        "weights.directionality has the published sign (Saponati et al. 2025); their code returns the opposite.": True,
        "Causal heads: no query is compared with a later key, so the positive, negative and skew shares are not "
        "identified; --analyzer extended computes the shares of the bilinear form extended to such pairs.": any(
            each.site.part == "decoder" for each in site_calls
        ),
        f"At {traced} of {len(site_calls)} sites the module has its own attention code: queries, keys and scale are "
        "traced from its softmax, and confirmed by a pass with different queries and keys.": traced,
        "The model adds terms to its scores that are not products of a query and a key (position bias, "
        "content–position terms): the shares and tokens.definite describe only the products.": biased,
        "Latent attention (MLA): the length of each token's latent vector weights the two parts of its "
        "key, without positions (nope) and rotated (rope), so a head has no single bilinear form; weights.* describe "
        "the nope part.": any(traits.latent for traits in site_traits),
    }
    return Conventions(
        position="rotary" if any(traits.rotary for traits in site_traits) else added,
        qk_norm=any(traits.qk_norm for traits in site_traits),
        bias="excluded" if any(traits.biased for traits in site_traits) else "none",
        notes=[note for note, applies in notes.items() if applies],
    )
