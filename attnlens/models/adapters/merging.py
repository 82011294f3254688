"""Merges an adapter's tensors into a model's weights, and takes them out again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnlens.errors import ModelError
from attnlens.files import sha256, shortened
from attnlens.models.adapters.files import AdapterFiles
from attnlens.models.adapters.settings import SAY_AGAIN, SAY_MERGE, AdapterSettings, read_settings
from attnlens.models.adapters.targets import Targets
from attnlens.models.adapters.tensors import AdapterTensors
from attnlens.models.stored import named
from attnlens.records import AdapterInfo, File

LINEAR, EMBEDDING, MAGNITUDE = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"), "lora_magnitude_vector"


@dataclass(frozen=True)
class LowRank:
    """W' = D(W + s·BA); D = diag(m / ‖rows of W + s·BA‖) for DoRA, else 1."""

    down: Tensor
    """A, (r, inputs)."""
    up: Tensor
    """B, (outputs, r)."""
    scale: float
    """s."""
    across: bool
    """Whether the weight has a row for each input (Conv1D, Embedding), and not for each output."""
    factor: Tensor | None = None
    """D as it multiplies the weight; None: 1."""

    def base(self, merged: Tensor) -> Tensor:
        """W = W'/D − s·BA in float64, so that the two differ by exactly the adapter; W itself to the rounding of W'."""
        whole = merged.double() if self.factor is None else merged.double() / self.factor.to(merged.device)
        return whole - self.change(merged)

    def change(self, like: Tensor) -> Tensor:
        """s·BA in float64, laid out as the weight is."""
        up, down = (part.to(like.device).double() for part in (self.up, self.down))
        change = self.scale * up @ down
        return change.mT if self.across else change


@dataclass(frozen=True)
class Replaced:
    """A tensor that the adapter brings whole (modules_to_save)."""

    original: Tensor
    """What the base has in its place."""

    def base(self, merged: Tensor) -> Tensor:
        """The original, in float64."""
        return self.original.to(merged.device).double()


@dataclass(frozen=True)
class Adapted:
    """An adapter that has been merged into a model."""

    info: AdapterInfo
    """Which adapter."""
    changes: Mapping[str, LowRank | Replaced]
    """What it did, by the name of the parameter."""
    unplaced: tuple[str, ...]
    """Its whole tensors for which the model has no place."""

    @contextmanager
    def removed(self, model: PreTrainedModel, path: str) -> Iterator[bool]:
        """Inside, the module at `path` has the base's weights, in float64; yields whether that makes a difference."""
        touched = {name: change for name, change in self.changes.items() if name.startswith(f"{path}.")}
        parameters = {name: model.get_parameter(name) for name in touched}
        merged = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, change in touched.items():
                parameters[name].data = change.base(merged[name])
            yield bool(touched)
        finally:
            for name, parameter in parameters.items():
                parameter.data = merged[name]


def merge(files: AdapterFiles, model: PreTrainedModel) -> Adapted:
    """Merge the adapter into the model's weights: W + s·BA in float64, rounded to the weights' own type.

    Raises ModelError where the adapter is of a kind that attnlens does not merge, or does not fit the model, or its
    files are broken; some of the model's weights may then be merged.
    """
    settings = read_settings(files.settings)
    tensors = AdapterTensors.of(files, settings, model)
    every, shared = dict(model.named_modules()), _shared(model)
    for name in (*(f"{path}.weight" for path in tensors.modules), *tensors.whole):
        _refuse_tied(settings, shared, name)
    modules = {path: _module(settings, model, every.get(path), path) for path in tensors.modules}
    targets = Targets(settings)
    _check_targets(targets, model, tensors)
    changes: dict[str, LowRank | Replaced] = {}
    for path, module in modules.items():
        changes[f"{path}.weight"] = _merge_one(tensors, targets, path, module)
    for name, stored in tensors.whole.items():
        parameter = model.get_parameter(name)
        changes[name] = Replaced(parameter.data)
        parameter.data = tensors.read(stored, *parameter.shape).to(parameter)
    return Adapted(_info(files, settings, tensors), changes, tensors.unplaced)


def _module(
    settings: AdapterSettings, model: PreTrainedModel, module: nn.Module | None, path: str
) -> nn.Linear | Conv1D | nn.Embedding:
    """The module that is adapted; raises ModelError where the model has none, or one of a kind that is not merged."""
    if module is None:
        raise ModelError(
            f"The adapter of {settings.file} changes {shortened(path)}, which this {type(model).__name__} does not "
            "have: it is of another base.",
            settings.say_base,
        )
    merged_into = (nn.Linear, Conv1D) if settings.magnitudes else (nn.Linear, Conv1D, nn.Embedding)
    if not isinstance(module, merged_into):
        raise ModelError(
            f"The adapter of {settings.file} changes {path}, a {type(module).__name__}, into which attnlens merges no "
            f"{settings.kind}.",
            SAY_MERGE,
        )
    return module


def _shared(model: PreTrainedModel) -> dict[str, list[str]]:
    """The names of each parameter that has several, by each of them."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return {name: found for found in names.values() for name in found if len(found) > 1}


def _refuse_tied(settings: AdapterSettings, shared: Mapping[str, list[str]], name: str) -> None:
    """Raise ModelError where another parameter is the same tensor, which the adapter does not mean."""
    if name in shared:
        other = next(one for one in shared[name] if one != name)
        raise ModelError(
            f"The adapter of {settings.file} changes {name}, which the model shares with {other}.", SAY_MERGE
        )


def _check_targets(targets: Targets, model: PreTrainedModel, tensors: AdapterTensors) -> None:
    """Raise ModelError where tensors and settings don't name the same modules: peft would leave some of them out."""
    file = targets.settings.file
    if beyond := [path for path in tensors.modules if path not in targets]:
        raise ModelError(f"The adapter holds matrices for {named(beyond)}, which {file} leaves out.", SAY_AGAIN)
    able = [path for path, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    wanted = [] if targets.settings.targets is None else [path for path in able if path in targets]
    if lacking := [path for path in wanted if path not in tensors.modules]:
        raise ModelError(f"{file} names {named(lacking)}, for which the adapter holds no matrices.", SAY_AGAIN)


def _merge_one(
    tensors: AdapterTensors, targets: Targets, path: str, module: nn.Linear | Conv1D | nn.Embedding
) -> LowRank:
    """Merge the matrices of one module into its weight."""
    settings, names = targets.settings, tensors.modules[path]
    pair = EMBEDDING if isinstance(module, nn.Embedding) else LINEAR
    parts = (*pair, MAGNITUDE) if settings.magnitudes else pair
    if set(names) != set(parts):
        raise ModelError(
            f"{tensors.files.tensors} holds {', '.join(sorted(names))} of {path}, where {settings.kind} has "
            f"{', '.join(parts)}.",
            SAY_AGAIN,
        )
    weight = module.weight
    across = not isinstance(module, nn.Linear)
    outputs, inputs = reversed(weight.shape) if across else weight.shape
    rank = targets.rank(path)
    down, up = tensors.read(names[pair[0]], rank, inputs), tensors.read(names[pair[1]], outputs, rank)
    found = LowRank(down, up, settings.scale(rank, targets.alpha(path)), across)
    merged = weight.data.double() + found.change(weight.data)
    if settings.magnitudes:
        magnitude = tensors.read(names[MAGNITUDE], outputs)
        factor = _factor(magnitude, merged, path, across=across)
        found, merged = replace(found, factor=factor), merged * factor
    weight.data = merged.to(weight)
    return found


def _factor(magnitude: Tensor, direction: Tensor, path: str, *, across: bool) -> Tensor:
    """m / ‖rows of W + s·BA‖, as it multiplies the weight. Raises ModelError where one is 0 or none."""
    factor: Tensor = magnitude.to(direction) / direction.norm(dim=0 if across else 1)
    if not bool((factor.isfinite() & (factor != 0)).all()):
        raise ModelError(f"DoRA's magnitudes of {path}, or its rows, are 0 or not finite.", SAY_AGAIN)
    return factor if across else factor[:, None]


def _info(files: AdapterFiles, settings: AdapterSettings, tensors: AdapterTensors) -> AdapterInfo:
    return AdapterInfo(
        id=files.id,
        revision=files.revision,
        base=settings.base,
        kind=settings.kind,
        rank=settings.rank,
        alpha=settings.alpha,
        modules=len(tensors.modules),
        replaced=sorted(tensors.whole),
        files=[File(name=file.name, sha256=sha256(file)) for file in (files.settings, files.tensors)],
    )
