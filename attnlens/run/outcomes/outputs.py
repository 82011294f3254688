"""One forward pass: its logits at predicted positions, last hidden states, and what each sequence makes of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlens import hooks, texts
from attnlens.records import Task
from attnlens.texts.targets import NOTHING, Fed, last_states, logits_of, of_text

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PassOutputs:
    """What one forward pass gives."""

    logits: Float[Tensor, "predicted classes"] | None
    """At the predicted positions only."""
    hidden: Float[Tensor, "tokens d_model"] | None
    """Last hidden states of real tokens."""
    owners: Int[Tensor, " tokens"] | None
    """The sequence of the batch that each of these tokens is of."""
    seconds: float
    """How long it took."""


def token_losses(logits: Tensor, targets: Tensor) -> Float[Tensor, " predicted"]:
    """The loss of each predicted token, in nats."""
    return torch.nn.functional.cross_entropy(logits, targets[targets != NOTHING], reduction="none")


def sequence_losses(logits: Tensor, targets: Tensor) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
    """The mean loss of each sequence that has targets, in nats per predicted token, and how many tokens those are."""
    return sequence_means(token_losses(logits, targets), targets != NOTHING)


def sequence_means(
    each: Float[Tensor, " predicted"], there: Bool[Tensor, "batch positions"]
) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
    """The mean over each sequence that predicts something, `each` standing for the positions `there`, and how many."""
    return owned_means(each, there.nonzero()[:, 0], len(there))


def owned_means(
    each: Float[Tensor, " tokens"], owners: Int[Tensor, " tokens"], count: int
) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
    """The mean of each of `count` sequences that owns any of these values, and how many it owns."""
    owners, each = owners.cpu(), each.double().cpu()
    counts = torch.bincount(owners, minlength=count).double()
    sums = torch.zeros_like(counts).index_add(0, owners, each)
    return (sums / counts.clamp(min=1))[counts > 0], counts[counts > 0]


def run(model: PreTrainedModel, fed: Fed, task: Task) -> PassOutputs:
    """One forward pass, timed."""
    _wait(model)
    start = time.perf_counter()
    with torch.no_grad():
        result = hooks.forward(model, fed.inputs, output_hidden_states=True)
    _wait(model)
    seconds = time.perf_counter() - start
    return PassOutputs(predictions(result, fed, task), *_hidden(result, fed.inputs), seconds)


def predictions(result: Any, fed: Fed, task: Task) -> Float[Tensor, "predicted classes"] | None:
    """The logits at the predicted positions, in float32 or better; of a classifier one row a sequence."""
    if task == "hidden":
        return None
    logits = logits_of(result)
    if fed.targets is not None:
        logits = of_text(logits, fed.targets, sees="pixel_values" in fed.inputs)[fed.targets != NOTHING]
    return logits if logits.dtype == torch.float64 else logits.float()


def _hidden(result: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The last hidden states at real tokens, and the sequence that each of these is of.

    A model that cuts its images into windows gives so many rows an image, those of one image after another.
    """
    found, sequences = last_states(result), texts.sequences_in(inputs)
    if found is None or len(found) % sequences:
        return None, None
    rows = torch.arange(len(found), device=found.device) // (len(found) // sequences)
    rows = rows.view(-1, *[1] * (found.dim() - 2)).expand(found.shape[:-1])
    states, owners = (hooks.at_real_tokens(tensor, inputs) for tensor in (found, rows))
    return states.flatten(0, -2), owners.flatten()


def tokens_in(fed: Fed) -> int:
    """Real tokens (or images) of a pass."""
    masks = [fed.inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in fed.inputs]
    return int(masks[0].sum()) if masks else texts.sequences_in(fed.inputs)


def divergence(own: Tensor, new: Tensor) -> Float[Tensor, " predicted"]:
    """KL(own ‖ new) = Σ (q − p − p log(q/p)) of each prediction, in nats.

    q − p sums up to 0 but for the rounding of both normalisations, which p log(q/p) holds too: here they cancel.
    """
    own, new = own.log_softmax(-1), new.log_softmax(-1)
    p = own.exp()
    return (new.exp() - p - p * (new - own)).sum(-1)


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
