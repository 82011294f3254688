"""List the tensors of weight files, build a model with transformers, and check the model against the files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from logging import CRITICAL, getLogger
from math import prod
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock, patch

import numpy

from attnlens.errors import ModelError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading import configs
from attnlens.models.loading.gguf import ATTENTION_NAMES, SAY_SAFETENSORS, GgufFiles, Settings
from attnlens.models.loading.gguf import read_header as read_gguf_header
from attnlens.models.loading.locate import Location, check_entries, foreign, names_in, readable
from attnlens.models.loading.stored import LocalFile, Stored, count_numbers, format_names, read_header, read_pickle

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from attnlens.models.loading.stored import TensorFiles


LoadingInfo = Mapping[str, set[Any]]
"""transformers' record of a load: names in missing_keys and unexpected_keys, names and shapes in mismatched_keys."""
PACKED = ("qweight", "qzeros", "weight_packed", "SCB", "absmax", "quant_map", "_proj_blocks")
"""Suffixes of the names of tensors that only quantised checkpoints have."""
WRAPPER = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
"""Prefix or infix that torch.compile, DataParallel, FSDP and others add to the tensor names of a wrapped model."""
SCALE = re.compile(r"(_scale|_scale_inv|_scales|_zero_point|\.scales?)$")
"""Pattern of the suffixes that turn a weight's name into the names of its scales and zeros."""


def check_loaded(
    place: Location, model: PreTrainedModel, stored: Mapping[str, Stored], loading_info: LoadingInfo
) -> None:
    """Raise ModelError if the loaded model differs from its files; `loading_info` is transformers' record of the load.

    transformers itself raises no error if it ignores an adapter's tensors, reads quantised codes as numbers, fills
    mismatched parameters with random values, or picks one of two tensors stored for the same parameter.
    """
    where, unused = place.folder / place.file, set(loading_info["unexpected_keys"])
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if low_rank := [name for name in sorted(unused) if re.search(r"(^|[._])lora_", name)]:
        problem = f"{where} contains an adapter that is not merged ({format_names(low_rank)})."
        raise ModelError(problem, "Merge the adapter with peft's merge_and_unload, and save the merged model.")
    codes, scales = _find_loaded_codes(model, parameters, stored, unused), list[str]()
    for name in sorted(unused & stored.keys()):
        stem = SCALE.sub("", name)
        if name.endswith(PACKED) or (stem != name and {stem, f"{stem}.weight"} & stored.keys()):
            scales.append(name)
    if codes or scales:
        if codes:
            what = f"{format_names(codes)} as {stored[codes[0]].type} codes"
        else:
            what = f"parts of quantised weights ({format_names(scales)})"
        method = configs.quantisation(place)[0]
        reason = f"tensors that {method} needs are missing" if method else "config.json does not describe them"
        problem = f"{where} stores {what}, but {reason}."
        raise ModelError(problem, configs.SAY_UNQUANTISED)
    if mismatched := sorted(loading_info["mismatched_keys"]):
        name, *shapes = mismatched[0]
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        size, expected = (" × ".join(map(str, shape)) for shape in shapes)
        differing = {length for stored_length, length in zip(*shapes, strict=False) if stored_length != length}
        causes = [f"{shorten_text(path)} = {n}" for path, n in configs.sizes(place.config) if n in differing]
        because = f" ({', '.join(causes)})" if causes else ""
        source, remedy = ("its fields", SAY_SAFETENSORS) if place.gguf else ("config.json", configs.SAY_BELONGS)
        problem = f"{name}{more} has shape {size} in the file, but {expected} according to {source}{because}"
        raise ModelError(f"{where} can't be loaded: {problem}.", remedy)
    if place.gguf:
        if ignored := [name for name in sorted(unused) if ATTENTION_NAMES.search(name)]:
            problem = f"transformers would ignore {format_names(ignored)} in {where}, which would change attention."
            raise ModelError(problem, SAY_SAFETENSORS)
        Settings(where).check_rotation(model)
    sources: dict[str, str] = {}
    for name in (name for name in stored if name not in unused):
        aliases = names_in_model(name, model.base_model_prefix)
        parameter = next((alias for alias in aliases if alias in parameters), name)
        if (first := sources.setdefault(parameter, name)) != name:
            problem = f"{where} contains both {first} and {name}, which belong to the same parameter."
            raise ModelError(problem, SAY_ONCE)
    missing = set(loading_info["missing_keys"])
    is_empty = len(missing) >= len(list(model.parameters()))
    for name in sorted(unused):
        plain, parts = WRAPPER.sub("", name), name.split(".")
        # if no tensor matches a parameter, any prefix counts as added; otherwise only those that wrappers add
        candidates = [*[plain] * (plain != name), *(".".join(parts[i:]) for i in range(1, len(parts)) if is_empty)]
        for candidate in candidates:
            if not missing.isdisjoint(names_in_model(candidate, model.base_model_prefix)):
                match = WRAPPER.search(name)
                added = match[0] if match and not name.endswith(candidate) else name.removesuffix(candidate)
                problem = f"{where} contains {shorten_text(name)}, which the model calls {shorten_text(candidate)}."
                wrappers = "torch.compile, DataParallel, FSDP, PEFT or Lightning add it when they wrap a model"
                raise ModelError(problem, f"Remove {shorten_text(added)} from the tensors' names; {wrappers}.")
    if is_empty:
        problem = f"None of the weights in {place.file} belongs to the class {type(model).__name__}: the file contains"
        raise ModelError(f"{problem} {format_names(sorted(stored))}.", "Use the config.json of these weights.")


def nonfinite_tensors(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters with NaN or Inf, in the model's order; load offloaded parameters one by one."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and not bool((load_offloaded_parameter(model, name) if parameter.is_meta else parameter).isfinite().all())
    ]


def _find_loaded_codes(
    model: PreTrainedModel, parameters: set[str], stored: Mapping[str, Stored], unused: set[str]
) -> list[str]:
    """Return the names of stored codes that were loaded into parameters as if they were plain numbers."""
    buffers = dict(model.named_buffers())
    # transformers can store a buffer under another path, so only the last component of its name is compared
    counters = {_last_component(name) for name, buffer in buffers.items() if not buffer.is_floating_point()}
    counters -= set(map(_last_component, parameters))
    # private in transformers, which does not load tensors that match these patterns; (?!) matches nothing
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["(?!)"]))
    loaded = []
    for name in (name for name, tensor in stored.items() if tensor.encoded):
        names = set(names_in_model(name, model.base_model_prefix))
        is_apart = bool(names & (buffers.keys() | unused)) or _last_component(name) in counters or ignored.search(name)
        if names & parameters or not is_apart:
            loaded.append(name)
    return loaded


def _last_component(name: str) -> str:
    return name.rpartition(".")[2]


def names_in_model(name: str, prefix: str) -> tuple[str, ...]:
    """Return a tensor's possible names in the model: unchanged, with the base model's `prefix`, and without it."""
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


SAY_ONCE = "Save the model again with each tensor stored once."


def list_tensors(place: Location) -> dict[str, Stored]:
    """Return {name: Stored} for all tensors of the weight files. Raises ModelError if a file is invalid."""
    tensors: dict[str, Stored] = {}
    for file in place.weights:
        with readable(file):
            if place.gguf:
                content = {entry.name: Stored(entry.shape, "F32") for entry in read_gguf_header(file).tensors}
            else:
                content = read_pickle(file) if place.form == "pickle" else read_header(LocalFile(file))[0]
        if twice := sorted(tensors.keys() & content.keys()):  # transformers takes the last, regardless of the index
            raise ModelError(f"{file} and another weight file both contain {format_names(twice)}.", SAY_ONCE)
        tensors |= content
    if not tensors:
        raise ModelError(f"{place.folder / place.file} contains no tensors.", "Download the model again.")
    return tensors


SAY_SUPPORTED = "Check that transformers supports this model."


DOWNLOADING = ("datasets", "huggingface_hub", "fsspec", "httpx", "urllib3")  # loggers that report retried downloads


@contextmanager
def silence_logging(*names: str) -> Iterator[None]:
    """Let transformers, accelerate, fake tensors and the loggers `names` log only critical messages inside the context.

    Their messages repeat a config's content, including control characters; serious problems are raised as errors. Mamba
    logs missing kernels when it first runs, and torch logs computations that need more than shapes.
    """
    from transformers.utils.logging import get_logger

    get_logger("transformers")  # sets transformers' default level
    with ExitStack() as undo:
        for logger in map(getLogger, ("transformers", "accelerate", "torch._subclasses.fake_tensor", *names)):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(CRITICAL)
        yield


@contextmanager
def quiet(place: Location | None = None) -> Iterator[None]:
    """Inside the context, silence progress bars, logs and warnings, block hub code, and parse a GGUF file only once.

    With `place`, old names in the model's config are accepted, too. A patch blocks code from the hub, because RWKV,
    YOSO and MRA load kernels while they are built, even with use_kernels=False or HF_HUB_OFFLINE.
    """
    from transformers.utils import logging

    hub = import_module("transformers.integrations.hub_kernels")
    with ExitStack() as undo, silence_logging(), warnings.catch_warnings(action="ignore"):
        if place is not None:
            undo.enter_context(configs.accept_old_names())
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            undo.callback(logging.enable_progress_bar)
        if hasattr(hub, "get_kernel_hub"):  # the package `kernels` is installed
            refuse = Mock(side_effect=FileNotFoundError("attnlens does not run code from the hub"))
            undo.enter_context(patch.object(hub, "get_kernel_hub", refuse))
            undo.enter_context(patch("kernels.get_kernel", refuse))
        if place is not None and place.gguf:

            class PlainReader(import_module("gguf").GGUFReader):  # type: ignore[misc]  # a package that ships no types
                """gguf's reader with a plain array as data, since slices of numpy's memmap take three times as long."""

                def __setattr__(self, name: str, value: object) -> None:
                    super().__setattr__(name, numpy.asarray(value) if name == "data" else value)

            undo.enter_context(patch("gguf.GGUFReader", cache(PlainReader)))
        yield


TIMES, PARTS_TIMES = 8, 16
"""Maximum ratio of numbers in a model to numbers in its files (which store tied weights once), and of modules and
tensors in the model to tensors in the files."""
SPARE, SPARE_BUFFERS, SPARE_PARTS = 2**24, 2**28, 2**12
"""Numbers in weights, numbers in buffers (position tables, masks), and modules and tensors allowed in excess."""


@contextmanager
def limited_size(place: Location, stored: Mapping[str, Stored]) -> Iterator[None]:
    """Raise ModelError inside the context if a model built on the meta device becomes far larger than its files."""
    from torch import Tensor
    from torch.nn.modules import module

    numbers = TIMES * count_numbers(stored) + SPARE
    room = {"numbers": numbers, "buffers": numbers + SPARE_BUFFERS, "parts": PARTS_TIMES * len(stored) + SPARE_PARTS}
    thread = get_ident()  # torch's hooks are global and also see modules built by other threads

    def count(kind: str, _owner: nn.Module, _name: str, value: object) -> None:
        is_on_meta = isinstance(value, Tensor) and value.is_meta
        if get_ident() != thread or (kind != "parts" and not is_on_meta):
            return
        room["parts"] -= 1
        if isinstance(value, Tensor):
            room[kind] -= prod(value.shape)
        if min(room.values()) >= 0:
            return
        sizes = [(size, path) for path, size in configs.fields(place.config) if isinstance(size, int) and size > 1]
        size, path = max(sizes, default=(0, ""))
        largest = f" (the largest setting is {shorten_text(path)} = {format_value(size)})" if sizes else ""
        problem = f"{place.config_file} describes a far larger model{largest} than the weight files contain"
        raise ModelError(f"{problem} ({count_numbers(stored)} numbers).", configs.SAY_BELONGS)

    with ExitStack() as stack:
        for kind, register in (
            ("numbers", module.register_module_parameter_registration_hook),
            ("buffers", module.register_module_buffer_registration_hook),
            ("parts", module.register_module_module_registration_hook),
        ):
            stack.callback(register(partial(count, kind)).remove)
        yield


def check_files(place: Location, *, adapter_too: bool = False) -> dict[str, Stored]:
    """Check a model's files; return {name: Stored}, empty for remote files. Raises ModelError if a file is invalid."""
    from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

    check_entries(place.folder, names_in(place.folder), adapter_too=adapter_too, gguf=bool(place.gguf))
    configs.check_config(place)
    packages = {"gguf": is_gguf_available, "accelerate": is_accelerate_available} if place.gguf else {}
    if missing := [name for name, is_available in packages.items() if not is_available()]:
        problem = f"{place.file} can't be read, because {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise ModelError(f"{problem} not installed.", f"Run: pip install {' '.join(missing)}")
    if place.urls:  # not downloaded: their headers are read from the hub later
        return {}
    stored = list_tensors(place)
    configs.check_counts(place, len(stored))
    return stored


def load_config(place: Location) -> PreTrainedConfig:
    """Load the config, apply a GGUF file's settings, and clear CHOICES. Raises ModelError if this fails."""
    from transformers import AutoConfig

    configs.own_models(place.config.get("model_type"))
    kind = f" (model_type = {format_value(place.config['model_type'])})" if "model_type" in place.config else ""
    with foreign(f"{place.config_file}{kind} can't be read", SAY_SUPPORTED):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            place.folder, trust_remote_code=place.trusts_code, **place.gguf
        )
    configs.clear_choices(config)
    if place.gguf:
        Settings(place.config_file).apply(config)
    return config


def open_gguf(place: Location, config: PreTrainedConfig, stored: Mapping[str, Stored]) -> GgufFiles | None:
    """Open the tensors of a GGUF file; return None if transformers' newer loader handles the architecture."""
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    header = read_gguf_header(place.config_file)
    if is_gguf_arch_supported(header.architecture):
        return None
    with foreign(f"{place.config_file} can't be read", SAY_SUPPORTED), limited_size(place, stored):
        return GgufFiles(place.config_file, header, config, configs.model_class(config, gguf=True, own_code=False))


def build_model(
    place: Location,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    stored: Mapping[str, Stored],
    files: TensorFiles | None = None,
    weights: Mapping[str, object] | None = None,
    spread: Mapping[str, object] = MappingProxyType({}),
) -> tuple[PreTrainedModel, LoadingInfo]:
    """Load the model, check it against its files, and return it with transformers' loading info.

    `weights` contains tensors read from `files`, or tensors that have only shapes; if it is None, transformers reads
    the tensors. `stored` describes the files' tensors, and `spread` contains transformers' options that
    spread the model over devices.
    """
    from transformers import GenerationConfig

    own_code = place.trusts_code and bool(getattr(config, "auto_map", None))
    options: dict[str, object] = {"trust_remote_code": True} if own_code else {}
    if place.form == "safetensors" and files is None:
        config.transformers_weights = place.file
    stored = stored if files is None else files.stored
    problem = f"{place.folder / place.file} can't be loaded with config.json"
    with foreign(problem, "Check that weights and config belong together."), limited_size(place, stored):
        class_ = configs.model_class(config, gguf=bool(place.gguf), own_code=own_code)
        if weights is None:
            options |= place.gguf
        else:
            for part in (config, getattr(config, "text_config", None)):  # quantised weights have been decoded
                for name in ("quantization_config", "compression_config"):
                    if hasattr(part, name):
                        delattr(part, name)
            # transformers ignores generation_config.json here, although it can set the decoder's start token
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
            ignore_mismatched_sizes=True,  # check_loaded raises an error that names them
            local_files_only=True,
            # a folder that can't exist: otherwise transformers, if peft is installed, applies an unchecked adapter
            # next to the weights, and may load the base that it names
            adapter_kwargs={"subfolder": "\0"},
            **spread,
            **options,
        )
    unexpected = {*loading_info["unexpected_keys"], *(files.ignored if files else ())}
    loading_info = {**loading_info, "unexpected_keys": unexpected}
    check_loaded(place, model, stored, loading_info)
    return model, loading_info
