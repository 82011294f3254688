"""Decode weights stored as codes with scales: fp8, mxfp4, GPTQ, AWQ, compressed-tensors, bitsandbytes.

W = (codes − zeros) · scales, in the layout of each method. Only mxfp4 is decoded with transformers, whose decoder for
fp8 guesses block sizes and rejects smaller blocks at an edge. Its other decoders need a GPU or packages that attnlens
does not require.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, prod
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from attnlens.errors import ModelError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading.configs import SAY_UNQUANTISED, quantisation
from attnlens.models.loading.locate import CONFIG, Json, Location, foreign
from attnlens.models.loading.stored import Stored

PartReader = Callable[[str], Tensor]  # Function that reads one of a weight's tensors, given its suffix
Settings = Json  # Quantisation settings in config.json
Shaped = TypeVar("Shaped", Tensor, Stored)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("_scale_inv", "_scale", ".scale", ".qscale_weight")
"""Suffixes of float8 scales: the first two follow the weight's name, the last two its module's name."""
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # Position in an AWQ word of the code for each of eight neighbouring columns
QUANT_STATE = ".quant_state.bitsandbytes__"
"""Suffix (after the weight's name, before the code type) of the tensor in which bitsandbytes describes the codes."""


def require(is_valid: bool, problem: str) -> None:
    """Raise ValueError with `problem` unless `is_valid`; CodedWeight adds the weight's name to the message."""
    if not is_valid:
        raise ValueError(problem)


class Parts(dict[str, Shaped]):
    """The tensors of a weight, or their shapes, keyed by the suffix of their names; "" is the key of the codes."""

    def __missing__(self, suffix: str) -> Shaped:
        raise ValueError(f"its tensor {suffix.lstrip('._')} is missing")


@dataclass(frozen=True)
class CodedWeight:
    """A weight that is stored as codes, with its scheme and the names of its tensors."""

    scheme: Scheme
    parts: Mapping[str, str]  # Names of its tensors in the files, keyed by their suffix; "" is the key of the codes
    settings: Settings  # Quantisation settings of the model
    problem: str  # Beginning of error messages: folder, method and name of the weight

    def decode(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight in float32; `read` returns a stored tensor by name. Raises ModelError if decoding fails."""
        with foreign(self.problem, SAY_UNQUANTISED):
            return self.scheme.decode(Parts({part: read(name) for part, name in self.parts.items()}), self.settings)

    def shape(self, stored: Mapping[str, Stored], read: Callable[[str], Tensor]) -> tuple[int, ...]:
        """Return the weight's shape, derived from its tensors' shapes or read from a tensor with `read`."""
        with foreign(self.problem, SAY_UNQUANTISED):
            parts = Parts({part: stored[name] for part, name in self.parts.items()})
            return self.scheme.shape(parts, lambda part: read(self.parts[part]))


def coded_weights(place: Location, names: Collection[str]) -> dict[str, CodedWeight]:
    """Return the coded weights, keyed by the names of the decoded weights; {} if the config declares none.

    Raises ModelError if the files contain none of the declared weights, or a weight both as codes and as numbers.
    """
    method, settings = quantisation(place)
    if method is None:
        return {}
    weights = dict[str, CodedWeight]()
    for scheme in SCHEMES[method]:
        for name in names:
            stem = name.removesuffix(scheme.code)
            parts = {part: stem + part for part in scheme.companions if stem + part in names}
            if name.endswith(scheme.code) and parts:
                weight = stem + scheme.target
                problem = f"{place.folder} ({method}) stores {shorten_text(weight)} as quantised codes"
                if weight in {*names} - {name}:
                    raise ModelError(f"{problem} and also unquantised; the two can differ.", SAY_UNQUANTISED)
                weights[weight] = CodedWeight(scheme, {"": name} | parts, settings, problem)
    if not weights:
        problem = f"{place.folder / CONFIG} declares weights quantised with {method}, but the files contain none."
        raise ModelError(problem, "Remove quantization_config from config.json if the weights are plain numbers.")
    return weights


# --- one scale per tensor, row or block: fp8, compressed-tensors -----------------------------------------------------


def decode_float8(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute codes · scale, with one scale per tensor, row or block (`weight_block_size`, by default 128 × 128)."""
    codes, scale, block = parts[""], _scale(parts), settings.get("weight_block_size")
    require(codes.dtype in FLOAT8, f"its codes are {codes.dtype}, not float8")
    is_block = isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) for side in block)
    require(is_block or block is None, f"weight_block_size is {format_value(block)}, not two numbers")
    is_larger = any(size > side for size, side in zip(codes.shape, block or [], strict=False))
    require(not is_larger or scale.numel() != 1, f"it has one scale, but weight_block_size is {block}")
    is_by_row = scale.dim() > 0 and scale.shape[0 if scale.dim() == 1 else -2] == codes.shape[-2]
    default = None if is_by_row else [128, 128]  # blocks as in transformers
    return codes.float() * _expand_scales(scale, codes.shape, block or default)


def decode_compressed(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute (codes − zero) · scale for float8 or int8 codes (compressed-tensors)."""
    codes, (group, _) = parts[""], _find_weight_group(settings)
    bits, size = group.get("num_bits", 8), group.get("group_size")
    is_known = codes.dtype in FLOAT8 or (codes.dtype == torch.int8 and bits == 8)
    problem = f"its codes ({codes.dtype}, num_bits {bits}) are neither float8 nor 8-bit int8, or are reordered"
    require(is_known and "_g_idx" not in parts, problem)
    block = group.get("block_structure") or ([1, size] if isinstance(size, int) and size > 0 else None)
    numbers = codes.float()
    _check_group(parts, group)
    if "_zero_point" in parts:
        numbers -= _expand_scales(parts["_zero_point"].float(), codes.shape, block)
    return numbers * _expand_scales(_scale(parts), codes.shape, block)


def _scale(parts: Parts[Tensor]) -> Tensor:
    """Return the scale in float32. Raises ValueError if it is missing, stored twice, or not a floating-point number."""
    present = [part for part in SCALES if part in parts]
    require(len(present) < 2, f"it has several scales: {', '.join(present)}")
    scale = parts[present[0] if present else "_scale"]
    require(scale.is_floating_point(), f"its scale is stored as {scale.dtype}, not as floating-point numbers")
    return scale.float()


def _check_group(parts: Parts[Tensor], group: Settings) -> None:
    """Raise ValueError if compressed-tensors' settings contradict the stored scales, zeros or order of inputs."""
    scale, zeros, strategy = parts["_scale"], parts.get("_zero_point"), group.get("strategy")
    matches = {"tensor": scale.numel() == 1, "channel": scale.dim() < 2 or scale.shape[-1] == 1}.get(
        str(strategy), True
    )
    require(matches, f"its scales have the shape {tuple(scale.shape)}, but strategy is {strategy}")
    require(group.get("symmetric") is not False or zeros is not None, "it has no zeros, but symmetric is false")
    has_zeros = zeros is not None and bool((zeros != 0).any())
    require(not (group.get("symmetric") and has_zeros), "it has zeros, but symmetric is true")
    is_ordered = group.get("actorder") not in ("group", "dynamic", True) or "_g_idx" in parts
    require(is_ordered, f"it has no order of inputs (g_idx), but actorder is {group.get('actorder')}")


def _expand_scales(scale: Tensor, shape: torch.Size, block: object) -> Tensor:
    """Expand scales (one per tensor, per row or per block) to one per code; a single scale stays a scalar."""
    if scale.numel() == 1:
        return scale.reshape(())
    grid = scale[:, None] if scale.dim() == 1 else scale
    fits = len(shape) >= 2 and grid.dim() == len(shape) and grid.shape[:-2] == shape[:-2]
    require(fits, f"a scale of shape {tuple(scale.shape)} does not fit codes of shape {tuple(shape)}")
    sides = block if isinstance(block, list) and len(block) == 2 else (None, None)
    for axis, size in zip((-2, -1), sides, strict=True):
        length, count = shape[axis], grid.shape[axis]
        is_side = isinstance(size, int) and size > 0
        side = size if is_side else {1: length, length: 1}.get(count, 0)
        fits = side > 0 and ceil(length / side) == count
        require(fits, f"the numbers of codes ({length}) and scales ({count}) don't match (blocks: {block})")
        grid = grid.repeat_interleave(min(side, length), axis).narrow(axis, 0, length)
    return grid


def _find_weight_group(settings: Settings) -> tuple[Settings, set[object]]:
    """Return compressed-tensors' settings for weights ({} if layer groups differ), and the num_bits of all groups."""
    groups = settings.get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    parts = [group.get("weights") for group in values if isinstance(group, dict)]
    weights: list[Settings] = [part for part in parts if isinstance(part, dict)]
    is_single = len({json.dumps(each, sort_keys=True) for each in weights}) == 1
    return weights[0] if is_single else {}, {each.get("num_bits") for each in weights}


# --- codes packed into words: GPTQ, AWQ, compressed-tensors ----------------------------------------------------------


def decode_packed(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute (code − zero) · scale for codes and zeros stored with 2^(bits − 1) added (compressed-tensors)."""
    words, scale, shape = parts[""], parts["_scale"], parts["_shape"].tolist()
    group, declared = _find_weight_group(settings)
    is_matrix = len(shape) == words.dim() == scale.dim() == 2 and words.shape[0] == shape[0]
    require(is_matrix, "its codes, scales and shape don't match")
    fitting = [bits for bits in (2, 4, 8) if bits in declared and ceil(shape[1] * bits / 32) == words.shape[1]]
    require(len(fitting) == 1, f"{words.shape[1]} words per row can't contain {shape[1]} codes of 2, 4 or 8 bits")
    bits = fitting[0]
    codes = _unpack_words(words, bits)[:, : shape[1]] - 2 ** (bits - 1)
    zeros, stored = torch.zeros_like(scale), dict(parts)
    if "_zero_point" in parts:
        stored["_zero_point"] = _unpack_words(parts["_zero_point"].mT, bits).mT[: shape[0]] - 2 ** (bits - 1)
        zeros = stored["_zero_point"].to(scale)
    _check_group(Parts(stored), group)
    return _decode_transposed(codes.mT, zeros.mT, scale.mT, group, parts.get("_g_idx"))


def decode_gptq(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute ((codes − zero) · scale)ᵀ for codes packed along inputs; all formats but gptq_v2 store zero − 1."""
    words, zero_words, scale, bits = _read_matrices(parts)
    overridden = {name for overrides in (settings.get("dynamic") or {}).values() for name in overrides or {}}
    # overridden settings vary by module
    settings = {name: value for name, value in settings.items() if name not in overridden}
    declared = settings.get("bits", bits)
    require(declared == bits, f"its codes have {bits} bits, but the setting bits is {format_value(declared)}")
    codes = _unpack_words(words.mT, bits).mT
    zeros = _unpack_words(zero_words, bits)[:, : scale.shape[1]]
    form, middle = settings.get("checkpoint_format") or "gptq", 2 ** (bits - 1)
    if form != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    is_symmetric = settings.get("sym") is not True or bool((zeros == middle).all())
    require(is_symmetric, f"sym is true, which implies zeros of {middle}, but in the format {form} its zeros differ")
    for zero in (middle - 1, middle + 1):
        is_shifted = bool((zeros == zero).all())
        require(not is_shifted, f"in the format {form} all its zeros are {zero}, off by one from the middle {middle}")
    has_order = settings.get("desc_act") is not True or ".g_idx" in parts or len(scale) == 1
    require(has_order, "its order of inputs (g_idx) is missing, but desc_act is true")
    return _decode_transposed(codes, zeros, scale, settings, parts.get(".g_idx"))


def decode_awq(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute ((codes − zero) · scale)ᵀ for codes of four bits, packed along outputs in the order of AWQ_ORDER."""
    *words, scale, _ = _read_matrices(parts)
    codes, zeros = (_unpack_words(part, 4).reshape(*part.shape, 8)[..., AWQ_ORDER].flatten(-2) for part in words)
    is_symmetric = settings.get("zero_point") is False or settings.get("sym") is True
    problem = "zero_point is false or sym is true, which implies zeros of 8, but its zeros differ"
    require(not is_symmetric or bool((zeros == 8).all()), problem)
    return _decode_transposed(codes, zeros, scale, settings)


def _decode_transposed(
    codes: Tensor, zeros: Tensor, scale: Tensor, settings: Settings, index: Tensor | None = None
) -> Tensor:
    """Compute ((codes − zero) · scale)ᵀ, where codes have one row per input, and zeros and scales have one per group.

    `index` is the group of each input; None means that groups are consecutive runs of inputs.
    """
    inputs, groups = codes.shape[0], scale.shape[0]
    matches = codes.shape[1] == scale.shape[1] and zeros.shape == scale.shape
    require(matches, "its codes, zeros and scales don't match")
    size = settings.get("group_size", settings.get("q_group_size"))
    require(isinstance(size, int | None), f"group_size is {format_value(size)}, not a number")
    is_grouped = size is None or ceil(inputs / (size if size > 0 else inputs)) == groups
    require(is_grouped, f"it has {groups} groups for {inputs} inputs, but group_size is {size}")
    ordered = torch.arange(inputs) // ceil(inputs / max(groups, 1))
    index = ordered if index is None else index.long()
    is_index = index.shape == (inputs,) and bool(((index >= 0) & (index < groups)).all())
    require(is_index, "its groups of inputs don't match its scales")
    is_ordered = settings.get("desc_act") is not False or torch.equal(index, ordered)
    require(is_ordered, "its inputs are in a different order, but desc_act is false")
    return ((codes - zeros[index]) * scale.float()[index]).mT.contiguous()


def _read_matrices(parts: Parts[Shaped]) -> tuple[Shaped, Shaped, Shaped, int]:
    """Return the codes, zeros and scales of a GPTQ or AWQ weight, and the bits per code, computed from the shapes."""
    codes, zeros, scales = matrices = parts[""], parts[".qzeros"], parts[".scales"]
    require(all(len(matrix.shape) == 2 for matrix in matrices), "its codes, zeros and scales are not matrices")
    require(not isinstance(codes, Tensor) or codes.dtype == torch.int32, "its codes are not 32-bit words")
    bits = 32 * zeros.shape[1] / max(scales.shape[1], 1)
    require(bits in (2, 4, 8), f"its codes have {bits:g} bits, not 2, 4 or 8")
    return codes, zeros, scales, int(bits)


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack the codes in words of 32 bits, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


# --- bytes: mxfp4, bitsandbytes --------------------------------------------------------------------------------------


def decode_mxfp4(parts: Parts[Tensor], _settings: Settings) -> Tensor:
    """Decode mxfp4 with transformers: FP4[code] · 2^(scale − 127), two codes per byte and one scale per block."""
    codes, scales = parts[""], parts["_scales"]
    require(codes.dtype == scales.dtype == torch.uint8, "its codes and scales are not bytes")
    weight: Tensor = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    return weight


def decode_four_bits(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute quant_map[code] · absmax[block] for two codes per byte, higher bits first (bitsandbytes nf4 and fp4)."""
    state, kind = _parse_state(parts), settings.get("bnb_4bit_quant_type")
    require(not settings.get("load_in_8bit"), "its codes have four bits, but load_in_8bit is true")
    is_kind = not kind or f"{QUANT_STATE}{kind}" in parts
    require(is_kind, f"its codes are {state.get('quant_type')}, but bnb_4bit_quant_type is {format_value(kind)}")
    shape, count = state["shape"], prod(state["shape"])  # read_shape has checked the shape
    codes, values = parts[""].contiguous().view(torch.uint8).flatten(), parts[".quant_map"]
    require(0 <= 2 * len(codes) - count <= 1, "its codes don't have the declared shape")
    require(values.shape == (16,), "its table does not have sixteen values")
    mapped = values.float()[torch.stack([codes >> 4, codes & 15], -1).flatten().long()[:count]]
    return (mapped * _repeat_blocks(_decode_absmax(parts, state), state.get("blocksize"), count)).reshape(*shape)


def _parse_state(parts: Mapping[str, Tensor]) -> Json:
    """Parse bitsandbytes' description of the codes, which is JSON in a tensor of bytes, or raise ValueError."""
    stored = next((value for part, value in parts.items() if part.startswith(QUANT_STATE)), None)
    state = None
    with suppress(ValueError, TypeError, RecursionError):
        state = json.loads(bytes(stored.tolist())) if stored is not None and stored.numel() < 2**16 else None
    require(isinstance(state, dict), "a valid description of its codes is missing")
    return cast("Json", state)


def _decode_absmax(parts: Parts[Tensor], state: Settings) -> Tensor:
    """Return the largest absolute value (absmax) of each block; decode values stored as codes."""
    absmax = parts[".absmax"]
    if absmax.is_floating_point():
        return absmax.float()
    values, outer, offset = parts[".nested_quant_map"], parts[".nested_absmax"], state.get("nested_offset")
    is_coded = absmax.dtype == torch.uint8 and values.shape == (256,)
    if not is_coded or not isinstance(offset, int | float):
        raise ValueError("its absmax can't be decoded")
    largest = _repeat_blocks(outer.float(), state.get("nested_blocksize"), len(absmax))
    return values.float()[absmax.long()] * largest + offset


def _repeat_blocks(largest: Tensor, side: object, count: int) -> Tensor:
    """Repeat each block's largest value for its `side` codes; return one value for each of `count` codes."""
    if not isinstance(side, int) or side < 1 or largest.shape != (ceil(count / side),):
        raise ValueError(f"{len(largest)} blocks of {format_value(side)} can't contain {count} codes")
    return largest.repeat_interleave(min(side, count))[:count]


def decode_eight_bits(parts: Parts[Tensor], settings: Settings) -> Tensor:
    """Compute codes · SCB/127, where SCB is the largest absolute value of each row (bitsandbytes LLM.int8)."""
    codes, largest, order = parts[""], parts[".SCB"], parts.get(".weight_format")
    require(not settings.get("load_in_4bit"), "its codes have eight bits, but load_in_4bit is true")
    is_by_row = codes.dtype == torch.int8 and largest.shape == codes.shape[:1]
    require(is_by_row, "its codes are not int8 with one SCB per row")
    require(order is None or not bool(order.any()), "its codes are not stored row by row")
    return codes.float() * largest.float()[:, None] / 127


# --- shapes, and the table of methods --------------------------------------------------------------------------------


def packed_shape(parts: Parts[Stored], _read: PartReader) -> tuple[int, ...]:
    """Return the shape (outputs, inputs) of a GPTQ or AWQ weight, whose words pack neighbouring inputs or outputs."""
    words, _, scale, bits = _read_matrices(parts)
    return scale.shape[1], prod(words.shape) * 32 // (bits * scale.shape[1])


def pair_shape(parts: Parts[Stored], _read: PartReader) -> tuple[int, ...]:
    """Return the shape of mxfp4 experts: (experts, rows, blocks, bytes) becomes (experts, 2 · blocks · bytes, rows)."""
    shape = parts[""].shape
    require(len(shape) == 4 and shape[:3] == parts["_scales"].shape, "its blocks and scales don't match")
    experts, rows, blocks, pairs = shape
    return experts, 2 * blocks * pairs, rows


def read_shape(parts: Parts[Stored], read: PartReader) -> tuple[int, ...]:
    """Return the stored shape, which is a tensor in compressed-tensors and an entry of quant_state in bitsandbytes."""
    states = {part: read(part) for part in parts if part.startswith(QUANT_STATE)}
    shape = read("_shape").tolist() if "_shape" in parts else _parse_state(states).get("shape")
    if not (isinstance(shape, list) and shape and all(isinstance(size, int) and size > 0 for size in shape)):
        raise ValueError("a valid description of its shape is missing")
    return tuple(shape)


@dataclass(frozen=True)
class Scheme:
    """Storage scheme of one kind of coded weight."""

    code: str  # Suffix of the codes' name, after the stem that all names of a weight's tensors share
    target: str  # Suffix of the weight's name, after the stem
    companions: tuple[str, ...]  # Suffixes of the weight's other tensors; at least one of them must exist
    decode: Callable[[Parts[Tensor], Settings], Tensor]
    """Function from parts and settings to the weight in float32; raises ValueError if the parts can't be decoded."""
    shape: Callable[[Parts[Stored], PartReader], tuple[int, ...]] = lambda parts, _read: parts[""].shape
    """Function from the parts' shapes, and a reader of parts, to the weight's shape; by default the codes' shape."""


_FLOAT8 = (Scheme("", "", SCALES[:2], decode_float8), Scheme(".weight", ".weight", SCALES[2:], decode_float8))
_BLOCKS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", f"{QUANT_STATE}nf4", f"{QUANT_STATE}fp4")
SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "fp8": _FLOAT8,
    "fbgemm_fp8": _FLOAT8,
    "mxfp4": (Scheme("_blocks", "", ("_scales",), decode_mxfp4, pair_shape),),
    "gptq": (Scheme(".qweight", ".weight", (".qzeros", ".scales", ".g_idx"), decode_gptq, packed_shape),),
    "awq": (Scheme(".qweight", ".weight", (".qzeros", ".scales"), decode_awq, packed_shape),),
    "compressed-tensors": (
        Scheme("_packed", "", ("_scale", "_shape", "_zero_point", "_g_idx"), decode_packed, read_shape),
        Scheme("", "", ("_scale", "_zero_point", "_g_idx"), decode_compressed),
    ),
    "bitsandbytes": (
        Scheme("", "", _BLOCKS, decode_four_bits, read_shape),
        Scheme(".weight", ".weight", (".SCB", ".weight_format"), decode_eight_bits),
    ),
}
