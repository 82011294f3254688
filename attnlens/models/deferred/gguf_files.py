"""Reads single tensors out of a GGUF file, decoded as transformers decodes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from attnlens.errors import ModelError
from attnlens.models.classes import model_class
from attnlens.models.deferred.reading import LocalFile, sampled
from attnlens.models.gguf import read_header
from attnlens.models.locate import Location
from attnlens.models.quiet import quiet
from attnlens.models.stored import Stored
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

ARCHITECTURE = "general.architecture"
SAY_LOAD = "Leave out --from-files."


class GgufFiles:
    """The tensors of a GGUF file under the names that they have in the model, none of which is decoded before."""

    def __init__(self, place: Location, config: PreTrainedConfig) -> None:
        self._module: Any = import_module("transformers.modeling_gguf_pytorch_utils")
        self._path = place.folder / place.file
        self._file = LocalFile(self._path)
        header = read_header(self._path)
        with quiet():
            reader = import_module("gguf").GGUFReader(self._path)
        self._refuse_others(reader)
        named = model_class(config, gguf=True, own_code=False)
        with torch.device("meta"):  # an Auto class makes a model of a config by another method
            self._model = getattr(named, "from_config", named)(config)
        # the lists of a vocabulary are long, and say nothing of tensors
        self._fields = {name: part for name, part in reader.fields.items() if not name.startswith("tokenizer.")}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._names = self._mapped(reader)
        digest = sha256(repr(header).encode()).hexdigest()
        size = self._file.size
        self.headers = [FileInParts(name=place.file, bytes=size, header_sha256=digest, stamp=self._file.stamp)]

    @property
    def names(self) -> Collection[str]:
        """Of all tensors, as the model calls them."""
        return self._names.keys()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, as the model has them."""
        state = self._model.state_dict()
        return {name: tuple(state[name].shape) for name in self._names}

    def table(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """How the tensors lie in the file, by its own names."""
        return stored

    def size(self, names: Iterable[str]) -> int:
        """How many bytes these tensors have in the file."""
        return sum(int(self._tensors[self._names[name]].n_bytes) for name in names)

    def sample(self, names: Iterable[str]) -> bytes:
        """A few bytes of each of these tensors as they lie."""
        lying = [self._tensors[self._names[name]] for name in names]
        return b"".join(sampled(self._file, int(one.data_offset), int(one.n_bytes)) for one in lying)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors. Raises ModelError where the file has changed since it was opened."""
        wanted = [self._tensors[self._names[name]] for name in names]
        with quiet(), self._only(wanted):
            found = self._module.load_gguf_checkpoint(self._path, return_tensors=True, model_to_load=self._model)
        self._file.read(0, 0)  # which looks whether it has changed
        tensors: dict[str, Tensor] = found["tensors"]
        return tensors

    def _mapped(self, reader: Any) -> dict[str, str]:
        """The model's names of the tensors, and the file's."""
        architecture = self._module.read_field(reader, ARCHITECTURE)[0]
        processor = self._module.TENSOR_PROCESSORS.get(architecture, self._module.TensorProcessor)(config={})
        with quiet():
            self._map = self._module.get_gguf_hf_weights_map(self._model, processor)
        state = self._model.state_dict()
        return {own: name for name, own in self._map.items() if name in self._tensors and own in state}

    def _refuse_others(self, reader: Any) -> None:
        """Raise ModelError for an architecture that transformers decodes in another way."""
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        architecture = self._module.read_field(reader, ARCHITECTURE)[0]
        if is_gguf_arch_supported(architecture):
            raise ModelError(
                f"{self._path} is a GGUF file of {architecture}, of which no single tensors are read.", SAY_LOAD
            )

    @contextmanager
    def _only(self, tensors: list[Any]) -> Iterator[None]:
        """Inside, transformers finds these tensors alone in the file, and the map of names that is known already."""
        library: Any = import_module("gguf")
        own = library.GGUFReader, self._module.get_gguf_hf_weights_map
        library.GGUFReader = lambda *_: SimpleNamespace(fields=self._fields, tensors=tensors)
        self._module.get_gguf_hf_weights_map = lambda *_, **__: self._map
        try:
            yield
        finally:
            library.GGUFReader, self._module.get_gguf_hf_weights_map = own
