"""Load weights, module by module, into a model whose tensors have only shapes, with transformers' loader."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ctypes import CDLL
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from safetensors.torch import load as load_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # private: torch's only tensors without values
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from attnlens.errors import ModelError
from attnlens.files import shorten_text
from attnlens.models.loading.building import quiet
from attnlens.models.loading.locate import Location, foreign
from attnlens.models.loading.quantised import coded_weights
from attnlens.models.loading.stored import LENGTH, LocalFile, RemoteFile, Stored, TensorFiles, read_header

if TYPE_CHECKING:
    from torch._ops import OpOverload  # private: torch exports no name for an operation


@dataclass
class DeferredWeights:
    """Weights of a model whose tensors have only shapes; a module's weights are read when the module is inspected."""

    model: PreTrainedModel  # The model, whose tensors have only shapes
    files: TensorFiles  # Files from which the weights are read
    rounded_to: torch.dtype | None  # Type to which weights are rounded when read; None: not rounded
    bytes_read: int = 0  # Number of bytes read so far
    nonfinite: list[str] = field(default_factory=list)  # Names of parameters with NaN or Inf among those read so far

    def __post_init__(self) -> None:
        for module in self.model.modules():
            # private in transformers; no public attribute shows whether the setter would raise an error
            if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
                # with batched_mm, no shape in a mixture of experts depends on the experts that tokens choose
                module.set_experts_implementation("batched_mm")
        self._paths = {module: name for name, module in self.model.named_modules()}
        # renamings and conversions that transformers applies to the tensors of such a checkpoint
        mapping = get_model_conversion_mapping(self.model)
        self._mapping = cast("list[core_model_loading.WeightConverter | core_model_loading.WeightRenaming]", mapping)

    @contextmanager
    def present(self, module: nn.Module, wanted: Callable[[], Collection[str]]) -> Iterator[None]:
        """Inside the context, load the tensors of `module` named by `wanted()`. Raises ModelError if loading fails."""
        with ExitStack() as undo:
            for owner in module.modules():  # private in torch; setattr would refuse tensors as parameters
                undo.callback(owner._parameters.update, dict(owner._parameters))
                undo.callback(owner._buffers.update, dict(owner._buffers))
            self._place(module, wanted())
            yield

    @contextmanager
    def whole(self, path: str) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
        """Load all weights of the module at `path`, in float64, inside the context; yield the model and the module."""
        module = self.model.get_submodule(path)
        names = [name for part in (module.named_parameters(), module.named_buffers()) for name, _ in part]
        with self.present(module, lambda: names):
            yield self.model, module

    def _stored_names(self, module: nn.Module, wanted: Collection[str]) -> list[str]:
        """Return the stored names of the module's `wanted` parameters, and of all its tensors to be converted."""
        inside = f"{self._paths[module]}."
        targets = {inside + name for name in wanted}
        return [
            name
            for name, (target, converted) in self._targets.items()
            # a converted tensor may become several parameters, of which only the first is known before reading
            if target in targets or (converted and target.startswith(inside))
        ]

    def sample(self, modules: Iterable[nn.Module]) -> bytes:
        """Return some stored bytes of each parameter of these modules, to detect changes to local files."""
        names = [self._stored_names(module, dict(module.named_parameters())) for module in modules]
        return self.files.sample(dict.fromkeys(chain.from_iterable(names)))

    def _place(self, module: nn.Module, wanted: Collection[str]) -> None:
        """Read a module's `wanted` parameters from the files, convert them with transformers, and assign them."""
        # glibc keeps freed memory between used blocks: 0.1 to 0.2 GB after 36 layers of an 8 B model
        if os.name == "posix" and hasattr(library := CDLL(None), "malloc_trim"):
            library.malloc_trim(0)
        names = self._stored_names(module, wanted)
        self.bytes_read += self.files.size(names)
        tensors = self.files.read(names)
        if self.rounded_to is not None:
            tensors = {name: tensor.to(self.rounded_to) for name, tensor in tensors.items()}
        settings = LoadStateDictConfig(dtype=self.model.dtype, weight_mapping=self._mapping)
        with patch.dict(os.environ, ONE_THREAD), quiet():
            loading_info, _ = core_model_loading.convert_and_load_state_dict_in_model(self.model, tensors, settings)
        path = self._paths[module]
        if loading_info.mismatched_keys or loading_info.conversion_errors:
            problem = f"The weights of {path} don't have the shapes that config.json requires."
            raise ModelError(problem, "Download the model again.")
        for name, part in module.named_parameters():
            part.requires_grad_(False)
            if name in wanted and not (is_announced(part) or bool(part.sum().isfinite())):
                self.nonfinite.append(f"{path}.{name}")

    @cached_property
    def _targets(self) -> Mapping[str, tuple[str, bool]]:
        """Name of the first parameter or buffer made from each stored tensor, and True if transformers converts it."""
        renamings = [entry for entry in self._mapping if isinstance(entry, core_model_loading.WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, core_model_loading.WeightConverter)]
        state, prefix, targets = self.model.state_dict(), self.model.base_model_prefix, {}
        for name in self.files.stored:
            target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:  # like transformers, keep names that the model has
                target, pattern = core_model_loading.rename_source_key(name, [], [], prefix, state)
            targets[name] = target, pattern is not None
        return targets


# --- shapes ----------------------------------------------------------------------------------------------------------

ONE_THREAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Environment variable that makes transformers load tensors one by one: its threads would share a FakeTensorMode."""


class ShapesAlone(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Torch mode that computes only shapes. No two tensors compare as equal, so that transformers ties none of them."""

    def dispatch(self, func: OpOverload, *more: Any, **options: Any) -> object:
        """Return False for `equal`; let FakeTensorMode dispatch all other operations."""
        return False if func is torch.ops.aten.equal.default else super().dispatch(func, *more, **options)


def is_announced(tensor: Tensor) -> bool:
    """Return True if the tensor has a shape but no values yet."""
    return isinstance(tensor, FakeTensor)


def widen(model: PreTrainedModel) -> None:
    """Convert the model's floating-point tensors, with or without values, to float64; tied parameters stay tied."""
    wide: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, part in module._parameters.items():  # private in torch, whose .double() fails on FakeTensors
            if part is not None and part.is_floating_point():
                if part not in wide:
                    wide[part] = nn.Parameter(part.detach().double(), requires_grad=False)
                module._parameters[name] = wide[part]
        for name, table in module._buffers.items():
            if table is not None and table.is_floating_point():
                module._buffers[name] = table.double()


# --- files -----------------------------------------------------------------------------------------------------------


class SafetensorsFiles(TensorFiles):
    """Tensors of local or remote safetensors files; the codes and scales of a quantised weight count as one tensor."""

    def __init__(self, place: Location) -> None:
        self.headers, self._sources = [], dict[str, tuple[LocalFile | RemoteFile, Stored]]()
        files: list[LocalFile | RemoteFile] = [RemoteFile(*item) for item in place.urls]
        for file in files or map(LocalFile, place.weights):
            tensors, header = read_header(file)
            self.headers.append(header)
            self._sources |= {name: (file, tensor) for name, tensor in tensors.items()}
        stored = {name: tensor for name, (_, tensor) in self._sources.items()}
        self.coded = coded_weights(place, stored)
        """Weights stored as codes, keyed by the name of the decoded weight."""
        codes = {part for weight in self.coded.values() for part in weight.parts.values()}
        self.stored = {name: tensor for name, tensor in stored.items() if name not in codes}
        self.stored |= {name: Stored(weight.shape(stored, self._read), "F32") for name, weight in self.coded.items()}

    def spans(self, names: Iterable[str]) -> list[tuple[LocalFile | RemoteFile, int, int]]:
        """Return (file, offset, size in bytes) of each stored part of these tensors."""
        parts = [part for name in names for part in (self.coded[name].parts.values() if name in self.coded else [name])]
        return [(file, stored.start, stored.bytes) for file, stored in (self._sources[part] for part in parts)]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError if that fails, or if a file changed since it was opened."""
        return {name: self.coded[name].decode(self._read) if name in self.coded else self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        """Read a stored tensor: let safetensors parse an in-memory file that contains only this tensor."""
        file, stored = self._sources[name]
        entry = {"dtype": stored.type, "shape": stored.shape, "data_offsets": [0, stored.bytes]}
        header = json.dumps({name: entry}).encode()
        content = len(header).to_bytes(LENGTH, "little") + header + file.read(stored.start, stored.bytes)
        problem = f"{file.name} stores {shorten_text(name)} in an unknown type"
        with foreign(problem, "Convert the model to float32 or bfloat16."):
            return load_bytes(content)[name]
