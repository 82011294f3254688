"""How does a swapped model survive the session? As an ordinary model folder, with attnlens.json beside the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from attnlens import calls, hooks
from attnlens.errors import ModelError, OutputError
from attnlens.kernels import parsed
from attnlens.models import SWAPPED, Loaded, load
from attnlens.models.quiet import quiet
from attnlens.records import Record, Site
from attnlens.records.tensors import Part

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTS, FITTED = SWAPPED, "attnlens.safetensors"


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


@dataclass(frozen=True)
class Swapped:
    """A model whose attention is computed with another kernel, until it is closed."""

    model: PreTrainedModel
    """Ready for any tool that runs a transformers model."""
    tokenizer: PreTrainedTokenizerBase | None
    """Its tokenizer, where it has one."""
    kernel: str
    """The kernel's spelling."""
    door: ExitStack
    """Holds the kernel in its place."""

    def close(self) -> None:
        """Give the model its own kernel back."""
        self.door.close()


def check_folder(folder: Path) -> None:
    """Raise OutputError where a model can't be saved in `folder`: it exists and is not empty, or can't be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} can't be written: it is not an empty folder.", "Give the path of a new folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.rmdir()
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}.", "Give a path that you can write.") from None


def save_swapped(folder: Path, loaded: Loaded, sites: tuple[Site, ...], swaps: dict[Site, hooks.Swap]) -> None:
    """Write the model as it is, its tokenizer, the kernel and its fitted parameters into a new folder.

    The folder gets its name when all is written, so that a killed run leaves none.
    """
    kernel = next(iter(swaps.values())).kernel
    part = folder.with_name(f".{folder.name}.part")
    if part.is_dir():
        shutil.rmtree(part)  # of a run that was killed
    with quiet(), _dequantised(loaded.model):
        loaded.model.save_pretrained(part)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(part)
    facts = SavedSwap(
        kernel=kernel.spelling,
        sites=[_saved(site, swaps.get(site)) for site in sites],
        swapped=[site.layer for site in swaps],
    )
    (part / FACTS).write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")
    fitted = {
        f"{site.layer}.{name}": value.contiguous().cpu()
        for site, swap in swaps.items()
        for name, value in swap.kernel.fitted.items()
    }
    save_file(fitted, part / FITTED)
    part.rename(folder)


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


@calls.public
def load_swapped(folder: str | Path, **loading: Any) -> Swapped:
    """The model that `swap-kernel --save` wrote, with its kernel in place; `loading` as for `load`.

    Raises ModelError where the folder holds no such model, or its attnlens.json does not belong to it.
    """
    place = Path(calls.path("folder", folder))
    try:
        facts = SavedSwap.model_validate_json((place / FACTS).read_bytes())
        fitted = load_file(place / FITTED)
    except (OSError, ValidationError, SafetensorError) as error:
        raise ModelError(
            f"{place} holds no swapped model: {str(error).splitlines()[0]}", "Give a folder that --save wrote."
        ) from None
    loaded = load(str(place), swapped=True, **loading)
    _check_belongs(facts, loaded.model, place)
    sites = tuple(Site(s.path, s.ordinal, s.layer, s.part, s.repeated) for s in facts.sites)
    heads = {s.layer: None if s.heads is None else tuple(s.heads) for s in facts.sites}
    kernel = parsed(facts.kernel, allow_signed=True)
    device = loaded.model.device
    swaps = {
        site: hooks.Swap(kernel.with_fitted(_of_layer(fitted, site.layer, device)), heads[site.layer])
        for site in sites
        if site.layer in facts.swapped
    }
    door = ExitStack()
    # A tool may use the encoder alone, or nothing at all before it closes.
    door.enter_context(hooks.replace(loaded.model, sites, swaps, every_site=False))
    return Swapped(loaded.model, loaded.tokenizer, facts.kernel, door)


def _check_belongs(facts: SavedSwap, model: PreTrainedModel, place: Path) -> None:
    """Raise ModelError where attnlens.json names sites that the model does not have."""
    modules = {name for name, _ in model.named_modules()}
    unknown = [site.path for site in facts.sites if site.path not in modules]
    unknown += [f"layer {layer}" for layer in facts.swapped if layer not in {site.layer for site in facts.sites}]
    if unknown:
        raise ModelError(
            f"{place} holds no swapped model: its {FACTS} names {unknown[0]}, which the model does not have.",
            "Give a folder that --save wrote, unchanged.",
        )


def _saved(site: Site, swap: hooks.Swap | None) -> SavedSite:
    heads = None if swap is None or swap.heads is None else list(swap.heads)
    return SavedSite(
        path=site.path, ordinal=site.ordinal, layer=site.layer, part=site.part, repeated=site.repeated, heads=heads
    )


def _of_layer(fitted: dict[str, Tensor], layer: int, device: Any) -> dict[str, Tensor]:
    return {
        name.partition(".")[2]: value.to(device)
        for name, value in fitted.items()
        if name.partition(".")[0] == str(layer)
    }
