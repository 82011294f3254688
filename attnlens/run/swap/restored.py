"""Loads a model that `swap-kernel --save` wrote, with its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from attnlens import arguments, hooks, texts
from attnlens.errors import FAILURES, AttnlensError, ModelError, UsageError
from attnlens.files import read_object, sha256
from attnlens.kernels import parsed
from attnlens.models import Loaded, Loading, first_line, load
from attnlens.models.folders import refuse_outside, weight_file
from attnlens.records import Site
from attnlens.requests import checked

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


from attnlens.run.swap.saved import FACTS, FITTED, SavedSwap, saved_site

SAVED, WRITTEN = "Give a folder that --save wrote.", "Give a folder that --save wrote, unchanged."


@dataclass(frozen=True)
class Swapped:
    """A model whose attention is computed with another kernel, until it is closed."""

    model: PreTrainedModel
    """Ready for any tool that runs a transformers model."""
    tokenizer: PreTrainedTokenizerBase | None
    """Its tokenizer, where it has one."""
    kernel: str
    """The kernel's spelling."""
    replacing: ExitStack
    """Holds the kernel in its place."""

    def close(self) -> None:
        """Give the model its own kernel back."""
        self.replacing.close()


@dataclass(frozen=True)
class Restored:
    """What a folder of `--save` holds: a model, and the kernel that belongs to it and is not yet in its place."""

    loaded: Loaded
    """The model with its weights, under its own kernel."""
    sites: tuple[Site, ...]
    """Every site of the model."""
    swaps: hooks.Swaps
    """The kernel at each swapped site."""
    kernel: str
    """Its spelling."""


@arguments.public
def load_swapped(folder: str | Path, **loading: Any) -> Swapped:
    """The model that `swap-kernel --save` wrote, with its kernel in place; `loading` as for `load`.

    Raises ModelError where the folder holds no such model, or one of its files is not the one that was written with
    the others.
    """
    found = restored(Path(arguments.path("folder", folder)), **loading)
    replacing = ExitStack()
    # A tool may use the encoder alone, or nothing at all before it closes.
    replacing.enter_context(hooks.replace(found.loaded.model, found.sites, found.swaps, every_site=False))
    return Swapped(found.loaded.model, found.loaded.tokenizer, found.kernel, replacing)


def restored(place: Path, **loading: Any) -> Restored:
    """The model of such a folder with its kernel beside it; raises what `load_swapped` raises."""
    checked(Loading, loading)
    facts, fitted = _read(place)
    loaded = load(str(place), swapped=True, **loading)
    _check_files(facts, {file.name: file.sha256 for file in loaded.info.files}, place)
    inputs = texts.placeholder(loaded, 2, seed=0).batches[0].inputs
    sites = _sites(facts, hooks.survey(loaded.model, inputs), place)
    swaps = _swaps(facts, sites, {name: value.to(loaded.model.device) for name, value in fitted.items()}, place)
    _try(loaded, inputs, sites, swaps, place)
    return Restored(loaded, sites, swaps, facts.kernel)


def _read(place: Path) -> tuple[SavedSwap, dict[str, Tensor]]:
    """What attnlens.json says and the fitted parameters, which must be what it says of them, and finite numbers."""
    facts = _facts(place)
    try:
        stored = weight_file(place, FITTED)
        digest, fitted = sha256(stored), load_file(stored)
    except (OSError, ModelError, SafetensorError) as error:
        raise _none(place, first_line(error).rstrip("."), SAVED) from None
    _check_files(facts, {FITTED: digest}, place)
    if {name: list(value.shape) for name, value in fitted.items()} != facts.fitted:
        raise _none(place, f"its {FITTED} does not hold the parameters that its {FACTS} names")
    broken = [name for name, value in fitted.items() if not bool(value.isfinite().all())]
    if broken:
        raise _none(place, f"{broken[0]} in its {FITTED} holds NaN or Inf")
    return facts, fitted


def _facts(place: Path) -> SavedSwap:
    """The content of attnlens.json, which is read where it lies in the folder itself."""
    try:
        refuse_outside(place, place / FACTS)
        return SavedSwap.model_validate(read_object(place / FACTS, ModelError, WRITTEN))
    except ModelError as error:
        raise _none(place, error.problem.rstrip("."), SAVED) from None
    except ValidationError as error:
        where, what = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise _none(place, f"its {FACTS} is not what --save writes ({where}: {what})", SAVED) from None


def _check_files(facts: SavedSwap, digests: Mapping[str, str], place: Path) -> None:
    """Raise ModelError where a file is not the one that attnlens.json names, or one more or less lies beside it."""
    here = {path.name for path in place.glob("*.safetensors")}
    changed = sorted(here ^ facts.files.keys()) or [n for n, own in digests.items() if facts.files.get(n, own) != own]
    if changed:
        raise _none(place, f"{changed[0]} is not the file that was saved with its {FACTS}")


def _sites(facts: SavedSwap, reached: Sequence[hooks.Reached], place: Path) -> tuple[Site, ...]:
    """The model's sites, which must be those that attnlens.json names, with the heads that it swaps."""
    for saved, found in zip(facts.sites, reached, strict=False):
        if saved_site(found.site, None) != saved.model_copy(update={"heads": None}):
            raise _none(place, f"its {FACTS} names {saved.path} as layer {saved.layer}, which the model does not have")
        wrong = [head for head in saved.heads or () if not 0 <= head < found.call.query.shape[1]]
        if wrong or len(set(saved.heads or ())) != len(saved.heads or ()):
            raise _none(place, f"its {FACTS} swaps heads of {saved.path} that the model does not have, or one twice")
    if len(facts.sites) != len(reached):
        raise _none(place, f"its {FACTS} names {len(facts.sites)} sites, and the model has {len(reached)}")
    missed = [layer for layer in facts.swapped if not 0 <= layer < len(reached)]
    if missed or not facts.swapped:
        raise _none(
            place, f"its {FACTS} swaps {f'layer {missed[0]}, which the model does not have' if missed else 'none'}"
        )
    return tuple(found.site for found in reached)


def _swaps(facts: SavedSwap, sites: tuple[Site, ...], fitted: Mapping[str, Tensor], place: Path) -> hooks.Swaps:
    """The kernel at each swapped site, whose fitted parameters must be of the same names at all of them."""
    try:
        kernel = parsed(facts.kernel, allow_signed=True)
    except UsageError as error:
        raise _none(place, f"its {FACTS} names no kernel: {error.problem.rstrip('.')}") from None
    own = {layer: _of_layer(fitted, layer) for layer in facts.swapped}
    if len({tuple(sorted(parameters)) for parameters in own.values()}) > 1:
        raise _none(place, f"its {FITTED} lacks parameters of some of the layers that are swapped")
    heads = [None if saved.heads is None else tuple(saved.heads) for saved in facts.sites]
    return {
        sites[layer]: hooks.Replacement(kernel.with_fitted(parameters), heads[layer])
        for layer, parameters in own.items()
    }


def _try(
    loaded: Loaded, inputs: Mapping[str, Tensor], sites: tuple[Site, ...], swaps: hooks.Swaps, place: Path
) -> None:
    """Raise ModelError where the swapped model can't run."""
    try:
        with torch.no_grad(), hooks.replace(loaded.model, sites, swaps):
            hooks.forward(loaded.model, inputs)
    except (*FAILURES, AttnlensError) as error:
        raise _none(place, f"its kernel does not fit its model ({first_line(error)})") from None


def _none(place: Path, why: str, remedy: str = WRITTEN) -> ModelError:
    return ModelError(f"{place} holds no swapped model: {why}.", remedy)


def _of_layer(fitted: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    parts = {name.partition(".")[::2]: value for name, value in fitted.items()}
    return {name: value for (number, name), value in parts.items() if number == str(layer)}
