"""What does `rbf:gamma=1+window:64` mean? A Kernel: a registered kernel with its parameters, tie and filter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.kernels.modifiers import FILTERS, TIES, Filter
from attnlens.registry import KernelInfo, Parameter, checked_name, kernels

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ALL = slice(None)


@dataclass(frozen=True)
class Kernel:
    """A kernel with everything that it needs to be computed."""

    info: KernelInfo
    """Which kernel."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Its parameters, defaults included."""
    tie: str | None = None
    """symmetric, tied-query or tied-key."""
    filter: Filter | None = None
    """Which keys a query keeps, beside the model's own mask."""
    fitted: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters chosen per head, (heads, …) each."""

    @cached_property
    def spelling(self) -> str:
        """As it can be typed: `rbf:gamma=0.5+window:64`."""
        numbers = _spelled(self.info.name, self.parameters)
        if (self.tie or self.filter) and self.info.name == "exponential":
            numbers = ""
        more = [self.tie] if self.tie else []
        if self.filter:
            more.append(_spelled(self.filter.modifier.name, self.filter.parameters, named=False))
        return "+".join(([numbers] if numbers else []) + more)

    @cached_property
    def signed(self) -> bool:
        """Whether k can be negative, so that attention is k / Σk and not softmax(log k)."""
        odd = any(p.even and self.parameters[p.name] % 2 for p in self.info.parameters)
        return odd or not self.info.positive

    def with_fitted(self, fitted: Mapping[str, Tensor]) -> Kernel:
        """The same kernel with parameters chosen per head."""
        return replace(self, fitted=dict(fitted))

    def log(
        self,
        query: Float[Tensor, "batch heads queries head_dim"],
        key: Float[Tensor, "batch heads keys head_dim"],
        scale: float,
        *,
        softcap: float | None = None,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> Float[Tensor, "batch heads rows columns"]:
        """log|k(q, k)| of these rows and columns, exact and with its query-only terms; keys are repeated under GQA.

        Score kernels read softcap · tanh(s⟨q, k⟩ / softcap) where the model caps its scores; the others have no score
        to cap. In float32 at least, but for a score that is itself the answer (exponential, hard).
        Raises UsageError for a tie where queries and keys are not the same tokens, and for a rank that is not fitted.
        """
        query, key = self.tied(query, key)
        forward = self._log(query[..., rows, :], key[..., columns, :], scale, softcap)
        if self.tie != "symmetric":
            return forward
        return (forward + self._log(query[..., columns, :], key[..., rows, :], scale, softcap).mT) / 2

    def sign(
        self,
        query: Float[Tensor, "batch heads queries head_dim"],
        key: Float[Tensor, "batch heads keys head_dim"],
        scale: float,
        *,
        softcap: float | None = None,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> Float[Tensor, "batch heads rows columns"]:
        """The sign of k, for a kernel that is `signed`."""
        assert self.info.sign is not None  # noqa: S101  # a kernel that can be negative has one
        query, key = self.tied(query, key)
        found = score(query[..., rows, :], key[..., columns, :], scale, softcap)
        return self.info.sign(found, **self.parameters, **self.fitted)

    def tied(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after the tie; raises UsageError where it needs them of the same tokens and they are not."""
        if self.tie is None:
            return query, key
        if query.shape[-2] != key.shape[-2]:
            raise UsageError(
                f"{self.tie} needs the queries and keys of the same tokens; this site has {query.shape[-2]} queries "
                f"and {key.shape[-2]} keys.",
                "Leave out cross-attention with --part, and run without a key-value cache.",
            )
        return {"tied-query": (query, query), "tied-key": (key, key)}.get(self.tie, (query, key))

    def _log(self, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
        numbers = {**self.parameters, **self.fitted}
        if self.info.needs_fit and not self.fitted:
            raise UsageError(
                f"{self.info.name} is nothing before it is fitted to a head.", "Add --fit, with some calibration text."
            )
        if self.info.form == "score":
            return self.info.function(score(query, key, scale, softcap), **numbers)
        if self.info.form == "pair":
            return self.info.function(query, key, scale, **numbers)
        sides = (self.info.function(x, scale, side, **numbers) for x, side in ((query, "query"), (key, "key")))
        return log_magnitude(next(sides) @ next(sides).mT)


def score(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """s⟨q, k⟩, bounded by the model's softcap where it has one."""
    product = query @ key.mT * scale
    return product if softcap is None else (product / softcap).tanh() * softcap


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: half precision has too few digits for the logarithm of a kernel."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def log_magnitude(value: Tensor) -> Tensor:
    """log|x|, in float32 at least, no lower than that of the smallest normal number: a row of zeros stays uniform."""
    import torch

    value = wide(value)
    return value.abs().clamp_min(torch.finfo(value.dtype).tiny).log()


def parsed(words: str, *, allow_signed: bool = False) -> Kernel:
    """The kernel that `words` spell: `name:parameter=value,…`, with ties and filters joined by `+`, in any order.

    Values may be typed without their names, in the order of the parameters (`rank:8`, `sink-window:4,64`); a tie or
    filter alone goes with the exponential kernel.
    Raises UsageError for an unknown name (did you mean), a parameter that does not exist or has the wrong type or
    range, two kernels, ties or filters, and an odd power where signed kernels are not allowed.
    """
    known = kernels()
    base, tie, filtered = [], [], []
    # The plus of 1e+06 joins nothing.
    for part in re.split(r"(?<!\d[eE])\+", words):
        name, _, numbers = part.strip().partition(":")
        checked_name("kernel", name, [*known, *TIES, *FILTERS])
        if name in TIES:
            _numbers(name, numbers, ())
            tie.append(name)
        elif name in FILTERS:
            values = _numbers(name, numbers, FILTERS[name].parameters)
            filtered.append(Filter(FILTERS[name], {key: int(value) for key, value in values.items()}))
        else:
            base.append(Kernel(known[name], _numbers(name, numbers, known[name].parameters)))
    for what, parts in (("kernel", base), ("tie", tie), ("filter", filtered)):
        if len(parts) > 1:
            raise UsageError(f"{words!r} has more than one {what}.", f"Give one {what}, or another --kernel for each.")
    chosen = base[0] if base else Kernel(known["exponential"])
    kernel = replace(chosen, tie=tie[0] if tie else None, filter=filtered[0] if filtered else None)
    _refuse_signed(kernel, allow_signed)
    return kernel


def _numbers(name: str, words: str, parameters: Sequence[Parameter]) -> dict[str, float]:
    """`gamma=1,…` or bare values in order, checked, with defaults."""
    values: dict[str, float] = {}
    for index, word in enumerate(filter(None, words.split(","))):
        key, equals, value = word.partition("=")
        if not equals:
            if index >= len(parameters):
                raise UsageError(f"{name} takes {_how_many(parameters)}, not {word!r}.", _help(name, parameters))
            key, value = parameters[index].name, word
        wanted = next((p for p in parameters if p.name == key.strip()), None)
        if wanted is None:
            raise UsageError(f"{name} has no parameter {key.strip()!r}.", _help(name, parameters))
        if wanted.name in values:
            raise UsageError(f"{name}: {wanted.name} is given twice.", _help(name, parameters))
        values[wanted.name] = _number(name, wanted, value.strip())
    for parameter in parameters:
        if parameter.name not in values:
            if parameter.default is None:
                raise UsageError(f"{name} needs {parameter.name}: {parameter.meaning}.", _help(name, parameters))
            values[parameter.name] = parameter.default
    return {p.name: values[p.name] for p in parameters}


def _number(name: str, parameter: Parameter, word: str) -> float:
    try:
        value = parameter.kind(word)
    except ValueError:
        what = "a whole number" if parameter.kind is int else "a number"
        raise UsageError(f"{name}: {parameter.name} must be {what}, not {word!r}.", _help(name, [parameter])) from None
    low = parameter.low is not None and value < parameter.low
    if (
        low
        or (parameter.above is not None and value <= parameter.above)
        or value != value
        or abs(value) == float("inf")
    ):
        above = "" if parameter.above is None else f" and above {parameter.above:g}"
        border = f"at least {parameter.low:g}" if low else f"finite{above}"
        raise UsageError(f"{name}: {parameter.name} must be {border}, not {word}.", _help(name, [parameter]))
    return value


def _refuse_signed(kernel: Kernel, allowed: bool) -> None:
    odd = [p.name for p in kernel.info.parameters if p.even and kernel.parameters[p.name] % 2]
    if odd and not allowed:
        raise UsageError(
            f"{kernel.info.name} with an odd {odd[0]} is negative somewhere, so that its rows are no probabilities.",
            f"Choose an even {odd[0]}, or add --allow-signed.",
        )


def _spelled(name: str, parameters: Mapping[str, float], named: bool = True) -> str:
    shown = {key: repr(value).removesuffix(".0") for key, value in parameters.items()}
    numbers = ",".join(f"{key}={value}" if named else value for key, value in shown.items())
    return f"{name}:{numbers}" if numbers else name


def _how_many(parameters: Iterable[Parameter]) -> str:
    count = len(list(parameters))
    return "no parameter" if count == 0 else "one parameter" if count == 1 else f"{count} parameters"


def _help(name: str, parameters: Sequence[Parameter]) -> str:
    if not parameters:
        return f"Write it as {name}."
    shown = ",".join(f"{p.name}={p.default:g}" if p.default is not None else f"{p.name}=…" for p in parameters)
    return f"Write it like {name}:{shown}; `attnlens list kernels` explains them."
