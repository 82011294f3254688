"""Models that have only shapes, built by transformers' own loading; weights are read from their files module by module.

Local safetensors files are read by the safetensors library, which maps a file only while it reads a tensor. Files on a
hub are read by byte ranges, quantised weights and GGUF files one weight at a time.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from huggingface_hub import get_hf_file_metadata
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2
from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open
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
from attnlens.models.loading.building import Stored, open_gguf, quiet, safetensors_header
from attnlens.models.loading.gguf import SAY_LOAD, GgufFiles
from attnlens.models.loading.locate import Location, WatchedFile, first_line
from attnlens.models.loading.placement import give_back
from attnlens.models.loading.quantised import coded_weights
from attnlens.records import FileInParts

if TYPE_CHECKING:
    from torch._ops import OpOverload  # private: torch exports no name for an operation
    from transformers import PreTrainedConfig


@dataclass
class DeferredWeights:
    """Weights of a model that has only shapes; the weights of a module are read while it is being inspected."""

    model: PreTrainedModel
    """The model, whose tensors have only shapes."""
    files: SafetensorsFiles | GgufFiles
    """Files that the weights are read from."""
    rounded_to: torch.dtype | None
    """Type to which weights are rounded when read; None: the stored type."""
    bytes_read: int = 0
    """Number of bytes read so far."""
    nonfinite: list[str] = field(default_factory=list)
    """Names of parameters with NaN or Inf among those read so far."""

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
        tensors, dtype = self.files.read(names), self.rounded_to
        for name, tensor in tensors.items():
            is_exact = tensor.is_floating_point() and torch.promote_types(tensor.dtype, dtype or tensor.dtype) == dtype
            # a type whose values `dtype` contains is widened only once, later
            tensors[name] = tensor if dtype is None or is_exact else tensor.to(dtype)
        settings = LoadStateDictConfig(dtype=self.model.dtype, weight_mapping=self._mapping)
        with patch.dict(os.environ, ONE_THREAD), quiet():
            loading_info, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings)
        path = self._paths[module]
        if loading_info.mismatched_keys or loading_info.conversion_errors:
            raise ModelError(
                f"The weights of {path} don't have the shapes of config.json.", "Download the model again."
            )
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
        for name in self.files.shapes:
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

LENGTH = 8
"""Bytes before a safetensors header, which give its length."""
LONGEST = 100 * 2**20
"""Maximum size of a header in bytes, as in the safetensors library."""
SAMPLE = 4096
"""Numbers sampled at the beginning, in the middle and at the end of a tensor, in whole rows, at least one."""
ATTEMPTS = 5
"""Number of requests for a range; each asks only for the bytes that have not arrived."""
WAIT = 0.5
"""Seconds before the second attempt, doubled before each later one."""
PATIENCE = 30.0
"""Seconds without a byte after which a connection counts as dropped."""
SAY_AGAIN, SAY_LATER = "Download the model again.", "Run the command again: finished work is kept."


def open_files(place: Location, config: PreTrainedConfig, stored: Mapping[str, Stored]) -> SafetensorsFiles | GgufFiles:
    """Open the weight files at `place`. Raises ModelError if they are in a form that can't be read in parts."""
    path = place.folder / place.file
    if place.form == "pickle":
        raise ModelError(f"{path} is a pickle, whose tensors can't be read individually.", "Convert it to safetensors.")
    files = SafetensorsFiles(place) if place.form == "safetensors" else open_gguf(place, config, stored)
    if files is None:
        raise ModelError(f"The tensors of {path} can't be read individually, because of its architecture.", SAY_LOAD)
    return files


def read_all(files: SafetensorsFiles | GgufFiles, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all tensors, 64 at a time; decoded tensors are converted to `dtype`, others keep their stored type."""
    names, tensors = list(files.shapes), dict[str, Tensor]()
    decoded = files.shapes if isinstance(files, GgufFiles) else files.coded
    for start in range(0, len(names), 64):
        for name, tensor in files.read(names[start : start + 64]).items():
            tensors[name] = tensor.to(dtype) if name in decoded else tensor
    return tensors


class SafetensorsFiles:
    """The tensors of safetensors files, local or on a hub, each read only on request.

    Quantised weights are decoded when they are read, and have the weights' own names.
    """

    ignored: Sequence[str] = ()
    """Tensors left out because the model lacks them: none."""

    def __init__(self, place: Location) -> None:
        files: list[LocalFile | RemoteFile] = [RemoteFile(*item) for item in place.urls]
        files = files or [LocalFile(path) for path in place.weights]
        self.headers = [file.record for file in files]
        """Records of the files for a report."""
        self._files = {name: file for file in files for name in file.stored}
        stored = {name: tensor for file in files for name, tensor in file.stored.items()}
        self._bytes = {name: tensor.bytes for name, tensor in stored.items()}
        self.coded = coded_weights(place, stored)
        """Weights stored as codes, keyed by the weights' own names."""
        shapes = {name: weight.shape(stored, self._read) for name, weight in self.coded.items()}
        codes = set(self._stored_names(self.coded))
        self.stored = {name: tensor for name, tensor in stored.items() if name not in codes}
        """Shape and type of each tensor; decoded weights are float32."""
        self.stored |= {name: Stored(shape, "F32") for name, shape in shapes.items()}
        self.shapes = {name: tensor.shape for name, tensor in self.stored.items()}
        """Shapes of all tensors, keyed by name."""

    def size(self, names: Iterable[str]) -> int:
        """Return the number of bytes read for these tensors."""
        return sum(self._bytes[name] for name in self._stored_names(names))

    def sample(self, names: Iterable[str]) -> bytes:
        """Return some numbers of each of these tensors, as stored."""
        return b"".join(self._files[name].sample(name) for name in self._stored_names(names))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError if that fails, or a file changed since it was opened."""
        return {name: self.coded[name].decode(self._read) if name in self.coded else self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        return self._files[name].read(name)

    def _stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the stored tensors that these tensors are made of."""
        return [part for name in names for part in (self.coded[name].parts.values() if name in self.coded else [name])]


class LocalFile(WatchedFile):
    """A safetensors file on this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stored = safetensors_header(path)
        with path.open("rb") as content:  # the library has checked that the file is complete
            header = content.read(int.from_bytes(content.read(LENGTH), "little"))
        self.record = self.in_report(sha256(header).hexdigest())

    def sample(self, name: str) -> bytes:
        """Return some numbers of a tensor, since a file's modification time can be set to any value."""
        with self._open() as content:
            part = content.get_slice(name)
            shape = part.get_shape()
            rows = max(1, SAMPLE // max(1, prod(shape[1:])))
            last = max(0, shape[0] - rows) if shape else 0
            spans = [slice(start, start + rows) for start in (0, last // 2, last)] if shape else [...]
            pieces: list[Tensor] = [part[span] for span in spans]
        return b"".join(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for piece in pieces)

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises ModelError if the file is gone, truncated, or has changed since it was opened."""
        with self._open() as content:
            tensor: Tensor = content.get_tensor(name)
            return tensor

    @contextmanager
    def _open(self) -> Iterator[Any]:  # safetensors has no types
        """Open the file inside the context; closing it unmaps the file."""
        self.check()
        try:
            with safe_open(self.path, framework="pt") as content:
                yield content
        except (SafetensorError, OSError) as error:
            self.check()
            raise ModelError(f"{self.path} can't be read: {first_line(error)}", SAY_AGAIN) from None
        self.check()


class RemoteFile:
    """A safetensors file in a hub repository at one commit, read by ranges; its stamp (ETag) identifies its content.

    huggingface_hub's own range readers hold a response of any length in memory, even if a server sends the whole
    file, and request the full range again if the connection drops.
    """

    def __init__(self, name: str, url: str) -> None:
        self._name, self._url = name, url
        try:
            metadata = get_hf_file_metadata(url)
        except (HfHubHTTPError, HTTPError) as error:
            raise ModelError(f"{name} can't be read from the hub: {first_line(error)}", SAY_LATER) from error
        if metadata.size is None:
            raise ModelError(f"The hub does not report the size of {name}.", "Download the model.")
        length = int.from_bytes(self._read_range(0, LENGTH), "little") if metadata.size >= LENGTH else 0
        if not 0 < length <= min(LONGEST, metadata.size - LENGTH):
            raise ModelError(f"{name} is truncated or not a safetensors file.", SAY_AGAIN)
        header = bytes(self._read_range(LENGTH, length))
        self._places = parse_header(name, header, metadata.size)
        self.stored = {tensor: stored for tensor, (stored, _) in self._places.items()}
        digest, stamp = sha256(header).hexdigest(), metadata.etag or ""
        self.record = FileInParts(name=name, bytes=metadata.size, header_sha256=digest, stamp=stamp)

    def sample(self, _name: str) -> bytes:
        """Return no bytes, because the stamp already identifies the content."""
        return b""

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises ModelError if the hub does not deliver it, or its type is unknown."""
        stored, start = self._places[name]
        entry = {"dtype": stored.type, "shape": stored.shape, "data_offsets": [0, stored.bytes]}
        header = json.dumps({name: entry}).encode()
        content = len(header).to_bytes(LENGTH, "little") + header + self._read_range(start, stored.bytes)
        try:  # the library parses a file with this one tensor
            return load_bytes(bytes(content))[name]
        except (SafetensorError, KeyError):
            problem = f"{self._name} stores {shorten_text(name)} in an unknown type."
            raise ModelError(problem, "Download the model.") from None

    def _read_range(self, start: int, count: int) -> bytearray:
        """Read `count` bytes from offset `start`. Raises ModelError if they do not arrive in ATTEMPTS attempts."""
        data, problem = bytearray(), ""
        for attempt in range(ATTEMPTS):
            time.sleep(WAIT * 2**attempt * (attempt > 0))
            first = start + len(data)
            span = {"Range": f"bytes={first}-{start + count - 1}", "Accept-Encoding": "identity"}
            headers = build_hf_headers() | span
            try:
                with get_session().stream(
                    "GET", self._url, follow_redirects=True, headers=headers, timeout=PATIENCE
                ) as answer:
                    if answer.status_code in (429, 500, 502, 503, 504):  # busy
                        continue
                    sent = answer.headers.get("Content-Range", "")
                    if answer.status_code != 206 or not sent.startswith(f"bytes {first}-"):
                        problem = (
                            f"The hub answers {answer.status_code} {sent} to a request for a part of {self._name}."
                        )
                        raise ModelError(problem, SAY_LATER)
                    for part in answer.iter_raw():
                        data += part[: count - len(data)]
            except HTTPError as error:
                problem = first_line(error)
            if len(data) == count:
                return data
        reason = problem or f"{len(data)} of {count} bytes arrived"
        raise ModelError(f"{self._name} can't be read from the hub: {reason}.", SAY_LATER)


def parse_header(file: str, header: bytes, size: int) -> dict[str, tuple[Stored, int]]:
    """Return each tensor's shape, type and start. Raises ModelError if the header contradicts the file's `size`."""
    begin = LENGTH + len(header)
    tensors: dict[str, tuple[Stored, int]] = {}
    try:
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                start, end = (begin + int(edge) for edge in entry["data_offsets"])
                stored = Stored(tuple(map(int, entry["shape"])), str(entry["dtype"]))
                if not begin <= start <= end <= size or end - start != stored.bytes:
                    problem = f"{file} is truncated, or its header gives a wrong size of {shorten_text(name)}."
                    raise ModelError(problem, SAY_AGAIN)
                tensors[name] = stored, start
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ModelError(f"{file} does not have a safetensors header.", SAY_AGAIN) from None
    return tensors
