"""Saves a swapped model as an ordinary model folder with attnlens.json, and loads one with its kernel."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from attnlens import arguments
from attnlens.choices import Part
from attnlens.errors import FAILURES, AttnlensError, ModelError, OutputError, UsageError
from attnlens.files import make_folder, opened, read_object, sha256, unwritten_folder
from attnlens.kernels import parsed
from attnlens.models import hooks, texts
from attnlens.models.loading import SWAPPED, Loaded, Loading, first_line, load
from attnlens.models.loading.building import quiet
from attnlens.models.loading.locate import refuse_outside, weight_file
from attnlens.records import Record, Report, Site
from attnlens.requests import checked

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTS, FITTED = SWAPPED, "attnlens.safetensors"
PART, LOCK = ".attnlens-save-", "lock"
"""How the name begins under which a folder is written, and the file in it that its process holds locked."""


class UnsavedError(OutputError):
    """The changed model could not be saved; `report` holds what was measured."""

    def __init__(self, error: OutputError, report: Report) -> None:
        super().__init__(error.problem, error.remedy)
        self.report = report


class SavedSite(Record):
    """One swapped site."""

    path: str
    """Module path."""
    ordinal: int
    """Which call of that module."""
    layer: int
    """Running number."""
    part: Part
    """encoder, decoder or cross."""
    repeated: bool
    """Whether the module is called more than once."""
    heads: list[int] | None
    """Which heads; None means all."""


class SavedSwap(Record):
    """The content of attnlens.json."""

    kernel: str
    """As it can be typed."""
    sites: list[SavedSite]
    """Every site of the model, in the order of execution."""
    swapped: list[int]
    """The layers that are swapped."""
    fitted: dict[str, list[int]]
    """The shape of each fitted parameter, by layer and name."""
    files: dict[str, str]
    """The SHA-256 of every file with weights or fitted parameters, by name."""


def save_swapped(folder: Path, loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps) -> None:
    """Write the model as it is, its tokenizer, the kernel and its fitted parameters into a new folder.

    The folder gets its name when all is written, so that a killed run leaves none. Raises OutputError where it can't be
    written.
    """
    real = Path(os.path.realpath(folder))
    make_folder(real.parent)
    try:
        with _part(real.parent) as part:
            _write(part, loaded, sites, swaps)
            part.rename(real)
    except (OSError, SafetensorError) as error:
        raise unwritten_folder(folder, getattr(error, "strerror", None) or str(error)) from None


@contextmanager
def _part(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, in one of a secret name that is removed at the end, as are those of killed runs."""
    for left in parent.glob(f"{PART}*/{LOCK}"):
        with suppress(OSError), opened(left) as lock:  # a pipe, which nobody holds locked, is not waited for
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where its process is alive
            shutil.rmtree(left.parent)
    secret = Path(tempfile.mkdtemp(prefix=PART, dir=parent))
    try:
        with (secret / LOCK).open("xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            part = secret / "model"
            part.mkdir()  # with the modes that the umask says, which the secret folder has not
            yield part
    finally:
        shutil.rmtree(secret, ignore_errors=True)


def _write(part: Path, loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps) -> None:
    with quiet(), _dequantised(loaded.model):
        loaded.model.save_pretrained(part)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(part)
    fitted = {
        f"{site.layer}.{name}": value.contiguous().cpu()
        for site, swap in swaps.items()
        for name, value in swap.kernel.fitted.items()
    }
    save_file(fitted, part / FITTED)
    facts = SavedSwap(
        kernel=next(iter(swaps.values())).kernel.spelling,
        sites=[saved_site(site, swaps.get(site)) for site in sites],
        swapped=[site.layer for site in swaps],
        fitted={name: list(value.shape) for name, value in fitted.items()},
        files={path.name: sha256(path) for path in sorted(part.glob("*.safetensors"))},
    )
    (part / FACTS).write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")


@contextmanager
def _dequantised(model: Any) -> Iterator[None]:
    """Inside the block a GGUF file's model, whose weights are plain numbers since it was loaded, says so."""
    quantizer, config = getattr(model, "hf_quantizer", None), model.config
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        yield
        return
    kept = config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    try:
        yield
    finally:
        model.hf_quantizer = quantizer
        if kept is not None:
            config.quantization_config = kept


def saved_site(site: Site, swap: hooks.Replacement | None) -> SavedSite:
    """A site as it is written down, with the heads that are swapped."""
    heads = None if swap is None or swap.heads is None else list(swap.heads)
    return SavedSite(
        path=site.path, ordinal=site.ordinal, layer=site.layer, part=site.part, repeated=site.repeated, heads=heads
    )


SAVED, WRITTEN = "Give a folder that --save wrote.", "Give a folder that --save wrote, unchanged."


@dataclass(frozen=True)
class Swapped:
    """A model whose attention is computed with another kernel, until it is closed."""

    model: PreTrainedModel  # ready for any tool that runs a transformers model
    tokenizer: PreTrainedTokenizerBase | None  # its tokenizer, where it has one
    kernel: str  # the kernel's spelling
    replacing: ExitStack  # holds the kernel in its place

    def close(self) -> None:
        """Give the model its own kernel back."""
        self.replacing.close()


@dataclass(frozen=True)
class Restored:
    """What a folder of `--save` holds: a model under its own kernel, all of its sites, and the kernel to swap in."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: hooks.Swaps
    kernel: str


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
    try:
        with torch.no_grad(), hooks.replace(loaded.model, sites, swaps):
            hooks.forward(loaded.model, inputs)
    except (*FAILURES, AttnlensError) as error:
        raise _none(place, f"its kernel does not fit its model ({first_line(error)})") from None
    return Restored(loaded, sites, swaps, facts.kernel)


def _read(place: Path) -> tuple[SavedSwap, dict[str, Tensor]]:
    """What attnlens.json says and the fitted parameters, which must be what it says of them, and finite numbers."""
    try:
        refuse_outside(place, place / FACTS)
        facts = SavedSwap.model_validate(read_object(place / FACTS, ModelError, WRITTEN))
    except ModelError as error:
        raise _none(place, error.problem.rstrip("."), SAVED) from None
    except ValidationError as error:
        where, what = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise _none(place, f"its {FACTS} is not what --save writes ({where}: {what})", SAVED) from None
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
        what = f"layer {missed[0]}, which the model does not have" if missed else "none"
        raise _none(place, f"its {FACTS} swaps {what}")
    return tuple(found.site for found in reached)


def _swaps(facts: SavedSwap, sites: tuple[Site, ...], fitted: Mapping[str, Tensor], place: Path) -> hooks.Swaps:
    """The kernel at each swapped site, whose fitted parameters must be of the same names at all of them."""
    try:
        kernel = parsed(facts.kernel, allow_signed=True)
    except UsageError as error:
        raise _none(place, f"its {FACTS} names no kernel: {error.problem.rstrip('.')}") from None
    parts = {name.partition(".")[::2]: value for name, value in fitted.items()}
    own = {
        layer: {name: value for (number, name), value in parts.items() if number == str(layer)}
        for layer in facts.swapped
    }
    if len({tuple(sorted(parameters)) for parameters in own.values()}) > 1:
        raise _none(place, f"its {FITTED} lacks parameters of some of the layers that are swapped")
    heads = [None if saved.heads is None else tuple(saved.heads) for saved in facts.sites]
    return {
        sites[layer]: hooks.Replacement(kernel.with_fitted(parameters), heads[layer])
        for layer, parameters in own.items()
    }


def _none(place: Path, why: str, remedy: str = WRITTEN) -> ModelError:
    return ModelError(f"{place} holds no swapped model: {why}.", remedy)
