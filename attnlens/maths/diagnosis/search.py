"""Search for the hypotheses, alone or in pairs, that explain the difference between two layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnlens.maths.diagnosis import heads as whole_heads
from attnlens.maths.diagnosis import matrices, norms, rows, values
from attnlens.maths.diagnosis.layer import (
    FACTOR,
    ROUNDING,
    SINGLE,
    Fit,
    Layer,
    Pair,
    Parts,
    Step,
    Structural,
    TensorHypothesis,
    count_heads,
    has_heads,
    name_heads,
    name_parts,
    residuals,
    rounding_limit,
)

STRUCTURAL: tuple[Structural, ...] = (
    rows.propose_wrong_head_count,
    rows.propose_row_order,
    whole_heads.propose_head_order,
    whole_heads.propose_averaged_keys,
    rows.propose_rows_across_heads,
    matrices.propose_exchange,
    matrices.propose_exchanged_gains,
    matrices.propose_misplaced,
    matrices.propose_wrong_split,
    matrices.propose_transpose,
    matrices.propose_basis,
    norms.propose_folded_norm,
)
"""Hypotheses on several tensors, in the order in which they are preferred."""
ON_TENSORS: tuple[TensorHypothesis, ...] = (
    values.propose_rounding,
    values.propose_lost_values,
    values.propose_offset,
    values.propose_factor,
    values.propose_grid,
    values.propose_float8,
    values.propose_changed_rows,
    values.propose_factors,
    values.propose_low_rank,
)
"""Hypotheses on single tensors, in the order in which they are preferred."""
WEAKER: tuple[TensorHypothesis, ...] = (values.propose_compensated_grid,)
"""Less specific hypotheses, which are tried if no other hypothesis explains a tensor."""


@dataclass(frozen=True)
class Cause:
    """A hypothesis that explains how some parts of a layer changed."""

    hypothesis: str  # name of the hypothesis
    text: str  # how the second layer differs, as a clause
    repair: str | None  # how to undo the difference, as an imperative; None if there is nothing to undo
    heads: tuple[int, ...] = ()  # query heads concerned; empty for the whole layer
    residual: float = 0.0  # largest relative residual of an explained part, as computed by `residuals`
    parts: tuple[str, ...] = ()  # names of the explained parts
    harmless: bool = False  # True if the layer's output is the same
    head_errors: tuple[float, ...] = ()  # relative error of each query head if W_Q is quantised; else empty


@dataclass(frozen=True)
class Diagnosis:
    """The causes of the difference between two layers, and what they leave unexplained."""

    causes: list[Cause] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)  # names of the parts that no hypothesis explains
    closest: tuple[str, float] | None = None  # hypothesis closest to an unexplained part, as a clause; its residual
    change: float = 0.0  # largest ‖B − A‖/max(‖A‖, ‖B‖) of an unexplained part
    unexplained_heads: tuple[int, ...] = ()  # query heads with an unexplained part; empty for all, or for none


ADDED = frozenset({"bias added", "gain added", *(f"first rounded to {name}" for name in values.TYPES)})
"""Names of hypotheses that are not reported if any tensor remains unexplained."""
NEAR = 0.5  # largest share of a difference that the closest hypothesis can leave
State = dict[str, Tensor]  # masks of the heads of parts, keyed by part; for example the unexplained heads


def _is_finite(part: Tensor) -> bool:
    return bool(part.isfinite().all())


def _rounded_heads(first: Tensor, second: Tensor) -> Tensor:
    """Return a mask of the heads that were only rounded to a coarser type."""
    pairs = [*zip(first, second, strict=True)]
    exact = [any(values.is_rounded(*pair, kind) for kind in values.TYPES.values()) for pair in pairs]
    return torch.tensor(exact, device=first.device)


def diagnose(first: Layer, second: Layer, order: Sequence[int] = ()) -> Diagnosis:
    """Find the hypotheses that turn the first layer into the second: single hypotheses, then pairs.

    If heads are known to have moved with all their tensors, `order` contains, for each query head of the first layer,
    its index in the second; otherwise `order` is empty.
    """
    first = replace(first, headless=first.headless | second.headless)
    best = Search(first, second)
    if order:
        best.adopt(whole_heads.follow_order(best.first, best.second, order))
    best.run()
    if best.left and not order:
        for step in matrices.propose_always(best.first, best.second):
            other = Search(first, second)
            if other.run(step) and (other.left, len(other.causes)) < (best.left, len(best.causes)):
                best = other
    return best.result


@dataclass
class Search:
    """A search for the causes of the difference between two layers."""

    first: Layer
    second: Layer
    causes: list[Cause] = field(default_factory=list)
    closest: tuple[str, float] | None = None
    hypotheses: tuple[TensorHypothesis, ...] = ON_TENSORS  # on single tensors

    def __post_init__(self) -> None:
        self.names = [name for name in self.first.parts if name in self.second.parts]
        self._find_non_finite()
        self.start = {name: self.residual(self.first.parts, name) for name in self.names}
        self.open = {name: residual > 0 for name, residual in self.start.items()}
        self.open |= {name: self.open[name] & ~broken for name, broken in self.broken.items()}
        self.current = self.first  # the first layer with all causes found so far applied

    def residual(self, parts: Parts, name: str) -> Tensor:
        """Return, per head, the relative difference between the predicted and the second layer's part `name`."""
        return residuals(parts[name], self.second.parts[name], name)

    def still_open(self, parts: Parts, name: str) -> Tensor:
        """Return a mask of the heads of the part `name` that the prediction `parts` does not explain."""
        after = self.residual(parts, name)
        limit = rounding_limit(name, self.first, self.second)
        wrong = (after > 0) & ((after > limit) | (after > self.start[name] / FACTOR))
        return wrong & ~self.broken[name] if name in self.broken else wrong

    @property
    def left(self) -> int:
        """Number of heads that no cause explains, summed over parts; a part without heads counts as one head."""
        return sum(int(heads.sum()) for heads in self.open.values())

    @property
    def result(self) -> Diagnosis:
        """The causes found, and the parts that they do not explain."""
        open_heads, causes = dict(self.open), self.causes
        if self.left:
            # The layer was probably trained; training also starts from biases of 0, gains of 1 and rounded weights.
            added = [cause for cause in causes if cause.hypothesis in ADDED]
            causes = [cause for cause in causes if cause not in added]
            open_heads |= {name: self.start[name] > 0 for cause in added for name in cause.parts}
        left = [name for name, heads in open_heads.items() if bool(heads.any())]
        heads = self._query_heads({name: open_heads[name] for name in left})
        change = max((float(self.start[name].max()) for name in left), default=0.0)
        return Diagnosis(causes, left, self.closest if left else None, change, heads)

    def run(self, step: Step | None = None) -> bool:
        """Search for single causes, then for pairs of a structural cause and causes on single tensors.

        If `step` is given, adopt it first, and do not search for pairs. Return False if no other structural step
        explains anything after `step`.
        """
        if step is not None:
            self.adopt(step)
        before = len(self.causes)
        self._find_structural()
        if step is not None and len(self.causes) == before:
            return False
        self._fit_tensors(self.current, ())
        if step is None:
            self._find_pairs()
            self.hypotheses = WEAKER
            self._find_pairs()
            self._fit_tensors(self.current, ())
        self._find_rounding()
        return True

    def _find_non_finite(self) -> None:
        """Add a cause for heads with new NaN or infinite numbers in the second layer, and exclude these heads.

        Set all NaN and infinite numbers of both layers to 0.
        """
        self.broken: State = {}
        for name in self.names:
            before, after = self.first.parts[name], self.second.parts[name]
            if before.shape == after.shape and not _is_finite(after):
                new = (before.isfinite() & ~after.isfinite()).reshape(count_heads(after, name), -1).any(1)
                self.broken |= {name: new} if bool(new.any()) else {}
        if self.broken:
            names, heads = tuple(self.broken), self._query_heads(self.broken)
            text = f"{name_parts(names)} {'contains' if len(names) == 1 else 'contain'} NaN or infinite numbers"
            repair = f"copy {name_parts(names)} from the first model"
            self.causes.append(Cause("not finite", text, repair, heads, 1.0, names))
        self.first, self.second = (
            side.with_parts({n: part.nan_to_num(0, 0, 0) for n, part in side.parts.items() if not _is_finite(part)})
            for side in (self.first, self.second)
        )

    def _find_structural(self) -> None:
        """Adopt the structural step with the largest `_gain`; repeat until no step has a positive gain."""
        while self.left:
            steps = [step for hypothesis in STRUCTURAL for step in hypothesis(self.current, self.second)]
            gains = [self._gain(step.parts) for step in steps]
            best = max(range(len(steps)), key=lambda place: gains[place], default=None)
            if best is None or gains[best] <= 0:
                break
            self.adopt(steps[best])

    def _gain(self, parts: Parts) -> int:
        """Return how many more heads a prediction explains; −1 if an explained head, or the shape, no longer fits."""
        total = 0
        for name in parts:
            if name not in self.open:
                continue
            after = self.still_open(parts, name)
            if after.shape != self.open[name].shape or bool((after & ~self.open[name]).any()):
                return -1
            total += int((self.open[name] & ~after).sum())
        return total

    def adopt(self, step: Step, fitted: Sequence[str] | None = None) -> None:
        """Add a structural step to the causes and apply it.

        If `fitted` is given, apply only the parts named in `fitted`, and those that the step brings nearer to the
        second layer.
        """
        parts = step.parts
        if fitted is not None:
            parts = {name: part for name, part in parts.items() if name in fitted or self._helps(name, part)}
        explained = [name for name in parts if name in self.open and bool(self.open[name].any())]
        self.current = self.current.with_parts(parts)
        for name in explained:
            self.open[name] = self.still_open(parts, name)
        residual = max((float(self.residual(parts, name).max()) for name in explained), default=0.0)
        cause = Cause(step.hypothesis, step.text, step.repair, step.heads, residual, tuple(explained), step.harmless)
        self.causes.append(cause)

    def _fit_tensors(self, layer: Layer, before: tuple[Step, ...]) -> bool:
        """Adopt for each part the first hypothesis on single tensors that explains the part's unexplained heads.

        Return True if any part is explained. `layer` is the current prediction after the structural steps `before`,
        which are adopted first if a part is explained.
        """
        fit_groups: dict[tuple[str, str], list[tuple[str, Fit, Tensor]]] = defaultdict(list)
        for name, heads in self.open.items():
            if not bool(heads.any()) or layer.parts[name].shape != self.second.parts[name].shape:
                continue
            for fit, chosen, residual in self._fits(layer, name, heads):
                predicted = self._predict(layer, name, fit, chosen)
                if not bool(self.still_open({name: predicted}, name)[chosen].any()):
                    fit_groups[fit.hypothesis, fit.text].append((name, fit, chosen))
                    break
                near = residual < NEAR * float(self.start[name].max())
                if near and (self.closest is None or residual < self.closest[1]):
                    plural = "" if fit.number == 1 else "s"
                    text = fit.text.format(parts=name_parts([name]), number=fit.number, s=plural)
                    self.closest = " and ".join([step.hypothesis for step in before] + [text]), residual
        if not fit_groups:
            return False
        for step in before:
            self.adopt(step, [name for fits in fit_groups.values() for name, *_ in fits])
        for fits in fit_groups.values():
            self._adopt_fits(fits)
        return True

    def _fits(self, layer: Layer, name: str, heads: Tensor) -> Iterator[tuple[Fit, Tensor, float]]:
        """Yield each fit of the hypotheses to a tensor, the indices of the fitted heads, and their largest residual.

        If some of `heads` changed by more than rounding to a type, only these heads are fitted.
        """
        if has_heads(name):
            others = heads & ~_rounded_heads(layer.parts[name], self.second.parts[name])
            heads = others if bool(others.any()) else heads
        chosen = heads.nonzero().flatten()
        pair = self._pair(layer, name, chosen)
        weight = name.removesuffix("bias") + "weight"
        if name.endswith("bias") and weight in layer.parts and weight in self.second.parts:
            pair = replace(pair, weight=self._pair(layer, weight, chosen))
        for hypothesis in self.hypotheses:
            for fit in hypothesis(pair):
                yield fit, chosen, float(residuals(fit.predicted, pair.second, name).max())

    def _pair(self, layer: Layer, name: str, chosen: Tensor) -> Pair:
        """Build the Pair of a part's chosen heads in `layer` and `second`, or of the whole part if it has no heads."""
        first, second = layer.parts[name], self.second.parts[name]
        if has_heads(name):
            first, second = first[chosen.to(first.device)], second[chosen.to(second.device)]
        spacings = [side.spacing.get(name, SINGLE) for side in (self.first, self.second)]
        query = self.first.parts.get("query.weight")
        head_dim = 1 if query is None else query.shape[1]
        numbers = tuple(chosen.tolist()) if has_heads(name) else ()
        return Pair(
            name,
            first,
            second,
            name in self.first.gains,
            spacing=max(spacings),
            finer=min(spacings),
            second_spacing=spacings[1],
            head_dim=head_dim,
            heads=numbers,
            inputs_first=name in self.first.inputs_first,
            offset=self.first.offsets.get(name, 0.0),
        )

    def _predict(self, layer: Layer, name: str, fit: Fit, chosen: Tensor) -> Tensor:
        """Return the whole part with the chosen heads replaced by the fit's prediction."""
        if not has_heads(name):
            return fit.predicted
        part = layer.parts[name].double().clone()
        part[chosen] = fit.predicted.double()
        return part

    def _adopt_fits(self, fits: list[tuple[str, Fit, Tensor]]) -> None:
        """Add the hypothesis of these fits as one cause; replace the fitted tensors of `current` by predictions."""
        names, fit = tuple(name for name, *_ in fits), fits[0][1]
        numbers = {name: torch.arange(len(self.open[name])) for name in names}
        heads = self._query_heads({name: torch.isin(numbers[name], chosen.cpu()) for name, _, chosen in fits})
        residual = 0.0
        for name, each, chosen in fits:
            part = self._predict(self.current, name, each, chosen)
            self.current = self.current.with_parts({name: part})
            residual = max(residual, float(self.residual({name: part}, name).max()))
            self.open[name] = torch.zeros_like(self.open[name])
        number = max(each.number for _, each, _ in fits)
        subject = f"{name_parts(names)} {'is' if len(names) == 1 else 'are'}"
        plural = "" if number == 1 else "s"
        text, hypothesis = (
            words.format(parts=subject, number=number, s=plural) for words in (fit.text, fit.hypothesis)
        )
        harmless = fit.harmless or self._is_key_bias(names)
        text += " (without RoPE, a key bias does not change attention)" if self._is_key_bias(names) else ""
        self.causes.append(Cause(hypothesis, text, fit.repair, heads, residual, names, harmless))

    def _is_key_bias(self, names: tuple[str, ...]) -> bool:
        """Return True if `names` contains only the key bias, and this bias cannot change attention."""
        shifts_rows = self.first.is_unrotated and "key.gain" not in self.first.parts
        return names == ("key.bias",) and shifts_rows and self.first.shift_invariant and self.second.shift_invariant

    def _helps(self, name: str, part: Tensor) -> bool:
        """Return True if `part` is nearer to the second layer's part than the current prediction is."""
        before, after = (self.residual(parts, name).sum() for parts in (self.current.parts, {name: part}))
        return bool(after < before)

    def _find_pairs(self) -> None:
        """Adopt the first structural step that explains a part together with a hypothesis on single tensors, if any."""
        if not self.left:
            return
        steps = [step for hypothesis in STRUCTURAL for step in hypothesis(self.current, self.second)]
        for step in steps:
            if self._fit_tensors(self.current.with_parts(step.parts), (step,)):
                self._find_structural()
                self._fit_tensors(self.current, ())
                return

    def _find_rounding(self) -> None:
        """Add one cause per number type, for tensors that differ from their prediction only by rounding."""
        by_type: dict[str, list[str]] = defaultdict(list)
        for name in self.names:
            if not bool((self.residual(self.current.parts, name) > 0).any()) or bool(self.open[name].any()):
                continue
            part, offset = self.current.parts[name].to(self.first.parts[name].dtype), self.first.offsets.get(name, 0.0)
            left = float(self.residual({name: part}, name).max())
            before, part, after = (each - offset for each in (self.first.parts[name], part, self.second.parts[name]))
            for kind, dtype in values.TYPES.items():
                coarser = values.is_exact(after, dtype) and not values.is_exact(before, dtype)
                near = coarser and left <= 2 * ROUNDING * torch.finfo(dtype).eps  # factors are fitted to rounded values
                if near or values.is_rounded(part, after, dtype):
                    by_type[kind].append(name)
                    break
        for kind, names in by_type.items():
            known = [cause for cause in self.causes if cause.hypothesis == f"rounded to {kind}"]
            names += [name for cause in known for name in cause.parts]
            text = f"{name_parts(names)} {'is' if len(names) == 1 else 'are'} rounded to {kind}"
            self.causes = [cause for cause in self.causes if cause not in known]
            self.causes.append(Cause(f"rounded to {kind}", text, None, (), 0.0, tuple(names)))

    def _query_heads(self, concerned: State) -> tuple[int, ...]:
        """Return the query heads that use the heads marked in `concerned`.

        The result is empty if all heads are concerned, or if a part has no heads.
        """
        if "query.weight" not in self.first.parts or not all(map(has_heads, concerned)):
            return ()
        key_heads = torch.arange(heads := len(self.first.weight("query")))
        masks = [part.cpu()[key_heads * len(part) // heads] for part in concerned.values()]
        return name_heads(torch.stack(masks).any(0).nonzero().flatten().tolist() if masks else [], self.first)
