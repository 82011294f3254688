"""Damage that `compare` must name, and unrelated changes that it must not explain (for diagnosis.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import damage as layouts
import torch
from torch import Tensor

ROLES = ("query", "key", "value", "output")


@dataclass
class Parts:
    """The tensors of one layer, as views of the model's own parameters, so that changes in place damage the model."""

    block: Any
    norm: Any  # before attention; after it in BERT
    weights: dict[str, Tensor]  # role → (heads, size, width)
    biases: dict[str, Tensor]  # role → (heads, size)
    gains: list[Any] = field(default_factory=list)  # norms of queries and keys

    @property
    def linear(self) -> list[Tensor]:
        """All matrices of the block as (outputs, inputs)."""
        found = [module.weight for module in self.block.modules() if isinstance(module, torch.nn.Linear)]
        conv = [module.weight.T for module in self.block.modules() if type(module).__name__ == "Conv1D"]
        return [weight.data for weight in (*found, *conv)]

    @property
    def grouped(self) -> bool:
        """True if several query heads share a key head."""
        return len(self.weights["query"]) > len(self.weights["key"])

    def both(self, *roles: str) -> list[Tensor]:
        """Return the weights and biases of these roles."""
        return [parts[role] for role in roles for parts in (self.weights, self.biases) if role in parts]

    @property
    def readers(self) -> list[Any]:
        """The matrices of the MLP that read the norm before it; empty if unknown."""
        mlp = getattr(self.block, "mlp", None)
        return [module for name in ("gate_proj", "up_proj") if (module := getattr(mlp, name, None)) is not None]


def find_layers(model: Any) -> list[Parts]:
    """Return the self-attention layers of a model."""
    kind, heads = model.config.model_type, model.config.num_attention_heads
    if kind in ("gpt_neox", "bloom", "falcon"):
        blocks = model.gpt_neox.layers if kind == "gpt_neox" else model.transformer.h
        return [_read_fused(block, heads) for block in blocks]
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    counts = dict(zip(ROLES, (heads, kv_heads, kv_heads, heads), strict=True))
    found = []
    for layer in layouts.layers(model):
        weights, biases = {}, {}
        for role, count in counts.items():
            weight, bias = getattr(layer, role)
            weights[role] = (weight.T if role == "output" else weight).unflatten(0, (count, -1))
            if bias is not None and role != "output":
                biases[role] = bias.unflatten(0, (count, -1))
        norms = [getattr(layer.attention, name, None) for name in ("q_norm", "k_norm")]
        found.append(Parts(layer.block, layer.norm, weights, biases, [norm for norm in norms if norm is not None]))
    return found


def _read_fused(block: Any, heads: int) -> Parts:
    """Return the parts of a block whose fused matrix has query, key and value of each head in turn."""
    attention = block.attention if hasattr(block, "attention") else block.self_attention
    fused = attention.query_key_value

    def split_roles(part: Tensor) -> dict[str, Tensor]:
        return dict(zip(ROLES, part.data.unflatten(0, (heads, 3, -1)).unbind(1), strict=False))

    weights = split_roles(fused.weight) | {"output": attention.dense.weight.data.T.unflatten(0, (heads, -1))}
    biases = {} if fused.bias is None else split_roles(fused.bias)
    return Parts(block, block.input_layernorm, weights, biases)


# --- changes of tensors in place --------------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Draw standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def interleave(size: int) -> Tensor:
    """Return the order 0, size/2, 1, size/2 + 1, …."""
    return torch.arange(size).view(2, -1).T.flatten()


def halves(size: int) -> Tensor:
    """Return the order that undoes `interleave`: the even numbers, then the odd ones."""
    return torch.arange(size).view(-1, 2).T.flatten()


def shuffle(size: int) -> Tensor:
    """Return a random order."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(4))


def reorder_rows(order: Callable[[int], Tensor], *roles: str, heads: slice = slice(None), gains: bool = False) -> Any:
    """Reorder the rows within heads; `gains`: of the norms of queries and keys, too."""

    def change(layer: Parts) -> None:
        for part in layer.both(*roles):
            part[heads] = part[heads][:, order(part.shape[1])].clone()
        for norm in layer.gains if gains else []:
            norm.weight.copy_(norm.weight[order(len(norm.weight))].clone())

    return change


def move_heads(*roles: str) -> Callable[[Parts], None]:
    """Move key heads one place on, and query heads by groups."""

    def change(layer: Parts) -> None:
        group = len(layer.weights["query"]) // len(layer.weights["key"])
        for role in roles:
            for part in layer.both(role):
                part.copy_(part.roll(group if role in ("query", "output") else 1, 0))

    return change


def order_heads(layer: Parts) -> None:
    """Put query heads into the order that tiled key heads need."""
    heads, kv_heads = (len(layer.weights[role]) for role in ("query", "key"))
    for part in layer.both("query", "output"):
        part.copy_(part[torch.arange(heads).view(kv_heads, -1).T.flatten()].clone())


def permute_as_queries(layer: Parts) -> None:
    """Permute the rows of keys as for the number of query heads."""
    for part in layer.both("key"):
        rows = part.reshape(len(layer.weights["query"]), 2, -1, *part.shape[2:])
        part.copy_(rows.transpose(1, 2).reshape(part.shape).clone())


def exchange(*pairs: tuple[Tensor, Tensor]) -> None:
    """Exchange the values of the tensors of each pair."""
    for first, second in pairs:
        held = first.clone()
        first.copy_(second)
        second.copy_(held)


def exchange_roles(one: str, other: str) -> Callable[[Parts], None]:
    """Exchange the weights and biases of two roles."""
    return lambda layer: exchange(*zip(layer.both(one), layer.both(other), strict=False))  # Whisper has no key bias


def transpose(role: str) -> Callable[[Parts], None]:
    """Transpose a square matrix."""

    def change(layer: Parts) -> None:
        part = layer.weights[role]
        part.copy_(part.flatten(0, 1).T.reshape(part.shape).clone())

    return change


def split(*, flat: bool) -> Callable[[Parts], None]:
    """Split a fused matrix in flat thirds instead of head by head, or the reverse."""

    def change(layer: Parts) -> None:
        for parts in (layer.weights, layer.biases):
            if parts:
                zeros = torch.zeros_like(next(iter(parts.values())))  # for a bias that the model lacks
                stacked = torch.stack([parts.get(role, zeros) for role in ROLES[:3]])
                by_head = stacked.transpose(0, 1)
                mixed = by_head.reshape(stacked.shape) if flat else stacked.reshape(by_head.shape).transpose(0, 1)
                for role, new in zip(ROLES, mixed.clone(), strict=False):
                    parts.get(role, torch.empty_like(new)).copy_(new)

    return change


def average_keys(layer: Parts) -> None:
    """Replace each head's keys and values by their mean over heads."""
    for part in layer.both("key", "value"):
        part.copy_(part.mean(0, keepdim=True).expand_as(part))


def change_basis(layer: Parts) -> None:
    """Multiply W_V by A and W_O by A⁻ᵀ within heads."""
    basis = torch.eye(layer.weights["value"].shape[1]) + 0.1 * draw(*[layer.weights["value"].shape[1]] * 2) / 4
    for part in layer.both("value"):
        part.copy_(torch.einsum("ij,hj...->hi...", basis, part))
    output = layer.weights["output"]
    output.copy_(torch.einsum("ij,hj...->hi...", torch.linalg.inv(basis).T, output))


def scale(factor: float, *roles: str) -> Callable[[Parts], None]:
    """Multiply the weights and biases of these roles."""
    return lambda layer: [part.mul_(factor) for part in layer.both(*roles)] and None


def scale_each(axes: int) -> Callable[[Parts], None]:
    """Multiply each head of queries (1), or each row (2), by its own factor."""

    def change(layer: Parts) -> None:
        for part in layer.both("query"):
            factors = 1.5 + draw(*part.shape[:axes]).clamp(-1, 1)
            part.mul_(factors.view(*factors.shape, *[1] * (part.dim() - axes)))

    return change


def offset_of(norm: Any) -> float:
    """Return what a norm adds to its weight: 1 in Gemma."""
    return 1.0 if "Gemma" in type(norm).__name__ else 0.0


def lose_gain(norm: Any) -> None:
    """Set a norm's gain to 1."""
    norm.weight.fill_(1 - offset_of(norm))


def fold(norm: Any, readers: Sequence[tuple[Tensor, Tensor | None]], *, reset: bool = True) -> None:
    """Multiply the inputs of matrices by a norm's gain, and reset the norm; its bias moves if all matrices have one."""
    bias = getattr(norm, "bias", None)
    moves = bias is not None and all(own_bias is not None for _, own_bias in readers)
    for weight, own_bias in readers:
        if moves:
            own_bias.add_(weight @ bias)
        weight.mul_(norm.weight + offset_of(norm))
    if reset:
        lose_gain(norm)
        if moves:
            bias.zero_()


def attention_readers(layer: Parts, *roles: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return the matrices and biases of these roles (default: query, key, value)."""
    return [(layer.weights[role], layer.biases.get(role)) for role in roles or ROLES[:3]]


def fold_cross(layer: Parts) -> None:
    """Fold the norm before cross-attention into its queries."""
    if hasattr(layer.block, "encoder_attn"):
        norm, query = layer.block.encoder_attn_layer_norm, layer.block.encoder_attn.q_proj
    else:
        norm, query = layer.block.layer[1].layer_norm, layer.block.layer[1].EncDecAttention.q
    fold(norm, [(query.weight.data, None if query.bias is None else query.bias.data)])


def last_norm(model: Any) -> Any:
    """Return the model's last norm."""
    return [module for module in model.modules() if "Norm" in type(module).__name__][-1]


def fold_last(model: Any) -> None:
    """Fold the last norm into the output matrix, which is then no longer the embedding."""
    output = model.get_output_embeddings()
    output.weight = torch.nn.Parameter(output.weight.clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    fold(last_norm(model), [(output.weight.data, None)])


def adapt(rank: int, *roles: str, size: float = 0.05) -> Callable[[Parts], None]:
    """Add an update of that rank to these matrices."""

    def change(layer: Parts) -> None:
        for number, role in enumerate(roles):
            part = layer.weights[role]
            matrix = part.flatten(0, 1)
            update = draw(len(matrix), rank, seed=number) @ draw(rank, matrix.shape[1], seed=number + 9)
            part.add_((size * update * matrix.norm() / update.norm()).reshape(part.shape))

    return change


# --- rounding and quantisation ----------------------------------------------------------------------------------------


def round_values(values: Tensor, bits: int, *, symmetric: bool = False) -> Tensor:
    """Round each row to 2^bits levels, between its extremes or symmetric to 0."""
    if symmetric:
        most = 2 ** (bits - 1) - 1
        step = (values.abs().amax(1, keepdim=True) / most).clamp(min=1e-12)
        return (values / step).round() * step
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    zero = (-low / step).round()
    return ((values / step + zero).round().clamp(0, 2**bits - 1) - zero) * step


def quantise(bits: int, group: int = 0, kind: torch.dtype = torch.float32, *, symmetric: bool = False) -> Any:
    """Round all matrices of a block by row, by groups of values in a row, by column (−1) or as a whole (−2)."""

    def change(layer: Parts) -> None:
        for weight in layer.linear:
            rows = weight.T if group == -1 else weight
            size = weight.numel() if group == -2 else rows.shape[1] if group < 1 else group
            if rows.numel() % size == 0 and (group < 1 or rows.shape[1] % size == 0):
                coded = round_values(rows.reshape(-1, size), bits, symmetric=symmetric).to(kind).float()
                rows.copy_(coded.reshape(rows.shape))

    return change


def quantise_with_feedback(bits: int) -> Callable[[Parts], None]:
    """Round each row to 2^bits levels as GPTQ does: the later inputs compensate the errors of the earlier ones."""

    def change(layer: Parts) -> None:
        for weight in layer.linear:
            width = weight.shape[1]
            inputs = draw(4 * width, width) @ (torch.eye(width) + draw(width, width, seed=2) / width**0.5)
            hessian = inputs.T @ inputs
            damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(width)
            inverse = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
            low, high = weight.amin(1), weight.amax(1)
            step = (high - low) / (2**bits - 1)
            zero = (-low / step).round()
            values = weight.clone()
            for column in range(width):
                codes = (values[:, column] / step + zero).round().clamp(0, 2**bits - 1)
                weight[:, column] = (codes - zero) * step
                error = (values[:, column] - weight[:, column]) / inverse[column, column]
                values[:, column:] -= error[:, None] * inverse[column, column:]

    return change


def cast(kind: torch.dtype, scaled: str = "") -> Callable[[Parts], None]:
    """Round all matrices of a block to a number type, without a factor, or divided by one (`tensor`) or by row."""

    def change(layer: Parts) -> None:
        for weight in layer.linear:
            largest = weight.abs().amax() if scaled == "tensor" else weight.abs().amax(1, keepdim=True)
            factor = largest / torch.finfo(kind).max if scaled else torch.ones(())
            weight.copy_((weight / factor).to(kind).float() * factor)

    return change


def chain(*changes: Callable[[Parts], object]) -> Callable[[Parts], None]:
    """Apply several changes in turn."""
    return lambda layer: [change(layer) for change in changes] and None


# --- the damages ------------------------------------------------------------------------------------------------------


POSSIBLE: dict[str, Callable[[Any, Parts], bool]] = {
    "all": lambda model, layer: True,
    "grouped": lambda model, layer: layer.grouped,
    "divided": lambda model, layer: (
        layer.grouped and layer.weights["key"][..., 0].numel() % (2 * len(layer.weights["query"])) == 0
    ),
    "equal": lambda model, layer: not layer.grouped,
    "square": lambda model, layer: len(layer.weights["query"].flatten(0, 1)) == layer.weights["query"].shape[2],
    "biased": lambda model, layer: "key" in layer.biases,
    "normed": lambda model, layer: bool(layer.gains),
    "gated": lambda model, layer: bool(layer.readers),
    "pre_norm": lambda model, layer: model.config.model_type != "bert",
    "cross": lambda model, layer: hasattr(layer.block, "encoder_attn") or len(getattr(layer.block, "layer", ())) == 3,
    "by_32": lambda model, layer: all(weight.shape[1] % 32 == 0 for weight in layer.linear),
    "positioned": lambda model, layer: model.config.model_type in ("t5", "bloom"),
    "unpositioned": lambda model, layer: model.config.model_type not in ("t5", "bloom"),
    "read_out": lambda model, layer: model.config.model_type not in ("bert", "t5"),
}
"""Which layers can have a damage."""


@dataclass(frozen=True)
class Damage:
    """A change, the hypotheses that name it (regular expressions, joined by &), and the layers that can have it."""

    change: Callable[[Any], object]
    expected: str
    possible: str = "all"  # a key of POSSIBLE
    whole: bool = False  # True if it is planted in the model instead of a layer


BFLOAT16, FLOAT16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
INTERLEAVED, FOUR_BITS = "^interleaved rows", "^quantised to 4 bits"
ONE = slice(1, 2)
DAMAGES: dict[str, Damage] = {
    "rows of q and k interleaved": Damage(reorder_rows(interleave, "query", "key"), INTERLEAVED),
    "rows of q and k half-split": Damage(reorder_rows(halves, "query", "key"), "^half-split rows"),
    "rows of k interleaved": Damage(reorder_rows(interleave, "key"), INTERLEAVED),
    "rows of k interleaved, one head": Damage(reorder_rows(interleave, "key", heads=ONE), INTERLEAVED),
    "rows of q, k and gains interleaved": Damage(
        reorder_rows(interleave, "query", "key", gains=True), INTERLEAVED, "normed"
    ),
    "rows of k shuffled": Damage(reorder_rows(shuffle, "key"), "^permuted rows"),
    "rows of k for the heads of q": Damage(
        permute_as_queries, "^interleaved rows of 8|^interleaved rows of 9", "divided"
    ),
    "heads of q and k reordered": Damage(move_heads("query", "key"), "^heads out of order"),
    "heads of q reordered": Damage(move_heads("query"), "^heads out of order|^tiled"),
    "heads of v reordered": Damage(move_heads("value"), "^heads out of order"),
    "heads reordered in all": Damage(move_heads(*ROLES), r"^reordered heads \(harmless\)", "unpositioned"),
    "heads without their position bias": Damage(move_heads(*ROLES), "^heads out of order$", "positioned"),
    "key heads tiled": Damage(order_heads, "^tiled key heads", "grouped"),
    "key heads averaged": Damage(average_keys, "^averaged key heads"),
    "q and k exchanged": Damage(exchange_roles("query", "key"), "^exchanged", "equal"),
    "k and v exchanged": Damage(exchange_roles("key", "value"), "^exchanged"),
    "q transposed": Damage(transpose("query"), "^transposed", "square"),
    "o transposed": Damage(transpose("output"), "^transposed", "square"),
    "fused matrix split flat": Damage(split(flat=True), "^wrong split", "equal"),
    "fused matrix split by head": Damage(split(flat=False), "^wrong split", "equal"),
    "gate and up exchanged": Damage(
        lambda layer: exchange([reader.weight for reader in layer.readers]), "^exchanged", "gated"
    ),
    "basis of v and o": Damage(change_basis, r"^different basis \(harmless\)"),
    "bias of q lost": Damage(lambda layer: layer.biases["query"].zero_(), "^bias dropped$", "biased"),
    "bias of k lost": Damage(lambda layer: layer.biases["key"].zero_(), "^bias dropped", "biased"),
    "bias of v lost": Damage(lambda layer: layer.biases["value"].zero_(), "^bias dropped$", "biased"),
    "gain of q lost": Damage(lambda layer: lose_gain(layer.gains[0]), "^gain dropped", "normed"),
    "gains of q and k + 1": Damage(
        lambda layer: [norm.weight.add_(1) for norm in layer.gains], "^gain offset", "normed"
    ),
    "norm's gain lost": Damage(lambda layer: lose_gain(layer.norm), "^gain dropped"),
    "norm's gain + 1": Damage(lambda layer: layer.norm.weight.add_(1), "^gain offset"),
    "norm folded": Damage(lambda layer: fold(layer.norm, attention_readers(layer)), "^norm folded", "pre_norm"),
    "norm folded into q and k": Damage(
        lambda layer: fold(layer.norm, attention_readers(layer, "query", "key")), r"^norm folded$", "pre_norm"
    ),
    "norm folded, not reset": Damage(
        lambda layer: fold(layer.norm, attention_readers(layer), reset=False), r"^norm folded$", "pre_norm"
    ),
    "norm of cross-attention folded": Damage(fold_cross, r"^norm folded \(harmless\)", "cross"),
    "last norm's gain lost": Damage(lambda model: lose_gain(last_norm(model)), "^gain dropped", "pre_norm", whole=True),
    "last norm's gain + 1": Damage(
        lambda model: last_norm(model).weight.add_(1), "^gain offset", "pre_norm", whole=True
    ),
    "last norm folded": Damage(fold_last, "^norm folded", "read_out", whole=True),
    "q times √head_dim": Damage(lambda layer: scale(layer.weights["query"].shape[1] ** 0.5, "query")(layer), "^scaled"),
    "v doubled": Damage(scale(2, "value"), "^scaled"),
    "a factor for each head of q": Damage(scale_each(1), "^heads scaled"),
    "a factor for each row of q": Damage(scale_each(2), "^(rows|columns) scaled"),
    "head of k zeroed": Damage(lambda layer: layer.weights["key"][ONE].zero_(), "^zeros|^scaled"),
    "NaN in k": Damage(lambda layer: layer.weights["key"][0, 0].fill_(math.nan), "^not finite"),
    "8 bits by row": Damage(quantise(8, symmetric=True), "^quantised to 8 bits"),
    "8 bits by matrix": Damage(quantise(8, -2, symmetric=True), "^quantised to 8 bits"),
    "8 bits by row, to bfloat16": Damage(quantise(8, 0, BFLOAT16, symmetric=True), "^quantised to 8 bits"),
    "8 bits by row, to float16": Damage(quantise(8, 0, FLOAT16, symmetric=True), "^quantised to 8 bits"),
    "4 bits by row": Damage(quantise(4), FOUR_BITS),
    "4 bits by 32": Damage(quantise(4, 32), FOUR_BITS, "by_32"),
    "4 bits by 32, symmetric": Damage(quantise(4, 32, symmetric=True), FOUR_BITS, "by_32"),
    "4 bits by row, to bfloat16": Damage(quantise(4, 0, BFLOAT16), FOUR_BITS),
    "4 bits by 32, to float16": Damage(quantise(4, 32, FLOAT16), FOUR_BITS, "by_32"),
    "4 bits by column": Damage(quantise(4, -1), FOUR_BITS),
    "4 bits with feedback (GPTQ)": Damage(quantise_with_feedback(4), FOUR_BITS),
    "3 bits by row": Damage(quantise(3), "^quantised to 3 bits"),
    "3 bits with feedback (GPTQ)": Damage(quantise_with_feedback(3), "^quantised to 3 bits"),
    "2 bits by 32": Damage(quantise(2, 32), "^quantised to 2 bits", "by_32"),
    "float8 e4m3": Damage(cast(E4M3), "float8_e4m3fn"),
    "float8 e5m2": Damage(cast(E5M2), "float8_e5m2"),
    "float8 e4m3, one factor": Damage(cast(E4M3, "tensor"), "float8_e4m3fn"),
    "float8 e4m3 by row": Damage(cast(E4M3, "row"), "float8_e4m3fn"),
    "float8 e5m2, one factor": Damage(cast(E5M2, "tensor"), "float8_e5m2"),
    "bfloat16": Damage(cast(BFLOAT16), "^rounded to bfloat16"),
    "float16": Damage(cast(FLOAT16), "^rounded to float16"),
    "LoRA of rank 1 on q": Damage(adapt(1, "query"), r"^rank \d+ update$"),
    "LoRA of rank 8 on q and v": Damage(adapt(8, "query", "value"), r"^rank \d+ update$"),
    "LoRA of rank 4, to bfloat16": Damage(
        chain(adapt(4, "query", "value", size=0.3), cast(BFLOAT16)), r"^rank \d+ update & ^rounded to bfloat16"
    ),
    "LoRA of rank 4, to 4 bits": Damage(
        chain(adapt(4, "query", "value", size=0.5), quantise(4)), rf"^rank \d+ update, quantised & {FOUR_BITS}"
    ),
    "rows interleaved, bias of k lost": Damage(
        chain(reorder_rows(interleave, "query", "key"), lambda layer: layer.biases["key"].zero_()),
        f"{INTERLEAVED} & ^bias dropped",
        "biased",
    ),
    "rows interleaved, 4 bits": Damage(
        chain(reorder_rows(interleave, "query", "key"), quantise(4)), f"{INTERLEAVED} & {FOUR_BITS}"
    ),
    "q and k exchanged, 8 bits": Damage(
        chain(exchange_roles("query", "key"), quantise(8)), "^exchanged & ^quantised to 8 bits", "equal"
    ),
    "split flat, bfloat16": Damage(
        chain(split(flat=True), cast(BFLOAT16)), "^wrong split & ^rounded to bfloat16", "equal"
    ),
    "keys averaged, 4 bits": Damage(chain(average_keys, quantise(4)), f"^averaged & {FOUR_BITS}"),
}
"""Damage of one layer, or of the whole model."""


def change_rope(**values: float | str) -> Callable[[Any], dict[str, Any]]:
    """Return settings of RoPE with other values; nothing if the model lacks RoPE."""

    def change(config: Any) -> dict[str, Any]:
        known = getattr(config, "rope_parameters", None)
        if not known:
            return {}
        nested = all(isinstance(value, dict) for value in known.values())
        return {
            "rope_parameters": {kind: value | values for kind, value in known.items()} if nested else known | values
        }

    return change


def change_field(name: str, value: object) -> Callable[[Any], dict[str, Any]]:
    """Return another value of a setting; nothing if the model lacks the setting."""
    return lambda config: {name: value} if getattr(config, name, None) else {}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SETTINGS: dict[str, Damage] = {
    "RoPE's base": Damage(change_rope(rope_theta=1e6), "^different rotation"),
    "RoPE, linear scaling": Damage(change_rope(rope_type="linear", factor=4.0), "^different rotation"),
    "RoPE, llama3 scaling": Damage(change_rope(rope_type="llama3", factor=8.0, **LLAMA3), "^different rotation"),
    "window halved": Damage(change_field("sliding_window", 4), "^different mask"),
    "softcap lost": Damage(change_field("attn_logit_softcapping", None), "^different softcap"),
    "query_pre_attn_scalar": Damage(change_field("query_pre_attn_scalar", 96), "^different scale"),
}
"""Other settings: functions of the config that return its new fields, empty if the model lacks them."""


# --- unrelated changes ------------------------------------------------------------------------------------------------


Change = Callable[[Any, torch.Generator], None]


def draw_size(generator: torch.Generator) -> float:
    """Return a relative size between 1e-5 and 1, uniform in its logarithm."""
    return float(10 ** (-5 + 5 * torch.rand(1, generator=generator)))


def in_tensors(
    make: Callable[[Tensor, Callable[[Tensor], Tensor], float], Tensor], share: float = 1.0, least: int = 1
) -> Change:
    """Change tensors of at least `least` axes, each with probability `share`: make(values, noise, size)."""

    def change(model: Any, generator: torch.Generator) -> None:
        size = draw_size(generator)
        for part in model.parameters():
            if part.dim() >= least and float(torch.rand(1, generator=generator)) < share:
                part.copy_(make(part, lambda each: torch.randn(each.shape, generator=generator), size))

    return change


def spread(part: Tensor) -> Tensor:
    """Return the standard deviation of a tensor, at least 1e-3."""
    return part.std(correction=0).clamp(min=1e-3)


def cluster(part: Tensor, noise: Callable[[Tensor], Tensor], _: float) -> Tensor:
    """Replace values by the nearest of 8 centres, by k-means."""
    values = part.flatten()
    centres = values[noise(values).argsort()[:8]].sort().values
    for _ in range(8):
        nearest = torch.bucketize(values, (centres[1:] + centres[:-1]) / 2)
        sums, counts = (
            torch.zeros_like(centres).index_add(0, nearest, each) for each in (values, torch.ones_like(values))
        )
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres[nearest].reshape(part.shape)


def add_orthogonal(part: Tensor, noise: Callable[[Tensor], Tensor], size: float) -> Tensor:
    """Add an update of full rank whose singular values are equal."""
    matrix = part.flatten(1)
    wide = matrix.shape[0] < matrix.shape[1]
    factor = torch.linalg.qr(noise(matrix.T if wide else matrix)).Q
    return part + (size * matrix.norm() / min(matrix.shape) ** 0.5 * (factor.T if wide else factor)).reshape(part.shape)


@torch.enable_grad()
def train(model: Any, generator: torch.Generator) -> None:
    """Take ten steps of AdamW on random tokens."""
    text = model.config.get_text_config()
    rate = draw_size(generator) ** 0.8 / 10
    model.requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(10):
        ids = torch.randint(5, min(text.vocab_size, 90), (8, 24), generator=generator)
        inputs = {"input_ids": ids} | ({"labels": ids} if text.model_type == "t5" else {})
        if text.model_type == "whisper":
            features = torch.randn(8, text.num_mel_bins, 2 * text.max_source_positions, generator=generator)
            inputs = {"input_features": features, "decoder_input_ids": ids}
        result = model(**inputs)
        scores = getattr(result, "logits", None)
        if scores is None:
            loss = result[0].square().mean()
        else:
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids.roll(-1, 1).flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.requires_grad_(False)


def disturb_head(model: Any, generator: torch.Generator) -> None:
    """Add noise to one key head."""
    size, key = draw_size(generator), find_layers(model)[0].weights["key"]
    key[1] += size * key.std() * torch.randn(key[1].shape, generator=generator)


def disturb_and_quantise(model: Any, generator: torch.Generator) -> None:
    """Add noise, then quantise all layers to 4 bits."""
    size = 0.05 + float(torch.rand(1, generator=generator))
    for layer in find_layers(model):
        for weight in layer.linear:
            weight.add_(size * weight.std() * torch.randn(weight.shape, generator=generator))
        quantise(4)(layer)


UNRELATED: dict[str, Change] = {
    "noise": in_tensors(lambda part, noise, size: part + size * spread(part) * noise(part)),
    "noise in some tensors": in_tensors(lambda part, noise, size: part + size * spread(part) * noise(part), 0.3),
    "relative noise": in_tensors(lambda part, noise, size: part * (1 + size * noise(part))),
    "steps of one size": in_tensors(lambda part, noise, size: part + size * spread(part) * noise(part).sign()),
    "training": train,
    "training from bfloat16": train,
    "codebook of 8 values": in_tensors(cluster, 0.5, 2),
    "pruning": in_tensors(lambda part, noise, size: part * (noise(part) > -0.5 - 2 * size**0.2), least=2),
    "update of full rank": in_tensors(add_orthogonal, least=2),
    "noise in one head": disturb_head,
    "noise, then 4 bits": disturb_and_quantise,
    "another seed": in_tensors(lambda part, noise, size: part.mean() + spread(part) * noise(part), least=2),
}
"""Changes of a model that no hypothesis describes."""
ALLOWED = {"noise, then 4 bits": "quantised to 4 bits"}
"""Unrelated change → the hypothesis that is true all the same."""
FROM_BFLOAT16 = {"training from bfloat16"}
"""Unrelated changes of models whose weights are rounded to bfloat16 first."""
