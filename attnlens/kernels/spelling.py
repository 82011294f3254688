"""Parse a kernel's spelling, such as `rbf:gamma=1+window:64`, and count the numbers that the kernel stores per head."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attnlens.arguments import checked_name
from attnlens.errors import UsageError
from attnlens.kernels.registry import FILTERS, HYBRIDS, TIES, KernelParameter, KeyFilter, kernels, torch
from attnlens.kernels.spec import Kernel

EXAMPLES = {"sinks": 4, "width": 64, "stride": 8}  # numbers used in examples of filters and hybrids


def parsed(words: str, *, allow_signed: bool = False) -> Kernel:
    """Parse the spelling of a kernel: `name:parameter=value,…`, with a tie, filter or hybrid joined by `+`.

    The parts can be in any order. Values can be given without names, in the order of the parameters (`rank:8`,
    `sink-window:4,64`). A tie or filter without a kernel applies to the exponential kernel. Raises UsageError for
    unknown names (with a suggestion), for parameters of a wrong type or range, for parts that cannot be combined, and
    for an odd power unless `allow_signed` is true.
    """
    known = kernels()
    bases, ties, filters, nears = list[Kernel](), list[str](), list[KeyFilter](), list[KeyFilter]()
    for part in re.split(r"(?<!\d[eE])\+", words):  # do not split at the plus of 1e+06
        name, _, numbers = part.strip().partition(":")
        checked_name("kernel", name, [*known, *TIES, *FILTERS, *HYBRIDS])
        if name in TIES:
            _parse_numbers(name, numbers, ())
            ties.append(name)
        elif modifier := FILTERS.get(name) or HYBRIDS.get(name):
            values = _parse_numbers(name, numbers, modifier.parameters)
            key_filter = KeyFilter(modifier, {name: int(value) for name, value in values.items()})
            (filters if name in FILTERS else nears).append(key_filter)
        else:
            bases.append(Kernel(known[name], _parse_numbers(name, numbers, known[name].parameters)))
    for what, parts in (("kernel", bases), ("tie", ties), ("filter", filters), ("hybrid", nears)):
        if len(parts) > 1:
            remedy = f"Give one {what}; swap-kernel can compare several kernels, with one --kernel for each."
            raise UsageError(f"{words!r} has more than one {what}.", remedy)
    base = bases[0] if bases else Kernel(known["exponential"])
    tie = base.info.oracle(**base.parameters) if base.info.oracle else next(iter(ties), None)
    kernel = replace(base, tie=tie, filter=next(iter(filters), None), near=next(iter(nears), None))
    odd = [p.name for p in base.info.parameters if p.even and base.parameters[p.name] % 2]
    if odd and not allow_signed:
        problem = (
            f"With an odd `{odd[0]}`, `{base.info.name}` can be negative, so attention rows are not probabilities."
        )
        raise UsageError(problem, f"Choose an even `{odd[0]}`, or pass allow_signed=True in Python.")
    for problem, remedy in _find_conflicts(words, kernel, ties):
        raise UsageError(f"{words!r}: {problem}.", remedy)
    return kernel


def _parse_numbers(name: str, words: str, parameters: Sequence[KernelParameter]) -> dict[str, float]:
    """Parse `gamma=1,…`, or values without names, and add the defaults of the parameters that are not given."""
    values: dict[str, float] = {}
    remedy, known = _suggest_spelling(name, parameters), {p.name: p for p in parameters}
    for index, word in enumerate(filter(None, words.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            if index >= len(parameters):
                count = {0: "no parameters", 1: "one parameter"}.get(len(parameters), f"{len(parameters)} parameters")
                raise UsageError(f"{name} takes {count}, so {word!r} is not allowed.", remedy)
            key, value = parameters[index].name, word.strip()
        if key not in known:
            raise UsageError(f"{name} has no parameter {key!r}.", remedy)
        if key in values:
            raise UsageError(f"{name}: the parameter {key} is given more than once.", remedy)
        values[key] = _parse_number(name, known[key], value)
    for missing in (p for p in parameters if p.name not in values and p.default is None):
        choices = f" ({' or '.join(word for word, _ in missing.words)})" if missing.words else ""
        raise UsageError(f"{name} needs the parameter {missing.name}: {missing.meaning}{choices}.", remedy)
    return {p.name: values[p.name] if p.default is None else values.get(p.name, p.default) for p in parameters}


def _parse_number(name: str, parameter: KernelParameter, word: str) -> float:
    """Parse one value; raise UsageError if it has the wrong type or violates a bound."""
    known, low, above, high = dict(parameter.words), parameter.low, parameter.above, parameter.high
    if word in known:
        return known[word]
    value, expected = math.nan, ""
    try:
        value = parameter.kind(word)
    except ValueError:
        expected = "a whole number" if parameter.kind is int else "a number"
    if known and high is None:
        expected = " or ".join(known)
    if expected:
        word = repr(word)
    elif value != value or abs(value) == math.inf or (above is not None and value <= above):
        # math.isfinite would raise for integers beyond the largest float
        expected = "finite" if above is None else f"finite and above {above:g}"
    elif low is not None and value < low:
        expected = f"at least {low:g}"
    elif high is not None and value > high:
        expected = f"at most {high}"
    elif parameter.kind is int and value % parameter.multiple_of:
        expected = f"a multiple of {parameter.multiple_of}"
    if expected:
        problem = f"{name}: {parameter.name} must be {expected}, not {word}."
        raise UsageError(problem, _suggest_spelling(name, [parameter]))
    return value


def _suggest_spelling(name: str, parameters: Sequence[KernelParameter]) -> str:
    """Return the remedy for a wrong parameter: an example of the correct spelling."""
    if not parameters:
        return f"Write `{name}` without parameters."
    if modifier := FILTERS.get(name) or HYBRIDS.get(name):
        return f"Write, for example, {example(name, modifier.parameters)}; see `attnlens list kernels`."
    shown = ",".join(f"{p.name}={format_default(p)}" for p in parameters)
    return f"Write {name}:{shown}; `attnlens list kernels` explains the parameters."


def _find_conflicts(words: str, kernel: Kernel, ties: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a problem and its remedy for each pair of parts that cannot be combined."""
    info, tie, near = kernel.info, kernel.tie, kernel.near
    hidden = kernel.filter.modifier.name if kernel.filter else None
    if info.oracle is not None and ties:
        problem = f"`{info.name}` already determines which part of log k is kept, so it conflicts with `{ties[0]}`"
        yield problem, f"Leave out `{ties[0]}`."
    if kernel.part is not None and info.form != "output":
        if hidden is not None:
            yield f"`{kernel.tied_by}` needs every pair of tokens, but `{hidden}` hides some", f"Leave out `{hidden}`."
        if kernel.signed or info.hard or info.form == "features":
            what = "can be negative" if kernel.signed else "picks one key" if info.hard else "is a sum over features"
            problem = f"`{tie}` decomposes log k, but `{info.name}` {what}"
            yield problem, f"Write `{tie}` alone, or with a kernel such as `rbf`."
    several = [p for p in info.parameters if not p.shown_at_default and kernel.parameters[p.name] != p.default]
    if tie is not None and info.prepare is not None and several and not kernel.oracle:
        name = several[0].name
        problem = f"`{tie}` cannot be combined with the parameter `{name}` of `{info.name}`"
        yield problem, f"Leave out `{tie}`, or `{name}`."
    if near is not None and (info.form != "features" or kernel.signed):
        what = "can be negative" if kernel.signed else "is not a kernel of positive features"
        alone = f", as in elu+{words}" if info.name not in words and not (tie or hidden) else ""
        problem = (
            f"`{near.modifier.name}` needs a kernel of positive features beyond its window, but `{info.name}` {what}"
        )
        yield problem, f"Choose one of {', '.join(far_kernels())}{alone}."
    if near is not None and (other := tie or hidden):
        problem = f"`{other}` cannot be combined with `{near.modifier.name}`, which consists of two kernels"
        yield problem, f"Leave out `{other}`."
    if info.form == "output" and (ties or hidden):
        problem = f"`{info.name}` has no scores per query and key, so it cannot be tied or filtered"
        yield problem, f"Write `{info.name}` alone."


def far_kernels() -> list[str]:
    """Return the names of the kernels that a hybrid can use beyond its window."""
    return [info.name for info in kernels().values() if info.form == "features" and info.positive]


def format_default(parameter: KernelParameter) -> str:
    """Return the parameter's default as a user types it; `…` if the parameter is required."""
    if parameter.default is None:
        return "…"
    return next((word for word, number in parameter.words if number == parameter.default), f"{parameter.default:g}")


def example(name: str, parameters: Sequence[KernelParameter]) -> str:
    """Return an example of a filter or hybrid with numbers: `sink-window:4,64`."""
    return f"{name}:{','.join(str(EXAMPLES[parameter.name]) for parameter in parameters)}"


ONE_KEY, FLOOR = "hard", "uniform"  # extreme kernels: all weight on one key, and equal weight on all keys
SINKS, WIDTH = 4, 64  # parameters of the sink-window that is compared with a kernel that stores all tokens


@dataclass(frozen=True)
class HeadShape:
    """Sizes that determine how many numbers the heads of a site store."""

    heads: int  # number of query heads with the kernel
    head_dim: int
    value_dim: int
    tokens: int  # number of keys, all of which the last query sees
    causal: bool  # True if no query sees a later key

    @property
    def token(self) -> int:
        """Number of coordinates that a cache stores per token: those of a key and of a value."""
        return self.head_dim + self.value_dim


def state_numbers(kernel: Kernel, shape: HeadShape) -> float | None:
    """Return the count of numbers that a head stores for `shape.tokens` tokens; None if all keys and values are stored.

    With a filter, a head stores the keys and values that one query sees; running sums over m features store
    m·(value_dim + 1); keys compressed to r numbers take tokens·(r + value_dim). A hybrid stores running sums, and the
    keys and values of its window. For `primal`, which has no attention matrix, the result is also None.
    """
    cached = cached_numbers(kernel)
    token = shape.token if cached is None else cached + shape.value_dim
    if kernel.filter is not None:
        return float(kept_keys(kernel.filter, shape) * token)
    if cached is not None:
        return shape.tokens * token
    if kernel.info.feature_map is None:
        return None
    near = 0 if kernel.near is None else kept_keys(kernel.near, shape) * token
    key = torch.zeros(1, shape.heads, 1, shape.head_dim)
    on_cpu = kernel.with_fitted({name: part.cpu() for name, part in kernel.fitted.items()})
    features = on_cpu.phi(key, shape.head_dim**-0.5, "key").shape[-1]
    return float(features * (shape.value_dim + 1) + near)


def kept_keys(key_filter: KeyFilter, shape: HeadShape) -> int:
    """Return the largest number of keys that any of `shape.tokens` queries sees under the filter and causal mask."""
    places = torch.arange(shape.tokens)
    counts = []
    for rows in torch.split(places, 1024):  # in parts, because the text may be long
        visible = key_filter.keeps(rows, places) & ((rows[:, None] >= places) | (not shape.causal))
        counts.append(int(visible.sum(-1).max()))
    return max(counts, default=0)


def cached_numbers(kernel: Kernel) -> float | None:
    """Return the number of coordinates stored per key, averaged over heads; None if whole keys are stored.

    The coordinates of a shared latent are divided equally among the key heads that share the latent.
    """
    key_map = kernel.fitted.get("key_map") if kernel.info.form == "score" else None
    if key_map is None:
        return None
    # if a head has a smaller rank than the others, its map has columns of zeros
    ranks = (key_map != 0).flatten(1, -2).any(-2).sum(-1).double()
    members = kernel.fitted.get("members")
    sharing = 1.0 if members is None else torch.tensor([float(len(row.unique())) for row in members]).to(ranks)
    return float((ranks / sharing).mean())


def sink_window(state: float | None, shape: HeadShape) -> Kernel | None:
    """Return the model's own kernel restricted to ⌊state/(head_dim + value_dim)⌋ keys; None if all keys fit.

    The keys are those of the first 4 tokens (at most half of the keys) and of the nearest tokens; if `state` is None,
    of the first 4 and the 64 nearest. In bidirectional heads, |i − j| < w keeps 2w − 1 keys, so the number of first
    tokens can be one smaller.
    """
    keys = SINKS + WIDTH if state is None else int(state // shape.token)  # `state` holds at least one token
    if keys >= shape.tokens:
        return None
    sinks = min(SINKS, keys // 2)
    if not shape.causal:
        sinks -= (keys - sinks) % 2 == 0
    width = keys - sinks if shape.causal else (keys - sinks + 1) // 2
    window = {"sinks": sinks, "width": width} if sinks else {"width": width}
    return Kernel(kernels()["exponential"], filter=KeyFilter(FILTERS["sink-window" if sinks else "window"], window))


def branches(kernel: Kernel) -> tuple[Kernel, Kernel]:
    """Return the model's own kernel restricted to the window of `kernel`, and `kernel` without its window."""
    window = kernel.filter
    if kernel.near is not None:  # hybrid or sink-hybrid
        window = KeyFilter(FILTERS[kernel.near.modifier.name.replace("hybrid", "window")], kernel.near.parameters)
    without = replace(kernel, filter=None, near=None, fitted=kernel.own_fitted)
    return Kernel(kernels()["exponential"], filter=window), without
