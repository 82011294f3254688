"""List the tensors of weight files, build a model from them with transformers, and check that it has their numbers.

Models are built silently and within size limits, and errors of transformers are converted.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from logging import CRITICAL, getLogger
from math import prod
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest.mock import Mock, patch

from attnlens.errors import ModelError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading.configs import (
    SAY_BELONGS,
    SAY_UNQUANTISED,
    check_config,
    check_counts,
    fields,
    foreign,
    model_class,
    own_models,
    refuse_mismatch,
    take_choices,
)
from attnlens.models.loading.gguf import OF_ATTENTION, SAY_SAFETENSORS, GgufFiles, Settings, read_header
from attnlens.models.loading.locate import (
    CONFIG,
    Location,
    Storage,
    check_small,
    names_in,
    readable,
    refuse_other_forms,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


LoadingInfo = Mapping[str, set[Any]]
"""transformers' record of a load: names under missing_keys and unexpected_keys, with shapes under mismatched_keys."""
PACKED = ("qweight", "qzeros", "weight_packed", "SCB", "absmax", "quant_map")
"""Names of tensors that only quantised checkpoints have."""
SCALE = re.compile(r"(_scale|_scale_inv|_scales|_zero_point|\.scales?)$")
"""Suffixes of scales and zeros after the name of their weight."""


def check_loaded(
    place: Location, model: PreTrainedModel, stored: Mapping[str, Stored], loading_info: LoadingInfo
) -> None:
    """Raise ModelError if the loaded model differs from its files, by transformers' loading info.

    Without an error, transformers ignores an adapter's tensors, reads quantised codes as numbers, fills mismatched
    parameters at random, and picks either of two tensors for one parameter.
    """
    where, unused = place.folder / place.file, set(loading_info["unexpected_keys"])
    if low_rank := [name for name in sorted(unused) if re.search(r"(^|[._])lora_", name)]:
        problem = f"{where} contains an adapter that is not merged ({format_names(low_rank)})."
        raise ModelError(problem, "Merge it with merge_and_unload of the package peft, and save the merged model.")
    if codes := _codes(model, stored, unused):
        problem = f"{where} stores {format_names(codes)} as {stored[codes[0]].type}"
        raise ModelError(f"{problem}, but nothing in config.json explains what the codes mean.", SAY_UNQUANTISED)
    if scales := [name for name in sorted(unused) if _belongs_to_codes(name, stored)]:
        problem = f"{where} contains {format_names(scales)}, of weights that are stored as codes"
        raise ModelError(f"{problem}, but nothing in config.json explains the codes.", SAY_UNQUANTISED)
    refuse_mismatch(place, loading_info["mismatched_keys"])
    if place.gguf:
        if ignored := [name for name in sorted(unused) if OF_ATTENTION.search(name)]:
            problem = f"{where} contains {format_names(ignored)}; it affects attention, but transformers ignores it."
            raise ModelError(problem, SAY_SAFETENSORS)
        Settings(where).check_rotation(model)
    parameters, sources = _parameter_names(model), dict[str, str]()
    for name in (name for name in stored if name not in unused):
        aliases = names_in_model(name, model.base_model_prefix)
        parameter = next((alias for alias in aliases if alias in parameters), name)
        if (first := sources.setdefault(parameter, name)) != name:
            problem = f"{where} contains both {first} and {name}, which are the same tensor of the model."
            raise ModelError(problem, SAY_ONCE)
    if len(loading_info["missing_keys"]) >= len(list(model.parameters())):
        problem = f"None of the weights in {place.file} belongs to a {type(model).__name__}."
        raise ModelError(problem, "Check the model's config.json.")


def nonfinite_tensors(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters with NaN or Inf, in the model's order; offloaded ones are loaded one by one."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and not bool((load_offloaded_parameter(model, name) if parameter.is_meta else parameter).isfinite().all())
    ]


def _belongs_to_codes(name: str, stored: Mapping[str, Stored]) -> bool:
    """Return whether an unused tensor has a name of quantised codes, or is the scale or zero of a stored weight."""
    stem = SCALE.sub("", name)
    return _leaf(name) in PACKED or (stem != name and (stem in stored or f"{stem}.weight" in stored))


def _codes(model: PreTrainedModel, stored: Mapping[str, Stored], unexpected: set[str]) -> list[str]:
    """Return the encoded tensors that were loaded as numbers: all except buffers, unexpected and ignored tensors."""
    parameters = _parameter_names(model)
    others = {name for name, _ in model.named_buffers()} | unexpected
    # transformers can store a buffer under another path, so that only its last name component is compared
    counters = {_leaf(name) for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    counters -= set(map(_leaf, parameters))
    # private in transformers, which does not load tensors that match these patterns; (?!) matches nothing
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["(?!)"]))

    def is_loaded(name: str) -> bool:
        names = set(names_in_model(name, model.base_model_prefix))
        is_apart = bool(names & others) or _leaf(name) in counters or ignored.search(name) is not None
        return bool(names & parameters) or not is_apart

    return [name for name, tensor in stored.items() if tensor.encoded and is_loaded(name)]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parameter_names(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def names_in_model(name: str, prefix: str) -> tuple[str, ...]:
    """Return the possible names of a tensor in the model: unchanged, with, and without the base model's prefix."""
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the floating-point types of unquantised weights."""
SAY_ONCE = "Save the model again with each tensor stored once."


class Stored(NamedTuple):
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    type: str
    """Name of the type in safetensors; F32 for all tensors of a GGUF file, since they are decoded."""

    @property
    def bytes(self) -> int:
        """Size in bytes, by the number of bits in the name of its type (BF16, F8_E4M3; BOOL takes a byte)."""
        bits = re.search(r"\d+", self.type)
        return prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    @property
    def encoded(self) -> bool:
        """True if the values are codes, integers or truth values instead of floating-point numbers."""
        return self.type not in FLOATS


def tensors_in(place: Location) -> dict[str, Stored]:
    """Return all tensors of the weight files, keyed by name.

    Raises ModelError if a file can't be read, is truncated or in another format, and if two files have a tensor of the
    same name, since transformers then takes the last one, regardless of the index.
    """
    readers: dict[Storage, Callable[[Path], dict[str, Stored]]] = {
        "safetensors": safetensors_header,
        "pickle": pickled_header,
        "gguf": lambda file: {entry.name: Stored(entry.shape, "F32") for entry in read_header(file).tensors},
    }
    tensors: dict[str, Stored] = {}
    for file in place.weights:
        with readable(file):
            content = readers[place.form](file)
        if twice := sorted(tensors.keys() & content.keys()):
            raise ModelError(f"{file} and another weight file both contain {format_names(twice)}.", SAY_ONCE)
        tensors |= content
    if not tensors:
        raise ModelError(f"{place.folder / place.file} contains no tensors.", "Download the model again.")
    return tensors


def numbers_in(tensors: Mapping[str, Stored]) -> int:
    """Return the total number of values in these tensors."""
    return sum(prod(tensor.shape) for tensor in tensors.values())


def safetensors_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. Raises ModelError if it is truncated or in another format."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # content is not a dict
            return {name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        problem = f"{file} is truncated or not a safetensors file: {shorten_text(str(error))}."
        raise ModelError(problem, "Download the model again.") from None


def pickled_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of an allowed pickle; weights_only builds only those. Raises ModelError for other content."""
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        problem = f"{file} contains objects other than tensors, or is not a pickle of torch: opening it could run code."
        raise ModelError(problem, "Get the model as safetensors.") from None
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        problem = f"{file} is truncated or not a pickle of torch: {shorten_text(str(error))}."
        raise ModelError(problem, "Download the model again.") from None
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} does not contain a dict of tensors.", "Save the model's state_dict.")
    return {
        str(name): Stored(tuple(value.shape), names.get(value.dtype, str(value.dtype).removeprefix("torch.")))
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }


def format_names(names: Iterable[str]) -> str:
    """Format names as `a`, or `a and 3 more`."""
    first, *more = map(shorten_text, names)
    return f"{first} and {len(more)} more" if more else first


SAY_SUPPORTED = "Check that transformers supports this model."


@contextmanager
def silence_logging() -> Iterator[None]:
    """Let transformers and accelerate log only critical messages inside the context; restore their levels at the end.

    Their messages repeat a config's content, including control characters; serious problems are raised as errors.
    Some models log when they run, not when they are loaded: Mamba logs at its first forward pass which of its kernels
    are not installed.
    """
    from transformers.utils import logging

    accelerate = getLogger("accelerate")
    levels = logging.get_verbosity(), accelerate.level
    logging.set_verbosity(CRITICAL)
    accelerate.setLevel(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        accelerate.setLevel(levels[1])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, logs and warnings inside the context, while a model is loaded."""
    from transformers.utils import logging

    with ExitStack() as undo, silence_logging(), warnings.catch_warnings(action="ignore"):
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            undo.callback(logging.enable_progress_bar)
        yield


@contextmanager
def no_kernels() -> Iterator[None]:
    """Keep transformers from downloading compiled code from the hub inside the context; models compute the same.

    This is a patch, because security needs it and no setting covers it: with the package `kernels`, RWKV, YOSO and MRA
    call transformers' get_kernel while they are built, and neither use_kernels=False nor USE_HUB_KERNELS (which is read
    only when transformers is first imported) stops them; HF_HUB_OFFLINE would still run code cached earlier.
    """
    hub = import_module("transformers.integrations.hub_kernels")
    if not hasattr(hub, "get_kernel_hub"):  # the package `kernels` is not installed
        yield
        return
    refuse = Mock(side_effect=FileNotFoundError("attnlens does not run code from the hub"))
    with patch.object(hub, "get_kernel_hub", refuse), patch("kernels.get_kernel", refuse):
        yield


TIMES, PARTS_TIMES = 8, 16
"""Factors by which a model can exceed its files' numbers (tied weights are stored once), and their tensor count."""
SPARE, SPARE_BUFFERS, SPARE_PARTS = 2**24, 2**28, 2**12
"""Additional allowances: numbers in weights, numbers in buffers (position tables, masks), modules and tensors."""


@contextmanager
def limited_size(place: Location, stored: Mapping[str, Stored]) -> Iterator[None]:
    """Raise ModelError inside the context if a model under construction becomes too large for its files.

    Its tensors are still on the meta device and take no memory. The error names the largest size in the config.
    """
    from torch import Tensor
    from torch.nn.modules import module

    numbers = TIMES * numbers_in(stored) + SPARE
    limits = {"numbers": numbers, "buffers": numbers + SPARE_BUFFERS, "parts": PARTS_TIMES * len(stored) + SPARE_PARTS}
    counts = dict.fromkeys(limits, 0)
    thread = get_ident()  # torch's hooks are global and also see modules built by other threads

    def count(kind: str, _owner: nn.Module, _name: str, value: object) -> None:
        is_on_meta = isinstance(value, Tensor) and value.is_meta
        if get_ident() != thread or (kind != "parts" and not is_on_meta):
            return
        counts["parts"] += 1
        if isinstance(value, Tensor):
            counts[kind] += prod(value.shape)
        if all(counts[name] <= limit for name, limit in limits.items()):
            return
        sizes = [(size, path) for path, size in fields(place.config) if isinstance(size, int) and size > 1]
        size, path = max(sizes, default=(0, ""))
        largest = f" (the largest number in it is {shorten_text(path)} = {format_value(size)})" if sizes else ""
        problem = f"{place.config_file} describes a far larger model{largest} than the weight files"
        raise ModelError(f"{problem} ({numbers_in(stored)} numbers).", SAY_BELONGS)

    with ExitStack() as stack:
        for kind, register in (
            ("numbers", module.register_module_parameter_registration_hook),
            ("buffers", module.register_module_buffer_registration_hook),
            ("parts", module.register_module_module_registration_hook),
        ):
            stack.callback(register(partial(count, kind)).remove)
        yield


def check_files(place: Location, trust_remote_code: bool, *, adapter_too: bool = False) -> dict[str, Stored]:
    """Check a model's files before it is loaded, and return their tensors. Raises ModelError for unsafe or bad ones."""
    from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

    names = names_in(place.folder)
    refuse_other_forms(place.folder, names, adapter_too=adapter_too)
    if place.form != "gguf":  # a GGUF file includes its config and tokenizer
        check_small(place.folder, names)
    check_config(place, trust_remote_code)
    if place.gguf and not (is_gguf_available() and is_accelerate_available()):
        problem = f"{place.file} needs the packages gguf and accelerate, but at least one is not installed."
        raise ModelError(problem, 'Run: pip install "attnlens[gguf]"')
    if place.urls:  # not downloaded: their headers are read from the hub later
        return {}
    stored = tensors_in(place)
    check_counts(place, len(stored))
    return stored


def load_config(place: Location, trust_remote_code: bool) -> PreTrainedConfig:
    """Load the model's configuration. Raises ModelError if it can't be read."""
    from transformers import AutoConfig

    own_models(place.config.get("model_type"))
    kind = f" (model_type = {format_value(place.config['model_type'])})" if "model_type" in place.config else ""
    with foreign(f"{place.config_file}{kind} can't be read", SAY_SUPPORTED):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            place.folder, trust_remote_code=trust_remote_code, **place.gguf
        )
    take_choices(config)
    if place.gguf:
        Settings(place.config_file).apply(config)
    return config


def open_gguf(place: Location, config: PreTrainedConfig, stored: Mapping[str, Stored]) -> GgufFiles | None:
    """Open the tensors of a GGUF file; return None if transformers has its newer loader for the architecture."""
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    path = place.folder / place.file
    header = read_header(path)
    if is_gguf_arch_supported(header.architecture):
        return None
    with foreign(f"{path} can't be read", SAY_SUPPORTED), limited_size(place, stored):
        return GgufFiles(path, header, config, model_class(config, gguf=True, own_code=False))


def build_model(
    place: Location,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    stored: Mapping[str, Stored],
    weights: Mapping[str, object] | None = None,
    ignored: Iterable[str] = (),
    spread: Mapping[str, object] = MappingProxyType({}),
) -> tuple[PreTrainedModel, LoadingInfo]:
    """Load the model, check it against its files, and return it with transformers' loading info.

    `weights` are decoded weights, if given, and `ignored` the names of tensors left out of them; `spread` are the
    options of transformers that spread the model over devices.
    """
    from transformers import GenerationConfig

    own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
    options: dict[str, object] = {"trust_remote_code": True} if own_code else {}
    if place.form == "safetensors" and weights is None:
        config.transformers_weights = place.file
    config_file = "" if place.gguf else f" with {CONFIG}"
    problem = f"{place.folder / place.file}{config_file} can't be loaded"
    with foreign(problem, "Check that weights and config belong together."), limited_size(place, stored):
        class_ = model_class(config, gguf=bool(place.gguf), own_code=own_code)
        if weights is None:
            options |= place.gguf
        else:
            for part in (config, getattr(config, "text_config", None)):  # quantised weights have been decoded
                for name in ("quantization_config", "compression_config"):
                    if hasattr(part, name):
                        delattr(part, name)
            # transformers reads this file only with weights from the folder; it can set the decoder's start token
            has_file = (place.folder / "generation_config.json").is_file()
            generation = GenerationConfig.from_pretrained(place.folder, local_files_only=True) if has_file else None
            options |= {"state_dict": dict(weights), "generation_config": generation}
            # private in transformers: an Auto class requires a folder
            mapping: Mapping[type, type[PreTrainedModel]] | None = getattr(class_, "_model_mapping", None)
            class_ = class_ if mapping is None else mapping[type(config)]
        load = cast("Callable[..., tuple[PreTrainedModel, LoadingInfo]]", class_.from_pretrained)
        model, loading_info = load(
            place.folder if weights is None else None,
            config=config,
            dtype=dtype,
            use_safetensors=place.form == "safetensors",
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loaded refuses them by name
            local_files_only=True,
            # a folder that can't exist: otherwise transformers, if peft is installed, applies an unchecked adapter
            # next to the weights, and may load the base that it names
            adapter_kwargs={"subfolder": "\0"},
            **spread,
            **options,
        )
    loading_info = {**loading_info, "unexpected_keys": {*loading_info["unexpected_keys"], *ignored}}
    check_loaded(place, model, stored, loading_info)
    return model, loading_info
