"""Check config.json before a model is built, and find the class and the tokenizer of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

from attnlens.choices import KERNEL_TRANSFORMER
from attnlens.errors import ModelError, TextError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading.locate import CONFIG, TOKENIZERS, Json, Location, describe_placeholder, foreign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


InputKind = Literal["text", "seq2seq", "pixels", "pixels+text", "audio", "other"]

AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
"""Auto classes of models that predict tokens, tried in this order if a checkpoint contains its own code."""


def model_class(config: PreTrainedConfig, *, gguf: bool, own_code: bool) -> type[PreTrainedModel]:
    """Return the class that the config names or, with `own_code` or if transformers lacks that class, an Auto class."""
    import transformers

    module = own_models(config.model_type) or transformers
    for name in () if own_code else config.architectures or ():
        class_ = getattr(module, name, None)
        if isinstance(class_, type) and issubclass(class_, transformers.PreTrainedModel):
            return class_
    auto = "AutoModel"
    if own_code:
        auto = next((name for name in AUTO_CLASSES if name in getattr(config, "auto_map", {})), auto)
    elif gguf and config.is_encoder_decoder:
        auto = "AutoModelForSeq2SeqLM"
    elif gguf and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = "AutoModelForCausalLM"
    auto_class: type[PreTrainedModel] = getattr(transformers, auto)  # not a PreTrainedModel, but it builds one
    return auto_class


def own_models(model_type: object) -> ModuleType | None:
    """Import and return the module that registers `reproduce`'s model type; return None for other model types."""
    if model_type != KERNEL_TRANSFORMER:
        return None
    from attnlens.models import kernel_transformers

    return kernel_transformers


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the submodel that reads text (the encoder if two do), or `config` itself if none does."""
    try:
        return config.get_text_config()
    except ValueError:  # ambiguous: two parts read text
        return config.get_text_config(encoder=True)


def kind_of(model: PreTrainedModel) -> InputKind:
    """Return the kind of a model's input.

    `seq2seq` means text for encoder and decoder, and `pixels+text` means images and texts (CLIP).
    """
    main = model.main_input_name
    if not isinstance(main, str) or main not in signature(model.forward).parameters:
        return "other"
    if main != "input_ids":
        others: dict[str, InputKind] = {"pixel_values": "pixels", "input_features": "audio", "input_values": "audio"}
        return others.get(main, "other")
    if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
        return "pixels+text"
    return "seq2seq" if model.config.is_encoder_decoder else "text"


def has_tokenizer(place: Location) -> bool:
    """Return True if the folder has tokenizer files, or if the weights are GGUF, which includes a tokenizer."""
    return bool(place.gguf) or any(any(place.folder.glob(pattern)) for pattern in TOKENIZERS)


def load_tokenizer(place: Location, config: PreTrainedConfig) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Load the tokenizer; return (tokenizer, ""), or (None, reason) if there is no usable tokenizer."""
    from transformers import AutoTokenizer

    if not has_tokenizer(place):
        return None, f"{place.folder} has no tokenizer files"
    try:
        with foreign("the tokenizer can't be loaded", "Use --source weights.", TextError):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                place.folder, trust_remote_code=place.trusts_code, local_files_only=True, **place.gguf
            )
            size = len(tokenizer)
    except TextError as error:
        return None, _explain_tokenizer(place) or error.problem
    # if files are missing, transformers returns a tokenizer with about five tokens, which can't represent text
    expected = getattr(text_config(config), "vocab_size", None) or 0
    if size * 10 >= expected:
        return tokenizer, ""
    problem = f"the tokenizer has {size} tokens, but the model has {expected}: tokenizer files are missing or wrong"
    return None, _explain_tokenizer(place) or problem


def _explain_tokenizer(place: Location) -> str:
    """Explain why a tokenizer can't be read if the cause is a placeholder file or missing packages; else return ""."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

    named = {file for pattern in TOKENIZERS for file in place.folder.glob(pattern)}
    files = [] if place.gguf else sorted(filter(Path.is_file, named))
    if placeholder := next(filter(None, map(describe_placeholder, files)), None):
        return " ".join(placeholder).rstrip(".")
    # SentencePiece's files begin with this byte; files of tiktoken are text
    models = (file for file in files if file.suffix in (".model", ".spm"))
    pieces = [file.name for file in models if file.read_bytes()[:1] == b"\n"]
    if pieces and not (is_sentencepiece_available() and is_protobuf_available()):
        packages = "the packages sentencepiece and protobuf (pip install sentencepiece protobuf)"
        return f"{pieces[0]} is a SentencePiece model, which needs {packages}, and tokenizer.json is missing"
    return ""


SIZES = {  # Names of widths, vocabulary sizes, layer counts and head counts in the configs of transformers
    *("hidden_size", "n_embd", "d_model", "dim", "head_dim", "d_kv", "vocab_size"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_attention_heads", "num_key_value_heads"),
    *("n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
}
LISTED = re.compile(r"(layers?|depths?|num_labels)$")
"""Pattern of the names of counts; config classes build lists or maps of that length before they check the count."""
SHARED_LAYERS, MOST_LABELS = 1000, 2**20
"""Number of layers that is always allowed, since layers can share tensors (ALBERT); maximum number of labels."""
CHOICES = {  # Settings that choose the code that computes a model, or the file from which its weights are read
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("fusion_config", "transformers_weights"),
}
DECODED = ("fp8", "fbgemm_fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "bitsandbytes")
"""Quantisation methods that attnlens decodes into plain numbers."""
GPTQ = {  # Settings of GPTQ → values for which its codes are decoded; None means absent
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "pack_dtype": (None, "int32"),
    "is_marlin_format": (None, False),
    "rotation": (None, ""),
}
COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""Formats of compressed-tensors that are decoded."""
READ_SETTINGS = ("quantization_config", "compression_config", "text_config.quantization_config")
"""Fields that describe quantised weights of the whole model or its language model; elsewhere, they are refused."""
LARGEST_SHARE = 16
"""Maximum partial_rotary_factor, above all values in transformers' own configs (EfficientLoFTR has 4)."""
DTYPES = ("dtype", "torch_dtype")  # Names of the field that gives the weights' type
OTHER_ROPES = ("default", "axial", "main", "mrope", "xdrope", "su")
"""Rotation types that transformers supports, but does not list in its table of functions. `su` is longrope's old name,
which transformers does not replace everywhere."""
SAY_CORRECT = "Correct the config, or download the model again."
SAY_BELONGS = "Use the config.json that belongs to these weights."
SAY_UNQUANTISED = "Get an unquantised or GGUF version of the model."


def check_config(place: Location) -> None:
    """Raise ModelError for untrusted code, and for invalid or unsupported settings that transformers would accept."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = place.config

    def require(is_valid: bool, path: str, value: object, words: str) -> None:
        if not is_valid:
            problem = f"{place.folder / CONFIG} sets {shorten_text(path)} = {format_value(value)}, {words}."
            raise ModelError(problem, SAY_CORRECT)

    for path, size in sizes(config):
        require(size >= 1, path, size, "which must be at least 1")
    kinds = (("model_type", str, "a string"), ("architectures", list, "a list of strings"), ("auto_map", dict, "a map"))
    for name, kind, words in kinds:
        value = config.get(name)
        items = value if isinstance(value, list) else []
        is_valid = isinstance(value, kind | None) and all(isinstance(item, str) for item in items)
        require(is_valid, name, value, f"which must be {words}")
    if pruned := config.get("pruned_heads"):
        problem = f"{place.folder / CONFIG} sets pruned_heads = {format_value(pruned)}: heads were removed"
        remedy = "Load the model with transformers 4, fill the removed heads with zeros, and save it without "
        raise ModelError(f"{problem}, which transformers 5 does not support.", f"{remedy}pruned_heads.")
    for path, value in fields(config):
        owner, _, name = path.rpartition(".")
        if name in DTYPES and isinstance(value, str):
            dtype = getattr(torch, value.removeprefix("torch."), None)
            require(value == "auto" or isinstance(dtype, torch.dtype), path, value, "which is not a torch dtype")
        is_rope = owner.endswith(("rope_scaling", "rope_parameters")) and name in ("rope_type", "type")
        if is_rope and isinstance(value, str) and not place.trusts_code:
            require(value in {*ROPE_INIT_FUNCTIONS, *OTHER_ROPES}, path, value, "which transformers does not support")
        if path.endswith("partial_rotary_factor") and isinstance(value, int | float):
            words = f"which must be above 0 and at most {LARGEST_SHARE}"
            require(0 < value <= LARGEST_SHARE, path, value, words)
        if path.endswith(("quantization_config", "compression_config")) and value is not None:
            method = _find_method(value) if isinstance(value, dict) else value
            if path not in READ_SETTINGS or not isinstance(method, str) or method not in DECODED:
                problem = f"{place.folder / CONFIG}: according to {shorten_text(path)}, the weights are quantised with"
                supported = f"attnlens supports GGUF and, for a whole model or its language model, {', '.join(DECODED)}"
                raise ModelError(f"{problem} {shorten_text(str(method))}; {supported}.", SAY_UNQUANTISED)
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING and not place.trusts_code:
        problem = f"{place.id} contains Python code, which would run on this machine."
        raise ModelError(problem, "Read the code in the model's folder; if you trust it, add --trust-remote-code.")


def quantisation(place: Location) -> tuple[str | None, Json]:
    """Return the quantisation method and its settings, or (None, {}) for plain weights and methods not in DECODED.

    Raises ModelError for a variant of the method that is not supported.
    """
    candidates = (value for path, value in fields(place.config) if path in READ_SETTINGS and isinstance(value, dict))
    settings: Json = {name: value for name, value in next(candidates, {}).items() if value is not None}
    method = str(_find_method(settings))
    if method not in DECODED:
        return None, {}
    reason, version = "", str(settings.get("version") or settings.get("format") or "gemm").lower()
    if place.form == "pickle":
        reason = "are stored as a pickle, which is not supported"
    elif method == "compressed-tensors" and settings.get("format") not in COMPRESSED:
        reason = f"are in the format {format_value(settings.get('format'))}, which is not supported"
    elif method == "compressed-tensors" and (
        settings.get("transform_config") or (settings.get("sparsity_config") or {}) not in ({}, {"format": "dense"})
    ):
        reason = "are rotated or sparse, which is not supported"
    elif method == "awq" and (version != "gemm" or any(settings.get(name, 4) != 4 for name in ("bits", "w_bit"))):
        reason = f"are in version {format_value(version)}; only version 'gemm' with four bits is supported"
    elif method == "gptq" and (unknown := [name for name, usual in GPTQ.items() if settings.get(name) not in usual]):
        reason = f"have {unknown[0]} = {format_value(settings[unknown[0]])}, which is not supported"
    if reason:
        raise ModelError(f"The weights of {place.folder} are quantised with {method} and {reason}.", SAY_UNQUANTISED)
    return method, settings


def _find_method(settings: Mapping[str, object]) -> object:
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    return settings.get("quant_method")


def check_counts(place: Location, tensors: int) -> None:
    """Raise ModelError if the config has more layers than a model of `tensors` tensors can have, or too many labels."""
    for path, value in fields(place.config):
        if not (match := LISTED.search(path)):
            continue
        most = MOST_LABELS if match[0] == "num_labels" else max(tensors, SHARED_LAYERS)
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int | float) and count > most:
                problem = f"{place.folder / CONFIG} sets {shorten_text(path)} = {format_value(count)}"
                raise ModelError(f"{problem}, but the weight files contain only {tensors} tensors.", SAY_CORRECT)


@contextmanager
def accept_old_names() -> Iterator[None]:
    """Inside the `with`, let transformers accept the dtypes `auto` and `torch.…`, and `su` for longrope, in configs."""
    from transformers import PreTrainedConfig

    read = PreTrainedConfig._dict_from_json_file  # private, but the only method called before the config's checks

    def read_corrected(path: str | PathLike[str]) -> Json:
        config: Json = read(path)
        for owner in (config, *(value for _, value in fields(config) if isinstance(value, dict))):
            for name in DTYPES:
                if isinstance(dtype := owner.get(name), str):
                    owner[name] = None if dtype == "auto" else dtype.removeprefix("torch.")
            if "long_factor" in owner:
                owner |= {name: "longrope" for name in ("rope_type", "type") if owner.get(name) == "su"}
        return config

    with patch.object(PreTrainedConfig, "_dict_from_json_file", staticmethod(read_corrected)):
        yield


def clear_choices(config: object) -> None:
    """Set the fields in CHOICES, which can make transformers run code from the hub, to None, also in nested configs."""
    from transformers import PreTrainedConfig

    pending, seen = [config], set[int]()
    while pending:
        item = pending.pop()
        inside = vars(item) if isinstance(item, PreTrainedConfig) else item
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(inside, dict):
            inside.update(dict.fromkeys(CHOICES & inside.keys()))
            pending += inside.values()
        elif isinstance(inside, list | tuple):
            pending += inside


def sizes(config: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield (dotted path, value) for each integer field named in SIZES, also in nested configs."""
    # latent attention has separate head sizes, and head_dim can then be 0 (GLM 5)
    is_latent = any(path.endswith("qk_nope_head_dim") for path, _ in fields(config))
    names = SIZES - {"head_dim"} if is_latent else SIZES
    for path, value in fields(config):
        if path.rpartition(".")[2] in names and isinstance(value, int) and not isinstance(value, bool):
            yield path, value


def fields(config: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for the fields of a config and its nested configs."""
    for name, value in config.items():
        yield f"{above}{name}", value
        if isinstance(value, dict):
            yield from fields(value, f"{above}{name}.")
