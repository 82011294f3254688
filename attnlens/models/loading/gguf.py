"""Read GGUF files: the header, attention settings that transformers ignores, and single tensors."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy

from attnlens.errors import ModelError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading.locate import SAY_AGAIN, SAY_PATH, foreign, say_merge
from attnlens.models.loading.stored import MOST_DIMENSIONS, LocalFile, RemoteFile, Stored, TensorFiles, record

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.integrations.gguf.reader import TensorInfo

LONGEST = 2**26  # Maximum size of a header in bytes; the largest vocabularies need a quarter of it
SAY_SAFETENSORS = "Get the model as safetensors: this GGUF file can't be read exactly."


# --- header ----------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """The metadata of a GGUF file."""

    architecture: str  # Name of the architecture in llama.cpp
    fields: Mapping[str, object]  # Numbers, texts and lists of numbers, keyed by name; for a list of texts, its length
    tensors: list[TensorInfo]
    """Name, shape in torch's order, storage type, offset relative to `data`, and size in bytes of each tensor."""
    data: int  # Offset of the tensor data in the file, in bytes


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises ModelError if the file is not a valid and complete GGUF model."""
    # private in transformers, whose public functions return either the fields or the tensors, from files of any size
    from transformers.integrations.gguf.reader import TensorInfo, _mapped, _read_metadata, _read_tensor_table

    with foreign(f"{path} can't be read", SAY_AGAIN):
        try:
            content = _mapped(str(path))
            fields, count, position = _read_metadata(content[:LONGEST], "it")
            entries, position = _read_tensor_table(content[:LONGEST], count, position)
        except (struct.error, OverflowError, UnicodeDecodeError):
            limit = f"{LONGEST // 2**20} MiB"
            raise ValueError(f"its header is truncated or damaged, or larger than {limit}") from None
    if fields.get("split.count", 1) != 1 or fields.get("split.tensors.count", count) != count:
        raise ModelError(f"{path} is one part of a split GGUF model.", say_merge(str(path)))
    if (kind := fields.get("general.type", "model")) != "model":
        raise ModelError(f"{path} is not a model: its general.type is {format_value(kind)}.", SAY_PATH)
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        problem = f"{path} has general.alignment = {format_value(alignment)}, which is not a positive integer."
        raise ModelError(problem, "Convert the model to GGUF again.")
    for name, number in fields.items():  # config classes build lists with an entry per layer
        if name.endswith(".block_count") and isinstance(number, int) and number > count:
            raise ModelError(f"{path} sets {shorten_text(name)} = {number}, but has only {count} tensors.", SAY_AGAIN)
    header = Header(str(fields.get("general.architecture")), fields, [], -(-position // alignment) * alignment)
    for name, shape, kind, offset in entries:
        if len(shape) > MOST_DIMENSIONS:
            problem = f"{path} has a tensor with {len(shape)} dimensions; at most {MOST_DIMENSIONS} are supported."
            raise ModelError(problem, SAY_AGAIN)
        block, block_size = import_module("gguf").GGML_QUANT_SIZES.get(kind, (0, 0))
        if block == 0 or prod(shape) % block:
            problem = f"{path} stores {shorten_text(name)} in an unknown type, or in a size that does not fit its type."
            raise ModelError(problem, "Convert the model to GGUF again.")
        size = prod(shape) // block * block_size
        if (last := header.data + offset + size) > len(content):
            problem = f"the data of {shorten_text(name)} end at byte {last}, but the file has {len(content)} bytes"
            raise ModelError(f"{path} is truncated: {problem}.", SAY_AGAIN)
        header.tensors.append(TensorInfo(name, shape, kind, offset, size))
    return header


# --- settings --------------------------------------------------------------------------------------------------------

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
ATTRIBUTES = {  # Field → config attributes for its value; only those that the config has are set
    "attention.layer_norm_rms_epsilon": EPSILONS,
    "attention.layer_norm_epsilon": EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
SHAPES = tuple(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length_swa", "value_length_swa"))
"""Fields that transformers compares with the shapes of tensors."""
ROTARY = (
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
"""Fields of the rotary embedding, which are applied to the config or compared with the model's rotary frequencies."""
UNSUPPORTED = (
    *(f"attention.{name}" for name in ("clamp_kqv", "group_norm_epsilon", "group_norm_groups", "output_scale")),
    *(f"attention.{name}_lora_rank" for name in ("q", "kv", "decay", "iclr", "value_residual_mix", "gate")),
    *(f"attention.{name}" for name in ("key_length_mla", "value_length_mla", "temperature_length")),
    *(f"attention.{name}" for name in ("temperature_scale", "indexer.head_count", "indexer.key_length")),
    *("attention.indexer.top_k", "rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"),
)
"""Fields that are refused unless they are 0, which means unset."""
QWEN_35 = ("rope.dimension_sections", "full_attention_interval")
"""Fields that transformers applies for Qwen 3.5; they are refused for other architectures."""
CHECKED = (
    *(f"attention.{name}" for name in ("causal", "max_alibi_bias", "scale", "key_length", "value_length")),
    *("attention.sliding_window_pattern", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
    *("expert_gating_func", "expert_weights_scale"),
)
"""Fields that must agree with what transformers' model computes."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Names of the tensors by which the frequencies of the rotary embedding are divided."""
HIDDEN_SCALES = ("logit_scale", "residual_scale", "embedding_scale", "use_parallel_residual")
"""Fields of some llama.cpp architectures that change hidden states or logits; they, too, must agree with the model."""
KNOWN = {*ATTRIBUTES, *SHAPES, *ROTARY, *UNSUPPORTED, *QWEN_35, *CHECKED, *HIDDEN_SCALES}
GATING = {"gpt-oss": 3, "minimax-m2": 2}
"""Value of expert_gating_func, keyed by architecture; other architectures use 1, the softmax over all experts."""
BETAS = (("fast", 32.0), ("slow", 1.0))
"""llama.cpp's defaults for the ends of YaRN's ramp, in rotations over the original context."""
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layer count, keyed by architecture, of the model whose score scale uses hidden_size / heads, not head_dim."""
ATTENTION_NAMES = re.compile(r"attn|attention|(\b|_)rope|indexer|embd|token_types")
"""Pattern for the names of fields and tensors that change attention or its inputs."""


class Settings:
    """Attention settings of a GGUF file; each is applied to transformers' config, checked against it, or refused."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path, self.architecture, prefix = path, header.architecture, f"{header.architecture}."
        self.fields = {name[len(prefix) :]: value for name, value in header.fields.items() if name.startswith(prefix)}
        self.factors: dict[str, list[float]] = {}
        for entry in (entry for entry in header.tensors if entry.name in FACTORS):
            is_vector = entry.ggml_type == 0 and len(entry.shape) == 1  # 0 is ggml's number of float32
            factors = numpy.fromfile(path, "<f4", prod(entry.shape), offset=header.data + entry.offset).tolist()
            if not is_vector or not all(0 < factor < math.inf for factor in factors):
                raise self._build_error(f"has {entry.name}, whose values are not positive float32 numbers")
            self.factors[entry.name] = factors

    def apply(self, config: PreTrainedConfig) -> None:
        """Apply settings that transformers ignores; raise ModelError if one is unsupported or contradicts `config`."""
        if self.architecture in LARGE_GEMMA and hasattr(config, "query_pre_attn_scalar"):
            is_large = config.num_hidden_layers == LARGE_GEMMA[self.architecture]
            per_head = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = per_head if is_large else config.head_dim
        kinds = getattr(config, "layer_types", None) or []
        checked = {
            "attention.causal": float(self.architecture != "t5encoder"),
            "attention.max_alibi_bias": 8.0 * (self.architecture == "bloom"),
            "attention.scale": getattr(config, "attention_multiplier", None)
            or (getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)) ** -0.5,
            "attention.key_length": _head_dim(config),
            "attention.value_length": _head_dim(config),
            "rope.scaling.yarn_ext_factor": float(self.fields.get("rope.scaling.type") == "yarn"),
            "rope.scaling.yarn_attn_factor": 1.0,
            "expert_gating_func": float(GATING.get(self.architecture, 1)),
            "expert_weights_scale": 1.0,
        }
        for name, value in self.fields.items():
            if name in ATTRIBUTES:
                self._set_attribute(config, name)
            elif name in HIDDEN_SCALES:
                default = 1.0 if name.endswith("_scale") else value
                self._require(name, value in (None, getattr(config, name, default)))
            elif name == "attention.sliding_window_pattern":
                if isinstance(value, int) and value > 0:
                    value = [layer % value < value - 1 for layer in range(len(kinds))]
                pattern = list(map(bool, value)) if isinstance(value, list) else []
                is_same = pattern[: len(kinds)] == [kind == "sliding_attention" for kind in kinds]
                self._require(name, not value or is_same)
            elif name in checked and (value or name in ("attention.causal", "rope.scaling.yarn_ext_factor")):
                # 1e-6, since a file stores settings in float32, whose rounding error is at most 6e-8
                self._require(name, math.isclose(self._number(name, 0.0), checked[name], rel_tol=1e-6))
            elif name in QWEN_35:
                self._require(name, not value or self.architecture.startswith("qwen35"))
            else:
                is_known = name in KNOWN and not (name in UNSUPPORTED and value)
                self._require(name, is_known or not ATTENTION_NAMES.search(name))
        self._apply_rotation(config)

    def _set_attribute(self, config: PreTrainedConfig, name: str) -> None:
        """Set the config's attributes for the field `name`. Raises ModelError if it has none and the value is not 0."""
        value = self._number(name, 0.0) and self.fields[name]
        attributes = [attribute for attribute in ATTRIBUTES[name] if hasattr(config, attribute)]
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        slides = name != "attention.sliding_window" or "sliding_attention" in kinds
        self._require(name, not value or bool(attributes and slides))
        for attribute in attributes:
            if name.endswith("epsilon"):
                setattr(config, attribute, float(cast("float", value)))
            elif value or getattr(config, attribute):
                setattr(config, attribute, value if value or name.endswith("layers") else None)

    def check_rotation(self, model: PreTrainedModel) -> None:
        """Raise ModelError if the model's rotary frequencies differ from those that llama.cpp would compute."""
        for name, table in model.named_buffers():
            if not name.endswith("inv_freq") or "original" in name:
                continue
            actual = table.detach().double().cpu().numpy()
            expected = self._frequencies(actual.size, local="sliding" in name)
            # transformers computes inv_freq in float32, with a relative rounding error of a few times 6e-8
            if expected.shape != actual.shape or not numpy.allclose(actual, expected, rtol=1e-5, atol=1e-12):
                rope = [f"{name} = {value}" for name, value in self.fields.items() if name.startswith("rope.")]
                settings = ", ".join([*rope, *self.factors]) or "no rotation"
                kind = type(model).__name__
                raise self._build_error(f"sets {settings}, which contradicts the {name} of transformers' {kind}")

    def _build_error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path} {problem}.", SAY_SAFETENSORS)

    def _require(self, name: str, is_supported: bool) -> None:
        """Raise ModelError with the name and value of the field unless `is_supported`."""
        if not is_supported:
            setting = f"{shorten_text(f'{self.architecture}.{name}')} = {format_value(self.fields[name])}"
            raise self._build_error(f"sets {setting}, which transformers' model does not support")

    def _number(self, name: str, default: float) -> float:
        """Return a field (or `default` if absent) as a number. Raises ModelError unless it is finite and at least 0."""
        value = self.fields.get(name, default)
        number = float(value) if isinstance(value, int | float) else math.nan
        self._require(name, 0 <= number < math.inf)
        return number

    # --- rotation

    @cached_property
    def _scaling(self) -> tuple[str, float]:
        """Type and factor of rotary scaling, or ("none", 1); the default type is "linear", as in llama.cpp."""
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 0.0)) or 1.0
        kind = str(self.fields.get("rope.scaling.type") or "linear")
        self._require("rope.scaling.type", kind in ("none", "linear", "yarn", "longrope"))
        if kind == "none" or factor == 1:
            return "none", 1.0
        self._require("rope.scaling.type", kind != "longrope")  # longrope has tensors of factors, not one factor
        if self.factors:
            raise self._build_error(f"has {next(iter(self.factors))} and also a rope.scaling.factor of {factor:g}")
        return kind, factor

    def _rotation(self, config: PreTrainedConfig) -> dict[str, object]:
        """Return transformers' rope_parameters ({} without scaling); raise ModelError if the scaling is unsupported."""
        kind, factor = self._scaling
        first = int(self._number("rope.scaling.original_context_length", 0)) or config.max_position_embeddings
        stretch = self._number("rope.scaling.attn_factor", 1.0)
        if self.factors:
            long, short = (self.factors.get(name) or self.factors.get(FACTORS[0], []) for name in FACTORS[1:])
            rotated = _head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0)
            count = int(self._number("rope.dimension_count", rotated)) // 2
            if not len(long) == len(short) == count:
                raise self._build_error(f"does not have {count} long and short factors in {', '.join(self.factors)}")
            parameters = {"factor": 1.0, "attention_factor": stretch, "original_max_position_embeddings": first}
            return {"rope_type": "longrope", "long_factor": long, "short_factor": short} | parameters
        self._require("rope.scaling.attn_factor", stretch == 1 or (kind == "yarn" and stretch > 0))
        if kind == "none":
            return {}
        parameters = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            parameters |= {f"beta_{end}": self._number(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in BETAS}
            parameters["attention_factor"] = stretch * (1 + 0.1 * math.log(factor))
            parameters["original_max_position_embeddings"] = first
        return parameters

    def _apply_rotation(self, config: PreTrainedConfig) -> None:
        parameters = getattr(config, "rope_parameters", None)
        if not parameters:
            if self.factors or self._scaling[0] != "none":
                raise self._build_error("has a rotary embedding, but transformers' model has none")
            return
        full = parameters.get("full_attention", parameters)
        if "rope.freq_base" in self.fields:
            full["rope_theta"] = self._number("rope.freq_base", 0)
        if "sliding_attention" not in parameters:
            slides = "sliding_attention" in (getattr(config, "layer_types", None) or [])
            for name in ("rope.freq_base", "rope.dimension_count"):
                is_same = self.fields.get(f"{name}_swa") in (None, self.fields.get(name))
                self._require(f"{name}_swa", is_same or not slides)
        elif "rope.freq_base_swa" in self.fields:
            parameters["sliding_attention"]["rope_theta"] = self._number("rope.freq_base_swa", 0)
        if full.get("rope_type") == "proportional":  # the factors come from the config
            return
        rotation = self._rotation(config)
        full.update(rotation)
        if "original_max_position_embeddings" in rotation and hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = rotation["original_max_position_embeddings"]

    def _frequencies(self, count: int, *, local: bool) -> NDArray[numpy.float64]:
        """Return llama.cpp's `count` rotary frequencies (for sliding layers if `local`); [] for invalid settings."""
        base, kind, factor = self._number("rope.freq_base", 10000.0), *self._scaling
        if local:
            base = self._number("rope.freq_base_swa", 10000.0 if self.architecture == "gemma3" else base)
        divisors = self.factors.get(FACTORS[0]) or self.factors.get(FACTORS[2]) or [1.0] * count
        rotated = int(self._number(f"rope.dimension_count{'_swa' * local}", 2 * count)) // 2
        if base <= 1 or not rotated == len(divisors) == count:
            return numpy.empty(0)
        steps = numpy.arange(count)
        plain: NDArray[numpy.float64] = base ** (-steps / count)
        if local and self.architecture in ("gemma3", "gemma4"):
            return plain
        if kind == "yarn":
            first = self._number("rope.scaling.original_context_length", 0) or self._number("context_length", 1)
            turns = [2 * math.pi * self._number(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in BETAS]
            if not all(turns) or not first:
                return numpy.empty(0)
            low, high = (count * math.log(first / each) / math.log(base) for each in turns)
            low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * count - 1)
            ramp = numpy.clip((steps - low) / max(high - low, 1e-3), 0, 1)  # 1e-3 as in llama.cpp
            return numpy.asarray(plain * (1 - ramp + ramp / factor))
        return numpy.asarray(plain / divisors / factor)


def _head_dim(config: PreTrainedConfig) -> int:
    """Return the dimension of a head according to the config."""
    sizes = [getattr(config, name, None) for name in ("global_head_dim", "head_dim", "d_kv")]
    heads = getattr(config, "num_attention_heads", None) or 1
    return int(next(filter(None, sizes), None) or config.hidden_size // heads)


# --- tensors ---------------------------------------------------------------------------------------------------------


class GgufFiles(TensorFiles):
    """Tensors of a GGUF file, named as in the model, and decoded one by one with transformers' code."""

    def __init__(self, path: Path, header: Header, config: PreTrainedConfig, class_: type[PreTrainedModel]) -> None:
        import torch

        self._file, self._start = LocalFile(path), header.data
        self.headers = [record(self._file, self._file.read(0, header.data))]
        # not documented by transformers, which offers no function for a single tensor; the module has no types
        reader = import_module("transformers.modeling_gguf_pytorch_utils")
        with torch.device("meta"):  # an Auto class builds a model by from_config, another class by its constructor
            model: PreTrainedModel = getattr(class_, "from_config", class_)(config)
        shapes = {name: tuple(part.shape) for name, part in model.state_dict().items()}
        processor = reader.TENSOR_PROCESSORS.get(header.architecture, reader.TensorProcessor)
        self._processor = processor(config=config.to_dict())
        # children suffice, because a file names parts of the model or of its base model; deeper modules take seconds
        children = [
            (name, SimpleNamespace(config=model.config, state_dict=child.state_dict, named_children=list))
            for name, child in model.named_children()
        ]
        top = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: children)
        self._map: dict[str, str] = reader.get_gguf_hf_weights_map(top, self._processor)
        self._entries: dict[str, list[TensorInfo]] = {}
        ignored = []
        for entry in header.tensors:
            # names of experts have no suffix
            target = self._map.get(entry.name) or self._map.get(entry.name.removesuffix(".weight"))
            if target in shapes:
                self._entries.setdefault(str(target), []).append(entry)
            elif entry.name not in FACTORS:  # Settings applies these
                ignored.append(entry.name)
        self.stored, self.ignored = {name: Stored(shapes[name], "F32") for name in self._entries}, ignored

    def spans(self, names: Iterable[str]) -> list[tuple[LocalFile | RemoteFile, int, int]]:
        """Return (file, offset, size in bytes) of each stored part of these tensors."""
        entries = [entry for name in names for entry in self._entries[name]]
        return [(self._file, self._start + entry.offset, entry.nbytes) for entry in entries]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError if the file has changed since it was opened."""
        import torch

        library = import_module("gguf")
        tensors: dict[str, Tensor] = {}
        for entry in (entry for name in names for entry in self._entries[name]):
            kind = library.GGMLQuantizationType(entry.ggml_type)
            data = numpy.frombuffer(self._file.read(self._start + entry.offset, entry.nbytes), numpy.uint8)
            data = data.reshape(library.quant_shape_to_byte_shape(entry.shape, kind))
            values = data.view("<f8").astype("<f4") if kind.name == "F64" else library.dequantize(data, kind)
            result = self._processor.process(
                weights=values, name=entry.name, tensor_key_mapping=self._map, parsed_parameters={"tensors": tensors}
            )
            if result.name in self._map:
                tensors[self._map[result.name]] = torch.from_numpy(numpy.array(result.weights))
        return tensors
