"""Save a swapped model as an ordinary model folder with attnlens.json, and load such a folder with its kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnlens import arguments
from attnlens.choices import Part
from attnlens.errors import FAILURES, AttnlensError, ModelError, OutputError
from attnlens.files import make_folder, read_object, sha256, unwritten_folder
from attnlens.kernels import parsed
from attnlens.models import hooks, texts
from attnlens.models.loading import SWAPPED, Loaded, first_line, load
from attnlens.models.loading.building import quiet
from attnlens.models.loading.locate import refuse_outside, weight_file
from attnlens.records import Record, Site
from attnlens.report.report import Report
from attnlens.requests import Loading

FACTS, FITTED = SWAPPED, "attnlens.safetensors"
WRITTEN = "Give a folder that --save wrote and that has not been changed since."


class UnsavedError(OutputError):
    """Failure to save the changed model; `report` contains the measurements."""

    def __init__(self, error: OutputError, report: Report) -> None:
        super().__init__(error.problem, error.remedy)
        self.report = report


class SavedSite(Record):
    """Record of one site: the fields of `records.Site`, and the swapped heads."""

    model_config = ConfigDict(from_attributes=True)

    path: str
    ordinal: int
    layer: int
    part: Part
    repeated: bool
    heads: list[int] | None = None  # swapped heads; None: all heads, or the site is not swapped


class SavedSwap(Record):
    """Content of attnlens.json, which describes a saved swap."""

    kernel: str  # spelled as on the command line
    sites: list[SavedSite]  # all sites of the model, in execution order
    swapped: list[int]  # numbers of the swapped layers
    fitted: dict[str, list[int]]  # shape of each fitted parameter, keyed by `LAYER.NAME`
    files: dict[str, str]  # SHA-256 of each file of weights or fitted parameters, keyed by file name


def save_swapped(folder: Path, loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps) -> None:
    """Write the model, its tokenizer, the kernel and its fitted parameters to a new folder, or raise OutputError.

    A temporary folder is renamed to `folder` once it is complete, so that a killed run leaves no incomplete `folder`.
    """
    real = Path(os.path.realpath(folder))
    make_folder(real.parent)
    try:
        with TemporaryDirectory(prefix=".attnlens-save-", dir=real.parent) as temporary:
            part = Path(temporary, "model")
            part.mkdir()  # with the umask's mode; temporary folders have mode 0700
            _write_files(part, loaded, sites, swaps)
            part.rename(real)
    except (OSError, SafetensorError) as error:
        raise unwritten_folder(folder, getattr(error, "strerror", None) or str(error)) from None


def _write_files(part: Path, loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps) -> None:
    with quiet(), _hide_quantization(loaded.model):
        loaded.model.save_pretrained(part)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(part)
    fitted = {
        f"{site.layer}.{name}": value.contiguous().cpu()
        for site, swap in swaps.items()
        for name, value in swap.kernel.fitted.items()
    }
    save_file(fitted, part / FITTED)
    heads = {site: list(swap.heads) for site, swap in swaps.items() if swap.heads is not None}
    facts = SavedSwap(
        kernel=next(iter(swaps.values())).kernel.spelling,
        sites=[SavedSite.model_validate(site).model_copy(update={"heads": heads.get(site)}) for site in sites],
        swapped=[site.layer for site in swaps],
        fitted={name: list(value.shape) for name, value in fitted.items()},
        files={path.name: sha256(path) for path in sorted(part.glob("*.safetensors"))},
    )
    (part / FACTS).write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")


@contextmanager
def _hide_quantization(model: Any) -> Iterator[None]:
    """Context manager: hide the quantisation settings of a GGUF model, because its weights are dequantised."""
    quantizer, config = getattr(model, "hf_quantizer", None), model.config
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        yield
        return
    quantization = config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    try:
        yield
    finally:
        model.hf_quantizer = quantizer
        if quantization is not None:
            config.quantization_config = quantization


@dataclass(frozen=True)
class Swapped:
    """A model whose attention uses another kernel until `close` is called."""

    model: PreTrainedModel  # ready for any tool that runs a transformers model
    tokenizer: PreTrainedTokenizerBase | None  # the model's tokenizer, if any
    kernel: str  # kernel as spelled on the command line
    replacing: ExitStack  # context of the replacement

    def close(self) -> None:
        """Restore the model's own kernel."""
        self.replacing.close()


@arguments.public
def load_swapped(folder: str | Path, **loading: Any) -> Swapped:
    """Load a model that `--save` wrote, with its kernel in place; `loading` contains options of `load`.

    Raise ModelError if the folder does not contain such a model, or if a file was changed after it was saved.
    Raise UsageError for invalid options.
    """
    loaded, sites, swaps = restore_saved(Path(arguments.path("folder", folder)), **loading)
    replacing = ExitStack()
    # A caller may run the encoder alone, or close the model without running it.
    replacing.enter_context(hooks.replace(loaded.model, sites, swaps, every_site=False))
    return Swapped(loaded.model, loaded.tokenizer, next(iter(swaps.values())).kernel.spelling, replacing)


def restore_saved(place: Path, **loading: Any) -> tuple[Loaded, tuple[Site, ...], hooks.Swaps]:
    """Load the model, sites and kernels of a `--save` folder without swapping. Raise the errors of `load_swapped`."""
    Loading(**loading)  # raises UsageError for invalid values
    with _convert_errors(place):
        facts, fitted = _read_facts(place)
    loaded = load(str(place), swapped=True, **loading)
    inputs = texts.placeholder(loaded, 2, seed=0).batches[0].inputs
    site_calls = hooks.survey(loaded.model, inputs)
    sites = tuple(each.site for each in site_calls)
    with _convert_errors(place):
        _check_files(facts, {file.name: file.sha256 for file in loaded.info.files}, place)
        _check_sites(facts, site_calls)
        swaps = _build_swaps(facts, sites, {name: value.to(loaded.model.device) for name, value in fitted.items()})
        with torch.no_grad(), hooks.replace(loaded.model, sites, swaps):
            hooks.forward(loaded.model, inputs)
    return loaded, sites, swaps


@contextmanager
def _convert_errors(place: Path) -> Iterator[None]:
    """Context manager: convert errors caused by a damaged or changed folder to ModelError."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{FACTS} was not written by --save ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    except (*FAILURES, OSError, SafetensorError, AttnlensError) as error:
        problem = first_line(error).rstrip(".")
    else:
        return
    raise ModelError(f"{place} does not contain a valid swapped model: {problem}.", WRITTEN)


def _read_facts(place: Path) -> tuple[SavedSwap, dict[str, Tensor]]:
    """Read attnlens.json and the fitted parameters; check the parameters' hash, names, shapes and finiteness."""
    refuse_outside(place, place / FACTS)
    facts = SavedSwap.model_validate(read_object(place / FACTS, ModelError, WRITTEN))
    stored = weight_file(place, FITTED)
    _check_files(facts, {FITTED: sha256(stored)}, place)
    fitted = load_file(stored)
    if {name: list(value.shape) for name, value in fitted.items()} != facts.fitted:
        raise ValueError(f"{FITTED} does not contain the parameters named in {FACTS}")
    broken = [name for name, value in fitted.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{broken[0]} in {FITTED} contains NaN or Inf")
    return facts, fitted


def _check_files(facts: SavedSwap, digests: Mapping[str, str], place: Path) -> None:
    """Raise ValueError if a weight file is missing, is not listed in attnlens.json, or has a different hash."""
    present = {path.name for path in place.glob("*.safetensors")}
    changed = {name for name, digest in digests.items() if facts.files.get(name, digest) != digest}
    if wrong := sorted(present ^ facts.files.keys() | changed):
        raise ValueError(f"{wrong[0]} is missing, is not listed in {FACTS}, or was changed after it was saved")


def _check_sites(facts: SavedSwap, site_calls: Sequence[hooks.SiteCall]) -> None:
    """Raise ValueError unless attnlens.json lists exactly the model's sites, and valid swapped heads and layers."""
    sites = [SavedSite.model_validate(each.site) for each in site_calls]
    if [saved.model_copy(update={"heads": None}) for saved in facts.sites] != sites:
        raise ValueError(f"{FACTS} lists attention that the model lacks, or omits attention that it has")
    for saved, each in zip(facts.sites, site_calls, strict=True):
        heads = saved.heads or []
        if len(set(heads)) != len(heads) or not set(heads) <= set(range(each.call.query.shape[1])):
            raise ValueError(f"{FACTS} swaps heads of {saved.path} that the model lacks, or swaps a head twice")
    if not facts.swapped or not set(facts.swapped) <= set(range(len(site_calls))):
        raise ValueError(f"{FACTS} swaps no layer, or a layer that the model lacks")


def _build_swaps(facts: SavedSwap, sites: tuple[Site, ...], fitted: Mapping[str, Tensor]) -> hooks.Swaps:
    """Return each swapped site's kernel and heads. Raise ValueError if a site lacks parameters that another has."""
    kernel = parsed(facts.kernel, allow_signed=True)
    by_layer: dict[int, dict[str, Tensor]] = {layer: {} for layer in facts.swapped}
    for full_name, value in fitted.items():
        number, _, name = full_name.partition(".")
        if number in map(str, facts.swapped):
            by_layer[int(number)][name] = value
    if len({tuple(sorted(parameters)) for parameters in by_layer.values()}) > 1:
        raise ValueError(f"{FITTED} lacks parameters of some swapped layers")
    heads = [None if saved.heads is None else tuple(saved.heads) for saved in facts.sites]
    return {
        sites[layer]: hooks.Replacement(kernel.with_fitted(parameters), heads[layer])
        for layer, parameters in by_layer.items()
    }
