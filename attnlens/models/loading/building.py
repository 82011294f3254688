"""Build a model from its config and tensors with transformers, silently and within size limits; convert its errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from logging import CRITICAL, getLogger
from math import prod
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING
from unittest.mock import Mock, patch

from attnlens.errors import ModelError
from attnlens.files import format_value, shorten_text
from attnlens.models.loading.configs import (
    SAY_BELONGS,
    check_config,
    check_counts,
    drop_settings,
    fields,
    foreign,
    model_class,
    own_models,
    refuse_own_code,
    take_choices,
)
from attnlens.models.loading.gguf import GgufFiles, Settings, read_header
from attnlens.models.loading.locate import CONFIG, Location, check_small, names_in, refuse_other_forms
from attnlens.models.loading.stored import LoadingInfo, Stored, check_loaded, numbers_in, tensors_in

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


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
    check_config(place)
    if not trust_remote_code:
        refuse_own_code(place.config, place.id)
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
            drop_settings(config)  # quantised weights have been decoded
            # transformers reads this file only with weights from the folder; it can set the decoder's start token
            has_file = (place.folder / "generation_config.json").is_file()
            generation = GenerationConfig.from_pretrained(place.folder, local_files_only=True) if has_file else None
            options |= {"state_dict": dict(weights), "generation_config": generation}
            if hasattr(class_, "_model_mapping"):  # private in transformers: an Auto class requires a folder
                class_ = class_._model_mapping[type(config)]
        model, loading_info = class_.from_pretrained(
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
