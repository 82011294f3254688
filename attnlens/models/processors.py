"""Loads what a checkpoint reads texts, images and sounds with (tokenizer, processor), or says why it can't be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnlens.errors import ModelError, TextError
from attnlens.models.classes import text_config
from attnlens.models.folders import TOKENIZERS, names_in, read_json
from attnlens.models.hub import first_line
from attnlens.models.locate import Location

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from attnlens.models import Loaded

Modality = Literal["image", "audio"]
SETTINGS = ("processor_config.json", "preprocessor_config.json")
"""In which files transformers looks for the settings of a processor."""
TINY = 10
"""A tokenizer that knows less than one in TINY of the model's tokens was made up from nothing."""


def has_tokenizer(place: Location) -> bool:
    """Whether a tokenizer's files lie beside the weights, or within them."""
    return bool(place.gguf) or any(path for pattern in TOKENIZERS for path in Path(place.folder).glob(pattern))


def load_tokenizer(place: Location, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[Any, str]:
    """The tokenizer and an empty text, or None and why there is none.

    Where files are missing, transformers returns a tokenizer of about five tokens that reads everything as unknown; the
    size of its vocabulary gives it away.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(place):
        return None, f"{place.folder} has no tokenizer files"
    try:
        with foreign("the tokenizer can't be loaded", "Use --source weights."):
            tokenizer = AutoTokenizer.from_pretrained(
                place.folder, trust_remote_code=trust_remote_code, local_files_only=True, **place.gguf
            )
            known = len(tokenizer)
    except TextError as error:
        return None, error.problem
    wanted = getattr(text_config(config), "vocab_size", None) or 0
    if known * TINY < wanted:
        return (
            None,
            f"the tokenizer has {known} tokens and the model {wanted}: its files are missing or of another kind",
        )
    return tokenizer, ""


@contextmanager
def foreign(problem: str, remedy: str) -> Iterator[None]:
    """Inside, whatever a tokenizer raises becomes a TextError: its files may come from anybody.

    The package tokenizers raises bare Exception, and a panic of its Rust, which is no Exception, for some files.
    """
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TextError(f"{problem}: {first_line(error)}", remedy) from None


def processor(loaded: Loaded, modality: Modality) -> Any:
    """What turns images, or sounds, into the inputs of this model.

    Raises ModelError where the checkpoint has none, where it would run code of its own, and where it can't be loaded.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    where = loaded.folder
    if where is None:
        raise ModelError(
            f"{loaded.info.id} has no folder that a processor could lie in.",
            "Load the model by its name or folder, or give its inputs to attnlens.capture.",
        )
    found = [name for name in SETTINGS if name in names_in(where)]
    if not found:
        raise ModelError(
            f"{where} has no {SETTINGS[1]}, which says how the model's {modality}s are prepared.",
            f"Copy it from the model's page, or leave out --{modality}: then noise is fed.",
        )
    if any("auto_map" in read_json(where / name) for name in found):
        raise ModelError(
            f"The processor of {loaded.info.id} is code of its own, which attnlens does not run.",
            f"Prepare the {modality}s yourself, and give them to attnlens.capture in Python.",
        )
    kind: Any = AutoImageProcessor if modality == "image" else AutoFeatureExtractor
    try:
        return kind.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{where} has no processor of {modality}s that can be loaded: {first_line(error)}",
            f"Mend its {found[0]}, or leave out --{modality}.",
        ) from error
