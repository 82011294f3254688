"""Load a model by name, and describe it.

locate.py finds the files, locally or on a hub. configs.py and gguf.py check configs and headers before anything is
built. building.py builds the model with transformers. stored.py reads headers and byte ranges, quantised.py and gguf.py
decode weights, adapters.py merges adapters, and deferred.py reads weights module by module. placement.py chooses
devices and checks free memory. No code from a file is run unless the caller allows it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

from attnlens import arguments
from attnlens.errors import ModelError, UsageError
from attnlens.files import sha256
from attnlens.models.loading import placement
from attnlens.models.loading.adapters import Adapted, find_adapter, merge_adapter
from attnlens.models.loading.building import build_model, check_files, load_config, nonfinite_tensors, open_gguf, quiet
from attnlens.models.loading.configs import InputKind, kind_of, load_tokenizer, quantisation
from attnlens.models.loading.locate import Location, find, first_line, names_in
from attnlens.models.loading.placement import device_of_inputs, format_devices
from attnlens.records import File, ModelInfo
from attnlens.requests import Loading

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from attnlens.models.loading.building import LoadingInfo
    from attnlens.models.loading.deferred import DeferredWeights
    from attnlens.models.loading.stored import Stored, TensorFiles

SWAPPED = "attnlens.json"  # Name of the file that marks a folder whose model was saved with another kernel


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, with gradients turned off, and its tokenizer and description."""

    model: PreTrainedModel  # The model, including its output head
    tokenizer: PreTrainedTokenizerBase | None  # The model's tokenizer, or None
    tokenizer_problem: str  # Reason why there is no tokenizer; empty if there is one
    info: ModelInfo  # Description of the model, without `conventions`, which only a forward pass shows
    kind: InputKind  # Kind of input that the model reads
    missing_keys: tuple[str, ...] = ()  # Parameters that the checkpoint lacks; their values are random
    unused_keys: tuple[str, ...] = ()  # Tensors of the checkpoint that the model does not use
    notes: tuple[str, ...] = ()  # Sentences for reports about the files that were read
    adapter: Adapted | None = None  # The adapter that was merged into the weights, or None
    folder: Path | None = None  # Folder of the checkpoint; None for a model in memory
    deferred: DeferredWeights | None = None
    """Reader of the weights, module by module, if the model has only shapes; otherwise None."""
    shapes: Loaded | None = None
    """If this model is spread over devices, a copy with only shapes, whose weights are read from files; else None."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights; for deferred weights, the type to which they are rounded, if any, or float32."""
        if self.deferred is None:
            return self.model.dtype
        import torch

        return self.deferred.rounded_to or torch.float32  # the type in which the model would be loaded

    @property
    def nonfinite(self) -> list[str]:
        """Names of parameters with NaN or Inf: all of them or, if weights are read from files, those found so far."""
        source = self if self.shapes is None else self.shapes
        return nonfinite_tensors(self.model) if source.deferred is None else source.deferred.nonfinite


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
    from_files: bool = False,
    device_map: str | None = None,
    max_cpu_memory: str | None = None,
) -> Loaded:
    """Load the model called `name`: `demo`, a folder, a .gguf or .safetensors file, or a hub id (`org/name@revision`).

    A path object always means a file or folder, never the hub. `revision` is a branch, tag or commit of a hub model.
    `dtype="auto"` keeps the checkpoint's type, with two exceptions: quantised weights are decoded, and half precision
    becomes float32 on the CPU, where half precision is slow and inaccurate. `device="auto"` is the first of cuda, mps
    and cpu that is available. `offline` uses only the local cache, which is also used if no connection to the hub
    succeeds within two seconds. `trust_remote_code` allows the model's own Python code to run, and `allow_pickle`
    allows weights that are stored as a pickle. `swapped` loads a model that `swap-kernel --save` wrote, but with the
    original kernel; `load_swapped` restores the new kernel as well. `adapter` names a LoRA, rsLoRA or DoRA adapter of
    peft (a folder or a hub id), which is merged into the weights. `from_files` builds the model without loading
    weights: `inspect` reads them from the files module by module to compute weights.* measures, but the model can't
    run. `device_map="auto"` spreads the model over GPUs, RAM (at most `max_cpu_memory`, e.g. "8GB") and disk; then
    `dtype="auto"` keeps half precision on the CPU, too.

    Raises UsageError for invalid arguments, and for `device_map` without the package accelerate. Raises TooLargeError
    if the model does not fit into free memory on the CPU. Raises ModelError if the model, the device, a package or a
    permission is missing, if files are broken, unsupported or do not belong together, or if the model was saved with
    another kernel.
    """
    options = locals()
    Loading(**{name: options[name] for name in Loading.model_fields})  # raises UsageError for invalid values
    placement.check_device_map(options)
    place_on = placement.choose_device(device)
    place = find(_format_name(name), revision, offline=offline, allow_pickle=allow_pickle, leave_weights=from_files)
    place = replace(place, trusts_code=trust_remote_code)
    if not swapped and SWAPPED in names_in(place.folder):
        problem = f"{place.folder} contains a model saved with another kernel, which a plain load would ignore."
        raise ModelError(problem, "Load the model with attnlens.load_swapped in Python.")
    if not swapped and "attnlens_primal" in place.config:
        problem = f"{place.id} has Primal-Attention layers, which compute no attention matrix to analyse."
        raise ModelError(problem, "Choose another model, or build this one with attnlens.lab.primal.build to run it.")
    if from_files and adapter is not None:
        problem = "--device files (from_files=True) never loads the whole model, so no adapter can be merged."
        raise ModelError(problem, "Merge the adapter into the model, save the merged model, and load it.")
    files = None if adapter is None else find_adapter(_format_name(adapter), offline=offline)
    stored = check_files(place, adapter_too=files is not None and files.folder.samefile(place.folder))
    if from_files:
        return _build_from_shapes(place, stored, dtype)
    if device_map is not None:
        return _load_spread(place, stored, dtype, max_cpu_memory)
    return _load_into_memory(place, stored, files, dtype, place_on)


def _load_into_memory(
    place: Location, stored: Mapping[str, Stored], adapter: Location | None, dtype: str, device: torch.device
) -> Loaded:
    """Load the model at `place` onto `device`; decode quantised weights, and merge the adapter if there is one."""
    import torch

    from attnlens.models.loading.deferred import SafetensorsFiles

    with quiet(place):
        config = load_config(place)
        loaded_dtype: torch.dtype | None = None if dtype == "auto" else getattr(torch, dtype)
        if loaded_dtype is None and device.type == "cpu":  # half precision is slow, and its errors look like asymmetry
            loaded_dtype = torch.float64 if config.dtype == torch.float64 else torch.float32
        method = quantisation(place)[0]
        if device.type == "cpu":
            placement.refuse_too_large(place, stored, loaded_dtype or torch.float32)
        files: TensorFiles | None = SafetensorsFiles(place) if method else None
        if place.gguf:
            files = open_gguf(place, config, stored)
        weights: dict[str, torch.Tensor] | None = None
        if files is not None:  # read one by one, because decoded numbers take up to eight times the memory of codes
            config_dtype = getattr(config, "dtype", None) if method else None
            decoded_dtype: torch.dtype = loaded_dtype or config_dtype or torch.float32
            coded = files.coded if isinstance(files, SafetensorsFiles) else files.stored
            tensors = (item for name in files.stored for item in files.read([name]).items())
            weights = {name: part.to(decoded_dtype) if name in coded else part for name, part in tensors}
        model, loading_info = build_model(place, config, loaded_dtype or "auto", stored, files, weights)
        merged = None if adapter is None else merge_adapter(adapter, model)
        tokenizer = load_tokenizer(place, config)
    model.requires_grad_(False).to(device)  # type: ignore[arg-type]  # the decorator of .to hides self
    return _describe(place, model, loading_info, tokenizer, adapter=merged)


def _load_spread(place: Location, stored: Mapping[str, Stored], dtype: str, max_cpu_memory: str | None) -> Loaded:
    """Load the model spread over all devices; in the result, `shapes` is the same model without weight values.

    Raises ModelError unless the weights are unquantised safetensors.
    """
    if place.form != "safetensors" or quantisation(place)[0] is not None:
        problem = f"--device spread requires unquantised safetensors files, which {place.id} does not have."
        raise ModelError(problem, "Convert the model to such files, or leave out --device spread.")
    shapes = _build_from_shapes(place, stored, dtype)
    with quiet(place), ExitStack() as undo:
        config = load_config(place)
        folder = undo.enter_context(TemporaryDirectory(prefix="attnlens-", ignore_cleanup_errors=True))
        spread = placement.spread_over_devices(max_cpu_memory) | {"offload_folder": folder}
        # transformers accepts the name of a torch dtype
        model, loading_info = build_model(place, config, dtype, stored, spread=spread)
        tokenizer = load_tokenizer(place, config)
        weakref.finalize(model, undo.pop_all().close)  # removes the folder when the model is freed
    return _describe(place, model.requires_grad_(False), loading_info, tokenizer, shapes=shapes)


def _build_from_shapes(place: Location, stored: Mapping[str, Stored], dtype: str) -> Loaded:
    """Build the model at `place` with shapes but no values. Raises ModelError if tensors can't be read individually."""
    import torch

    from attnlens.models.loading.deferred import ONE_THREAD, DeferredWeights, SafetensorsFiles, ShapesAlone, widen

    path = place.folder / place.file
    if place.form == "pickle":
        raise ModelError(f"{path} is a pickle, whose tensors can't be read individually.", "Convert it to safetensors.")
    with quiet(place), patch.dict(os.environ, ONE_THREAD):
        config = load_config(place)
        files = open_gguf(place, config, stored) if place.gguf else SafetensorsFiles(place)
        if files is None:
            problem = f"Tensors of {path} can't be read individually: its GGUF architecture is not supported."
            remedy = "Give the model as safetensors or, if it fits into memory, leave out --device files."
            raise ModelError(problem, remedy)
        with ShapesAlone(allow_non_fake_inputs=True):
            shapes = {name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in files.stored.items()}
        model, loading_info = build_model(place, config, torch.float32, stored, files, shapes)
    # position tables were computed in float32, as in a loaded model; float64 represents all weights exactly
    widen(model.requires_grad_(False))
    weights = DeferredWeights(model, files, None if dtype == "auto" else getattr(torch, dtype))
    no_tokenizer = None, "the model has only shapes and its weights are read from files, so it cannot run"
    return _describe(place, model, loading_info, no_tokenizer, deferred=weights)


def _describe(
    place: Location,
    model: PreTrainedModel,
    loading_info: LoadingInfo,
    tokenizer: tuple[PreTrainedTokenizerBase | None, str],
    adapter: Adapted | None = None,
    deferred: DeferredWeights | None = None,
    shapes: Loaded | None = None,
) -> Loaded:
    """Return the model as Loaded, with its description; `loading_info` is transformers' record of the load."""
    missing, unused = (tuple(sorted(loading_info[name])) for name in ("missing_keys", "unexpected_keys"))
    info = ModelInfo(
        id=place.id,
        revision=place.revision,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        files=[] if deferred else [File(name=file.name, sha256=sha256(file)) for file in place.weights],
        files_in_parts=deferred.files.headers if deferred else [],
        unexpected=[*unused, *(adapter.unplaced if adapter else ())],
        quantised=quantisation(place)[0],
        adapter=adapter.info if adapter else None,
    )
    notes, kind = (*place.notes, *([] if deferred else _note_untied(model))), kind_of(model)
    return Loaded(model, *tokenizer, info, kind, missing, unused, notes, adapter, place.folder, deferred, shapes)


def _note_untied(model: PreTrainedModel) -> list[str]:
    """Return [note] if the config ties the output matrix to the embedding, but the two differ in the files; else []."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if output is None or not getattr(model.config, "tie_word_embeddings", False):
        return []
    name = next((name for name, module in model.named_modules() if module is output), None)
    if f"{name}.weight" not in (type(model)._tied_weights_keys or {}):
        return []
    weight, embedding = output.weight, model.get_input_embeddings().weight
    if weight is embedding or weight.shape != embedding.shape or weight.is_meta or bool((weight == embedding).all()):
        return []
    problem = f"{name}.weight differs from the embedding, although config.json ties the two (tie_word_embeddings)"
    return [f"{problem}: its values in the files were used."]


def _format_name(name: object) -> str:
    """Return the name as a string; a relative path object gets the prefix `./` to distinguish it from a hub id."""
    if isinstance(name, os.PathLike):
        arguments.path("name", name)
        return os.path.join(os.curdir, os.fspath(name))  # noqa: PTH118  # pathlib would drop the dot again
    if not isinstance(name, str):
        problem = f"A value of type {type(name).__name__} is not a model name."
        raise UsageError(problem, "Give a hub id, a path, or the result of attnlens.load.")
    return arguments.word("model", name)
