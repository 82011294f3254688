"""Load the tokenizer of a checkpoint, or say why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.errors import TextError
from attnlens.models.classes import text_config
from attnlens.models.folders import TOKENIZERS
from attnlens.models.hub import first_line
from attnlens.models.locate import Location

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
