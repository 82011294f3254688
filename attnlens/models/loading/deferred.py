"""Models that have only shapes, built by transformers' own loading; weights are read from their files module by module.

Files on a hub are read by byte ranges, quantised weights and GGUF files one weight at a time.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # private: torch's only tensors of shapes
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from attnlens.errors import ModelError
from attnlens.files import shorten_text
from attnlens.models.loading.building import open_gguf, quiet
from attnlens.models.loading.locate import Location
from attnlens.models.loading.placement import give_back
from attnlens.models.loading.quantised import coded_weights
from attnlens.models.loading.stored import LENGTH, LocalFile, RemoteFile, Stored, TensorFiles, read_header

if TYPE_CHECKING:
    from torch._ops import OpOverload  # private: torch exports no name for an operation
    from transformers import PreTrainedConfig


@dataclass
class DeferredWeights:
    """Weights of a model that has only shapes; the weights of a module are read while it is being inspected."""

    model: PreTrainedModel  # The model, whose tensors have only shapes
    files: TensorFiles  # Files that the weights are read from
    rounded_to: torch.dtype | None  # Type to which weights are rounded when read; None: the stored type
    bytes_read: int = 0  # Number of bytes read so far
    nonfinite: list[str] = field(default_factory=list)  # Names of parameters with NaN or Inf among those read so far

    def __post_init__(self) -> None:
        for module in self.model.modules():
            # private in transformers, and the only way to know whether the setter would raise
            if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
                # with batched_mm, no shape in a mixture of experts depends on which expert a token chose
                module.set_experts_implementation("batched_mm")

    @contextmanager
    def present(self, module: nn.Module, wanted: Callable[[], Collection[str]]) -> Iterator[None]:
        """Give the module's `wanted` parameters and buffers their values inside the context, or raise ModelError."""
        saved = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()]
        try:
            self._place(module, wanted())
            yield
        finally:
            for owner, parameters, buffers in saved:  # private in torch; setattr would refuse tensors as parameters
                owner._parameters.update(parameters)
                owner._buffers.update(buffers)

    @contextmanager
    def whole(self, path: str) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
        """Read all weights of the module at `path`, in float64, inside the context; yield the model and the module."""
        module = self.model.get_submodule(path)
        names = [name for part in (module.named_parameters(), module.named_buffers()) for name, _ in part]
        with self.present(module, lambda: names):
            yield self.model, module

    def stored_names(self, module: nn.Module, wanted: Collection[str]) -> list[str]:
        """Return the names, in the files, of the tensors that the `wanted` parameters of the module are made of."""
        inside = f"{self._paths[module]}."
        targets = {inside + name for name in wanted}
        return [
            name
            for name, (target, converted) in self._targets.items()
            # a converted tensor may become several parameters, of which only the first is known before reading
            if target in targets or (converted and target.startswith(inside))
        ]

    def sample(self, modules: Iterable[nn.Module]) -> bytes:
        """Return some bytes of each tensor of these modules, as stored in their files."""
        names = dict[str, None]()
        for module in dict.fromkeys(modules):
            names |= dict.fromkeys(self.stored_names(module, [name for name, _ in module.named_parameters()]))
        return self.files.sample(names)

    def _place(self, module: nn.Module, wanted: Collection[str]) -> None:
        """Read the tensors of a module, and let transformers convert them and assign them to its parameters."""
        give_back()  # memory freed by the previous module
        names = self.stored_names(module, wanted)
        self.bytes_read += self.files.size(names)
        tensors = self.files.read(names)
        if self.rounded_to is not None:
            tensors = {name: tensor.to(self.rounded_to) for name, tensor in tensors.items()}
        settings = LoadStateDictConfig(dtype=self.model.dtype, weight_mapping=self._mapping)
        with patch.dict(os.environ, ONE_THREAD), quiet():
            loading_info, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings)
        path = self._paths[module]
        if loading_info.mismatched_keys or loading_info.conversion_errors:
            problem = f"The weights of {path} don't have the shapes of config.json."
            raise ModelError(problem, "Download the model again.")
        for name, part in module.named_parameters():
            part.requires_grad_(False)
            if name in wanted and not (is_announced(part) or bool(part.sum().isfinite())):
                self.nonfinite.append(f"{path}.{name}")

    @cached_property
    def _paths(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    @cached_property
    def _mapping(self) -> list[WeightConverter | WeightRenaming]:
        """Renamings and conversions that transformers applies to the tensors of such a checkpoint."""
        return cast("list[WeightConverter | WeightRenaming]", get_model_conversion_mapping(self.model))

    @cached_property
    def _targets(self) -> Mapping[str, tuple[str, bool]]:
        """Map from a name in the files to the (first) parameter or buffer it becomes, and whether it is converted."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        state, prefix, targets = self.model.state_dict(), self.model.base_model_prefix, {}
        for name in self.files.stored:
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:  # as transformers does: a name of the model stays
                target, pattern = rename_source_key(name, [], [], prefix, state)
            targets[name] = target, pattern is not None
        return targets


# --- shapes ----------------------------------------------------------------------------------------------------------

ONE_THREAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Environment that makes transformers place tensors one by one: its threads would share one fake mode."""


class ShapesAlone(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Mode that computes with shapes; tensors never compare equal, so transformers does not tie them.

    transformers compares two tensors if a checkpoint stores a tied weight under both of its names.
    """

    def dispatch(self, func: OpOverload, *more: Any, **options: Any) -> object:
        """Return False for `equal`, and dispatch every other operation as FakeTensorMode does."""
        return False if func is torch.ops.aten.equal.default else super().dispatch(func, *more, **options)


class ShapeSlice:
    """Stand-in for a tensor slice of a file, in the interface that transformers reads: a known shape, no numbers."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...], mode: FakeTensorMode) -> None:
        self.shape, self.mode = shape, mode

    def __getitem__(self, _: object) -> Tensor:
        with self.mode:
            return torch.empty(self.shape, dtype=self.dtype)


def is_announced(tensor: Tensor) -> bool:
    """Return whether the tensor has a shape but no numbers."""
    return isinstance(tensor, FakeTensor)


def widen(model: PreTrainedModel) -> None:
    """Convert the model's floating-point tensors to float64, with or without numbers; tied tensors stay tied."""
    wide: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, part in module._parameters.items():  # private in torch, whose .double() fails on tensors of shapes
            if part is not None and part.is_floating_point():
                if part not in wide:
                    wide[part] = nn.Parameter(part.detach().double(), requires_grad=False)
                module._parameters[name] = wide[part]
        for name, table in module._buffers.items():
            if table is not None and table.is_floating_point():
                module._buffers[name] = table.double()


@contextmanager
def mute_shape_errors() -> Iterator[None]:
    """Silence torch's messages on stderr about shape computations that need numbers; our own errors report them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with patch.object(logger, "disabled", True), warnings.catch_warnings(action="ignore"):
        yield


# --- files -----------------------------------------------------------------------------------------------------------


def open_files(place: Location, config: PreTrainedConfig, stored: Mapping[str, Stored]) -> TensorFiles:
    """Open the weight files at `place`. Raises ModelError if they are in a form that can't be read in parts."""
    path = place.folder / place.file
    if place.form == "pickle":
        raise ModelError(f"{path} is a pickle, whose tensors can't be read individually.", "Convert it to safetensors.")
    files = SafetensorsFiles(place) if place.form == "safetensors" else open_gguf(place, config, stored)
    if files is None:
        problem = f"The tensors of {path} can't be read individually, because of its architecture."
        raise ModelError(problem, "Leave out --device files.")
    return files


def read_all(files: TensorFiles, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all tensors; decoded tensors are converted to `dtype`, others keep their stored type."""
    decoded = files.coded if isinstance(files, SafetensorsFiles) else files.stored
    tensors = dict[str, Tensor]()
    for name in files.stored:  # one by one, because decoded numbers take up to eight times the memory of their codes
        tensors |= {name: part.to(dtype) if name in decoded else part for name, part in files.read([name]).items()}
    return tensors


class SafetensorsFiles(TensorFiles):
    """The tensors of safetensors files, local or on a hub; quantised weights have the weights' own names."""

    def __init__(self, place: Location) -> None:
        self.headers, self._sources = [], dict[str, tuple[LocalFile | RemoteFile, Stored]]()
        files: list[LocalFile | RemoteFile] = [RemoteFile(*item) for item in place.urls]
        for file in files or map(LocalFile, place.weights):
            tensors, header = read_header(file)
            self.headers.append(header)
            self._sources |= {name: (file, tensor) for name, tensor in tensors.items()}
        stored = {name: tensor for name, (_, tensor) in self._sources.items()}
        self.coded = coded_weights(place, stored)
        """Weights stored as codes, keyed by the weights' own names."""
        codes = {part for weight in self.coded.values() for part in weight.parts.values()}
        self.stored = {name: tensor for name, tensor in stored.items() if name not in codes}
        self.stored |= {name: Stored(weight.shape(stored, self._read), "F32") for name, weight in self.coded.items()}

    def spans(self, names: Iterable[str]) -> list[tuple[LocalFile | RemoteFile, int, int]]:
        """Return file, offset and size in bytes of all data that these tensors are made of."""
        parts = [part for name in names for part in (self.coded[name].parts.values() if name in self.coded else [name])]
        return [(file, stored.start, stored.bytes) for file, stored in (self._sources[part] for part in parts)]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError if that fails, or a file changed since it was opened."""
        return {name: self.coded[name].decode(self._read) if name in self.coded else self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        """Read a stored tensor: the safetensors library parses a file in memory with this one tensor."""
        file, stored = self._sources[name]
        entry = {"dtype": stored.type, "shape": stored.shape, "data_offsets": [0, stored.bytes]}
        header = json.dumps({name: entry}).encode()
        content = len(header).to_bytes(LENGTH, "little") + header + file.read(stored.start, stored.bytes)
        try:
            return load_bytes(content)[name]
        except (SafetensorError, KeyError):
            problem = f"{file.name} stores {shorten_text(name)} in an unknown type."
            raise ModelError(problem, "Convert the model to other types.") from None
