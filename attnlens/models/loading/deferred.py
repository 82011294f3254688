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
from typing import TYPE_CHECKING, Any

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
from attnlens.models.loading.building import open_gguf, quiet
from attnlens.models.loading.configs import method_of
from attnlens.models.loading.gguf import SAY_LOAD, GgufFiles
from attnlens.models.loading.hub import first_line
from attnlens.models.loading.locate import Location, WatchedFile
from attnlens.models.loading.placement import give_back
from attnlens.models.loading.quantised import CodedWeight, coded_weights
from attnlens.models.loading.stored import Stored, safetensors_header
from attnlens.records import FileInParts

if TYPE_CHECKING:
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
        """Give the `module` values for its `wanted` parameters and buffers inside the context.

        Raises ModelError if a file contradicts its header, or has changed.
        """
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
        with one_thread(), quiet():
            loading_info, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings)
        path = self._paths[module]
        if loading_info.mismatched_keys or loading_info.conversion_errors:
            raise ModelError(f"The weights of {path} don't have the shapes of config.json.", "Download them again.")
        for name, part in module.named_parameters():
            part.requires_grad_(False)
            if name in wanted and not (is_announced(part) or bool(part.sum().isfinite())):
                self.nonfinite.append(f"{path}.{name}")

    @cached_property
    def _paths(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    @cached_property
    def _mapping(self) -> list[Any]:
        """Renamings and conversions that transformers applies to the tensors of such a checkpoint."""
        return list(get_model_conversion_mapping(self.model, None, None))

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

ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes transformers place tensors one by one: its threads would share one fake mode."""


class ShapesAlone(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Mode that computes with shapes, in which no two tensors are equal, so that transformers does not tie them.

    transformers compares two tensors if a checkpoint stores a tied weight under both of its names.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return False for `equal`, and dispatch every other operation as FakeTensorMode does."""
        return False if func is torch.ops.aten.equal.default else super().dispatch(func, types, args, kwargs)


class ShapeSlice:
    """Stand-in for a tensor slice of a file, in the interface that transformers reads: a known shape, no numbers."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...], mode: FakeTensorMode) -> None:
        self.shape, self.mode = shape, mode

    def __getitem__(self, _: object) -> Tensor:
        with self.mode:
            return torch.empty(self.shape, dtype=self.dtype)


def shape_slices(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ShapeSlice]:
    """Return stand-ins for tensors of these shapes, keyed by name, which take part in computations as shapes."""
    mode = ShapesAlone(allow_non_fake_inputs=True)
    return {name: ShapeSlice(shape, mode) for name, shape in shapes.items()}


def is_announced(tensor: Tensor) -> bool:
    """Return whether the tensor has a shape but no numbers."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def one_thread() -> Iterator[None]:
    """Make transformers place tensors one by one inside the context."""
    before = {name: value for name, value in os.environ.items() if name == ONE_THREAD}
    os.environ[ONE_THREAD] = "1"
    try:
        yield
    finally:
        del os.environ[ONE_THREAD]
        os.environ.update(before)


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
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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
SAY_LATER = "Run the command again: finished work is kept."


def open_files(place: Location, config: PreTrainedConfig) -> SafetensorsFiles | GgufFiles:
    """Open the weight files at `place`. Raises ModelError if they are in a form that can't be read in parts."""
    path = place.folder / place.file
    if place.form == "pickle":
        raise ModelError(f"{path} is a pickle, whose tensors can't be read individually.", "Convert it to safetensors.")
    if place.form == "safetensors":
        return open_safetensors(place)
    files = open_gguf(place, config)
    if files is None:
        raise ModelError(f"The tensors of {path} can't be read individually, because of its architecture.", SAY_LOAD)
    return files


def open_safetensors(place: Location) -> SafetensorsFiles:
    """Open the safetensors files at `place`, local or on a hub; quantised weights are decoded when they are read."""
    files = RemoteFiles(RemoteFile(*item) for item in place.urls) if place.urls else SafetensorsFiles(place.weights)
    method = method_of(place)
    return files if method is None else CodedFiles(files, coded_weights(place, method, files.stored))


def read_all(files: SafetensorsFiles | GgufFiles, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all tensors, 64 at a time; decoded tensors are converted to `dtype`, others keep their stored type."""
    names, tensors = list(files.shapes), dict[str, Tensor]()
    decoded = files.coded if isinstance(files, CodedFiles) else files.shapes
    for start in range(0, len(names), 64):
        for name, tensor in files.read(names[start : start + 64]).items():
            tensors[name] = tensor.to(dtype) if name in decoded else tensor
    return tensors


class SafetensorsFiles:
    """The tensors of local safetensors files, each read only on request."""

    ignored: Sequence[str] = ()
    """Tensors left out because the model lacks them: none."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.headers: list[FileInParts] = []
        """Records of the files for a report."""
        self.stored: dict[str, Stored] = {}
        """Shape and type of each tensor."""
        self._files: dict[str, WatchedFile] = {}
        for file in map(WatchedFile, paths):
            tensors = safetensors_header(file.path)
            self.stored |= tensors
            self._files |= dict.fromkeys(tensors, file)
            with file.path.open("rb") as content:  # the library has checked that the file is complete
                header = content.read(int.from_bytes(content.read(LENGTH), "little"))
            self.headers.append(file.in_report(sha256(header).hexdigest()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, keyed by name."""
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def size(self, names: Iterable[str]) -> int:
        """Return the size of these tensors in bytes."""
        return sum(self.stored[name].bytes for name in names)

    def sample(self, names: Iterable[str]) -> bytes:
        """Return some numbers of each of these tensors, since a file's modification time can be set to any value."""
        pieces: list[Tensor] = []
        for name in names:
            with self._open_file_of(name) as content:
                part = content.get_slice(name)
                shape = part.get_shape()
                rows = max(1, SAMPLE // max(1, prod(shape[1:])))
                last = max(0, shape[0] - rows) if shape else 0
                spans = [slice(start, start + rows) for start in (0, last // 2, last)] if shape else [...]
                pieces += [part[span] for span in spans]
        return b"".join(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for piece in pieces)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read these tensors. Raises ModelError if a file is gone, truncated, or has changed since it was opened."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            with self._open_file_of(name) as content:
                tensors[name] = content.get_tensor(name)
        return tensors

    @contextmanager
    def _open_file_of(self, name: str) -> Iterator[Any]:
        """Open the file of a tensor inside the context; closing it unmaps the file."""
        file = self._files[name]
        file.check()
        try:
            with safe_open(file.path, framework="pt") as content:
                yield content
        except (SafetensorError, OSError) as error:
            file.check()
            raise ModelError(f"{file.path} can't be read: {first_line(error)}", "Download it again.") from None
        file.check()


class RemoteFile:
    """A safetensors file in a hub repository at one commit, read by ranges; its stamp (ETag) identifies its content.

    huggingface_hub's own range readers hold a response of any length in memory, even if a server sends the whole
    file, and request the full range again if the connection drops.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        try:
            metadata = get_hf_file_metadata(url)
        except (HfHubHTTPError, HTTPError) as error:
            raise ModelError(f"{name} can't be read from the hub: {first_line(error)}", SAY_LATER) from error
        if metadata.size is None:
            raise ModelError(f"The hub does not report the size of {name}.", "Download the model.")
        self.size, self.stamp = metadata.size, metadata.etag or ""
        length = int.from_bytes(self.read(0, LENGTH), "little") if self.size >= LENGTH else 0
        if not 0 < length <= min(LONGEST, self.size - LENGTH):
            raise ModelError(f"{name} is truncated or not a safetensors file.", "Download it again.")
        self.header = bytes(self.read(LENGTH, length))

    def entries(self) -> dict[str, tuple[Stored, int]]:
        """Return each tensor's shape, type and start offset. Raises ModelError if the header contradicts the file."""
        begin = LENGTH + len(self.header)
        tensors: dict[str, tuple[Stored, int]] = {}
        try:
            for name, entry in json.loads(self.header).items():
                if name != "__metadata__":
                    start, end = (begin + int(edge) for edge in entry["data_offsets"])
                    stored = Stored(tuple(map(int, entry["shape"])), str(entry["dtype"]))
                    if not begin <= start <= end <= self.size or end - start != stored.bytes:
                        problem = f"{self.name} is truncated, or its header gives a wrong size of {shorten_text(name)}."
                        raise ModelError(problem, "Download it again.")
                    tensors[name] = stored, start
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ModelError(f"{self.name} does not have a safetensors header.", "Download it again.") from None
        return tensors

    def read(self, start: int, count: int) -> bytearray:
        """Read `count` bytes from offset `start`. Raises ModelError if they do not arrive in ATTEMPTS attempts."""
        data, problem = bytearray(), ""
        for attempt in range(ATTEMPTS):
            time.sleep(WAIT * 2**attempt * (attempt > 0))
            first = start + len(data)
            span = {"Range": f"bytes={first}-{start + count - 1}", "Accept-Encoding": "identity"}
            options: dict[str, Any] = {"headers": build_hf_headers() | span, "timeout": PATIENCE}
            try:
                with get_session().stream("GET", self.url, follow_redirects=True, **options) as answer:
                    if answer.status_code in (429, 500, 502, 503, 504):  # busy
                        continue
                    sent = answer.headers.get("Content-Range", "")
                    if answer.status_code != 206 or not sent.startswith(f"bytes {first}-"):
                        problem = f"The hub answers {answer.status_code} {sent} to a request for a part of {self.name}."
                        raise ModelError(problem, SAY_LATER)
                    for part in answer.iter_raw():
                        data += part[: count - len(data)]
            except HTTPError as error:
                problem = first_line(error)
            if len(data) == count:
                return data
        reason = problem or f"{len(data)} of {count} bytes arrived"
        raise ModelError(f"{self.name} can't be read from the hub: {reason}.", SAY_LATER)


class RemoteFiles(SafetensorsFiles):
    """The tensors of safetensors files on a hub."""

    def __init__(self, files: Iterable[RemoteFile]) -> None:
        super().__init__([])
        self._starts: dict[str, tuple[RemoteFile, int]] = {}
        for file in files:
            for name, (stored, start) in file.entries().items():
                self.stored[name], self._starts[name] = stored, (file, start)
            digest = sha256(file.header).hexdigest()
            self.headers.append(FileInParts(name=file.name, bytes=file.size, header_sha256=digest, stamp=file.stamp))

    def sample(self, names: Iterable[str]) -> bytes:  # the interface of SafetensorsFiles
        """Return no bytes, because the stamp already identifies the content."""
        return b""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read these tensors. Raises ModelError if the hub does not deliver them, or their type is unknown."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            stored, (file, start) = self.stored[name], self._starts[name]
            entry = {"dtype": stored.type, "shape": stored.shape, "data_offsets": [0, stored.bytes]}
            header = json.dumps({name: entry}).encode()
            content = len(header).to_bytes(LENGTH, "little") + header + file.read(start, stored.bytes)
            try:  # the library parses a file with this one tensor
                tensors |= load_bytes(bytes(content))
            except (SafetensorError, KeyError):
                raise ModelError(
                    f"{file.name} stores {shorten_text(name)} in an unknown type.", "Download it."
                ) from None
        return tensors


class CodedFiles(SafetensorsFiles):
    """The tensors of safetensors files with quantised weights, which are decoded and have the weights' own names."""

    def __init__(self, files: SafetensorsFiles, coded: Mapping[str, CodedWeight]) -> None:
        """Determine the shapes of the `coded` weights in `files`. Raises ModelError if the files don't contain them."""
        super().__init__([])
        self.files, self.coded, self.headers = files, coded, files.headers
        codes = {name for weight in coded.values() for name in weight.parts.values()}
        self.stored = {name: tensor for name, tensor in files.stored.items() if name not in codes}
        for name, weight in coded.items():
            self.stored[name] = Stored(weight.shape(files.stored, lambda part: files.read([part])[part]), "F32")

    def size(self, names: Iterable[str]) -> int:
        """Return how many bytes are read for these tensors."""
        return self.files.size(self._stored_names(names))

    def sample(self, names: Iterable[str]) -> bytes:
        """Return some numbers of each stored tensor that these tensors are decoded from."""
        return self.files.sample(self._stored_names(names))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read and decode these tensors. Raises ModelError as SafetensorsFiles does, and if one can't be decoded."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            parts = self.files.read(self._stored_names([name]))
            weight = self.coded.get(name)
            tensors |= parts if weight is None else {name: weight.decode(parts)}
        return tensors

    def _stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the stored tensors that these tensors are made of."""
        return [part for name in names for part in (self.coded[name].parts.values() if name in self.coded else [name])]
