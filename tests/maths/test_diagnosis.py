"""Tests that each hypothesis is named when its damage is planted, alone and with another, and not otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnlens.maths.diagnosis import Diagnosis, Layer, diagnose

Parts = dict[str, Tensor]
Change = Callable[[Layer], Parts]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZE, WIDTH = 12, 64
INTERLEAVE = torch.arange(SIZE).view(2, -1).T.flatten()
ROPE = [(pair, pair + SIZE // 2) for pair in range(SIZE // 2)]
KV_HEADS = {"whole": 4, "grouped": 2}


def draw(kind: str, seed: int = 0, rope: bool = True) -> Layer:
    """A random layer of 4 query heads on 4 key heads, or of 6 on 2, with biases, gains and another matrix."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = (4, 4) if kind == "whole" else (6, 2)
    shapes = {"query": heads, "key": kv_heads, "value": kv_heads, "output": heads}

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    parts = {f"{role}.weight": noise(count, SIZE, WIDTH) for role, count in shapes.items()}
    parts |= {f"{role}.bias": noise(count, SIZE) for role, count in shapes.items() if role != "output"}
    parts |= {"query.gain": 1 + 0.3 * noise(SIZE), "key.gain": 1 + 0.3 * noise(SIZE), "mlp.weight": noise(96, WIDTH)}
    return Layer(parts, frozenset({"query.gain", "key.gain"}), ROPE if rope else ())


def rows(layer: Layer, roles: Sequence[str] = ("query", "key"), heads: Sequence[int] | None = None) -> Parts:
    """The parts with the rows of these roles interleaved."""
    parts = {}
    for role in roles:
        chosen = range(len(layer.parts[f"{role}.weight"])) if heads is None else heads
        for name in (f"{role}.weight", f"{role}.bias"):
            parts[name] = layer.parts[name].clone()
            for head in chosen:
                parts[name][head] = layer.parts[name][head][INTERLEAVE]
        if heads is None:
            parts[f"{role}.gain"] = layer.parts[f"{role}.gain"][INTERLEAVE]
    return parts


def wrong_count(layer: Layer) -> Parts:
    """The keys permuted as if they had as many heads as the queries."""
    heads = len(layer.parts["query.weight"])
    parts = {}
    for name in ("key.weight", "key.bias"):
        part = layer.parts[name]
        parts[name] = part.reshape(heads, 2, -1, *part.shape[2:]).transpose(1, 2).reshape(part.shape)
    return parts


def reorder(*roles: str) -> Callable[[Layer], Parts]:
    def change(layer: Layer) -> Parts:
        return {
            name: part.roll(1, 0)
            for name, part in layer.parts.items()
            if name.split(".")[0] in roles and "gain" not in name
        }

    return change


def reorder_groups(layer: Layer) -> Parts:
    """Whole groups of query heads move with their key heads, values and output."""
    group = len(layer.parts["query.weight"]) // len(layer.parts["key.weight"])
    steps = {"query": group, "key": 1, "value": 1, "output": group}
    return {
        name: part.roll(steps[name.split(".")[0]], 0)
        for name, part in layer.parts.items()
        if name.split(".")[0] in steps and not name.endswith("gain")
    }


def tiled(layer: Layer) -> Parts:
    kv_heads = len(layer.parts["key.weight"])
    heads = len(layer.parts["query.weight"])
    order = torch.arange(heads).view(kv_heads, -1).T.flatten()
    return {name: layer.parts[name][order] for name in ("query.weight", "query.bias")}


def average(layer: Layer) -> Parts:
    names = [f"{role}.{kind}" for role in ("key", "value") for kind in ("weight", "bias")]
    return {name: layer.parts[name].mean(0, keepdim=True).expand_as(layer.parts[name]) for name in names}


def exchange(layer: Layer) -> Parts:
    others = {"query": "key", "key": "query"}
    kinds = ("weight", "bias", "gain")
    return {f"{role}.{kind}": layer.parts[f"{other}.{kind}"] for role, other in others.items() for kind in kinds}


def exchange_in_one_head(layer: Layer) -> Parts:
    parts = {name: layer.parts[name].clone() for name in ("query.weight", "key.weight", "query.bias", "key.bias")}
    for kind in ("weight", "bias"):
        parts[f"query.{kind}"][2], parts[f"key.{kind}"][2] = (
            layer.parts[f"key.{kind}"][2],
            layer.parts[f"query.{kind}"][2],
        )
    return parts


def rotate_roles(layer: Layer) -> Parts:
    sources = {"query": "key", "key": "value", "value": "query"}
    return {
        f"{role}.{kind}": layer.parts[f"{other}.{kind}"]
        for role, other in sources.items()
        for kind in ("weight", "bias")
    }


def split_flat(layer: Layer) -> Parts:
    """A fused matrix that holds query, key and value of each head in turn, cut in thirds."""
    parts = {}
    for kind in ("weight", "bias"):
        three = [layer.parts[f"{role}.{kind}"] for role in ("query", "key", "value")]
        fused = torch.cat([part[head] for head in range(len(three[0])) for part in three])
        for role, third in zip(("query", "key", "value"), fused.chunk(3), strict=True):
            parts[f"{role}.{kind}"] = third.reshape(three[0].shape)
    return parts


def scale(factor: float, *names: str) -> Callable[[Layer], Parts]:
    return lambda layer: {name: factor * layer.parts[name] for name in names or ("query.weight", "query.bias")}


def fill(value: float, *names: str) -> Callable[[Layer], Parts]:
    return lambda layer: {name: torch.full_like(layer.parts[name], value) for name in names}


def shift(layer: Layer) -> Parts:
    return {name: layer.parts[name] + 1 for name in ("query.gain", "key.gain")}


def quantise(bits: int, group: int = 0) -> Callable[[Layer], Parts]:
    """Round each row, or each group of values, of every matrix to 2^bits levels between its extremes."""

    def change(layer: Layer) -> Parts:
        parts = {}
        for name, part in layer.parts.items():
            if part.dim() > 1 and not name.endswith("bias"):
                matrix = part.permute(2, 0, 1).flatten(1) if name == "output.weight" else part.flatten(0, -2)
                groups = matrix.reshape(-1, group or matrix.shape[1])
                low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
                step = (high - low) / (2**bits - 1)
                coded = (((groups - low) / step).round() * step + low).reshape(matrix.shape)
                if name == "output.weight":
                    heads, size, width = part.shape
                    coded = coded.reshape(width, heads, size).permute(1, 2, 0)
                parts[name] = coded.reshape(part.shape)
        return parts

    return change


def adapt(rank: int, *names: str) -> Callable[[Layer], Parts]:
    """An update of that rank, 2 % of the matrix's size."""

    def change(layer: Layer) -> Parts:
        generator, parts = torch.Generator().manual_seed(9), {}
        for name in names or ("query.weight", "value.weight"):
            matrix = layer.parts[name].flatten(0, -2)
            factors = [torch.randn(side, rank, generator=generator) for side in matrix.shape]
            update = factors[0] @ factors[1].T
            parts[name] = (matrix + 0.02 * update * matrix.norm() / update.norm()).reshape(layer.parts[name].shape)
        return parts

    return change


def cast(kind: torch.dtype) -> Callable[[Layer], Parts]:
    return lambda layer: {name: part.to(kind).float() for name, part in layer.parts.items()}


def cast_scaled(kind: torch.dtype, by_row: bool) -> Change:
    """Divide each matrix or row by a factor, round it to a type, and multiply it by the factor."""

    def change(layer: Layer) -> Parts:
        parts = {}
        for name, part in layer.parts.items():
            if part.dim() > 1 and not name.endswith("bias"):
                rows = (part.permute(2, 0, 1).flatten(1) if name == "output.weight" else part.flatten(0, -2)).clone()
                factor = (rows.abs().amax(1, keepdim=True) if by_row else rows.abs().amax()) / torch.finfo(kind).max
                coded = (rows / factor).to(kind).float() * factor
                if name == "output.weight":
                    heads, size, width = part.shape
                    coded = coded.reshape(width, heads, size).permute(1, 2, 0)
                parts[name] = coded.reshape(part.shape)
        return parts

    return change


def transpose(layer: Layer) -> Parts:
    matrix = layer.parts["square.weight"]
    return {"square.weight": matrix.T.contiguous()}


def change_basis(layer: Layer) -> Parts:
    generator, parts = torch.Generator().manual_seed(3), dict(layer.parts)
    group = len(parts["query.weight"]) // len(parts["key.weight"])
    for name in ("query.weight", "query.bias", "key.weight", "key.bias"):
        parts[name] = parts[name].clone()
    for head in range(len(parts["key.weight"])):
        basis = torch.eye(SIZE) + 0.1 * torch.randn(SIZE, SIZE, generator=generator)
        for name, matrix in (("key", torch.linalg.inv(basis).T), ("query", basis)):
            places = [head] if name == "key" else range(head * group, (head + 1) * group)
            for place in places:
                for kind in ("weight", "bias"):
                    parts[f"{name}.{kind}"][place] = matrix @ parts[f"{name}.{kind}"][place]
    return parts


def scale_each(layer: Layer, axes: int = 1, *names: str) -> Parts:
    """A factor of its own for each head (`axes` 1) or row (2)."""
    generator = torch.Generator().manual_seed(6)
    parts = {}
    for name in names or ("query.weight",):
        part = layer.parts[name]
        factors = 0.5 + torch.rand(part.shape[:axes], generator=generator)
        for each in (name, name.replace("weight", "bias"))[: 3 - axes]:
            parts[each] = layer.parts[each] * factors.view(*factors.shape, *[1] * (layer.parts[each].dim() - axes))
    return parts


def scale_columns(layer: Layer) -> Parts:
    factors = 0.5 + torch.rand(WIDTH, generator=torch.Generator().manual_seed(6))
    return {f"{role}.weight": layer.parts[f"{role}.weight"] * factors for role in ("query", "key", "value")}


def quantise_columns(layer: Layer) -> Parts:
    matrix = layer.parts["mlp.weight"].T
    return {"mlp.weight": quantise(4)(layer.with_parts({"mlp.weight": matrix}))["mlp.weight"].T}


def exchange_key_and_value(layer: Layer) -> Parts:
    return {f"{a}.weight": layer.parts[f"{b}.weight"] for a, b in (("key", "value"), ("value", "key"))}


def adapt_strongly(layer: Layer) -> Parts:
    generator, matrix = torch.Generator().manual_seed(9), layer.parts["mlp.weight"]
    factors = [torch.randn(side, 4, generator=generator) for side in matrix.shape]
    update = factors[0] @ factors[1].T
    return {"mlp.weight": matrix + 0.5 * update * matrix.norm() / update.norm()}


def swap_gates(layer: Layer) -> Parts:
    part = layer.parts["key.weight"].clone()
    part[0] = part[0][torch.randperm(SIZE, generator=torch.Generator().manual_seed(4))]
    return {"key.weight": part}


def mix_heads(*roles: str, biases: bool = True) -> Callable[[Layer], Parts]:
    """One permutation of all rows across heads, the same for roles with as many heads."""

    def change(layer: Layer) -> Parts:
        parts = {}
        for role in roles:
            for name in (f"{role}.weight", f"{role}.bias")[: 1 + biases]:
                part = layer.parts[name]
                order = torch.randperm(len(part) * SIZE, generator=torch.Generator().manual_seed(8))
                parts[name] = part.flatten(0, 1)[order].reshape(part.shape)
        return parts

    return change


SINGLES: dict[str, tuple[Change, str, list[str]]] = {
    "interleaved": (rows, "both", ["interleaved rows"]),
    "interleaved in one head": (lambda layer: rows(layer, heads=[1]), "whole", ["interleaved rows"]),
    "keys alone interleaved": (lambda layer: rows(layer, ["key"]), "both", ["interleaved rows"]),
    "some permutation": (swap_gates, "both", ["permuted rows"]),
    "across heads": (mix_heads("query", "key"), "both", ["rows across heads"]),
    "across heads, without biases": (mix_heads("query", "key", biases=False), "both", ["rows across heads"]),
    "queries across heads": (mix_heads("query"), "both", ["rows across heads"]),
    "keys across heads": (mix_heads("key"), "both", ["rows across heads"]),
    "wrong head count": (wrong_count, "grouped", ["interleaved rows of 6 heads"]),
    "heads reordered": (reorder_groups, "both", ["reordered heads"]),
    "heads of q and k reordered": (reorder("query", "key"), "whole", ["heads out of order"]),
    "tiled": (tiled, "grouped", ["tiled key heads"]),
    "averaged": (average, "grouped", ["averaged key heads"]),
    "exchanged": (exchange, "whole", ["exchanged"]),
    "exchanged in one head": (exchange_in_one_head, "whole", ["exchanged"]),
    "roles rotated": (rotate_roles, "whole", ["exchanged"]),
    "flat split": (split_flat, "whole", ["wrong split"]),
    "bias dropped": (fill(0, "query.bias"), "both", ["bias dropped"]),
    "gain lost": (fill(1, "query.gain", "key.gain"), "both", ["gain dropped"]),
    "1 + g": (shift, "both", ["gain offset"]),
    "scaled": (scale(SIZE**-0.5), "both", ["scaled"]),
    "8 bits": (quantise(8), "both", ["quantised to 8 bits"]),
    "4 bits in groups": (quantise(4, 16), "whole", ["quantised to 4 bits"]),
    "3 bits": (quantise(3), "both", ["quantised to 3 bits"]),
    "LoRA": (adapt(3), "both", ["rank 3 update"]),
    "bf16": (cast(torch.bfloat16), "both", ["rounded to bfloat16"]),
    "fp16": (cast(torch.float16), "both", ["rounded to float16"]),
    "float8, 3 bits of mantissa": (cast(E4M3), "both", ["rounded to float8_e4m3fn"]),
    "float8, 2 bits of mantissa": (cast(E5M2), "both", ["rounded to float8_e5m2"]),
    "float8 with one factor": (cast_scaled(E4M3, by_row=False), "both", ["quantised to float8_e4m3fn"]),
    "float8 by row": (cast_scaled(E4M3, by_row=True), "both", ["quantised to float8_e4m3fn"]),
    "wider float8 by row": (cast_scaled(E5M2, by_row=True), "both", ["quantised to float8_e5m2"]),
    "basis": (change_basis, "both", ["another basis"]),
    "key zeroed": (fill(0, "key.weight"), "both", ["zeros"]),
    "gain zeroed": (fill(0, "query.gain"), "both", ["zeros"]),
    "factor per head": (scale_each, "both", ["heads scaled"]),
    "factor per row": (lambda layer: scale_each(layer, 2), "both", ["rows scaled"]),
    "factor per column": (scale_columns, "both", ["columns scaled"]),
    "4 bits by column": (quantise_columns, "both", ["quantised to 4 bits"]),
    "key and value exchanged": (exchange_key_and_value, "both", ["exchanged"]),
}


def apply(layer: Layer, *changes: Change) -> Layer:
    """The layer after these changes, with the number types in which its parts can be stored."""
    for change in changes:
        layer = layer.with_parts(change(layer))
    exact = {name: torch.equal(part, part.bfloat16().float()) for name, part in layer.parts.items()}
    spacing = {name: torch.finfo(torch.bfloat16).eps for name, each in exact.items() if each}
    return replace(layer, spacing=spacing if all(exact.values()) else {})


def kinds_of(layouts: str) -> list[str]:
    return [*KV_HEADS] if layouts == "both" else [layouts]


def names(diagnosis: Diagnosis) -> list[str]:
    return sorted(cause.hypothesis for cause in diagnosis.causes)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, each in SINGLES.items() for kind in kinds_of(each[1])]
)
def test_each_hypothesis_is_named_alone(name, kind):
    change, _, expected = SINGLES[name]
    first = draw(kind)
    diagnosis = diagnose(first, apply(first, change))
    assert names(diagnosis) == expected
    assert not diagnosis.unexplained
    assert diagnosis.closest is None


PAIRS = [
    ("interleaved", "bf16"),
    ("interleaved", "bias dropped"),
    ("interleaved", "LoRA"),
    ("interleaved", "8 bits"),
    ("interleaved", "3 bits"),
    ("interleaved", "scaled"),
    ("interleaved", "gain lost"),
    ("keys alone interleaved", "1 + g"),
    ("some permutation", "LoRA"),
    ("across heads", "bf16"),
    ("across heads, without biases", "bf16"),
    ("keys across heads", "bf16"),
    ("queries across heads", "LoRA"),
    ("heads reordered", "bf16"),
    ("exchanged", "bf16"),
    ("exchanged", "interleaved"),
    ("flat split", "interleaved"),
    ("flat split", "bf16"),
    ("factor per head", "bf16"),
    ("factor per head", "interleaved"),
    ("exchanged", "scaled"),
    ("LoRA", "1 + g"),
    ("scaled", "bias dropped of keys"),
    ("1 + g", "bf16"),
    ("tiled", "3 bits"),
    ("interleaved", "float8 by row"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_causes_are_named_together(one, other):
    all_singles = SINGLES | {"bias dropped of keys": (fill(0, "key.bias"), "both", ["bias dropped"])}
    kind = "grouped" if "grouped" in (all_singles[one][1], all_singles[other][1]) else "whole"
    first = draw(kind)
    diagnosis = diagnose(first, apply(first, all_singles[one][0], all_singles[other][0]))
    assert names(diagnosis) == sorted(all_singles[one][2] + all_singles[other][2])
    assert not diagnosis.unexplained


def unrelated(seed: int) -> tuple[str, Layer, Layer]:
    """A pair of layers with a change that no hypothesis describes, and the kind of change."""
    generator = torch.Generator().manual_seed(1000 + seed)
    first = draw("whole" if seed % 2 else "grouped", seed, rope=seed % 3 > 0)

    def noise(part: Tensor) -> Tensor:
        return torch.randn(part.shape, generator=generator)

    def change_parts(change: Callable[[Tensor], Tensor], share: float = 1.0) -> Layer:
        chosen = [name for name in first.parts if torch.rand(1, generator=generator) < share]
        return first.with_parts({name: change(first.parts[name]) for name in chosen or ["key.weight"]})

    size = 10 ** (-5 + 5 * float(torch.rand(1, generator=generator)))
    kinds: list[tuple[str, Callable[[], Layer]]] = [
        ("noise", lambda: change_parts(lambda part: part + size * noise(part))),
        ("noise in some tensors", lambda: change_parts(lambda part: part + size * noise(part), 0.3)),
        ("steps of one size", lambda: change_parts(lambda part: part + size * noise(part).sign())),
        ("full-rank training", lambda: change_parts(lambda part: part + size * noise(part) * part.abs())),
        ("another seed", lambda: draw("whole" if seed % 2 else "grouped", seed + 5000)),
        ("pruned", lambda: change_parts(lambda part: part * (noise(part) > -1))),
        (
            "one head trained",
            lambda: first.with_parts({"key.weight": _in_one_head(first.parts["key.weight"], size, noise)}),
        ),
        ("3 bits", lambda: apply(first, quantise(3, (0, 16)[seed % 2]))),
    ]
    kind, build = kinds[seed % len(kinds)]
    return kind, first, build()


def _in_one_head(part: Tensor, size: float, noise: Callable[[Tensor], Tensor]) -> Tensor:
    changed = part.clone()
    changed[1] += size * noise(part)[1]
    return changed


@pytest.mark.parametrize("kind", KV_HEADS)
def test_a_bias_has_the_factors_of_the_rows_of_its_matrix(kind):
    first = draw(kind)
    first = first.with_parts({"mlp.bias": torch.linspace(-1, 1, 96)})
    factors = {name: 0.5 + torch.rand(first.parts[f"{name}.weight"].shape[:-1]) for name in ("query", "mlp")}
    scaled = {
        f"{name}.{part}": first.parts[f"{name}.{part}"] * (factor[..., None] if part == "weight" else factor)
        for name, factor in factors.items()
        for part in ("weight", "bias")
    }
    diagnosis = diagnose(first, first.with_parts(scaled))
    assert [(cause.hypothesis, cause.parts) for cause in diagnosis.causes] == [
        ("rows scaled", ("query.weight", "query.bias")),
        ("rows scaled", ("mlp.weight", "mlp.bias")),
    ]
    assert not diagnosis.unexplained
    other = diagnose(first, first.with_parts(scaled | {"query.bias": scaled["query.bias"].flip(-1)}))  # the control
    assert other.unexplained == ["query.bias"]


@pytest.mark.parametrize("pairs", [8, pytest.param(200, marks=pytest.mark.full)])
def test_unrelated_changes_are_not_diagnosed(pairs):
    false = []
    for seed in range(pairs):
        kind, first, second = unrelated(seed)
        diagnosis = diagnose(first, second)
        allowed = {"quantised to 3 bits"} if kind == "3 bits" else set()
        false += [(seed, kind, name) for name in set(names(diagnosis)) - allowed]
        assert diagnosis.causes or diagnosis.unexplained
    assert len(false) <= pairs // 200, false


# --- harmless or not ------------------------------------------------------------------------------------------------


def without_gains(layer: Layer) -> Layer:
    return replace(layer, parts={name: part for name, part in layer.parts.items() if "gain" not in name})


def turn_pairs(layer: Layer, angle: float = 0.7) -> Layer:
    """Rotate the pairs of W_Q and W_K that RoPE rotates, by the same angle."""
    turn = torch.eye(SIZE)
    for one, other in ROPE:
        turn[one, one] = turn[other, other] = math.cos(angle)
        turn[other, one], turn[one, other] = math.sin(angle), -math.sin(angle)
    names = [f"{role}.{kind}" for role in ("query", "key") for kind in ("weight", "bias")]
    return layer.with_parts({name: torch.einsum("ij,hj...->hi...", turn, layer.parts[name]) for name in names})


def test_another_basis_is_harmless_only_without_norms():
    for rope in (True, False):
        normed = draw("whole", rope=rope)
        plain = without_gains(normed)
        (cause,) = diagnose(plain, turn_pairs(plain)).causes
        assert cause.harmless
        assert cause.text.endswith("attention is the same")
        (cause,) = diagnose(normed, turn_pairs(normed)).causes
        assert not cause.harmless
        assert "does not commute" in cause.text
        assert cause.repair is not None
        norm = plain.with_parts({"attn.q_norm.weight": torch.rand(SIZE)})  # a norm whose role is unknown
        assert not diagnose(norm, turn_pairs(norm)).causes[0].harmless
        elsewhere = replace(norm, headless=frozenset({"attn.q_norm.weight"}))
        assert diagnose(elsewhere, turn_pairs(elsewhere)).causes[0].harmless
    general = diagnose(plain := without_gains(draw("whole")), plain.with_parts(change_basis(plain))).causes
    assert not general[0].harmless
    assert "RoPE" in general[0].text


HEADED = {"sinks": (4,), "relative_attention_bias.weight": (32, 4), "head_norm.weight": (48,)}


@pytest.mark.parametrize("name", HEADED)
@pytest.mark.parametrize("known", [False, True])
def test_reordered_heads_are_harmless_only_if_all_tensors_of_heads_moved(name, known):
    generator = torch.Generator().manual_seed(1)
    first = draw("whole").with_parts({name: torch.randn(HEADED[name], generator=generator)})
    moved = first.with_parts(reorder("query", "key", "value", "output")(first))
    order = (1, 2, 3, 0) if known else ()
    (cause,) = diagnose(first, moved, order).causes
    assert not cause.harmless
    assert cause.text.endswith(f"but {name} is unchanged")
    assert name in cause.repair
    width = 12 if name == "head_norm.weight" else 1
    both = moved.with_parts({name: first.parts[name].roll(width, -1)})
    diagnosis = diagnose(first, both, order)
    assert [(cause.hypothesis, cause.harmless) for cause in diagnosis.causes] == [("reordered heads", True)]
    assert not diagnosis.unexplained
    outside = frozenset({name})
    (cause,) = diagnose(replace(first, headless=outside), replace(moved, headless=outside), order).causes
    assert cause.harmless


def test_gains_over_all_heads_move_with_the_heads():
    first = draw("grouped")
    gains = {"query.gain": torch.rand(6 * SIZE), "key.gain": torch.rand(2 * SIZE)}
    first = first.with_parts(gains)
    moved = first.with_parts(reorder_groups(first))
    (cause,) = diagnose(first, moved).causes
    assert not cause.harmless
    assert "g_Q and g_K are unchanged" in cause.text
    both = moved.with_parts(
        {"query.gain": gains["query.gain"].roll(3 * SIZE), "key.gain": gains["key.gain"].roll(SIZE)}
    )
    diagnosis = diagnose(first, both)
    assert [(cause.hypothesis, cause.harmless) for cause in diagnosis.causes] == [("reordered heads", True)]
    assert not diagnosis.unexplained


@pytest.mark.parametrize("kind", KV_HEADS)
def test_rows_of_values_reordered_alike_are_harmless(kind):
    first, order = draw(kind), torch.randperm(SIZE, generator=torch.Generator().manual_seed(2))
    values = {name: first.parts[name][:, order] for name in ("value.weight", "value.bias")}
    output = {"output.weight": first.parts["output.weight"][:, order]}
    (cause,) = diagnose(first, first.with_parts(values | output)).causes
    assert cause.harmless
    assert "rows of W_V" in cause.text
    assert "columns of W_O" in cause.text
    assert cause.text.endswith("the same in both: attention's output is the same")
    for parts in (values, output, values | {"output.weight": first.parts["output.weight"][:, order.flip(0)]}):
        diagnosis = diagnose(first, first.with_parts(parts))
        assert diagnosis.causes
        assert not diagnosis.unexplained
        assert not any(cause.harmless for cause in diagnosis.causes)
        assert all(cause.repair for cause in diagnosis.causes)
    stays = first.with_parts(values | output | {"value.bias": first.parts["value.bias"]})
    (cause,) = diagnose(first, stays).causes
    assert not cause.harmless
    assert "b_V is unchanged" in cause.text


@pytest.mark.parametrize("kind", KV_HEADS)
def test_a_factor_of_values_divided_out_of_the_output_is_harmless(kind):
    first = draw(kind)
    scaled = {name: 3 * first.parts[name] for name in ("value.weight", "value.bias")}
    output = first.parts["output.weight"]
    (cause,) = diagnose(first, first.with_parts(scaled | {"output.weight": output / 3})).causes
    assert cause.harmless
    assert cause.text.startswith("W_V is multiplied by 3 and W_O divided by it")
    causes = diagnose(first, first.with_parts(scaled | {"output.weight": output / 2})).causes
    assert not any(cause.harmless for cause in causes)


# --- single tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_a_cause(number):
    first = draw("whole")
    spoiled = rows(first)
    spoiled["value.weight"] = first.parts["value.weight"].clone()
    spoiled["value.weight"][2, 3, 4] = number
    diagnosis = diagnose(first, first.with_parts(spoiled))
    assert names(diagnosis) == ["interleaved rows", "not finite"]
    assert not diagnosis.unexplained
    cause = next(cause for cause in diagnosis.causes if cause.hypothesis == "not finite")
    assert (cause.parts, cause.heads) == (("value.weight",), (2,))
    assert cause.text == "W_V contains NaN or infinite numbers"
    both = first.with_parts({"value.weight": spoiled["value.weight"]})
    assert diagnose(both, both) == Diagnosis()


def test_changed_rows_are_counted():
    first = draw("whole").with_parts({"embed.weight": torch.randn(200, WIDTH)})
    rows_of = {name: first.parts[name].clone() for name in ("embed.weight", "value.weight", "mlp.weight")}
    rows_of["embed.weight"][90:98] += 1
    rows_of["value.weight"][1, 3:5] *= -1
    rows_of["mlp.weight"][:, 7] += torch.randn(96)
    diagnosis = diagnose(first, first.with_parts(rows_of))
    assert {cause.text: cause.heads for cause in diagnosis.causes} == {
        "embed.weight is changed in 8 rows only: 90–97": (),
        "W_V is changed in 2 rows only: 15–16": (1,),
        "mlp.weight is changed in 1 column only: 7": (),
    }
    assert not diagnosis.unexplained
    dense = first.with_parts(adapt(2, "mlp.weight")(first))  # the control
    assert names(diagnose(first, dense)) == ["rank 2 update"]


def test_rows_that_changed_slightly_were_trained_and_need_no_repair():
    first = draw("whole").with_parts({"embed.weight": torch.randn(200, WIDTH)})
    embedding = first.parts["embed.weight"].clone()
    embedding[90:98] += 1e-3 * torch.randn(8, WIDTH)
    (cause,) = diagnose(first, first.with_parts({"embed.weight": embedding})).causes
    text = "embed.weight is changed in 8 rows only: 90–97 (by at most a tenth of their size, as in training)"
    assert (cause.text, cause.repair, cause.harmless) == (text, None, False)
    embedding[3] = 0  # one row is lost
    (cause,) = diagnose(first, first.with_parts({"embed.weight": embedding})).causes
    assert cause.repair == "copy the rows from the first model"


def test_few_values_are_neither_a_grid_nor_changed_rows():
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(8, 4, generator=generator)
    first = draw("whole").with_parts(
        {"table.weight": table, "types.weight": torch.randn(2, WIDTH, generator=generator)}
    )
    codebook = torch.randn(8, generator=generator)
    coded = codebook[(table[..., None] - codebook).abs().argmin(-1)]
    types = first.parts["types.weight"] * (torch.rand(2, WIDTH, generator=generator) > 0.2)
    diagnosis = diagnose(first, first.with_parts({"table.weight": coded, "types.weight": types}))
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["table.weight", "types.weight"])


def test_a_few_changed_values_are_neither_changed_rows_nor_an_update_of_low_rank():
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))
    first = draw("whole").with_parts({"table.weight": table})
    pruned = table.clone()
    pruned[[2, 5], 1] = 0
    diagnosis = diagnose(first, first.with_parts({"table.weight": pruned}))
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["table.weight"])
    pruned[:, 1] = 0  # the control
    assert names(diagnose(first, first.with_parts({"table.weight": pruned}))) == ["columns replaced"]


def test_lost_precision_is_named_only_if_nothing_else_changed_without_an_explanation():
    """Training changes all tensors, few values of which can look like those that rounding lost."""
    exact = draw("whole")
    rounded = apply(exact, cast(torch.bfloat16))
    noise = 0.1 * torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(3))
    trained = exact.with_parts({"mlp.weight": exact.parts["mlp.weight"] + noise})
    diagnosis = diagnose(rounded, replace(trained, spacing={}))
    assert not diagnosis.causes
    assert {"query.weight", "mlp.weight"} <= {*diagnosis.unexplained}
    added = rounded.with_parts({"query.bias": torch.zeros(4, SIZE)})
    assert names(diagnose(added, added.with_parts({"query.bias": torch.full((4, SIZE), 1e-6)}))) == ["bias added"]


def test_factors_near_one_are_written_with_enough_digits():
    first = draw("whole")
    (cause,) = diagnose(first, first.with_parts(scale(1.0005, "mlp.weight")(first))).causes
    assert (cause.text, cause.repair) == ("mlp.weight is multiplied by 1.0005", "divide by 1.0005")
    tiny = diagnose(first, first.with_parts(scale(1 + 3e-7, "mlp.weight")(first)))
    assert not any(cause.hypothesis == "scaled" for cause in tiny.causes)


@pytest.mark.parametrize(
    ("levels", "bits"), [(2, "1 bit"), (3, "2 bits"), (7, "3 bits"), (15, "4 bits"), (255, "8 bits")]
)
def test_symmetric_grids_have_the_bits_of_their_levels(levels, bits):
    first = draw("whole").with_parts({"mlp.weight": torch.randn(64, 4096, generator=torch.Generator().manual_seed(5))})
    part, half = first.parts["mlp.weight"], (levels - 1) / 2
    if levels == 2:
        coded = part.sign() * part.abs().mean(1, keepdim=True)
    else:
        step = part.abs().amax(1, keepdim=True) / half
        coded = (part / step).round() * step
    (cause,) = diagnose(first, first.with_parts({"mlp.weight": coded})).causes
    assert cause.hypothesis == f"quantised to {bits}"
    assert cause.text == f"mlp.weight is quantised to {bits} row by row"


def test_rows_across_heads_are_damage_and_orders_within_heads_keep_their_names():
    first = draw("whole")
    (cause,) = diagnose(first, apply(first, mix_heads("query", "key"))).causes
    assert (cause.text, cause.harmless, cause.heads) == (
        "the rows of W_Q and W_K are in a different order across heads",
        False,
        (),
    )
    assert cause.repair == "write the rows of W_Q and W_K in the first model's order"
    (cause,) = diagnose(first, apply(first, mix_heads("key", biases=False))).causes
    assert cause.text == "the rows of W_K are in a different order across heads, but b_K is unchanged"
    swapped = first.parts["key.weight"].clone()
    swapped[[1, 2], 0] = swapped[[2, 1], 0]  # two rows of two heads
    (cause,) = diagnose(first, first.with_parts({"key.weight": swapped})).causes
    assert (cause.hypothesis, cause.heads) == ("rows across heads", (1, 2))
    for change, expected in ((rows, "interleaved rows"), (reorder("query", "key"), "heads out of order")):
        assert names(diagnose(without_gains(first), without_gains(apply(first, change)))) == [expected]


def test_biases_that_stay_are_named_with_reordered_heads():
    first, order = draw("whole"), [0, 2, 1, 3]
    weight = {"query.weight": first.parts["query.weight"][order]}
    diagnosis = diagnose(first, first.with_parts(weight))
    (cause,) = diagnosis.causes
    assert (cause.hypothesis, cause.heads, diagnosis.unexplained) == ("heads out of order", (1, 2), [])
    assert "but b_Q, " in cause.text
    assert "are unchanged" in cause.text
    both = first.with_parts(weight | {"query.bias": first.parts["query.bias"][order]})
    (cause,) = diagnose(first, both).causes
    assert "b_Q" not in cause.text


def test_exchanged_gains_and_keys_averaged_alone_are_named():
    first = draw("whole")
    gains = {"query.gain": first.parts["key.gain"], "key.gain": first.parts["query.gain"]}
    (cause,) = diagnose(first, first.with_parts(gains)).causes
    assert (cause.hypothesis, cause.text) == ("exchanged", "g_Q and g_K are exchanged")
    keys = {}
    for name in ("key.weight", "key.bias"):
        part = first.parts[name]
        keys[name] = part.view(2, 2, *part.shape[1:]).mean(1).repeat_interleave(2, 0)
    diagnosis = diagnose(first, first.with_parts(keys))
    assert [(cause.hypothesis, cause.text) for cause in diagnosis.causes] == [
        ("averaged key heads", "4 key heads were averaged in groups of 2 (W_K)")
    ]
    assert not diagnosis.unexplained


def scale_heads(layer: Layer) -> Parts:
    part = layer.parts["query.weight"].clone()
    part[1:3] *= 0.5
    return {"query.weight": part}


@pytest.mark.parametrize(
    ("change", "expected"), [(scale_heads, "scaled"), (adapt(3), "rank 3 update"), (scale(0.7), "scaled")]
)
def test_rounding_after_another_change_is_named(change, expected):
    first = draw("whole")
    diagnosis = diagnose(first, apply(first, change, cast(torch.bfloat16)))
    assert names(diagnosis) == sorted([expected, "rounded to bfloat16"])
    assert not diagnosis.unexplained
    if change is scale_heads:
        assert next(cause for cause in diagnosis.causes if cause.hypothesis == "scaled").heads == (1, 2)


@pytest.mark.parametrize("changes", [(adapt(3), quantise(4)), (quantise(8), cast(torch.bfloat16))])
def test_pairs_beyond_the_search_get_no_wrong_cause(changes):
    first = draw("whole")
    diagnosis = diagnose(first, apply(first, *changes))
    allowed = {"rounded to bfloat16", "quantised to 4 bits", "quantised to 8 bits"}
    assert {cause.hypothesis for cause in diagnosis.causes} <= allowed


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [0, 64])
def test_a_grid_is_found_in_values_rounded_after_dequantisation(kind, bits, group):
    first = draw("whole").with_parts({"mlp.weight": torch.randn(48, 256, generator=torch.Generator().manual_seed(7))})
    part = first.parts["mlp.weight"]
    values = part.reshape(-1, group or 256)
    step = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    coded = ((values / step).round() * step).reshape(part.shape)
    second = first.with_parts({"mlp.weight": coded.to(kind).float()})
    spacing = {"mlp.weight": max(torch.finfo(kind).eps, torch.finfo(torch.float32).eps)}
    diagnosis = diagnose(first, replace(second, spacing=spacing))
    where = f"in groups of {group} values" if group else "row by row"
    assert [cause.text for cause in diagnosis.causes] == [f"mlp.weight is quantised to {bits} bits {where}"]
    noisy = coded + 0.3 * step.mean() * torch.randn(coded.shape, generator=torch.Generator().manual_seed(8))
    assert not diagnose(first, first.with_parts({"mlp.weight": noisy.to(kind).float()})).causes


def test_an_update_before_quantisation_is_named_with_its_rank():
    first = draw("whole").with_parts({"mlp.weight": torch.randn(96, 128, generator=torch.Generator().manual_seed(7))})
    only = {"mlp.weight": apply(first, adapt_strongly, quantise(4)).parts["mlp.weight"]}
    (cause,) = diagnose(first, first.with_parts(only)).causes
    assert cause.hypothesis == "rank 4 update, quantised to 4 bits"
    assert cause.text == "mlp.weight is changed by an update of rank 4, then quantised to 4 bits row by row"

    def retrain(layer: Layer) -> Parts:
        return {"mlp.weight": layer.parts["mlp.weight"] + 0.5 * torch.randn(96, 128)}

    only = {"mlp.weight": apply(first, retrain, quantise(4)).parts["mlp.weight"]}
    diagnosis = diagnose(first, first.with_parts(only))
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["mlp.weight"])


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_float8_has_the_factor_of_the_matrix_row_or_group(kind, stored):
    first = draw("whole").with_parts({"mlp.weight": torch.randn(48, 256, generator=torch.Generator().manual_seed(7))})
    part, name = first.parts["mlp.weight"], str(kind).removeprefix("torch.")
    for size, where in ((part.numel(), "with one factor"), (256, "row by row"), (128, "in groups of 128 values")):
        values = part.reshape(-1, size)
        factors = values.abs().amax(1, keepdim=True) / torch.finfo(kind).max
        coded = ((values / factors).to(kind).float() * factors).reshape(part.shape).to(stored).float()
        spacing = {"mlp.weight": max(torch.finfo(stored).eps, torch.finfo(torch.float32).eps)}
        (cause,) = diagnose(first, replace(first.with_parts({"mlp.weight": coded}), spacing=spacing)).causes
        assert cause.text == f"mlp.weight is quantised to {name} {where}"
    moved = part + 0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(8))
    trained = first.with_parts(
        {"mlp.weight": moved.to(kind).float()}
    )  # the control: exact, but not the nearest numbers
    diagnosis = diagnose(first, trained)
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["mlp.weight"])


def test_numbers_that_are_too_small_for_a_type_are_lost():
    first = draw("whole").with_parts({"query.bias": torch.full((4, SIZE), 1e-5)})
    for second in (cast(E4M3)(first)["query.bias"], torch.zeros(4, SIZE)):
        assert names(diagnose(first, first.with_parts({"query.bias": second}))) == ["bias dropped"]


def test_training_steps_from_float8_are_not_lost_precision():
    exact = draw("whole").with_parts({"mlp.weight": 0.02 * torch.randn(96, WIDTH)})  # many numbers are subnormal
    rounded = exact.with_parts({"mlp.weight": exact.parts["mlp.weight"].to(E4M3).float()})
    assert names(diagnose(rounded, exact)) == ["first rounded to float8_e4m3fn"]
    steps = 1e-4 * torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(3))
    assert not diagnose(rounded, rounded.with_parts({"mlp.weight": rounded.parts["mlp.weight"] + steps})).causes


@pytest.mark.parametrize("bits", [3, 4])
def test_a_grid_whose_errors_are_compensated_is_named(bits):
    """As in GPTQ, the error of each column is added to the next ones."""
    generator = torch.Generator().manual_seed(7)
    first = draw("whole").with_parts({"mlp.weight": torch.randn(96, 128, generator=generator)})
    part = first.parts["mlp.weight"]
    low, high = part.amin(1), part.amax(1)
    step = (high - low) / (2**bits - 1)
    coded, left = torch.empty_like(part), part.clone()
    for column in range(128):
        coded[:, column] = low + step * ((left[:, column] - low) / step).round().clamp(0, 2**bits - 1)
        left[:, column + 1 :] += 0.1 * (left[:, column] - coded[:, column])[:, None]
    (cause,) = diagnose(first, first.with_parts({"mlp.weight": coded})).causes
    assert cause.hypothesis == f"quantised to {bits} bits"
    assert cause.text.endswith("row by row, not always to the nearest level (as GPTQ does, or after a small change)")
    other = first.with_parts({"mlp.weight": part.flip(0)})  # the control: rows of another matrix
    diagnosis = diagnose(other, first.with_parts({"mlp.weight": coded}))
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["mlp.weight"])


def test_a_grid_of_many_small_and_few_large_values_is_found_after_rounding():
    """Most values are on a few levels, and all values of a level are rounded alike."""
    generator = torch.Generator().manual_seed(7)
    part = torch.randn(64, 512, generator=generator) ** 3
    first = draw("whole").with_parts({"mlp.weight": part})
    step = part.abs().amax(1, keepdim=True) / 127
    coded = ((part / step).round() * step).bfloat16().float()
    second = replace(first.with_parts({"mlp.weight": coded}), spacing={"mlp.weight": torch.finfo(torch.bfloat16).eps})
    assert names(diagnose(first, second)) == ["quantised to 8 bits"]


def test_small_training_steps_from_rounded_weights_are_not_lost_precision():
    exact = draw("whole")
    rounded = apply(exact, cast(torch.bfloat16))
    causes = diagnose(rounded, replace(exact, spacing={})).causes
    assert {cause.hypothesis for cause in causes} == {"first rounded to bfloat16"}
    generator = torch.Generator().manual_seed(3)
    steps = {
        name: part * (1 + 1e-4 * torch.randn(part.shape, generator=generator)) for name, part in rounded.parts.items()
    }
    assert not diagnose(rounded, replace(rounded.with_parts(steps), spacing={})).causes


def test_a_few_gains_after_training_steps_are_not_lost_precision():
    """Training steps have sizes up to some number, while rounding errors are uniform up to half a unit."""
    generator = torch.Generator().manual_seed(1)
    exact = 0.5 + 0.49 * torch.rand(40, generator=generator)
    rounded = exact.bfloat16().float()
    first = Layer({"norm.weight": rounded}, frozenset({"norm.weight"}))
    assert names(diagnose(first, first.with_parts({"norm.weight": exact}))) == ["first rounded to bfloat16"]
    steps = 0.65 * 2**-9 * torch.linspace(-1, 1, 40)  # half a unit is 2⁻⁹
    diagnosis = diagnose(first, first.with_parts({"norm.weight": rounded + steps}))
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["norm.weight"])


def test_an_update_is_of_low_rank_only_to_the_rounding_of_the_second_model():
    """Training steps from bfloat16 weights have singular values that fall below the rounding of these weights."""
    first = apply(draw("whole"), cast(torch.bfloat16))
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(size, WIDTH, generator=generator)).Q for size in (96, WIDTH))
    sizes = 2.0 * 0.5 ** torch.arange(WIDTH)
    weight = first.parts["mlp.weight"]
    for used, expected in ((6, ["rank 6 update"]), (WIDTH, [])):
        update = left[:, :used] * sizes[:used] @ right[:, :used].T
        second = replace(first.with_parts({"mlp.weight": weight + update}), spacing={})
        assert names(diagnose(first, second)) == expected


def test_biases_are_added_only_if_nothing_else_changed_without_an_explanation():
    second = draw("whole")
    first = second.with_parts({"query.bias": torch.zeros(4, SIZE)})
    assert names(diagnose(first, second)) == ["bias added"]
    other = second.with_parts({"mlp.weight": second.parts["mlp.weight"] + 0.1 * torch.randn(96, WIDTH)})
    diagnosis = diagnose(first, other)
    assert (diagnosis.causes, diagnosis.unexplained) == ([], ["query.bias", "mlp.weight"])


def test_tensors_without_heads_in_the_place_of_others_are_named():
    generator = torch.Generator().manual_seed(4)
    extra = {name: torch.randn(96, WIDTH, generator=generator) for name in ("mlp.gate.weight", "mlp.up.weight")}
    first = draw("whole").with_parts(extra)
    swapped = {"mlp.gate.weight": extra["mlp.up.weight"], "mlp.up.weight": extra["mlp.gate.weight"]}
    (cause,) = diagnose(first, first.with_parts(swapped)).causes
    assert cause.text == "mlp.gate.weight and mlp.up.weight are exchanged"
    (cause,) = diagnose(first, first.with_parts({"mlp.up.weight": extra["mlp.gate.weight"]})).causes
    assert (cause.hypothesis, cause.text) == ("misplaced", "mlp.up.weight contains the values of mlp.gate.weight")


def test_a_step_before_another_says_what_it_leaves():
    first = draw("whole")
    diagnosis = diagnose(first, apply(first, rows, adapt(3)))
    step = next(cause for cause in diagnosis.causes if cause.hypothesis == "interleaved rows")
    assert 0.001 < step.residual < 0.1


def test_parts_named_like_a_role_have_no_heads():
    """In BERT's blocks, tensors of the MLP are called output.dense and output.LayerNorm."""
    first = draw("whole").with_parts(
        {"output.dense.weight": torch.randn(WIDTH, 96), "output.LayerNorm.weight": torch.rand(WIDTH)}
    )
    changed = {name: part + 0.1 * torch.randn(part.shape) for name, part in first.parts.items() if "output." in name}
    changed.pop("output.weight")
    diagnosis = diagnose(first, first.with_parts(changed))
    assert (diagnosis.causes, diagnosis.unexplained) == ([], [*changed])


def test_a_key_bias_is_harmless_only_if_softmax_cancels_it():
    first = draw("plain", rope=False)
    first = without_gains(first)
    second = apply(first, fill(0, "key.bias"))
    for invariant in (True, False):
        (cause,) = diagnose(replace(first, shift_invariant=invariant), second).causes
        assert (cause.hypothesis, cause.harmless) == ("bias dropped", invariant)


def with_norms(kind: str = "whole") -> Layer:
    """A layer with a LayerNorm before attention, one before the MLP, and two matrices that read the latter."""
    first = draw(kind)
    generator = torch.Generator().manual_seed(7)
    extra = {
        name: torch.randn(shape, generator=generator)
        for name, shape in {
            "mlp.up.weight": (96, WIDTH),
            "mlp.weight": (96, WIDTH),
            "mlp.down.weight": (WIDTH, 96),
            "norm.bias": (WIDTH,),
        }.items()
    }
    extra |= {name: 1 + 0.3 * torch.randn(WIDTH, generator=generator) for name in ("norm.weight", "last.weight")}
    outside = frozenset(extra)
    return replace(first.with_parts(extra), gains=first.gains | {"norm.weight", "last.weight"}, headless=outside)


def fold(norm: str, *readers: str) -> Callable[[Layer], Parts]:
    """The gain and the bias of a norm in these matrices and their biases, in float64 and then in float32."""

    def change(layer: Layer) -> Parts:
        gain, bias = layer.parts[f"{norm}.weight"].double(), layer.parts.get(f"{norm}.bias")
        parts = {f"{norm}.weight": torch.ones(WIDTH)}
        for reader in readers:
            weight = layer.parts[f"{reader}.weight"].double()
            parts[f"{reader}.weight"] = (weight * gain).float()
            if bias is not None:
                parts[f"{reader}.bias"] = (layer.parts[f"{reader}.bias"].double() + weight @ bias.double()).float()
        return parts | ({} if bias is None else {f"{norm}.bias": torch.zeros(WIDTH)})

    return change


ATTENTION, MLP = ("query", "key", "value"), ("mlp", "mlp.up")


@pytest.mark.parametrize("kind", KV_HEADS)
def test_a_norm_folded_into_all_matrices_that_read_it_is_harmless(kind):
    first = with_norms(kind)
    for norm, readers in (("norm", ATTENTION), ("last", MLP)):
        (cause,) = diagnose(first, apply(first, fold(norm, *readers))).causes
        assert (cause.hypothesis, cause.harmless, cause.repair) == ("norm folded", True, None)
    diagnosis = diagnose(first, apply(first, fold("norm", *ATTENTION), fold("last", *MLP), cast(torch.bfloat16)))
    assert names(diagnosis) == ["norm folded", "norm folded", "rounded to bfloat16"]
    back = diagnose(apply(first, fold("norm", *ATTENTION)), first)
    assert [(cause.hypothesis, cause.harmless) for cause in back.causes] == [("norm folded", True)]
    assert not diagnosis.unexplained


@pytest.mark.parametrize(
    ("norm", "readers", "left"),
    [("norm", ("query", "key"), "W_V"), ("norm", ("value",), "W_Q and W_K"), ("last", ("mlp",), "mlp.up.weight")],
)
def test_a_norm_folded_into_some_matrices_only_is_damage(norm, readers, left):
    first = with_norms()
    (cause,) = diagnose(first, apply(first, fold(norm, *readers))).causes
    assert (cause.hypothesis, cause.harmless) == ("norm folded", False)
    assert cause.text.endswith(f", but {left} {'are' if ' and ' in left else 'is'} unchanged")
    assert cause.repair is not None
    assert f"fold the norm into {left} too" in cause.repair


def test_a_norm_folded_without_its_bias_or_after_a_residual_is_damage():
    first = with_norms()
    second = apply(first, fold("norm", *ATTENTION))
    lost = second.with_parts({"query.bias": first.parts["query.bias"]})
    (cause,) = diagnose(first, lost).causes
    assert not cause.harmless
    assert cause.text.endswith(", but b_Q is unchanged")
    (cause,) = diagnose(replace(first, is_post_norm=True), second).causes
    assert not cause.harmless


def test_a_norm_that_all_matrices_read_is_folded_into_all():
    """In a parallel block, one norm feeds both attention and the MLP."""
    first = with_norms()
    parts = {name: part for name, part in first.parts.items() if name not in ("last.weight", "norm.bias")}
    first = replace(first, parts=parts, gains=first.gains - {"last.weight"})
    (cause,) = diagnose(first, apply(first, fold("norm", *ATTENTION, *MLP))).causes
    assert cause.harmless
    (cause,) = diagnose(first, apply(first, fold("norm", *ATTENTION))).causes
    assert cause.text.endswith(", but mlp.weight and mlp.up.weight are unchanged")


def test_a_folded_norm_that_is_still_applied_is_damage():
    first = with_norms()
    folded = apply(first, fold("norm", *ATTENTION))
    kept = {name: first.parts[name] for name in ("norm.weight", "norm.bias")}
    (cause,) = diagnose(first, folded.with_parts(kept)).causes
    assert (cause.hypothesis, cause.harmless) == ("norm folded", False)
    assert cause.text == "norm.weight is folded into W_Q, W_K and W_V, but not set to 1: the gain is applied twice"
    assert cause.repair == "set norm.weight to 1, or copy W_Q, W_K and W_V from the first model"
    assert names(diagnose(first, apply(first, scale_columns))) == ["columns scaled"]  # the control: other numbers


def test_keys_and_values_of_cross_attention_do_not_read_its_norm():
    first = replace(with_norms(), is_cross=True)
    (cause,) = diagnose(first, apply(first, fold("norm", "query"))).causes
    assert (cause.hypothesis, cause.harmless) == ("norm folded", True)
    (cause,) = diagnose(replace(first, is_cross=False), apply(first, fold("norm", "query"))).causes
    assert cause.text.endswith("but W_K and W_V are unchanged")


def test_a_lost_gain_is_not_a_folded_norm():
    first = with_norms()
    assert names(diagnose(first, apply(first, fold("norm")))) == ["bias dropped", "gain dropped"]
