"""Is there a tokenizer that fits the model, and if not, why not?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.models.heads import text_config
from attnlens.models.hub import first_line
from attnlens.models.places import Place

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PATTERNS = ("tokenizer*", "vocab*", "*.model", "merges*", "tekken*", "*.tiktoken")
"""Names of the files in which tokenizers are kept."""
TINY = 10
"""A tokenizer that knows less than one in TINY of the model's tokens was made up from nothing."""


def has_tokenizer(place: Place) -> bool:
    """Whether a tokenizer's files lie beside the weights, or within them."""
    return bool(place.gguf) or any(path for pattern in PATTERNS for path in Path(place.folder).glob(pattern))


def load_tokenizer(place: Place, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[Any, str]:
    """The tokenizer and an empty text, or None and why there is none.

    Where files are missing, transformers returns a tokenizer of about five tokens that reads everything as unknown; the
    size of its vocabulary gives it away.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(place):
        return None, f"{place.folder} has no tokenizer files"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place.folder, trust_remote_code=trust_remote_code, local_files_only=True, **place.gguf
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        return None, f"the tokenizer can't be loaded: {first_line(error)}"
    known, wanted = len(tokenizer), getattr(text_config(config), "vocab_size", None) or 0
    if known * TINY < wanted:
        return (
            None,
            f"the tokenizer has {known} tokens and the model {wanted}: its files are missing or of another kind",
        )
    return tokenizer, ""
