"""Does what was asked for exist in this model, is it whole, and how is its attention put together?"""

from __future__ import annotations

from collections.abc import Sequence

from attnlens import models, weights
from attnlens.errors import ModelError, UsageError
from attnlens.hooks import Reached
from attnlens.records import Conventions

CAUSAL_NOTE = "Causal heads: the scores above the diagonal belong to the kernel, but the model never uses them."
UNKNOWN_NOTE = "The tokenizer does not know {:.0%} of the text's tokens: the model was made for another language."
MANY_UNKNOWN = 0.1
"""Share of unknown tokens from which the text is called foreign to the model."""
SIGN_NOTE = "weights.directionality has the published sign (Saponati et al. 2025); their code returns the opposite."


def check_numbers(what: str, numbers: Sequence[int] | None, count: int) -> None:
    """Raise UsageError for a layer or head that the model does not have."""
    wrong = [number for number in numbers or () if not 0 <= number < count]
    if wrong:
        raise UsageError(f"There is no {what} {wrong[0]}.", f"The model has {what}s 0 to {count - 1}.")


def refuse_initialised(loaded: models.Loaded, reached: Sequence[Reached]) -> None:
    """Raise ModelError where an attention rests on a weight that the checkpoint lacks, so that it is random."""
    last = reached[-1].site.path
    order = [name for name, _ in loaded.model.named_parameters(remove_duplicate=False)]
    up_to = max(index for index, name in enumerate(order) if name.startswith(f"{last}."))
    missing = [name for name in loaded.missing_keys if name in order and order.index(name) <= up_to]
    if missing:
        raise ModelError(
            f"The checkpoint of {loaded.info.id} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ", which would be filled at random.",
            "Get a complete checkpoint, or load it under the architecture that it was saved from.",
        )


def conventions(reached: Sequence[Reached], read: Sequence[weights.Factors], unknown_share: float) -> Conventions:
    """What a reader must know about the model's attention to understand the numbers."""
    rotary = any(factors.rotation is not None for factors in read)
    added = any(found.call.query_key(found.site).bias is not None for found in reached)
    biased = any(bool(factors.maps.query_bias.any() or factors.maps.key_bias.any()) for factors in read)
    causal = any(found.site.part == "decoder" for found in reached)
    return Conventions(
        position="rotary" if rotary else "bias" if added else "absolute",
        qk_norm=any(factors.qk_norm for factors in read),
        bias="excluded" if biased else "none",
        notes=[SIGN_NOTE]
        + [CAUSAL_NOTE] * causal
        + [UNKNOWN_NOTE.format(unknown_share)] * (unknown_share > MANY_UNKNOWN),
    )
