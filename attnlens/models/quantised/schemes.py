"""What codes and their scales stand for, method by method: W = (codes − zeros) · scales in each method's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from attnlens.files import written
from attnlens.models.quantised.bitsandbytes import QUANT_STATE, eight_bits, four_bits, in_state
from attnlens.models.quantised.parts import CodesError, Parts, PartShapes, sizes

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("_scale_inv", "_scale", ".scale", ".qscale_weight")
"""How the names of scales of float8 end, two behind the weight's name and two behind its module's."""
FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the sixteen codes of four bits with a sign and an exponent (E2M1)."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight codes in a word of AWQ belongs to which of eight neighbouring columns."""
COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""The formats of compressed-tensors that are decoded."""


def as_codes(shapes: PartShapes, _read: object, _settings: object) -> tuple[int, ...]:
    """The shape of the codes: one for each number."""
    return shapes[""]


def along_inputs(shapes: PartShapes, _read: object, _settings: object) -> tuple[int, ...]:
    """The shape of a weight of GPTQ, in whose words the codes of neighbouring inputs lie."""
    words, zero_words, scale = _matrices(shapes)
    return scale[1], words[0] * 32 // _bits(zero_words[1], scale[1])


def along_outputs(shapes: PartShapes, _read: object, _settings: object) -> tuple[int, ...]:
    """The shape of a weight of AWQ, in whose words the codes of neighbouring outputs lie."""
    words, _, scale = _matrices(shapes)
    return scale[1], words[0]


def written_apart(_shapes: object, read: Callable[[str], Tensor], _settings: object) -> tuple[int, ...]:
    """The shape that compressed-tensors writes beside its words."""
    return sizes(read("_shape").tolist())


def in_pairs(shapes: PartShapes, _read: object, _settings: object) -> tuple[int, ...]:
    """The shape of experts of mxfp4, two codes a byte: (experts, rows, blocks, bytes) → (experts, numbers, rows)."""
    experts, rows, blocks, pairs = _blocks(shapes)
    return experts, 2 * blocks * pairs, rows


@dataclass(frozen=True)
class Scheme:
    """How one kind of coded weight is stored."""

    code: str
    """How the name of its codes ends, behind the weight's stem."""
    target: str
    """How the weight's own name ends."""
    companions: tuple[str, ...]
    """The ends of the names of what else it is made of; one of them must be there."""
    decode: Callable[[Parts, dict[str, Any]], Tensor]
    """(parts by those ends, the codes by "", settings) → the weight in float32; raises CodesError."""
    shape: Callable[[PartShapes, Callable[[str], Tensor], dict[str, Any]], tuple[int, ...]] = as_codes
    """(shapes of the parts, what reads one of them, settings) → the weight's shape; raises CodesError."""


def refusal(method: str, settings: Mapping[str, Any]) -> str | None:
    """Why checkpoints with those settings are not decoded; None where they are."""
    if method == "compressed-tensors":
        unknown = settings.get("format") not in COMPRESSED
        sparse = (settings.get("sparsity_config") or {}) not in ({}, {"format": "dense"})
        if unknown or sparse or settings.get("transform_config"):
            what = "rotated or sparse" if not unknown else f"in the format {written(settings.get('format'))}"
            return f"are {what}, which attnlens does not decode"
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if method == "awq" and (version != "gemm" or settings.get("bits", settings.get("w_bit", 4)) != 4):
        return f"are in the version {written(version)} or not of four bits, which attnlens does not decode"
    return None


def float8(parts: Parts, settings: dict[str, Any]) -> Tensor:
    """codes · scale, a scale for the tensor, for each row, or for each block of `weight_block_size`."""
    if parts[""].dtype not in FLOAT8:
        raise CodesError(f"its codes are {parts[''].dtype} and no float8")
    return _scaled(parts, settings.get("weight_block_size"))


def microscaled(parts: Parts, _settings: dict[str, Any]) -> Tensor:
    """FP4[code] · 2^(scale − 127), two codes a byte, the lower bits first, a scale for each block (mxfp4)."""
    codes, scale = parts[""], parts["_scales"]
    _blocks({name: tuple(part.shape) for name, part in parts.items()})
    if (codes.dtype, scale.dtype) != (torch.uint8, torch.uint8):
        raise CodesError("its codes and scales are no bytes")
    numbers = FP4[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return torch.ldexp(numbers, scale.int()[..., None] - 127).flatten(-2).mT.contiguous()


def _blocks(shapes: PartShapes) -> tuple[int, ...]:
    """The shape of the blocks of mxfp4, each with a scale."""
    if len(shapes[""]) != 4 or shapes[""][:3] != shapes["_scales"]:
        raise CodesError("its blocks and scales don't go together")
    return shapes[""]


def compressed(parts: Parts, settings: dict[str, Any]) -> Tensor:
    """(codes − zero) · scale of float8 or int8."""
    if parts[""].dtype not in (*FLOAT8, torch.int8) or "_g_idx" in parts:
        raise CodesError(f"its codes are {parts[''].dtype}")
    blocks = {str(group.get("block_structure")): group.get("block_structure") for group in _weight_groups(settings)}
    return _scaled(parts, next(iter(blocks.values())) if len(blocks) == 1 else None)


def _scaled(parts: Parts, block: object) -> Tensor:
    codes, zero = parts[""].float(), parts.get("_zero_point")
    scale = next((parts[part] for part in SCALES if part in parts), None)
    if scale is None:
        raise CodesError("it has no scale")
    if zero is not None:
        codes = codes - _spread(zero.float(), codes.shape, block)
    return codes * _spread(scale.float(), codes.shape, block)


def _spread(scale: Tensor, shape: torch.Size, block: object) -> Tensor:
    """A scale for every code: of the tensor's, each row's, or each block's."""
    if scale.numel() == 1:
        return scale.reshape(())
    grid = scale[:, None] if scale.dim() == 1 else scale
    if len(shape) < 2 or grid.dim() != len(shape) or grid.shape[:-2] != shape[:-2]:
        raise CodesError(f"a scale of {tuple(scale.shape)} does not go with codes of {tuple(shape)}")
    sides = block if isinstance(block, list) and len(block) == 2 else (None, None)
    for axis, side in zip((-2, -1), sides, strict=True):
        grid = grid.repeat_interleave(_side(shape[axis], grid.shape[axis], side), axis).narrow(axis, 0, shape[axis])
    return grid


def _side(length: int, count: int, side: object) -> int:
    """How many of `length` codes share a scale where there are `count` of them; those at the end may be fewer."""
    if isinstance(side, int) and side > 0 and ceil(length / side) == count:
        return side
    if length % max(count, 1) or not count:
        raise CodesError(f"{count} scales do not divide {length} codes")
    return length // count


def _weight_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the settings of compressed-tensors say of weights, group by group."""
    groups = settings.get("config_groups")
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return [weights for weights in found if isinstance(weights, dict)]


def packed(parts: Parts, settings: dict[str, Any]) -> Tensor:
    """(codes − 2^(b−1) − zero) · scale of b bits, packed along rows (compressed-tensors)."""
    words, scale = parts[""], parts.get("_scale")
    shape = parts["_shape"].tolist() if "_shape" in parts else []
    if scale is None or scale.dim() != 2 or len(shape) != 2 or words.dim() != 2 or words.shape[0] != shape[0]:
        raise CodesError("its codes, scales and shape don't go together")
    asked = {group.get("num_bits") for group in _weight_groups(settings)}
    fitting = [bits for bits in (2, 4, 8) if bits in asked and ceil(shape[1] * bits / 32) == words.shape[1]]
    if len(fitting) != 1:
        raise CodesError(f"{words.shape[1]} words a row are no {shape[1]} codes of 2, 4 or 8 bits")
    bits = fitting[0]
    codes = _unpacked(words, bits)[:, : shape[1]] - 2 ** (bits - 1)
    zeros = torch.zeros_like(scale)
    if "_zero_point" in parts:
        zeros = (_unpacked(parts["_zero_point"].mT, bits).mT[: shape[0]] - 2 ** (bits - 1)).to(scale)
    return _transposed(codes.mT, zeros.mT, scale.mT, parts.get("_g_idx"))


def gptq(parts: Parts, settings: dict[str, Any]) -> Tensor:
    """((codes − zero) · scale)ᵀ, packed along inputs; zeros are stored less 1, but in the format gptq_v2."""
    words, zero_words, scale = _three(parts)
    bits = _bits(zero_words.shape[1], scale.shape[1])
    codes = _unpacked(words.mT, bits).mT
    zeros = _unpacked(zero_words, bits)[:, : scale.shape[1]]
    if settings.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    return _transposed(codes, zeros, scale, parts.get(".g_idx"))


def awq(parts: Parts, _settings: dict[str, Any]) -> Tensor:
    """((codes − zero) · scale)ᵀ of four bits, packed along outputs in the order of AWQ_ORDER."""
    words, zero_words, scale = _three(parts)
    codes, zeros = (
        _unpacked(part, 4).reshape(*part.shape, 8)[..., list(AWQ_ORDER)].flatten(-2) for part in (words, zero_words)
    )
    return _transposed(codes, zeros, scale)


def _transposed(codes: Tensor, zeros: Tensor, scale: Tensor, groups: Tensor | None = None) -> Tensor:
    """((codes − zero) · scale)ᵀ of codes with a row for each input, and a row of zeros and scales for each group."""
    if codes.shape[1] != scale.shape[1] or zeros.shape != scale.shape:
        raise CodesError("its codes, zeros and scales don't go together")
    index = _group_index(groups, codes.shape[0], scale.shape[0])
    return ((codes - zeros[index]) * scale.float()[index]).mT.contiguous()


def _three(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zeros and scales, of which GPTQ and AWQ have all."""
    _matrices({name: tuple(part.shape) for name, part in parts.items()})
    if parts[""].dtype != torch.int32:
        raise CodesError("its codes are no words of 32 bits")
    return parts[""], parts[".qzeros"], parts[".scales"]


def _matrices(shapes: PartShapes) -> tuple[tuple[int, ...], ...]:
    """The shapes of codes, zeros and scales, each a matrix."""
    found = tuple(shapes.get(part, ()) for part in ("", ".qzeros", ".scales"))
    if any(len(shape) != 2 for shape in found):
        raise CodesError("it lacks zeros or scales, or its codes, zeros and scales are no matrices")
    return found


def _bits(zero_words: int, scales: int) -> int:
    """How many bits a code has, by the zeros of a group: as many as its scales, packed."""
    bits = 32 * zero_words / max(scales, 1)
    if bits not in (2, 4, 8):
        raise CodesError(f"its codes have {bits:g} bits, and not 2, 4 or 8")
    return int(bits)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes in words of 32 bits, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def _group_index(given: Tensor | None, inputs: int, groups: int) -> Tensor:
    """Which group of scales each input belongs to."""
    if given is None:
        return torch.arange(inputs) // ceil(inputs / max(groups, 1))
    if given.shape != (inputs,) or not bool(((given >= 0) & (given < groups)).all()):
        raise CodesError("its groups of inputs don't go with its scales")
    return given.long()


_FLOAT8 = (Scheme("", "", SCALES[:2], float8), Scheme(".weight", ".weight", SCALES[2:], float8))
_STATE = (f"{QUANT_STATE}nf4", f"{QUANT_STATE}fp4")
SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "fp8": _FLOAT8,
    "fbgemm_fp8": _FLOAT8,
    "mxfp4": (Scheme("_blocks", "", ("_scales",), microscaled, in_pairs),),
    "gptq": (Scheme(".qweight", ".weight", (".qzeros", ".scales", ".g_idx"), gptq, along_inputs),),
    "awq": (Scheme(".qweight", ".weight", (".qzeros", ".scales"), awq, along_outputs),),
    "compressed-tensors": (
        Scheme("_packed", "", ("_scale", "_shape", "_zero_point", "_g_idx"), packed, written_apart),
        Scheme("", "", ("_scale", "_zero_point", "_g_idx"), compressed),
    ),
    "bitsandbytes": (
        Scheme("", "", (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *_STATE), four_bits, in_state),
        Scheme(".weight", ".weight", (".SCB", ".weight_format"), eight_bits),
    ),
}
