"""Loads a model from its name and describes it before it has run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens import arguments
from attnlens.errors import AttnlensError, ModelError, UsageError, is_memory
from attnlens.files import sha256
from attnlens.models.adapters.files import AdapterFiles, find_adapter
from attnlens.models.bounds import bounded
from attnlens.models.classes import InputKind, kind_of, model_class, own_models, refuse_own_code
from attnlens.models.configs import check_config, check_counts, drop_settings, take_choices
from attnlens.models.folders import check_small, names_in, refuse_other_forms
from attnlens.models.gguf import read_once
from attnlens.models.hub import first_line
from attnlens.models.integrity import check_loaded, nonfinite_tensors
from attnlens.models.locate import CONFIG, Location, find
from attnlens.models.placement import device_of, dtype_of
from attnlens.models.quantised import decoded, method_of, table
from attnlens.models.quiet import no_kernels, no_peft, quiet
from attnlens.models.stored import Stored, tensors_in
from attnlens.models.tokenizers import load_tokenizer
from attnlens.records import File, ModelInfo
from attnlens.requests import Loading, checked

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from attnlens.models.adapters.merging import Adapted

__all__ = ["SWAPPED", "Kind", "Loaded", "Loading", "first_line", "load", "nonfinite_tensors"]

GENERATION = "generation_config.json"
SWAPPED = "attnlens.json"
"""What lies beside weights that were saved with another kernel."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode without gradients, and what belongs to it."""

    model: PreTrainedModel
    """The model, with the head that the checkpoint names."""
    tokenizer: PreTrainedTokenizerBase | None
    """Its tokenizer, or None."""
    tokenizer_problem: str
    """Why there is no tokenizer; empty where there is one."""
    info: ModelInfo
    """Which model it is; its conventions are not known yet."""
    kind: InputKind
    """What it reads."""
    missing_keys: tuple[str, ...] = ()
    """Parameters that the checkpoint lacks, so that they hold random numbers."""
    unused_keys: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model has no place for."""
    adapter: Adapted | None = None
    """The adapter that was merged into its weights."""
    folder: Path | None = None
    """Where the checkpoint lies; None for a model in memory."""


@arguments.public
def load(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    swapped: bool = False,
    adapter: str | os.PathLike[str] | None = None,
) -> Loaded:
    """The model called `name`: `demo`, a folder, a .gguf or .safetensors file, or a hub id (`org/name@revision`).

    A path object always means a file or folder, never the hub. `dtype="auto"` is the checkpoint's own type, but half
    precision is raised to float32 on the CPU, where it is slow and inaccurate; a GGUF file is dequantised.
    `device="auto"` is the first of cuda, mps, cpu that is there.
    `offline` looks into the local cache and never at the network; without it, a hub that does not answer within two
    seconds is left alone in the same way. Nothing asks a question on stdin. `swapped` reads the weights that
    `swap-kernel --save` wrote, without the kernel that they were made for, which `load_swapped` puts in its place.
    `adapter` names a LoRA, rsLoRA or DoRA adapter of peft (a folder or a hub id), which is merged into the weights.

    Raises UsageError for words that make no sense (unknown dtype, a revision of a folder); ModelError where the model
    is not there, its files are broken, it needs a pickle or foreign code that was not allowed, a package is missing,
    its weights don't fit its config, it was saved with another kernel, the adapter is none or of another base, or there
    is no such device.
    """
    switches = {"offline": offline, "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    checked(Loading, {"device": device, "dtype": dtype, "revision": revision, "adapter": adapter, **switches})
    place_on = device_of(device)
    place = find(_written(name), revision, offline=offline, allow_pickle=allow_pickle)
    if not swapped:
        _refuse_swapped(place)
    files = None if adapter is None else find_adapter(_written(adapter), offline=offline, allow_pickle=allow_pickle)
    return _loaded(place, files, dtype, place_on, trust_remote_code)


def _loaded(
    place: Location, adapter: AdapterFiles | None, dtype: str, device: torch.device, trust_remote_code: bool
) -> Loaded:
    """The model at that place, its codes decoded and the adapter merged, on that device."""
    from attnlens.models.adapters.merging import merge  # late: it loads torch

    stored = _checked(place, trust_remote_code, adapter)
    with quiet(), no_kernels(), no_peft(), read_once() if place.gguf else nullcontext():
        config = _config(place, trust_remote_code)
        kind, method = dtype_of(dtype, config, device), method_of(place)
        weights = None if method is None else decoded(place, method, config.dtype if isinstance(kind, str) else kind)
        if weights is not None:
            drop_settings(config)
            stored = table(weights, stored)
        with bounded(place, stored):
            model, found = _model(place, config, kind, trust_remote_code, weights)
        check_loaded(place, model, stored, found)
        adapted = None if adapter is None else merge(adapter, model)
        tokenizer, problem = load_tokenizer(place, config, trust_remote_code=trust_remote_code)
    model.requires_grad_(False).to(device)  # type: ignore[arg-type]  # the decorator of .to hides self
    missing, unused = (tuple(sorted(found[name])) for name in ("missing_keys", "unexpected_keys"))
    info = _info(place, model, unused).model_copy(update={"quantised": method})
    if adapted is not None:
        info = info.model_copy(update={"adapter": adapted.info, "unexpected": [*unused, *adapted.unplaced]})
    return Loaded(model, tokenizer, problem, info, kind_of(model), missing, unused, adapted, Path(place.folder))


def _checked(place: Location, trust_remote_code: bool, adapter: AdapterFiles | None) -> dict[str, Stored]:
    """The tensors of the weight files; raises ModelError for what can be told from the files before they are loaded."""
    names = names_in(place.folder)
    refuse_other_forms(place.folder, names, adapter_too=adapter is not None and adapter.lies_in(place.folder))
    if place.form != "gguf":  # which holds its config and tokenizer itself
        check_small(place.folder, names)
    check_config(place)
    if not trust_remote_code:
        refuse_own_code(place.config, place.id)
    _check_packages(place)
    stored = tensors_in(place)
    check_counts(place, len(stored))
    return stored


def _refuse_swapped(place: Location) -> None:
    if SWAPPED in names_in(place.folder):
        raise ModelError(
            f"{place.folder} holds a model with another kernel, as --save wrote it, which would be left out here.",
            "Use attnlens.load_swapped in Python.",
        )
    if "attnlens_primal" in place.config:
        raise ModelError(
            f"{place.id} is a model with primal layers, which have no attention to look at.",
            "Build it with attnlens.primal.build, whose documentation says how its weights are loaded.",
        )


def _written(name: object) -> str:
    """The model's name as a string; a path is written so that it can't be mistaken for a hub id or `demo`."""
    if isinstance(name, os.PathLike):
        arguments.path("name", name)
        return os.path.join(os.curdir, os.fspath(name))  # noqa: PTH118  # pathlib would drop the dot again
    if not isinstance(name, str):
        raise UsageError(f"A {type(name).__name__} names no model.", "Give a hub id, a path, or what load returned.")
    return arguments.word("model", name)


def _info(place: Location, model: PreTrainedModel, unused: tuple[str, ...]) -> ModelInfo:
    return ModelInfo(
        id=place.id,
        revision=place.revision,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        files=[File(name=file.name, sha256=sha256(file)) for file in place.weights],
        unexpected=list(unused),
    )


def _check_packages(place: Location) -> None:
    """Raise ModelError where a GGUF file is to be read and one of the two packages that this takes is missing."""
    from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

    if place.gguf and not (is_gguf_available() and is_accelerate_available()):
        raise ModelError(
            f"{place.file} needs the packages gguf and accelerate, which are not both installed.",
            'Run: pip install "attnlens[gguf]"',
        )


def _config(place: Location, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    own_models(place.config.get("model_type"))
    where = place.folder / (place.file if place.gguf else CONFIG)
    with _foreign(f"{where} can't be read", "Is it a model that transformers knows?"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            place.folder, trust_remote_code=trust_remote_code, **place.gguf
        )
    take_choices(config)
    return config


def _model(
    place: Location,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    weights: dict[str, torch.Tensor] | None,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model, and what transformers tells of its loading; from `weights`, where they had to be decoded."""
    own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
    options: dict[str, Any] = {"trust_remote_code": True} if own_code else {}
    if place.form == "safetensors" and weights is None:
        config.transformers_weights = place.file
    config_file = "" if place.gguf else f" with {CONFIG}"
    problem = f"{place.folder / place.file}{config_file} can't be loaded"
    with _foreign(problem, "Check that weights and config belong together."):
        if weights is not None:
            options |= {"state_dict": weights, "generation_config": _generation(place)}
        named = model_class(config, gguf=bool(place.gguf), own_code=own_code)
        model, found = named.from_pretrained(
            place.folder if weights is None else None,
            config=config,
            dtype=dtype,
            use_safetensors=place.form == "safetensors",
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named, and refused
            local_files_only=True,
            **place.gguf,
            **options,
        )
    return model, found


def _generation(place: Location) -> GenerationConfig | None:
    """What transformers reads beside the weights where it finds them itself: it may name the decoder's first token."""
    from transformers import GenerationConfig

    there = (place.folder / GENERATION).is_file()
    return GenerationConfig.from_pretrained(place.folder, local_files_only=True) if there else None


@contextmanager
def _foreign(problem: str, remedy: str) -> Iterator[None]:
    """Inside, whatever transformers raises becomes a ModelError; no list of what it raises for such files is whole."""
    try:
        yield
    except AttnlensError:
        raise
    except ImportError as error:
        raise ModelError(f"{problem}: {first_line(error)}", "Install the package that it asks for.") from error
    except Exception as error:
        if is_memory(error):
            raise ModelError(f"{problem}: there is not enough memory.", "Take a smaller model.") from error
        raise ModelError(f"{problem}: {first_line(error)}", remedy) from error
