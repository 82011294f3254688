"""Saves a swapped model as an ordinary model folder with attnlens.json."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from attnlens import hooks
from attnlens.choices import Part
from attnlens.errors import OutputError
from attnlens.files import make_folder, opened, sha256, unwritten_folder
from attnlens.models import SWAPPED, Loaded
from attnlens.models.quiet import quiet
from attnlens.records import Record, Report, Site

if TYPE_CHECKING:
    pass

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
        files=_digests(part),
    )
    (part / FACTS).write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each safetensors file in a folder, by name."""
    return {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}


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
