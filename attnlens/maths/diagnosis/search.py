"""Search the hypotheses, alone and in pairs, that explain how one layer became another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlens.maths.diagnosis import rows, values
from attnlens.maths.diagnosis.layer import FACTOR, SINGLE, Layer, Parts, has_heads, limit_of, name_parts, residuals
from attnlens.maths.diagnosis.steps import OF_TENSOR, STRUCTURAL, Fit, Pair, Step

__all__ = ["Cause", "Diagnosis", "diagnose", "rows", "values"]


@dataclass(frozen=True)
class Cause:
    """A hypothesis that explains parts of a layer."""

    hypothesis: str
    text: str
    repair: str | None
    heads: tuple[int, ...]  # query heads concerned; empty for the whole layer
    residual: float  # largest residual that it leaves
    parts: tuple[str, ...]  # parts that it explains
    harmless: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The causes of the difference of two layers."""

    causes: list[Cause] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)  # parts that no hypothesis explains
    closest: tuple[str, float] | None = None  # the hypothesis nearest to an unexplained part, and its residual
    change: float = 0.0  # largest ‖B − A‖/‖B‖ of an unexplained part
    unexplained_heads: tuple[int, ...] = ()  # query heads with an unexplained part; empty for all, or for none


NEAR = 0.5  # share of a difference that a hypothesis must leave at most to be named as the closest
State = dict[str, Tensor]  # True for each head of each part that still differs without an explanation


def diagnose(first: Layer, second: Layer, order: Sequence[int] = ()) -> Diagnosis:
    """Find the hypotheses that turn the first layer into the second: single ones, then pairs.

    `order`: the second layer's head for each head of the first, if it is known that they moved with all their tensors.
    """
    best = Search(first, second)
    if order:
        best.adopt_known(rows.follow_order(first, order))
    best.run()
    if best.left and not order:
        for step in rows.unconditional(first, second):
            other = Search(first, second)
            if other.run_after(step) and (other.left, len(other.causes)) < (best.left, len(best.causes)):
                best = other
    return best.result


@dataclass
class Search:
    """A search for the causes of one layer's difference."""

    first: Layer
    second: Layer
    causes: list[Cause] = field(default_factory=list)
    closest: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        self.names = [name for name in self.first.parts if name in self.second.parts]
        self.start = {name: self.residual(self.first.parts, name) for name in self.names}
        self.open = {name: residual > 0 for name, residual in self.start.items()}
        self.current = self.first  # the first layer after the causes found so far

    def residual(self, parts: Parts, name: str) -> Tensor:
        """Compute what a prediction leaves of a part, by head."""
        return residuals(parts[name], self.second.parts[name], name)

    def still_open(self, parts: Parts, name: str) -> Tensor:
        """Return which heads of a part a prediction does not explain."""
        after = self.residual(parts, name)
        limit = limit_of(name, self.first, self.second)
        return (after > 0) & ((after > limit) | (after > self.start[name] / FACTOR))

    @property
    def left(self) -> int:
        """Number of heads of parts that no cause explains."""
        return sum(int(heads.sum()) for heads in self.open.values())

    @property
    def result(self) -> Diagnosis:
        """The causes found, and what they leave."""
        left = [name for name, heads in self.open.items() if bool(heads.any())]
        heads = self._query_heads({name: self.open[name] for name in left})
        change = max((float(self.start[name].max()) for name in left), default=0.0)
        return Diagnosis(self.causes, left, self.closest if left else None, change, heads)

    def run(self) -> None:
        """Search causes one after another, then a structural one together with one of single tensors."""
        self._find_structural()
        self._fit_tensors(self.current, ())
        self._find_pairs()
        self._find_rounding()

    def run_after(self, step: Step) -> bool:
        """Search as `run` does after one structural step; False if no other structural step then explains anything."""
        self.adopt_known(step)
        before = len(self.causes)
        self._find_structural()
        if len(self.causes) == before:
            return False
        self._fit_tensors(self.current, ())
        self._find_rounding()
        return True

    def _find_structural(self) -> None:
        """Adopt the structural step that explains most, as long as one explains anything."""
        while self.left:
            steps = [step for hypothesis in STRUCTURAL for step in hypothesis(self.current, self.second)]
            gains = [self._gain(step.parts) for step in steps]
            best = max(range(len(steps)), key=lambda place: gains[place], default=None)
            if best is None or gains[best] <= 0:
                break
            self._adopt(steps[best])

    def _gain(self, parts: Parts) -> int:
        """Return how many open heads of parts a prediction explains; −1 if it makes an explained one worse."""
        total = 0
        for name in parts:
            if name not in self.open:
                continue
            after = self.still_open(parts, name)
            if after.shape != self.open[name].shape or bool((after & ~self.open[name]).any()):
                return -1
            total += int((self.open[name] & ~after).sum())
        return total

    def _adopt(self, step: Step) -> None:
        """Add a structural step to the causes."""
        explained = [name for name in step.parts if name in self.open and bool(self.open[name].any())]
        self.current = self.current.with_parts(step.parts)
        residual = max((float(self.residual(step.parts, name).max()) for name in explained), default=0.0)
        for name in explained:
            self.open[name] = self.still_open(step.parts, name)
        cause = Cause(step.hypothesis, step.text, step.repair, step.heads, residual, tuple(explained), step.harmless)
        self.causes.append(cause)

    def _fit_tensors(self, layer: Layer, before: tuple[Step, ...]) -> bool:
        """Adopt the hypotheses on single tensors that explain open heads of `layer`, after the steps `before`."""
        found: dict[tuple[str, str], list[tuple[str, Fit, Tensor]]] = defaultdict(list)
        for name, heads in self.open.items():
            if not bool(heads.any()) or layer.parts[name].shape != self.second.parts[name].shape:
                continue
            for fit, chosen, residual in self._fits(layer, name, heads):
                if bool(self._explains(layer, name, fit, chosen)):
                    found[fit.hypothesis, fit.text].append((name, fit, chosen))
                    break
                near = residual < NEAR * float(self.start[name].max())
                if near and (self.closest is None or residual < self.closest[1]):
                    text = fit.text.format(parts=name_parts([name]), number=fit.number)
                    self.closest = " and ".join([step.hypothesis for step in before] + [text]), residual
        if not found:
            return False
        for step in before:
            self._adopt_partially(step, [name for fits in found.values() for name, *_ in fits])
        for fits in found.values():
            self._adopt_fits(fits)
        return True

    def _fits(self, layer: Layer, name: str, heads: Tensor) -> Iterator[tuple[Fit, Tensor, float]]:
        """Yield each hypothesis on a tensor with the heads it is fitted to, and the residual that it leaves."""
        chosen = heads.nonzero().flatten()
        first, second = layer.parts[name], self.second.parts[name]
        if has_heads(name):
            first, second = first[chosen.to(first.device)], second[chosen.to(second.device)]
        spacings = [side.spacing.get(name, SINGLE) for side in (self.first, self.second)]
        query = self.first.parts.get("query.weight")
        head_dim = 1 if query is None else query.shape[1]
        pair = Pair(name, first, second, name in self.first.gains, max(spacings), min(spacings), head_dim)
        for hypothesis in OF_TENSOR:
            for fit in hypothesis(pair):
                yield fit, chosen, float(residuals(fit.predicted, second, name).max())

    def _predict(self, layer: Layer, name: str, fit: Fit, chosen: Tensor) -> Tensor:
        if not has_heads(name):
            return fit.predicted
        part = layer.parts[name].double().clone()
        part[chosen] = fit.predicted.double()
        return part

    def _explains(self, layer: Layer, name: str, fit: Fit, chosen: Tensor) -> bool:
        return not bool(self.still_open({name: self._predict(layer, name, fit, chosen)}, name)[chosen].any())

    def _adopt_fits(self, fits: list[tuple[str, Fit, Tensor]]) -> None:
        """Add one hypothesis to the causes, with all the tensors it explains."""
        names, fit = tuple(name for name, *_ in fits), fits[0][1]
        heads = self._query_heads({name: self.open[name] for name in names})
        residual = 0.0
        for name, each, chosen in fits:
            part = self._predict(self.current, name, each, chosen)
            self.current = self.current.with_parts({name: part})
            residual = max(residual, float(self.residual({name: part}, name).max()))
            self.open[name] = torch.zeros_like(self.open[name])
        number = max(each.number for _, each, _ in fits)
        subject = f"{name_parts(names)} {'is' if len(names) == 1 else 'are'}"
        text, hypothesis = fit.text.format(parts=subject, number=number), fit.hypothesis.format(number=number)
        harmless = fit.harmless or self._is_key_bias(names)
        text += " (without RoPE, a key bias does not change attention)" if self._is_key_bias(names) else ""
        self.causes.append(Cause(hypothesis, text, fit.repair, heads, residual, names, harmless))

    def _is_key_bias(self, names: tuple[str, ...]) -> bool:
        """Return True if only a key bias changed, which adds the same number to all scores of a query."""
        return names == ("key.bias",) and self.first.unrotated and "key.gain" not in self.first.parts

    def adopt_known(self, step: Step) -> None:
        """Add a step to the causes before the search."""
        self._adopt_partially(step, list(step.parts))

    def _adopt_partially(self, step: Step, names: list[str]) -> None:
        """Add a step that explains only together with the next one."""
        parts = {name: part for name, part in step.parts.items() if name in names or self._helps(name, part)}
        self.current = self.current.with_parts(parts)
        for name in parts:
            if name in self.open:
                self.open[name] = self.still_open(parts, name)
        cause = Cause(step.hypothesis, step.text, step.repair, step.heads, 0.0, tuple(parts), step.harmless)
        self.causes.append(cause)

    def _helps(self, name: str, part: Tensor) -> bool:
        before, after = (self.residual(parts, name).sum() for parts in (self.current.parts, {name: part}))
        return bool(after < before)

    def _find_pairs(self) -> None:
        """Try a structural step with hypotheses on what it leaves of single tensors."""
        if not self.left:
            return
        steps = [step for hypothesis in STRUCTURAL for step in hypothesis(self.current, self.second)]
        for step in steps:
            if self._fit_tensors(self.current.with_parts(step.parts), (step,)):
                self._find_structural()
                self._fit_tensors(self.current, ())
                return

    def _find_rounding(self) -> None:
        """Name the number type to which the predicted tensors were rounded, if the rest is exactly that."""
        by_type: dict[str, list[str]] = defaultdict(list)
        for name in self.names:
            if not bool((self.residual(self.current.parts, name) > 0).any()) or bool(self.open[name].any()):
                continue
            part = self.current.parts[name].to(self.first.parts[name].dtype)
            for kind, dtype in values.TYPES.items():
                if torch.equal(part.to(dtype).double(), self.second.parts[name].double()):
                    by_type[kind].append(name)
                    break
        for kind, names in by_type.items():
            known = [cause for cause in self.causes if cause.hypothesis == f"rounded to {kind}"]
            names += [name for cause in known for name in cause.parts]
            text = f"{name_parts(names)} {'is' if len(names) == 1 else 'are'} rounded to {kind}"
            self.causes = [cause for cause in self.causes if cause not in known]
            self.causes.append(Cause(f"rounded to {kind}", text, None, (), 0.0, tuple(names)))

    def _query_heads(self, concerned: State) -> tuple[int, ...]:
        """Return the query heads of these heads of parts; () if all are concerned, or a part without heads."""
        if "query.weight" not in self.first.parts or not all(map(has_heads, concerned)):
            return ()
        heads, found = len(self.first.parts["query.weight"]), set[int]()
        for part in concerned.values():
            found |= {head for head in range(heads) if bool(part[head * len(part) // heads])}
        return () if len(found) == heads else tuple(sorted(found))
