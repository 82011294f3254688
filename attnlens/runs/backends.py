"""Compare attention backends with the model in float64, and test each backend's attention masks."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.choices import BACKENDS
from attnlens.errors import FAILURES, AttnlensError, ModelError, is_memory
from attnlens.models import hooks, loading
from attnlens.models.hooks import SiteCall
from attnlens.models.hooks.interface import list_configs
from attnlens.models.hooks.survey import recompute
from attnlens.models.trace import call_arguments, remove_hooks, tensors
from attnlens.records import BackendCheck, MaskCheck, Sight, Site, SiteError
from attnlens.requests import DoctorRequest
from attnlens.runs import checks
from attnlens.runs.masks import STEPS, Case, Cases, explain_no_masks, key_input, main_input

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

TOLERANCE = 1e-5  # Largest relative error of outputs that is accepted in float64
ROUNDINGS = 16  # Largest accepted error in lower precision, in machine epsilons; at least TOLERANCE
SIZE = 1e-2  # Size of a perturbation relative to the norm of the token's vector
COARSE_SIZES = (SIZE, 10 * SIZE)  # Sizes in lower precision: an output depends on a token only if both change it
NOISE = 100  # An output depends on a token if perturbing it changes the output by more than NOISE × rounding noise
ATTENDED = 1e-6  # Smallest attention weight with which a perturbed token must change the output
CLEARLY_ATTENDED = 0.05  # Largest value to which ATTENDED is raised for backends whose outputs differ from float64
COARSE = 0.02  # Largest relative difference between two passes of a backend that bfloat16 rounding can explain
DEFAULT = ("eager", "sdpa")  # Backends that run everywhere without compilation
Outputs = dict[Site, Tensor]


@contextmanager
def use_backend(model: PreTrainedModel, name: str) -> Iterator[PreTrainedModel]:
    """Context manager: yield the model, or a copy, with attention backend `name`; raise ValueError if unsupported."""
    # a private method, because transformers has no public one
    if model._can_set_attn_implementation():
        with hooks.implementation(model, name):
            if not any(getattr(config, "_attn_implementation", None) == name for config in list_configs(model)):
                raise ValueError(f"{type(model).__name__} does not support {name}")
            yield model
        return
    if name != "eager" and not (name == "sdpa" and model._supports_sdpa):
        raise ValueError(f"{type(model).__name__} has its own attention code, which does not support {name}")
    if name == getattr(model.config, "_attn_implementation", "eager"):
        yield model
        return
    # hand-written attention chooses its code when the model is built
    twin: PreTrainedModel = type(model)._from_config(  # type: ignore[no-untyped-call]
        copy.deepcopy(model.config), attn_implementation=name
    )
    twin.load_state_dict(model.state_dict())
    nn.Module.to(twin, device=model.device, dtype=model.dtype)
    nn.Module.eval(twin)
    if twin.dtype == torch.float64:
        hooks.allow_float64(twin)
    yield twin


@contextmanager
def record_sites(
    model: PreTrainedModel, targets: Sequence[SiteCall], calls: dict[Site, dict[str, Any]], outputs: Outputs
) -> Iterator[None]:
    """Context manager: during one pass, record the arguments and outputs of the targets' modules, by site."""
    by_call = {(target.site.path, target.site.ordinal): target.site for target in targets}
    paths = {model.get_submodule(target.site.path): target.site.path for target in targets}
    counter = Counter[nn.Module]()

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        site = by_call.get((paths[module], counter[module]))
        counter[module] += 1
        if site is not None:
            calls[site] = call_arguments(module, args, kwargs)
            outputs[site] = first_float_tensor(output)

    with remove_hooks([module.register_forward_hook(record, with_kwargs=True) for module in paths]):
        yield


def first_float_tensor(output: object) -> Tensor:
    """Return the first floating-point tensor of a module's output."""
    return next(part for part in tensors(output) if part.is_floating_point())


def main_output(result: Any) -> Tensor:
    """Return the logits in a model's output, or the first floating-point tensor of an output without logits."""
    logits = getattr(result, "logits", None)
    return logits if isinstance(logits, Tensor) else first_float_tensor(result.to_tuple())


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Compute ‖expected − actual‖ / ‖expected‖ in float64, or ‖actual‖ if `expected` is 0."""
    expected, actual = expected.double(), actual.double()
    return float((expected - actual).norm()) / (float(expected.norm()) or 1.0)


def largest_error(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest relative error over pairs of expected and actual tensors; NaN if any error is NaN."""
    return float(torch.tensor([relative_error(*pair) for pair in zip(expected, actual, strict=True)]).max())


def tolerance_between_passes(tolerance: float, error: float) -> float:
    """Return the tolerance for comparing two passes of a backend whose error against float64 is `error`."""
    return tolerance if error <= tolerance else max(tolerance, min(2 * error, COARSE))


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """A mask test with the results of the reference model."""

    case: Case
    targets: list[SiteCall]  # Calls of the sites whose keys come from the perturbed input
    allowed: dict[Site, Bool[Tensor, "rows queries tokens"]]  # True for tokens that the output may depend on
    attention: dict[Site, Float[Tensor, "rows queries tokens"]]  # Largest weight over heads; 0 for tokens not allowed
    expected: list[Tensor]  # Model output for each of the case's `pieces`


class Comparison:
    """Comparison of backends with a reference: the model with recomputed attention, in float64 if possible."""

    def __init__(
        self,
        loaded: loading.Loaded,
        inputs: Mapping[str, Tensor],
        site_calls: Sequence[SiteCall],
        request: DoctorRequest,
    ) -> None:
        self.model = loaded.model
        self.reference = self.model
        if self.model.dtype != torch.float64:
            self.reference = copy.deepcopy(self.model).double()
            hooks.allow_float64(self.reference)
            try:
                with torch.no_grad():
                    hooks.forward(self.reference, hooks.as_dtype(inputs, torch.float64))
            except FAILURES:
                self.reference = self.model  # the model can't run in float64
        self.inputs = dict(inputs)
        self.site_calls = [each for each in site_calls if each.site.is_among(request.layers)]
        self.named_backends = None if request.backends is None else request.backends.split(",")
        self.named_masks = None if request.masks is None else request.masks.split(",")
        self.outputs: Outputs = {}
        exact = hooks.as_dtype(self.inputs, self.reference.dtype)
        with self._recomputing(), record_sites(self.reference, self.site_calls, {}, self.outputs):
            result = hooks.forward(self.reference, exact)
        self.results = hooks.real_outputs(result, exact)
        self.tokens = main_output(result).argmax(-1) if hasattr(result, "logits") else None
        self.some_layers = request.layers is not None
        self.cases: Cases | None = None
        self.prepared, self.refused = list[PreparedCase](), dict[str, str]()
        self._prepare()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        with torch.no_grad(), hooks.answer_calls(self.reference, recompute):
            yield

    def _prepare(self) -> None:
        """Build the mask tests with their reference outputs; record in `refused` why a test can't be built or run.

        If the model's masks can't be tested at all, only requested tests are recorded.
        """
        named = self.named_masks
        if (reason := explain_no_masks(self.inputs)) is not None:
            self.refused = dict.fromkeys(named or (), reason)
            return
        exact = hooks.as_dtype(self.inputs, self.reference.dtype)
        cases = self.cases = Cases(self.reference, exact, self.site_calls, named)
        device = loading.device_of_inputs(self.reference)
        for case in cases.build():
            if isinstance(case, tuple):
                self.refused[case[0]] = case[1]
                continue
            try:
                prepared = self._prepare_case(case.to(device), cases)
            except (*FAILURES, AttnlensError) as error:
                if is_memory(error):
                    raise
                self.refused[case.name] = (
                    f"the model can't run on the inputs of this test ({loading.first_line(error)})"
                )
                continue
            if prepared is not None:
                self.prepared.append(prepared)

    def _prepare_case(self, case: Case, cases: Cases) -> PreparedCase | None:
        """Compute a test's reference results; None for an unrequested packing test that does not apply."""
        by_call = {(each.site.path, each.site.ordinal): each.site for each in self.site_calls}
        below = torch.ones(case.documents.shape[1], case.documents.shape[1], dtype=torch.bool).tril()
        targets, allowed, attention, separated = list[SiteCall](), {}, {}, False
        for each in hooks.survey(self.reference, case.inputs):
            site = by_call.get((each.site.path, each.site.ordinal))
            if site is None or key_input(site, self.inputs) != case.perturbed:
                continue
            target, call = replace(each, site=site), each.call
            if call.key.shape[2] != case.documents.shape[1]:
                continue
            visible_tokens = case.visible_tokens(cases.rules[site], call.query.shape[2])
            as_declared = replace(call, allowed=visible_tokens[:, None].to(call.query.device), causal=False)
            largest = as_declared.query_key(site).attention.amax(1).cpu() * visible_tokens
            if (mask := call.visible()) is not None:
                visible = mask.any(1).cpu()
                across = case.documents[:, :, None] != case.documents[:, None, :]
                separated = separated or (
                    visible.shape[1:] == below.shape and not bool((visible & across & below).any())
                )
                if site.traced:  # its own code may have a window that no configuration names
                    largest = largest * visible
            targets.append(target)
            allowed[site], attention[site] = visible_tokens, largest
        if case.name == "packed" and not separated and self.named_masks is None:
            return None  # the model does not separate documents by their positions
        expected = []
        with self._recomputing():
            for _, start, end, alone in case.pieces:
                expected.append(main_output(hooks.forward(self.reference, alone))[0, : end - start])
        return PreparedCase(case, targets, allowed, attention, expected)

    def names(self) -> Iterator[str]:
        """Yield the names of the requested backends; by default eager and sdpa, or all backends on a CUDA device."""
        if self.named_backends is not None:
            yield from self.named_backends
            return
        yield from DEFAULT
        if self.model.device.type == "cuda":
            yield from (name for name in BACKENDS if name not in DEFAULT)

    def check(self, name: str) -> BackendCheck | None:
        """Compare one backend with the reference, in float32 or bfloat16 if the backend can't run in the model's type.

        Return None if the backend can't run and no backends were requested.
        """
        reasons = list[str]()
        for dtype in dict.fromkeys((self.model.dtype, torch.float32, torch.bfloat16)):
            model = self.model
            try:
                if dtype != model.dtype:
                    model = nn.Module.to(copy.deepcopy(model), dtype)
                with torch.no_grad(), use_backend(model, name) as running:
                    return self._check_running(name, running)
            except (*FAILURES, ImportError, AttnlensError) as error:
                if is_memory(error):
                    raise
                reasons.append(loading.first_line(error))
                if isinstance(error, ImportError | ValueError):
                    break
        if self.named_backends is None:
            return None
        return BackendCheck(backend=name, verdict="not run", reason=reasons[0])

    def _check_running(self, name: str, model: PreTrainedModel) -> BackendCheck:
        inputs, outputs = hooks.as_dtype(self.inputs, model.dtype), dict[Site, Tensor]()
        with record_sites(model, self.site_calls, {}, outputs):
            result = hooks.forward(model, inputs)
        error = largest_error(self.results, hooks.real_outputs(result, inputs))
        sites = list[SiteError]()
        for target in self.site_calls:
            if target.site in outputs:
                each = [hooks.at_real_tokens(part[target.site], inputs) for part in (self.outputs, outputs)]
                site_error = relative_error(*each)
                finite = site_error if math.isfinite(site_error) else None
                sites.append(SiteError(site=target.site.name, layer=target.site.layer, error=finite))
        rounding = torch.finfo(model.dtype).eps
        tolerance = TOLERANCE if model.dtype == torch.float64 else max(TOLERANCE, ROUNDINGS * rounding)
        agreement = None
        if self.tokens is not None:
            agreement = float((main_output(result).argmax(-1) == self.tokens).double().mean())
        explained = None
        if name == "eager" or model.dtype != torch.float64:  # other backends compute softmax in the model's type
            explained = self._explain_rounding(sites, tolerance, model.dtype)
        most, reason = (tolerance, None) if explained is None else explained
        if not math.isfinite(error):
            reason = checks.describe_overflow(model.dtype, self.site_calls)
        close = error <= tolerance
        masks = list[MaskCheck]()
        if math.isfinite(error):
            tests = [partial(self._check_mask, prepared, model, most, error) for prepared in self.prepared]
            masks += [_run_test(prepared.case.name, test) for prepared, test in zip(self.prepared, tests, strict=True)]
            masks += self._check_cache(model, tolerance_between_passes(most, error), against_itself=not close)
        masks += [build_unchecked(mask, why) for mask, why in self.refused.items()]
        verdict: Literal["agrees", "rounds", "differs"] = "agrees" if close else "rounds" if explained else "differs"
        if any(mask.verdict == "differs" for mask in masks):
            verdict = "differs"
        return BackendCheck(
            backend=name,
            verdict=verdict,
            reason=reason,
            dtype=str(model.dtype).removeprefix("torch."),
            output_error=error if math.isfinite(error) else None,
            tolerance=tolerance,
            greedy_agreement=agreement,
            sites=sites,
            masks=masks,
        )

    def _explain_rounding(
        self, sites: Sequence[SiteError], tolerance: float, dtype: torch.dtype
    ) -> tuple[float, str] | None:
        """Return the largest error that the rounding of scores can cause, and a description of the rounding.

        Return None if no site's error exceeds the tolerance, or if rounding does not explain the first such error.
        """
        first = next((each for each in sites if each.error is None or each.error > tolerance), None)
        if first is None or first.error is None:
            return None
        target = next(each for each in self.site_calls if each.site.name == first.site)
        most, text = checks.bound_rounding(target.call.query_key(target.site), dtype)
        return (most, f"its {text} (first at {first.site})") if first.error <= most else None

    def _check_mask(
        self, prepared: PreparedCase, model: PreTrainedModel, tolerance: float, output_error: float
    ) -> MaskCheck:
        """Run one mask test; repeat it in float32 if the outputs in float64 are not finite."""
        check = self._try_mask(prepared, model, tolerance, output_error)
        if check.error is None and model.dtype == torch.float64:
            return self._try_mask(prepared, nn.Module.float(copy.deepcopy(model)), tolerance, output_error)
        return check

    def _try_mask(
        self, prepared: PreparedCase, model: PreTrainedModel, tolerance: float, output_error: float
    ) -> MaskCheck:
        """Run one mask test in the model's dtype; its error is None if outputs at real tokens are not finite.

        If `output_error`, the backend's error on ordinary inputs, exceeds the tolerance, larger deviations are
        accepted, because the backend may round coarsely.
        """
        case = prepared.case
        least = ATTENDED
        if not output_error <= tolerance:
            least = min(max(ATTENDED, NOISE * output_error), CLEARLY_ATTENDED)
        calls, outputs = dict[Site, dict[str, Any]](), dict[Site, Tensor]()
        inputs = hooks.as_dtype(case.inputs, model.dtype)
        with record_sites(model, prepared.targets, calls, outputs):
            result = main_output(hooks.forward(model, inputs))
        piece_outputs = [result[row, start:end] for row, start, end, _ in case.pieces]
        if not all(bool(part.isfinite().all()) for part in piece_outputs):
            reason = "the outputs are not finite"
            return MaskCheck(mask=case.name, verdict="differs", error_judged=case.same_positions, reason=reason)
        faults, count = list[Sight](), 0
        for target in prepared.targets:
            wrong = self._probe(prepared, target, model.get_submodule(target.site.path), calls, outputs, least)
            faults += wrong[:1]
            count += len(wrong)
        if not faults and (beyond := self._probe_outputs(prepared, model, inputs, result)):
            faults, count = beyond[:1], len(beyond)
        error = largest_error(prepared.expected, piece_outputs)
        wrong_outputs = False
        if case.same_positions and not error <= tolerance:
            # compare two passes of the same backend, because its rounding in both is not a fault of the mask
            unmasked = []
            for (*_, alone), part in zip(case.pieces, piece_outputs, strict=True):
                output = main_output(hooks.forward(model, hooks.as_dtype(alone, model.dtype)))
                unmasked.append(output[0, : len(part)])
            limit = tolerance_between_passes(tolerance, output_error)
            wrong_outputs = not largest_error(unmasked, piece_outputs) <= limit
        return MaskCheck(
            mask=case.name,
            verdict="differs" if faults or wrong_outputs else "agrees",
            error=error,
            error_judged=case.same_positions,
            faults=faults,
            count=count,
        )

    def _probe_outputs(
        self, prepared: PreparedCase, model: PreTrainedModel, inputs: dict[str, Tensor], result: Tensor
    ) -> list[Sight]:
        """Find model outputs that depend on the perturbed token although no path of allowed attention connects them.

        Return [] if only some layers were requested, or if outputs do not correspond to tokens of the perturbed input.
        """
        case = prepared.case
        shape = case.documents.shape
        if self.some_layers or case.perturbed != main_input(case.inputs) or result.shape[:2] != shape:
            return []
        seen = torch.eye(shape[1], dtype=torch.bool).expand(shape[0], -1, -1)
        for target in prepared.targets:
            if target.other is None:
                seen = seen | (prepared.allowed[target.site].double() @ seen.double() > 0)
        rows, probes = torch.arange(shape[0]), torch.tensor(case.probes)
        hidden = ~seen[rows, :, probes] & (case.documents >= 0)
        if not bool(hidden.any()):
            return []
        with perturb_embeddings(model, inputs[case.perturbed], case.probes):
            moved = main_output(hooks.forward(model, inputs))
        rounding = torch.finfo(model.dtype).eps * float(result.abs().max())
        change = (moved - result).abs().flatten(2).amax(-1).cpu()
        places = (hidden & (change > NOISE * rounding)).nonzero().tolist()
        return [_build_sight("sees", case, place, change, None) for place in places]

    def _probe(
        self,
        prepared: PreparedCase,
        target: SiteCall,
        module: nn.Module,
        calls: Mapping[Site, dict[str, Any]],
        outputs: Mapping[Site, Tensor],
        least: float,
    ) -> list[Sight]:
        """Find outputs of a site that depend on a masked token or ignore an attended token, largest change first.

        A token counts as attended if its attention weight is at least `least`.
        """
        case, site = prepared.case, target.site
        arguments, name = calls[site], target.other or target.input_name
        hidden = arguments[name]
        rows, probes = torch.arange(len(case.probes)), torch.tensor(case.probes)
        base = first_float_tensor(module(**arguments))
        noise = float((base - outputs[site]).abs().max())
        sees, change = torch.ones((), dtype=torch.bool), torch.zeros(())
        for size in (SIZE,) if hidden.dtype == torch.float64 else COARSE_SIZES:
            moved = perturb(hidden, case.probes, size, seed=site.layer)
            change = (first_float_tensor(module(**arguments | {name: moved})) - base).abs().amax(-1).cpu()
            sees = sees & (change > NOISE * noise)
        real = case.documents >= 0 if sees.shape[1] == case.documents.shape[1] else torch.ones_like(sees)
        allowed = prepared.allowed[site][rows, :, probes]
        required = prepared.attention[site][rows, :, probes] >= least
        wrong = [
            _build_sight("sees", case, place, change, site) for place in (sees & ~allowed & real).nonzero().tolist()
        ]
        missed = (~sees & required & real).nonzero().tolist()
        wrong += [_build_sight("misses", case, place, change, site) for place in missed]
        return sorted(wrong, key=lambda each: -(each.change or 0.0))

    def _check_cache(self, model: PreTrainedModel, tolerance: float, *, against_itself: bool) -> list[MaskCheck]:
        """Run the cache test.

        Return [] if masks can't be tested, if only other tests are requested, or if no test is requested and the model
        has no cache.
        """
        named = self.named_masks is not None and "cache" in self.named_masks
        if (self.named_masks is not None and not named) or self.cases is None:
            return []
        if not self.cases.causal or not {"past_key_values", "use_cache"} <= self.cases.parameters.keys():
            return [build_unchecked("cache", "the model has no cache")] if named else []
        inputs = self.cases.cache_inputs()
        return [_run_test("cache", partial(self._decode, model, inputs, tolerance, against_itself=against_itself))]

    def _decode(
        self, model: PreTrainedModel, inputs: dict[str, Tensor], tolerance: float, *, against_itself: bool
    ) -> MaskCheck:
        """Decode with the cache (a prefill, then single steps), and compare each output with that of a single pass.

        The single pass uses the reference model or, if `against_itself`, the backend.
        """
        name = main_input(inputs)
        targets = [
            each for each in self.site_calls if each.site.part != "cross" and key_input(each.site, inputs) == name
        ]
        whole: Outputs = {}
        reference, computing = (model, torch.no_grad()) if against_itself else (self.reference, self._recomputing())
        with computing, record_sites(reference, targets, {}, whole):
            expected = main_output(hooks.forward(reference, hooks.as_dtype(inputs, reference.dtype)))
        inputs = hooks.as_dtype(inputs, model.dtype)
        tokens, cache = inputs[name].shape[1], None
        errors, faults, count, reason = list[float](), dict[Site, Sight](), 0, None
        ends = [0, *range(tokens - STEPS, tokens + 1)]
        for start, end in pairwise(ends):
            outputs: Outputs = {}
            step = {**inputs, name: inputs[name][:, start:end]}
            try:
                with record_sites(model, targets, {}, outputs):
                    result = model(**step, use_cache=True, **({} if cache is None else {"past_key_values": cache}))
            except FAILURES as failure:
                if cache is None or is_memory(failure):
                    raise
                reason = f"token {start} can't be decoded with the cache ({loading.first_line(failure)})"
                return MaskCheck(mask="cache", verdict="differs", reason=reason)
            cache = result.past_key_values
            if cache is None:
                return build_unchecked("cache", "the model returns no cache")
            errors.append(relative_error(expected[:, start:end], main_output(result)))
            for site, output in outputs.items():
                error = relative_error(whole[site][:, start:end], output)
                if not error <= tolerance:
                    count += 1
                    fields = {"layer": site.layer, "site": site.name, "change": error if math.isfinite(error) else None}
                    faults.setdefault(site, Sight(kind="differs", output=start, token=None, **fields))
        cached_tokens = getattr(cache, "get_seq_length", lambda: tokens)()
        if cached_tokens != tokens:
            reason = f"the cache contains {cached_tokens} of {tokens} tokens"
        error = max(errors)
        ordered = sorted(faults.values(), key=lambda each: (each.output, each.layer or 0))
        return MaskCheck(
            mask="cache",
            verdict="agrees" if error <= tolerance and not faults else "differs",
            error=error if math.isfinite(error) else None,
            faults=ordered,
            count=count,
            reason=reason,
        )


def build_unchecked(mask: str, reason: str) -> MaskCheck:
    """Build the record of a mask test that was not run."""
    return MaskCheck(mask=mask, verdict="not checked", reason=reason)


def _run_test(mask: str, test: Callable[[], MaskCheck]) -> MaskCheck:
    """Run a mask test; if the model can't run on the test's inputs, return a record with the reason."""
    try:
        return test()
    except (*FAILURES, ImportError) as error:
        if is_memory(error):
            raise
        return build_unchecked(mask, loading.first_line(error))


def _build_sight(
    kind: Literal["sees", "misses"], case: Case, place: Sequence[int], change: Tensor, site: Site | None
) -> Sight:
    """Build the record of a mask fault; `place` is the row and the output's position."""
    row, output = place
    layer, name = (None, None) if site is None else (site.layer, site.name)
    token, size = case.probes[row], float(change[row, output])
    return Sight(kind=kind, output=output, token=token, layer=layer, site=name, change=size)


def perturb(hidden: Tensor, probes: Sequence[int], size: float, seed: int) -> Tensor:
    """Return a copy of `hidden` with token `probes[r]` of row r moved by `size` × its norm in a random direction."""
    rows, places = torch.arange(len(probes)), torch.tensor(list(probes))
    moved, token = hidden.clone(), hidden[rows, places]
    direction = torch.randn(token.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction = (direction / direction.norm(dim=-1, keepdim=True)).to(token)
    moved[rows, places] = token + size * token.norm(dim=-1, keepdim=True) * direction
    return moved


@contextmanager
def perturb_embeddings(model: PreTrainedModel, ids: Tensor, probes: Sequence[int]) -> Iterator[None]:
    """Context manager: perturb the embedding of token `probes[r]` in row r whenever the model embeds `ids`."""

    def move(_module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor | None:
        embedded = args[0] if args else None
        # embeddings of positions can have one row for all sequences
        if not isinstance(embedded, Tensor) or not torch.equal(embedded, ids) or output.shape[:2] != ids.shape:
            return None
        return perturb(output, probes, SIZE, seed=0)

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    with remove_hooks([module.register_forward_hook(move) for module in embeddings]):
        yield


def check_backends(
    loaded: loading.Loaded, inputs: Mapping[str, Tensor], request: DoctorRequest
) -> tuple[list[BackendCheck], list[str]]:
    """Compare the requested or default backends with the model in float64; return comparisons and notes.

    If the backends can't be compared, return a note with the reason, or raise ModelError if backends or masks were
    requested.
    """
    try:
        comparison = Comparison(loaded, inputs, hooks.survey(loaded.model, inputs), request)
        return [check for name in comparison.names() if (check := comparison.check(name)) is not None], []
    except (*FAILURES, AttnlensError) as error:
        problem = f"Attention backends could not be compared: {loading.first_line(error).rstrip('.')}."
        if request.backends is not None or request.masks is not None:
            raise ModelError(problem, "Leave out --backends and --masks.") from error
        return [], [problem]
