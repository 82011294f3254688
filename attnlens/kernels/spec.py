"""Kernel: a registered kernel with its parameters, tie and filter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.kernels.registry import KERNELS, NEAR_WEIGHT, TIES, Fit, KernelInfo, KernelParameter, KeyFilter, torch

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped
    from torch import Tensor, dtype

    from attnlens.kernels.registry import Key, Matrix, Pairs, Query
    from attnlens.records import Call

    Cap = float | None

WHOLE = slice(None)


@dataclass(frozen=True)
class Kernel:
    """A registered kernel with its parameters, tie, filter, hybrid and fitted parameters."""

    info: KernelInfo  # the registered kernel
    parameters: Mapping[str, float] = field(default_factory=dict)  # all parameters, including defaults
    tie: str | None = None  # name of a tie in TIES, or None
    filter: KeyFilter | None = None  # filter of the keys a query keeps, in addition to the model's own mask
    fitted: Mapping[str, Shaped[Tensor, "heads ..."]] = field(default_factory=dict)  # parameters that a fit chose
    near: KeyFilter | None = None  # for a hybrid: filter of the keys that use the model's own kernel

    @cached_property
    def spelling(self) -> str:
        """The kernel as a user types it: `rbf:gamma=0.5+window:64`."""
        base = _spell(self.info.name, self.info.parameters, self.parameters)
        if self.oracle:
            return base
        parts = ["" if (self.tie or self.filter) and self.info.name == "exponential" else base, self.tie]
        for each in filter(None, (self.filter, self.near)):
            parts.append(_spell(each.modifier.name, each.modifier.parameters, each.parameters, named=False))
        return "+".join(filter(None, parts))

    @cached_property
    def formula(self) -> str:
        """Formula of log k, including the effects of the tie, filter or hybrid."""
        if self.oracle and self.tie is not None:  # no form is fitted
            return f"{TIES[self.tie].formula}; L the head's own s⟨q_i, k_j⟩ in a whole sequence"
        modifiers = [TIES[self.tie]] if self.tie is not None else []
        modifiers += [each.modifier for each in (self.filter, self.near) if each is not None]
        return "; ".join([self.info.formula, *(f"{modifier.name}: {modifier.formula}" for modifier in modifiers)])

    @cached_property
    def signed(self) -> bool:
        """True if k can be negative; attention is then k / Σk instead of softmax(log k)."""
        return not self.info.positive or any(p.even and self.parameters[p.name] % 2 for p in self.info.parameters)

    @property
    def oracle(self) -> bool:
        """True if the kernel keeps a part of the evaluated text's own log k (for analysis) instead of a fitted form."""
        return self.info.oracle is not None and self.info.oracle(**self.parameters) is not None

    @property
    def tied_by(self) -> str:
        """The tie as typed, or the kernel that implies a tie (`nearest:positive,oracle`); empty if there is no tie."""
        return re.sub(r"\w+=", "", self.spelling) if self.oracle else self.tie or ""

    @property
    def needs_fit(self) -> bool:
        """True if the kernel is undefined without calibration text."""
        return self.info.needs_fit and not self.oracle

    @property
    def fits(self) -> bool:
        """True if the kernel has parameters that a fit can choose."""
        return self.info.fit is not None or self.near is not None

    @property
    def fit_reads(self) -> bool:
        """True if the fit reads queries and keys of a text; False if it reads only their shapes."""
        return self.info.fit_reads or self.near is not None

    @property
    def part(self) -> Callable[[Pairs], Pairs] | None:
        """Function that maps log k of a whole sequence to the part that the tie keeps; None if there is no such tie."""
        return None if self.tie is None else TIES[self.tie].part

    @property
    def shares_latents(self) -> bool:
        """True if several key heads share a latent, so that the kernel cannot be applied to a single head."""
        return self.parameters.get("group", 1) > 1

    def select_head(self, index: int) -> Kernel:
        """Return the kernel with the fitted parameters of the head at `index` among the fitted heads."""
        fitted = {name: part[index : index + 1] for name, part in self.fitted.items()}
        if "members" in fitted:
            fitted["members"] = fitted["members"] * 0  # a single head has a single key head
        return self.with_fitted(fitted)

    @property
    def has_gradient(self) -> bool:
        """True if attention is differentiable in queries and keys; False for uniform, hard, mercer, negativeless."""
        return self.info.reads and not self.info.hard and self.tie not in ("mercer", "negativeless")

    def prepare_call(self, call: Call) -> tuple[Call, Kernel]:
        """Return an equivalent call, and the exponential kernel with this kernel's tie, filter and hybrid.

        If the kernel has no `prepare`, or `prepare` returns None, return `call` and this kernel.
        """
        if not self.oracle:
            prepared = None if self.info.prepare is None else self.info.prepare(call, **self.parameters, **self.fitted)
            if prepared is None:
                return call, self
            call = prepared
        return call, replace(self, info=KERNELS["exponential"], parameters={}, fitted={})

    @property
    def own_fitted(self) -> dict[str, Shaped[Tensor, "heads ..."]]:
        """Fitted parameters passed to the kernel's functions: all except a hybrid's weight of near keys."""
        return {name: part for name, part in self.fitted.items() if name != NEAR_WEIGHT}

    @property
    def chosen(self) -> list[str]:
        """Names of the parameters that a fit chooses; indices of key heads and the model's rotation are excluded."""
        return sorted(name for name in self.fitted if name not in ("members", "key_head", "frequency", "partner"))

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the fitted parameters that healing can train."""
        return self.info.trainable + ((NEAR_WEIGHT,) if self.near is not None else ())

    def build_fit(self) -> Fit | None:
        """Build the fit of the kernel's free parameters per head; return None if it has no free parameters."""
        fit = None if self.info.fit is None else self.info.fit(**self.parameters)
        return fit if self.near is None else NearFit(fit)

    def phi(self, x: Query, scale: float, side: str) -> Float[Tensor, "batch heads queries features"]:
        """Compute φ of the queries or keys (`side`: "query" or "key"); raise UsageError if a needed fit is missing."""
        assert self.info.feature_map is not None  # noqa: S101  # callers that sum features check this
        self._refuse_unfitted()
        features = self.info.feature_map(x, scale, side, **self.parameters, **self.own_fitted)
        return self._check_shape(features, (*x.shape[:-1], features.shape[-1] if features.dim() else 0))

    def with_fitted(self, fitted: Mapping[str, Shaped[Tensor, "heads ..."]]) -> Kernel:
        """Return a copy of the kernel with these fitted per-head parameters."""
        return replace(self, fitted=dict(fitted))

    def log(
        self, query: Query, key: Key, scale: float, *, softcap: Cap = None, rows: slice = WHOLE, columns: slice = WHOLE
    ) -> Float[Tensor, "batch heads rows columns"]:
        """Compute log|k(q, k)| exactly for queries `rows` and keys `columns`; `key` has one head per query head.

        Terms that depend only on the query are included, except if a tie needs whole sequences. Score kernels use
        softcap · tanh(s⟨q, k⟩ / softcap) if the model caps its scores. The result has at least float32 precision,
        unless it is the score itself. For a hybrid, the result is log|k| of the far keys' kernel. Raises UsageError if
        a tie would pair different tokens, the kernel must be fitted first, or the kernel's form is "output".
        """
        query, key = self.apply_tie(query, key)
        if self.part is not None:
            return self.part(self._log(query, key, scale, softcap))[..., rows, columns]
        forward = self._log(query[..., rows, :], key[..., columns, :], scale, softcap)
        if self.tie == "symmetric":
            return (forward + self._log(query[..., columns, :], key[..., rows, :], scale, softcap).mT) / 2
        return forward

    def sign(
        self, query: Query, key: Key, scale: float, *, softcap: Cap = None, rows: slice = WHOLE, columns: slice = WHOLE
    ) -> Float[Tensor, "batch heads rows columns"]:
        """Compute the sign of k for a `signed` kernel; the arguments are those of `log`."""
        assert self.info.sign is not None  # noqa: S101  # every kernel that can be negative has a sign function
        query, key = self.apply_tie(query, key)
        scores = score(query[..., rows, :], key[..., columns, :], scale, softcap)
        return self.info.sign(scores, **self.parameters, **self.fitted)

    def apply_tie(
        self, query: Query, key: Float[Tensor, "batch kv_heads keys head_dim"]
    ) -> tuple[Float[Tensor, "batch _ queries head_dim"], Float[Tensor, "batch _ keys head_dim"]]:
        """Return queries and keys after the tie; raise UsageError if the tie would pair different tokens."""
        if self.tie is not None:
            refuse_unpaired(self.tie, query.shape[-2], key.shape[-2])
        return key if self.tie == "tied-key" else query, query if self.tie == "tied-query" else key

    def _log(self, query: Query, key: Key, scale: float, softcap: Cap) -> Matrix:
        info, numbers = self.info, {**self.parameters, **self.own_fitted}
        if info.form == "output":
            problem = f"{info.name} is not a function of a query and a key, so it has no attention matrix."
            raise UsageError(problem, "Compare the outputs instead, or choose another kernel.")
        self._refuse_unfitted()
        if info.form == "pair":
            shape = *query.shape[:-1], key.shape[-2]
            return self._check_shape(info.function(query, key, scale, **numbers), shape)
        if info.form == "score":
            if info.dot is not None:
                query, key, scale = info.dot(query, key, scale, **numbers)
            scores = score(query, key, scale, softcap)
            return self._check_shape(info.function(scores, **numbers), scores.shape)
        product = self.phi(query, scale, "query") @ self.phi(key, scale, "key").mT
        return log_magnitude(product + smallest_kernel(product.dtype))

    def _check_shape(self, result: Tensor, shape: Sequence[int]) -> Tensor:
        """Return `result`, the value of the kernel's function; raise UsageError if its shape is not `shape`."""
        if result.shape != (expected := tuple(shape)):
            problem = f"The function of kernel {self.info.name} returns shape {tuple(result.shape)}, not {expected}."
            raise UsageError(problem, "Return log k for each query and key, or the features of each query or key.")
        return result

    def _refuse_unfitted(self) -> None:
        if self.needs_fit and not self.own_fitted:
            problem = f"Kernel `{self.info.name}` must be fitted before use."
            remedy = "Fit the kernel with attnlens.swap_kernel, or choose a kernel that needs no fit."
            raise UsageError(problem, remedy)


def refuse_unpaired(name: str, queries: int, keys: int, *, cross: bool = False) -> None:
    """Raise UsageError if queries and keys belong to different tokens or, with `cross`, to different sequences."""
    if cross or queries != keys:
        if cross:
            difference, remedy = "attends to another sequence", "Leave out cross-attention with --part."
        else:
            difference = f"has {queries} queries and {keys} keys"
            remedy = "Run without a key-value cache (use_cache=False)."
        problem = f"`{name}` needs queries and keys of the same tokens, but this attention layer {difference}."
        raise UsageError(problem, remedy)


def score(query: Query, key: Key, scale: float, softcap: Cap) -> Matrix:
    """Compute s⟨q, k⟩, bounded by `softcap` unless it is None."""
    product = query @ key.mT * scale
    return product if softcap is None else (product / softcap).tanh() * softcap


def wide(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert half precision, which has too few digits for the logarithm of a kernel, to float32."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def log_magnitude(value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute log|x| in float32 or better; clamp |x| to the smallest normal number, so that zeros get equal weights."""
    value = wide(value)
    return value.abs().clamp_min(torch.finfo(value.dtype).tiny).log()


def smallest_kernel(of: dtype) -> float:
    """Return the number added to ⟨φ(q), φ(k)⟩ so that queries with features of 0 attend uniformly (float32: 1e-31)."""
    # Sums of at least (smallest normal number / eps) keep all digits, and 1/k has a gradient.
    return torch.finfo(of).tiny / torch.finfo(of).eps


def _spell(name: str, known: Sequence[KernelParameter], values: Mapping[str, float], *, named: bool = True) -> str:
    """Spell a kernel, filter or hybrid with its parameters; defaults are spelled only if `shown_at_default`."""
    words = []
    for parameter in known:
        value = values[parameter.name]
        if parameter.shown_at_default or value != parameter.default:
            word = next((word for word, number in parameter.words if number == value), repr(value).removesuffix(".0"))
            words.append(f"{parameter.name}={word}" if named else word)
    return f"{name}:{','.join(words)}" if words else name


class NearFit:
    """Fit of a hybrid: the kernel of far keys is fitted separately, and the weight γ of near keys starts at 1."""

    def __init__(self, far: Fit | None) -> None:
        self.far = far
        self.typed = {NEAR_WEIGHT: 0.0} if far is None else far.typed and {NEAR_WEIGHT: 0.0} | far.typed
        self.heads = 0

    def update(self, call: Call) -> None:
        """Add a batch to the fit of the kernel of far keys."""
        self.heads = call.query.shape[1]
        if self.far is not None:
            self.far.update(call)

    def solve(self) -> dict[str, Shaped[Tensor, "heads ..."]]:
        """Return the fitted parameters of the kernel of far keys, and `near_log_weight`, (heads,)."""
        parameters = {} if self.far is None else self.far.solve()
        device = next((part.device for part in parameters.values()), None)
        return parameters | {NEAR_WEIGHT: torch.zeros(self.heads, device=device)}
