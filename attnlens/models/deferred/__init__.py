"""Models whose weights stay in their files: built from shapes, a module's tensors read while it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from attnlens.errors import ModelError
from attnlens.models.deferred.memory import give_back
from attnlens.models.deferred.shapes import announced, is_announced, one_thread, unspoken, widen, without_choices
from attnlens.models.quiet import quiet
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DeferredWeights", "TensorFiles", "announced", "is_announced", "one_thread", "unspoken", "widen"]


class TensorFiles(Protocol):
    """Tensors that lie in weight files under the names that transformers looks for."""

    @property
    def headers(self) -> list[FileInParts]:
        """What stands for the files in a report."""

    @property
    def names(self) -> Collection[str]:
        """Of all of them."""

    def size(self, names: Iterable[str]) -> int:
        """How many bytes are read for these."""

    def sample(self, names: Iterable[str]) -> bytes:
        """Some bytes of each of these, which are others where its numbers are, unless the file's stamp says that."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some of them. Raises ModelError where a file is gone, cut off or not the one that was opened."""


@dataclass
class DeferredWeights:
    """The weights of a model that has shapes alone: each module's are read while somebody looks at it."""

    model: PreTrainedModel
    """The model of shapes."""
    files: TensorFiles
    """What its weights are read from."""
    rounded_to: torch.dtype | None
    """The type to which they are rounded when they are read; None: as they lie."""
    bytes_read: int = 0
    """How much was read so far."""
    nonfinite: list[str] = field(default_factory=list)
    """Names of parameters with NaN or Inf, among those read so far."""

    def __post_init__(self) -> None:
        without_choices(self.model)

    @contextmanager
    def present(self, module: nn.Module, wanted: Callable[[], Collection[str]]) -> Iterator[None]:
        """Inside, the `module` has values for the `wanted` of its parameters and buffers.

        Raises ModelError where a file does not hold what it announced, or has changed.
        """
        kept = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()]
        try:
            self._place(module, wanted())
            yield
        finally:
            for owner, parameters, buffers in kept:
                owner._parameters.update(parameters)
                owner._buffers.update(buffers)

    @contextmanager
    def whole(self, path: str) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
        """Inside, the module of that path has all its weights, in float64; with it comes the model around it."""
        module = self.model.get_submodule(path)
        names = [name for part in (module.named_parameters(), module.named_buffers()) for name, _ in part]
        with self.present(module, lambda: names):
            yield self.model, module

    def needed(self, module: nn.Module, wanted: Collection[str]) -> list[str]:
        """The tensors of the files that these parameters of the module are made of."""
        path = self._paths[module]
        targets = {f"{path}.{name}" for name in wanted}
        inside = f"{path}."
        return [
            name
            for name, (target, converted) in self._targets.items()
            # what is converted may become several parameters, and only the first is known before
            if target in targets or (converted and target.startswith(inside))
        ]

    def sample(self, modules: Iterable[nn.Module]) -> bytes:
        """Some bytes of each tensor of these modules, as their files have them."""
        wanted = {
            name: None
            for module in dict.fromkeys(modules)
            for name in self.needed(module, [name for name, _ in module.named_parameters()])
        }
        return self.files.sample(wanted)

    def _place(self, module: nn.Module, wanted: Collection[str]) -> None:
        """Read the tensors of a module, and let transformers convert and place them."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        give_back()  # what the module before left
        names = self.needed(module, wanted)
        self.bytes_read += self.files.size(names)
        tensors = {name: _as(tensor, self.rounded_to) for name, tensor in self.files.read(names).items()}
        settings = LoadStateDictConfig(dtype=self.model.dtype, weight_mapping=self._mapping)
        with one_thread(), quiet():
            found, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings)
        path = self._paths[module]
        if found.mismatched_keys or found.conversion_errors:
            raise ModelError(f"The weights of {path} don't have the shapes of their config.", "Download them again.")
        for name, part in module.named_parameters():
            part.requires_grad_(False)
            if name in wanted and not (is_announced(part) or bool(part.sum().isfinite())):
                self.nonfinite.append(f"{path}.{name}")

    @cached_property
    def _paths(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    @cached_property
    def _mapping(self) -> list[Any]:
        """How transformers renames and converts the tensors of such a checkpoint."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self.model, None, None))

    @cached_property
    def _targets(self) -> Mapping[str, tuple[str, bool]]:
        """Name in the files → the (first) parameter or buffer that it becomes, and whether it is converted."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        state, prefix, found = self.model.state_dict(), self.model.base_model_prefix, {}
        for name in self.files.names:
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:  # as transformers does: it should not have been renamed
                target, pattern = rename_source_key(name, [], [], prefix, state)
            found[name] = target, pattern is not None
        return found


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor as that type would hold it; one that the type holds exactly stays, to be widened once."""
    if dtype is None:
        return tensor
    exact = tensor.is_floating_point() and torch.promote_types(tensor.dtype, dtype) == dtype
    return tensor if exact else tensor.to(dtype)
