"""Read GGUF files: the header with bounds checks, attention settings that transformers drops, and single tensors.

llama.cpp is the reference for the meaning of fields and tensors.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from hashlib import sha256
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from attnlens.errors import ModelError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading.locate import WatchedFile
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

VERSIONS = (2, 3)
MOST_ITEMS = 2**21
"""Maximum total number of fields, tensors and list entries in a header; the largest vocabularies need half of it."""
LONGEST_VALUE = 4096
"""Bytes of a text, and entries of a list, beyond which a field's value is skipped."""
FORMATS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
"""struct format of a field's value, indexed by GGUF's type number; empty for texts and lists."""
TEXT, LIST = 8, 9
SAMPLE = 4096
"""Bytes sampled at the beginning, in the middle and at the end of a tensor."""
SAY_AGAIN = "Download it again."
SAY_SAFETENSORS = "Get the model as safetensors: this GGUF file can't be read exactly."
SAY_LOAD = "Leave out --device files."


# --- header ----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Shape in torch's order, the reverse of GGUF's."""
    type: int
    """ggml's number of the storage type."""
    offset: int
    """Offset of the tensor's data in bytes, relative to `Header.data`."""


class Header(NamedTuple):
    """The metadata of a GGUF file."""

    fields: dict[str, Any]
    """Numbers, short texts and short lists of numbers, keyed by name; None for longer values."""
    tensors: list[Entry]
    """The tensor table."""
    data: int
    """Offset of the tensor data in the file, in bytes."""

    @property
    def architecture(self) -> str:
        """Name of the architecture in llama.cpp."""
        return str(self.fields.get("general.architecture"))

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the architecture, without its name as prefix."""
        prefix = f"{self.architecture}."
        return {name.removeprefix(prefix): value for name, value in self.fields.items() if name.startswith(prefix)}


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, and check that the file is complete.

    Raises ModelError if the file is not GGUF, is truncated, or has implausible counts.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelError(f"{path} is an empty file.", SAY_AGAIN) from None
    with data:
        try:
            header = _Reader(path, data).header()
        except (struct.error, UnicodeDecodeError) as error:
            what = "is truncated in its header" if isinstance(error, struct.error) else "has names that are not UTF-8"
            raise ModelError(f"{path} {what}.", SAY_AGAIN) from None
        _check(path, header, len(data))
    return header


class _Reader:
    """Parser with a position in a GGUF file; its methods raise struct.error if the file ends too early."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.position, self.items = 0, 0

    def header(self) -> Header:
        """Read the header. Raise ModelError if the file is not GGUF of a version in VERSIONS."""
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file.", "Give a file that a converter to GGUF wrote.")
        self.position = 4
        version, tensors, count = self.unpack("IQQ")
        if version not in VERSIONS:
            raise ModelError(f"{self.path} is GGUF of version {version}, which can't be read.", "Convert it again.")
        fields = {}
        for _ in self.count_items(count):
            name = self.text()
            fields[name] = self.value(*self.unpack("I"))
        entries = [self.entry() for _ in self.count_items(tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            problem = f"{self.path} has general.alignment = {alignment}, which is not a power of two."
            raise ModelError(problem, "Convert it again.")
        return Header(fields, entries, -(-self.position // alignment) * alignment)

    def count_items(self, count: int) -> range:
        """Return range(count). Raises ModelError if the header has more than MOST_ITEMS items in total."""
        self.items += count
        if self.items > MOST_ITEMS:
            raise ModelError(f"{self.path} declares {self.items} entries in its header.", SAY_AGAIN)
        return range(count)

    def skip(self, length: int) -> slice:
        """Advance by `length` bytes, and return their place in the data."""
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise struct.error
        return slice(start, self.position)

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.data[self.skip(struct.calcsize(f"<{form}"))])

    def text(self) -> str:
        return self.data[self.skip(*self.unpack("Q"))].decode()

    def value(self, kind: int) -> Any:
        """Read one value of type `kind`; skip long texts, long lists and lists of texts, and return None for them."""
        if kind == TEXT:
            span = self.skip(*self.unpack("Q"))
            return self.data[span].decode() if span.stop - span.start <= LONGEST_VALUE else None
        if kind != LIST:
            return self.unpack(self.form(kind))[0]
        inner, count = self.unpack("IQ")
        if inner == LIST:
            raise ModelError(f"{self.path} has lists of lists in its header.", "Convert it again.")
        steps = self.count_items(count)
        if inner == TEXT:  # a loop without calls of methods, since a vocabulary has 100,000 texts and more
            position, size, length_at = self.position, len(self.data), struct.Struct("<Q").unpack_from
            for _ in steps:
                position += 8 + length_at(self.data, position)[0]
                if position > size:
                    raise struct.error
            self.position = position
            return None
        form = self.form(inner)
        if count <= LONGEST_VALUE:
            return list(self.unpack(f"{count}{form}"))
        self.skip(count * struct.calcsize(f"<{form}"))
        return None

    def form(self, kind: int) -> str:
        if kind >= len(FORMATS):
            raise ModelError(f"{self.path} has a field of the unknown type {kind}.", "Convert it again.")
        return FORMATS[kind]

    def entry(self) -> Entry:
        """Read the name, shape, type and offset of the next tensor. Raise ModelError for more than 8 dimensions."""
        name, (dimensions,) = self.text(), self.unpack("I")
        if dimensions > 8:
            raise ModelError(f"{self.path} has a tensor of {dimensions} dimensions.", SAY_AGAIN)
        shape = self.unpack(f"{dimensions}Q")
        kind, offset = self.unpack("IQ")
        return Entry(name, tuple(reversed(shape)), kind, offset)


def _check(path: Path, header: Header, size: int) -> None:
    """Raise ModelError for more layers than tensors (lists in the config grow with layers), and for truncated data."""
    count = len(header.tensors)
    for name, number in header.fields.items():
        if name.endswith(".block_count") and isinstance(number, int) and number > count:
            raise ModelError(f"{path} sets {shorten_text(name)} = {number}, but has {count} tensors.", SAY_AGAIN)
    blocks: dict[int, tuple[int, int]] = import_module("gguf").GGML_QUANT_SIZES
    for entry in header.tensors:
        if entry.type not in blocks or prod(entry.shape) % blocks[entry.type][0]:
            raise ModelError(f"{path} stores {shorten_text(entry.name)} in an unknown type.", "Convert it again.")
        last = header.data + entry.offset + _bytes(entry)
        if last > size:
            problem = f"the data of {shorten_text(entry.name)} end at byte {last}, but the file has {size}"
            raise ModelError(f"{path} is truncated: {problem}.", SAY_AGAIN)


def _bytes(entry: Entry) -> int:
    """Return the size of a tensor in the file, in bytes."""
    numbers, size = import_module("gguf").GGML_QUANT_SIZES[entry.type]
    return int(prod(entry.shape) // numbers * size)


# --- settings --------------------------------------------------------------------------------------------------------

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
ATTRIBUTES = {
    "attention.layer_norm_rms_epsilon": EPSILONS,
    "attention.layer_norm_epsilon": EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Config attributes for the value of each field; those that the config has are set."""
BY_SHAPE = tuple(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length_swa", "value_length_swa"))
"""Fields that the tensor shapes repeat, so that transformers rejects a wrong value."""
ROTATION = (
    *("dimension_count", "dimension_count_swa", "freq_base", "freq_base_swa", "scale_linear", "scaling.type"),
    *("scaling.factor", "scaling.original_context_length", "scaling.finetuned", "scaling.attn_factor"),
    *("scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
)
"""Fields with the prefix `rope.` that are applied or checked."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the frequencies of a rotation are divided by."""
HIDDEN_SCALES = ("logit_scale", "residual_scale", "embedding_scale", "use_parallel_residual")
"""Fields of some llama.cpp architectures that change hidden states or logits."""
BETAS = (("fast", 32.0), ("slow", 1.0))
"""Ends of YaRN's ramp, in rotations over the original context, with llama.cpp's defaults."""
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layer count of the Gemma size whose score scale uses hidden_size / heads instead of head_dim."""
OF_ATTENTION = re.compile(r"attn|rope_f")
"""Pattern in the names of tensors that change attention."""


class Settings:
    """Attention settings of a GGUF file, each of which is applied to a config, checked, or rejected."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self.fields = header.settings
        self.factors = {entry.name: self._factors(entry) for entry in header.tensors if entry.name in FACTORS}

    def refusal(self, name: str) -> ModelError:
        """Build the ModelError for a field that can't be applied."""
        setting = f"{shorten_text(f'{self.header.architecture}.{name}')} = {format_value(self.fields[name])}"
        return ModelError(
            f"{self.path} sets {setting}, which the model in transformers does not support.", SAY_SAFETENSORS
        )

    def _factors(self, entry: Entry) -> list[float]:
        if entry.type == 0 and len(entry.shape) == 1:  # ggml's number of float32
            start = self.header.data + entry.offset
            factors = numpy.fromfile(self.path, "<f4", entry.shape[0], offset=start).astype(float)
            if numpy.isfinite(factors).all() and (factors > 0).all():
                return list(map(float, factors))
        problem = f"{self.path} has {entry.name}, whose values are not frequency factors."
        raise ModelError(problem, SAY_SAFETENSORS)

    def number(self, name: str, default: float) -> float:
        """Return a field as a number. Raises ModelError if it is not a finite number of at least 0."""
        value = self.fields.get(name, default)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.refusal(name)
        return float(value)

    def apply(self, config: PreTrainedConfig) -> None:
        """Set the settings that transformers' reader drops. Raises ModelError for a field that no config expresses."""
        architecture = self.header.architecture
        if architecture in LARGE_GEMMA and hasattr(config, "query_pre_attn_scalar"):
            is_large = config.num_hidden_layers == LARGE_GEMMA[architecture]
            per_head = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = per_head if is_large else config.head_dim
        for name, value in self.fields.items():
            if name in ATTRIBUTES:
                self._set(config, name)
            elif name in HIDDEN_SCALES:
                if value not in (None, getattr(config, name, 1.0 if name.endswith("_scale") else value)):
                    raise self.refusal(name)
            elif name == "attention.sliding_window_pattern":
                self._check_pattern(config)
            elif name.startswith("attention.") and name not in BY_SHAPE:
                usual = {
                    "attention.causal": float(architecture != "t5encoder"),
                    "attention.max_alibi_bias": 8.0 * (architecture == "bloom"),
                    "attention.scale": _scale(config),
                    "attention.key_length": _head_dim(config),
                    "attention.value_length": _head_dim(config),
                }.get(name, 0.0)
                unset = value == 0 and name != "attention.causal"
                # 1e-6, since a file stores settings in float32, whose rounding error is at most 6e-8
                if not unset and not math.isclose(self.number(name, 0.0), usual, rel_tol=1e-6):
                    raise self.refusal(name)
        self._apply_rotation(config)

    def _set(self, config: PreTrainedConfig, name: str) -> None:
        value = self.number(name, 0.0) and self.fields[name]
        names = [attribute for attribute in ATTRIBUTES[name] if hasattr(config, attribute)]
        slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
        if value and (not names or (name == "attention.sliding_window" and not slides)):
            raise self.refusal(name)
        for attribute in names:
            if value or getattr(config, attribute):
                setattr(config, attribute, value if value or name.endswith(("epsilon", "layers")) else None)

    def _check_pattern(self, config: PreTrainedConfig) -> None:
        """Raise ModelError if the layers with a sliding window differ from those of the config."""
        name = "attention.sliding_window_pattern"
        pattern, kinds = self.fields[name], getattr(config, "layer_types", None) or []
        if isinstance(pattern, int) and pattern > 0:
            pattern = [layer % pattern < pattern - 1 for layer in range(len(kinds))]
        expected = [kind == "sliding_attention" for kind in kinds]
        if pattern and [bool(slides) for slides in pattern][: len(kinds)] != expected:
            raise self.refusal(name)

    # --- rotation

    @cached_property
    def _scaling(self) -> tuple[str, float]:
        """Type and factor of the rotation's scaling; as in llama.cpp, a factor without a type means linear."""
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 0.0)) or 1.0
        kind = self.fields.get("rope.scaling.type") or "linear"
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise self.refusal("rope.scaling.type")
        if self.factors and kind in ("linear", "yarn") and factor != 1:
            problem = f"{self.path} has {next(iter(self.factors))} and a rope.scaling.factor of {factor:g}."
            raise ModelError(problem, SAY_SAFETENSORS)
        usual = kind in ("none", "longrope") or factor == 1
        return ("none", 1.0) if usual else (kind, factor)

    def _rotation(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the scaling as transformers' rope_parameters, {} if none. Raises ModelError if that is impossible."""
        kind, factor = self._scaling
        first = int(self.number("rope.scaling.original_context_length", 0)) or config.max_position_embeddings
        stretch = self.number("rope.scaling.attn_factor", 1.0)
        if self.factors:
            both = [self.factors.get(name) or self.factors.get(FACTORS[0]) for name in FACTORS[1:]]
            if None in both:
                raise ModelError(f"{self.path} has only one of {' and '.join(FACTORS[1:])}.", SAY_SAFETENSORS)
            rotated = _head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0)
            count = int(self.number("rope.dimension_count", rotated)) // 2
            for name, factors in self.factors.items():
                if len(factors) != count:
                    raise ModelError(f"{self.path} has {len(factors)} factors in {name}, not {count}.", SAY_SAFETENSORS)
            lengths = dict(zip(("long_factor", "short_factor"), both, strict=True))
            parameters = {"factor": 1.0, "attention_factor": stretch, "original_max_position_embeddings": first}
            return {"rope_type": "longrope"} | lengths | parameters
        if stretch != 1:
            raise self.refusal("rope.scaling.attn_factor")
        parameters = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            parameters |= {f"beta_{end}": self.number(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in BETAS}
            parameters |= {"original_max_position_embeddings": first, "attention_factor": 1 + 0.1 * math.log(factor)}
        return {} if kind == "none" else parameters

    def _apply_rotation(self, config: PreTrainedConfig) -> None:
        takes_sections = self.header.architecture.startswith("qwen35")
        known = (*ROTATION, *["dimension_sections"] * takes_sections)
        for name, value in self.fields.items():
            if name.startswith("rope.") and value and name.removeprefix("rope.") not in known:
                raise self.refusal(name)
        parameters = getattr(config, "rope_parameters", None)
        if not parameters:
            if self.factors or self._scaling[0] != "none":
                raise ModelError(f"{self.path} has a rotary embedding, but not in transformers.", SAY_SAFETENSORS)
            return
        full = parameters.get("full_attention", parameters)
        if "rope.freq_base" in self.fields:
            full["rope_theta"] = self.number("rope.freq_base", 0)
        if "rope.freq_base_swa" in self.fields and "sliding_attention" in parameters:
            parameters["sliding_attention"]["rope_theta"] = self.number("rope.freq_base_swa", 0)
        if full.get("rope_type") == "proportional":  # its factors come from the config
            return
        rotation = self._rotation(config)
        full.update(rotation)
        if "original_max_position_embeddings" in rotation and hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = rotation["original_max_position_embeddings"]

    def check_rotation(self, model: PreTrainedModel) -> None:
        """Raise ModelError if the model's rotary frequencies differ from those that llama.cpp would compute."""
        for name, table in model.named_buffers():
            if not name.endswith("inv_freq") or "original" in name:
                continue
            actual = table.detach().double().cpu().numpy()
            expected = self._frequencies(actual.size, local="sliding" in name)
            # transformers computes inv_freq in float32: powers and quotients are rounded by a few times 6e-8
            if expected.shape != actual.shape or not numpy.allclose(actual, expected, rtol=1e-5, atol=1e-12):
                rope = [f"{name} = {value}" for name, value in self.fields.items() if name.startswith("rope.")]
                settings = ", ".join([*rope, *self.factors]) or "nothing about its rotation"
                problem = f"{self.path} sets {settings}, which differs from {name} of transformers'"
                raise ModelError(f"{problem} {type(model).__name__}.", SAY_SAFETENSORS)

    def _frequencies(self, count: int, *, local: bool) -> NDArray[numpy.float64]:
        """Compute the `count` frequencies of a rotation as llama.cpp does; of sliding-window layers if `local`.

        The result is empty if the file's settings imply another count or are invalid.
        """
        base, kind, factor = self.number("rope.freq_base", 10000.0), *self._scaling
        if local:
            base = self.number("rope.freq_base_swa", 10000.0 if self.header.architecture == "gemma3" else base)
        divisors = self.factors.get(FACTORS[0]) or self.factors.get(FACTORS[2]) or [1.0] * count
        rotated = int(self.number(f"rope.dimension_count{'_swa' * local}", 2 * count)) // 2
        if base <= 1 or not rotated == len(divisors) == count:
            return numpy.empty(0)
        steps = numpy.arange(count)
        plain: NDArray[numpy.float64] = base ** (-steps / count)
        if local and self.header.architecture in ("gemma3", "gemma4"):
            return plain
        if kind == "yarn":
            first = self.number("rope.scaling.original_context_length", 0) or self.number("context_length", 1)
            turns = [2 * math.pi * self.number(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in BETAS]
            if not all(turns) or not first:
                return numpy.empty(0)
            low, high = (count * math.log(first / each) / math.log(base) for each in turns)
            low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * count - 1)
            ramp = numpy.clip((steps - low) / max(high - low, 1e-3), 0, 1)  # 1e-3 as in llama.cpp
            plain *= 1 - ramp + ramp / factor
            return plain
        return numpy.asarray(plain / divisors / factor)


def _scale(config: PreTrainedConfig) -> float:
    """Return the factor that the config applies to scores, such as head_dim^(−1/2)."""
    multiplier = getattr(config, "attention_multiplier", None)
    return float(multiplier or (getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)) ** -0.5)


def _head_dim(config: PreTrainedConfig) -> int:
    """Return the dimension of a head by the config."""
    sizes = [getattr(config, name, None) for name in ("global_head_dim", "head_dim", "d_kv")]
    heads = getattr(config, "num_attention_heads", None) or 1
    return int(next(filter(None, sizes), None) or config.hidden_size // heads)


# --- tensors ---------------------------------------------------------------------------------------------------------


class GgufFiles:
    """The tensors of a GGUF file under their names in the model, decoded one by one.

    transformers' own loading reads only whole files; its names and conversions are applied to one tensor at a time.
    """

    def __init__(self, path: Path, header: Header, config: PreTrainedConfig, class_: Any) -> None:
        import torch

        self._file, self._header = WatchedFile(path), header
        # not documented by transformers, which offers no function for a single tensor; it has no types either
        reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
        with torch.device("meta"):  # an Auto class builds a model by from_config, another class by its constructor
            model = getattr(class_, "from_config", class_)(config)
        self._shapes = {name: tuple(part.shape) for name, part in model.state_dict().items()}
        processor = reader.TENSOR_PROCESSORS.get(header.architecture, reader.TensorProcessor)
        self._processor = processor(config=config.to_dict())
        self._map: dict[str, str] = reader.get_gguf_hf_weights_map(_two_levels(model), self._processor)
        self._sources: dict[str, list[Entry]] = {}
        self.ignored: list[str] = []
        """Tensors of the file that match no tensor of the model."""
        for entry in header.tensors:
            target = self._map.get(entry.name) or self._map.get(entry.name.removesuffix(".weight"))  # experts lack it
            if target in self._shapes:
                self._sources.setdefault(str(target), []).append(entry)
            elif entry.name not in FACTORS:  # Settings applies these
                self.ignored.append(entry.name)

    @property
    def headers(self) -> list[FileInParts]:
        """Record of the file for a report."""
        return [self._file.in_report(sha256(repr(self._header).encode()).hexdigest())]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, keyed by their names in the model."""
        return {name: self._shapes[name] for name in self._sources}

    def size(self, names: Iterable[str]) -> int:
        """Return the size of these tensors in the file, in bytes."""
        return sum(_bytes(entry) for name in names for entry in self._sources[name])

    def sample(self, names: Iterable[str]) -> bytes:
        """Return a few stored bytes of each of these tensors."""
        pieces = []
        for entry in (entry for name in names for entry in self._sources[name]):
            last = max(0, _bytes(entry) - SAMPLE)
            pieces += [self._data(entry, start, min(SAMPLE, _bytes(entry))).tobytes() for start in (0, last // 2, last)]
        return b"".join(pieces)

    def _data(self, entry: Entry, start: int, count: int) -> NDArray[numpy.uint8]:
        """Read `count` bytes of a tensor from `start`. Raises ModelError if the file changed since it was opened."""
        self._file.check()
        values = numpy.fromfile(self._file.path, numpy.uint8, count, offset=self._header.data + entry.offset + start)
        self._file.check()
        return values

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError if the file has changed since it was opened."""
        import torch

        library: Any = import_module("gguf")
        tensors: dict[str, Tensor] = {}
        for entry in (entry for name in names for entry in self._sources[name]):
            kind = library.GGMLQuantizationType(entry.type)
            data = self._data(entry, 0, _bytes(entry))
            plain = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}.get(kind.name)
            shape = entry.shape if plain else library.quant_shape_to_byte_shape(entry.shape, kind)
            values = data.view(plain).reshape(shape) if plain else data.reshape(shape)
            values = values.astype("<f4") if kind.name == "F64" else library.dequantize(values, kind)
            result = self._processor.process(
                weights=values, name=entry.name, tensor_key_mapping=self._map, parsed_parameters={"tensors": tensors}
            )
            if result.name in self._map:
                tensors[self._map[result.name]] = torch.from_numpy(numpy.array(result.weights))
        return tensors


def _two_levels(model: PreTrainedModel) -> Any:
    """Return a stand-in for a model whose grandchildren are hidden from transformers' name mapping.

    Visiting them costs seconds and adds no name: a file stores the model, or the base model inside it.
    """

    def stand_in(part: nn.Module, children: list[tuple[str, Any]]) -> Any:
        return SimpleNamespace(config=model.config, state_dict=part.state_dict, named_children=lambda: children)

    return stand_in(model, [(name, stand_in(child, [])) for name, child in model.named_children()])


@contextmanager
def read_once() -> Iterator[None]:
    """Make transformers read a file's header only once inside the context, and in a third of the time.

    It reads the header for the config and again for the tokenizer, 3 seconds each for a vocabulary of 50,000, mostly in
    slices of numpy's memmap, and has no parameter for a header that was read before. This patch only saves time:
    without it, loading takes three times as long.
    """
    library: Any = import_module("gguf")
    original: Any = library.GGUFReader

    class Plain(original):  # type: ignore[misc]  # a class of a package that ships no types
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, numpy.asarray(value) if name == "data" else value)

    once = cache(Plain)
    library.GGUFReader = lambda path: once(os.fspath(path))
    try:
        yield
    finally:
        library.GGUFReader = original
