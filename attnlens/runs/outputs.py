"""Run forward passes and compute paired losses per sequence and token."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from attnlens.errors import ModelError, is_memory
from attnlens.maths.statistics import Design, paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import NOTHING, Fed, last_states, logits_of, of_text
from attnlens.records import BeyondWindow, Change, PositionChange, Task
from attnlens.runs.provenance import peak_memory
from attnlens.wording import format_count

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


Variant = Callable[[], AbstractContextManager[object]]  # function that returns a context in which the model is changed
CLEAR = Path("/proc/self/clear_refs")  # Linux: writing 5 resets this process's peak memory


def speed(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """Compute the median over passes of tokens per second; of several passes, omit the first (warm-up)."""
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    return statistics.median(rates[1:] or rates)


def measure_peak(model: PreTrainedModel, work: Callable[[], object]) -> int | None:
    """Run `work` and return the peak memory during it in bytes (GPU: allocated, CPU: resident); None if unknown."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        work()
        return int(torch.cuda.max_memory_allocated(model.device))
    try:
        CLEAR.write_text("5")
    except OSError:
        work()
        return None
    work()
    return peak_memory()


@contextmanager
def enough_memory(inputs: Mapping[str, Tensor], purpose: str = "for") -> Iterator[None]:
    """Context manager: raise ModelError (`Not enough memory PURPOSE N sequences at once.`) if memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory(error):
            raise
        size = next(iter(inputs.values())).shape[0]
        remedy = "Use a smaller --batch-size." if size > 1 else "Use a smaller --length."
        raise ModelError(f"Not enough memory {purpose} {format_count(size, 'sequence')} at once.", remedy) from None


@dataclass(frozen=True)
class PassOutputs:
    """Outputs of one forward pass."""

    logits: Float[Tensor, "predicted classes"] | None  # at the predicted positions; None for the task `hidden`
    hidden: Float[Tensor, "tokens d_model"] | None  # last hidden states of real tokens; None if unknown
    owners: Int[Tensor, " tokens"] | None  # index of each token's sequence in the batch; None if `hidden` is None
    seconds: float  # duration of the pass


def token_losses(logits: Tensor, targets: Tensor) -> Float[Tensor, " predicted"]:
    """Compute the loss of each predicted token, in nats."""
    return torch.nn.functional.cross_entropy(logits, targets[targets != NOTHING], reduction="none")


def sequence_losses(logits: Tensor, targets: Tensor) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
    """Return the mean loss in nats and the number of predicted tokens, for each sequence that has any."""
    return sequence_means(token_losses(logits, targets), targets != NOTHING)


def sequence_means(
    values: Float[Tensor, " predicted"], predicted: Bool[Tensor, "batch positions"]
) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
    """Return the mean and number of the predicted tokens' values, for each sequence that has any."""
    return average_by_sequence(values, predicted.nonzero()[:, 0], len(predicted))


def average_by_sequence(
    values: Float[Tensor, " tokens"], owners: Int[Tensor, " tokens"], count: int
) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
    """Return the mean and number of values, for each sequence that has any; `owners` are the values' sequences."""
    owners, values = owners.cpu(), values.double().cpu()
    counts = torch.bincount(owners, minlength=count).double()
    sums = torch.zeros_like(counts).index_add(0, owners, values)
    return (sums / counts.clamp(min=1))[counts > 0], counts[counts > 0]


def run(model: PreTrainedModel, fed: Fed, task: Task) -> PassOutputs:
    """Run one forward pass; return its outputs and duration."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(model.device)
    start = time.perf_counter()
    with torch.no_grad():
        result = hooks.forward(model, fed.inputs, output_hidden_states=True)
    if on_gpu:
        torch.cuda.synchronize(model.device)
    seconds = time.perf_counter() - start
    states = last_states(result)
    owners = None if states is None else sequence_index(states, fed.inputs)
    hidden = None if states is None or owners is None else hooks.at_real_tokens(states, fed.inputs).flatten(0, -2)
    return PassOutputs(predictions(result, fed, task), hidden, owners, seconds)


def predictions(result: object, fed: Fed, task: Task) -> Float[Tensor, "predicted classes"] | None:
    """Return the logits at predicted positions (in classifiers, one row per sequence); None for the task `hidden`."""
    if task == "hidden":
        return None
    logits = logits_of(result)
    if fed.targets is not None:
        logits = of_text(logits, fed.targets, sees="pixel_values" in fed.inputs)[fed.targets != NOTHING]
    return logits if logits.dtype == torch.float64 else logits.float()


def sequence_index(states: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the batch index of each real token's sequence; None if sequences have unequal numbers of rows."""
    sequences = texts.sequences_in(inputs)  # a model that cuts images into windows returns several rows per image
    if len(states) % sequences:
        return None
    rows = torch.arange(len(states), device=states.device) // (len(states) // sequences)
    rows = rows.view(-1, *[1] * (states.dim() - 2)).expand(states.shape[:-1])
    return hooks.at_real_tokens(rows, inputs).flatten()


def tokens_in(fed: Fed) -> int:
    """Count a pass's tokens except padding (encoder–decoders: decoder tokens); without a mask, count sequences."""
    masks = [fed.inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in fed.inputs]
    return int(masks[0].sum()) if masks else texts.sequences_in(fed.inputs)


def divergence(original: Tensor, new: Tensor) -> Float[Tensor, " predicted"]:
    """Compute KL(p ‖ q) = Σ (q − p − p log(q/p)) of each prediction in nats; p is the original distribution, q the new.

    Σ (q − p) is 0 except for the rounding error of the normalisations, which cancels that of Σ p log(q/p).
    """
    original, new = original.log_softmax(-1), new.log_softmax(-1)
    p = original.exp()
    return (new.exp() - p - p * (new - original)).sum(-1)


LARGEST_LOSS = 700.0  # largest loss in nats with a perplexity: exp(x) overflows above 709.8


def paired_change(
    before: Float[Tensor, " sequences"],
    after: Float[Tensor, " sequences"],
    counts: Float[Tensor, " sequences"],
    design: Design,
    seed: int,
    of: Callable[[Tensor], Tensor] = lambda mean: mean,
) -> Change:
    """Return `of`(mean loss) before and after, and the difference with its 95 % interval.

    Means are weighted by `counts`. Sequences are paired; pairs with NaN are omitted. The interval is None if it can't
    be estimated.
    """
    delta, low, high = paired_difference(before, after, design, weights=counts, of=of, seed=seed)
    valid = ~(after - before).isnan()
    weights = counts[valid]
    first, second = (float(of((part[valid] * weights).sum() / weights.sum())) for part in (before, after))
    return Change(before=first, after=second, delta=delta, ci95=None if math.isnan(low) else (low, high))


BINS = 8  # parts of a sequence with separate losses: enough to show where a window ends
FEWEST = 8  # minimum number of tokens for a mean, because the losses of single tokens vary by several nats


@dataclass
class TokenLosses:
    """Loss of each predicted token under the original and a changed model, by sequence."""

    before: list[Float[Tensor, " predicted"]] = field(default_factory=list)  # one tensor per sequence; can end in NaN
    after: list[Float[Tensor, " predicted"]] = field(default_factory=list)  # losses of the changed model
    back: list[Int[Tensor, " predicted"]] = field(default_factory=list)  # see `repetition_distances`

    def add(
        self,
        losses: Sequence[Float[Tensor, " predicted"]],
        targets: Int[Tensor, "batch positions"],
        ids: Int[Tensor, "batch positions"],
    ) -> None:
        """Add a batch; `losses` are the losses of the predicted tokens in the original and in the changed model."""
        predicted = (targets != NOTHING).cpu()
        before, after = (loss.double().cpu() for loss in losses)
        distances = repetition_distances(ids, targets)[predicted]
        for rows, part in ((self.before, before), (self.after, after), (self.back, distances)):
            rows += torch.split(part, predicted.sum(1).tolist())

    def join(self) -> list[Tensor]:
        """Return `before`, `after` (padded with NaN) and `back` (padded with 0) as tensors with a row per sequence."""
        fields = (self.before, torch.nan), (self.after, torch.nan), (self.back, 0)
        return [pad_sequence(rows, batch_first=True, padding_value=filler) for rows, filler in fields]

    def by_position(self, design: Design, seed: int) -> list[PositionChange]:
        """Return the change in mean loss in each of up to BINS ranges of positions of nearly equal length."""
        before, after, _ = self.join()
        length, changes = before.shape[1], []
        bins = min(BINS, length)
        for start, end in pairwise(length * part // bins for part in range(bins + 1)):
            chosen = torch.zeros_like(before, dtype=torch.bool)
            chosen[:, start:end] = True
            change, tokens = _change(before, after, chosen, design, seed)
            changes.append(PositionChange(first=start + 1, last=end, tokens=tokens, change=change))
        return changes

    def count(self, window: int) -> int:
        """Count predicted tokens that, with the token before, repeat a pair last seen over `window` tokens earlier."""
        return sum(int((part > window).sum()) for part in self.back)

    def beyond(self, window: int, design: Design, seed: int) -> BeyondWindow | str:
        """Return the change in mean loss on the tokens that `count` counts, or a reason if these are too few."""
        if (count := self.count(window)) < FEWEST:
            distance = format_count(window, "token")
            repeat = "repeats" if count == 1 else "repeat"
            few = f"only {format_count(count, 'token')} (fewer than {FEWEST})"
            return f"{few} {repeat} a pair of tokens last seen more than {distance} earlier"
        before, after, back = self.join()
        change, tokens = _change(before, after, back > window, design, seed)
        return BeyondWindow(window=window, tokens=tokens, change=change)


def repetition_distances(
    ids: Int[Tensor, "batch positions"], targets: Int[Tensor, "batch positions"]
) -> Int[Tensor, "batch positions"]:
    """Return how many positions earlier each pair (id, target) last occurred in its sequence; 0 for new pairs.

    If the distance is at most w, a window of w keys (including the query's own) contains the earlier target, which an
    induction head can copy.
    """
    distances = torch.zeros(targets.shape, dtype=torch.long)
    for row, (row_ids, following) in enumerate(zip(ids.tolist(), targets.tolist(), strict=True)):
        last: dict[tuple[int, int], int] = {}
        for place, pair in enumerate(zip(row_ids, following, strict=True)):
            if pair[1] != NOTHING:
                distances[row, place] = place - last.get(pair, place)
                last[pair] = place
    return distances


def _change(before: Tensor, after: Tensor, chosen: Tensor, design: Design, seed: int) -> tuple[Change, int]:
    """Return the change in mean loss over the chosen tokens, and the number of these tokens."""
    chosen = chosen & ~before.isnan()
    counts = chosen.sum(1).double()
    first, second = (torch.where(chosen, part, 0.0).sum(1) / counts for part in (before, after))
    return paired_change(first, second, counts, design, seed), int(counts.sum())
