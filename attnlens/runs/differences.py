"""Compare a changed model with the original on the same batches, with paired differences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlens.errors import FAILURES, ModelError, TextError, UsageError, is_memory
from attnlens.maths.statistics import Design, paired_difference, standard_error
from attnlens.maths.statistics.design import LinearCKA
from attnlens.models import texts
from attnlens.models.loading import Loaded, first_line
from attnlens.models.texts.sequences import position_limit
from attnlens.models.texts.targets import HEADLESS, NO_LOSS, NOTHING, Fed
from attnlens.records import Agreement, Change, Outcome, PredictionChange, Task, TextChange, TextCosine
from attnlens.runs import outputs
from attnlens.runs.outputs import PassOutputs, TokenLosses, Variant, run, tokens_in
from attnlens.runs.progress import AddSteps

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import Cache, PreTrainedModel

MOST = 16  # maximum number of evaluated windows whose beginnings are continued, and of prompts per batch
TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}  # inputs of a model that reads only text
FAILED = (*FAILURES, ModelError, UsageError)  # raised by models and kernels that do not support a cache


@dataclass(frozen=True)
class Prompts:
    """Prompts to continue, as one batch."""

    ids: Int[Tensor, "prompts tokens"]
    mask: Int[Tensor, "prompts tokens"]  # 0 at padding, which is on the left
    source: str  # `windows`, or the name of a file

    def parts(self) -> Iterator[Prompts]:
        """Yield the prompts in batches of at most MOST."""
        for ids, mask in zip(torch.split(self.ids, MOST), torch.split(self.mask, MOST), strict=True):
            yield Prompts(ids, mask, self.source)


@dataclass(frozen=True)
class Continuations:
    """Prompts with the original model's continuations."""

    prompts: Prompts
    tokens: Int[Tensor, "steps prompts"]  # generated tokens
    ends: Int[Tensor, " ids"]  # ids of the tokens that end a text


def choose_prompts(model: PreTrainedModel, fed: Sequence[Fed], task: Task, prompts: Prompts | None) -> Prompts | str:
    """Return `prompts`, by default the beginnings of up to MOST sequences, or why sequences can't be continued.

    Each beginning has half the median length; sequences shorter than the median are left out. Raise UsageError if the
    model can't continue `prompts`.
    """
    reason = ""
    if task != "causal":
        reason = NOT_CAUSAL if prompts is None else "it does not predict the next token"
    elif set(fed[0].inputs) - TEXT:
        reason = "the model has inputs other than text"
    elif "past_key_values" not in inspect.signature(model.forward).parameters:
        reason = "the model has no key-value cache"
    if reason and prompts is not None:
        raise UsageError(f"The model can't continue prompts: {reason}.", "Omit prompts.")
    if reason or prompts is not None:
        return prompts or reason
    rows: list[Tensor] = []
    for batch in fed:
        ids, mask = batch.inputs["input_ids"], batch.inputs.get("attention_mask")
        rows += list(ids) if mask is None else [row[real.bool()] for row, real in zip(ids, mask, strict=True)]
    middle = sorted(map(len, rows))[len(rows) // 2]
    halves = [row[: max(1, middle // 2)] for row in rows if len(row) >= middle]
    count = min(MOST, len(halves))
    ids = torch.stack([halves[number * len(halves) // count] for number in range(count)])
    return Prompts(ids, torch.ones_like(ids), "windows")


def tokenize_prompts(loaded: Loaded, content: texts.Content) -> Prompts:
    """Tokenize a file's prompts, one per nonblank line.

    Raise TextError if there are no prompts or a prompt is too long, and UsageError if the model has no tokenizer.
    """
    lines = [line for line in content.text.splitlines() if line.strip()]
    if not lines:
        raise TextError(f"{content.name} contains no prompts.", "Give a file with one prompt per line.")
    if loaded.tokenizer is None:
        raise UsageError("The model can't continue prompts: it has no tokenizer.", "Omit prompts.")
    rows = [torch.tensor(loaded.tokenizer(line, verbose=False)["input_ids"]) for line in lines]
    longest, limit = max(map(len, rows)), position_limit(loaded.model)
    if limit is not None and longest >= limit:
        problem = f"{content.name} contains a prompt of {longest} tokens, but the model's context has only {limit}."
        raise TextError(problem, f"Shorten the prompts to at most {limit - 1} tokens.")
    # the mask hides padding, so any id can be the padding
    ids, mask = (
        pad_sequence(part, batch_first=True, padding_side="left").to(loaded.model.device)
        for part in (rows, list(map(torch.ones_like, rows)))
    )
    return Prompts(ids, mask, content.name)


def continue_prompts(model: PreTrainedModel, prompts: Prompts, tokens: int) -> Continuations | str:
    """Continue the prompts greedily with the original model; return the continuations, or why this is impossible."""
    if tokens < 1:
        return "the prompts fill the model's context"
    try:
        with torch.no_grad():
            parts = [torch.stack(list(_greedy(model, part, tokens))) for part in prompts.parts()]
    except FAILED as error:
        if is_memory(error):
            raise
        return f"the model can't continue a text with a key-value cache ({first_line(error).rstrip('.')})"
    chosen = torch.cat(parts, 1)
    # the ids that end a text are in the generation settings or, without them, in the config
    ends = [getattr(each, "eos_token_id", None) for each in (getattr(model, "generation_config", None), model.config)]
    end: int | list[int] = next((each for each in ends if each is not None), [])
    return Continuations(prompts, chosen, chosen.new_tensor([end] if isinstance(end, int) else end))


def measure_agreement(model: PreTrainedModel, original: Continuations | str, variant: Variant) -> Agreement | str:
    """Count the tokens generated after each prompt before the models differ; return the reason if the variant fails."""
    if isinstance(original, str):
        return original
    try:
        with torch.no_grad(), variant():
            pairs = zip(original.prompts.parts(), torch.split(original.tokens, MOST, 1), strict=True)
            counts = [_count_common(first, original.ends, _greedy(model, part, len(first))) for part, first in pairs]
            until = torch.cat(counts).tolist()
    except FAILED as error:
        if is_memory(error):
            raise
        problem = error.problem if isinstance(error, ModelError | UsageError) else first_line(error)
        return f"the kernel does not run with a key-value cache ({problem.rstrip('.')})"
    total, ordered = len(original.tokens), sorted(until)
    # quartiles are counts that occur, without interpolation
    low, middle, high = (ordered[(len(ordered) - 1) * part // 4] for part in (1, 2, 3))
    return Agreement(
        prompts=len(until),
        source=original.prompts.source,
        prompt_tokens=original.prompts.ids.shape[1],
        tokens=total,
        until=until,
        median=middle,
        quartiles=(low, high),
        never=sum(count == total for count in until),
    )


def _count_common(
    expected: Int[Tensor, "steps prompts"], ends: Int[Tensor, " ids"], chosen: Iterator[Int[Tensor, " prompts"]]
) -> Int[Tensor, " prompts"]:
    """Count, for each prompt, the tokens before `chosen` differs from `expected`; all if both end the text equally."""
    equal = torch.ones_like(expected[0], dtype=torch.bool)
    counts = torch.zeros_like(expected[0])
    for tokens, new in zip(expected, chosen, strict=False):
        equal &= tokens == new
        counts += equal
        ended = equal & torch.isin(new, ends)
        counts[ended], equal = len(expected), equal & ~ended
        if not bool(equal.any()):
            break
    return counts


def _greedy(model: PreTrainedModel, prompts: Prompts, tokens: int) -> Iterator[Int[Tensor, " prompts"]]:
    """At each step, yield the likeliest next token of each prompt and append it to the input."""
    ids, mask = prompts.ids, prompts.mask
    padded = not bool(mask.all())
    positioned = padded and "position_ids" in inspect.signature(model.forward).parameters
    cache: Cache | None = None
    for _ in range(tokens):
        # positions do not count padding
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]} if positioned else {}
        result = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **positions)
        cache, chosen = result.past_key_values, result.logits[:, -1].argmax(-1)
        if cache is None:
            raise ModelError("the model returns no key-value cache", "Set --generate 0.")
        yield chosen
        ids, mask = chosen[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


Name = TypeVar("Name")
Fields = tuple[dict[str, object], dict[str, str]]  # fields of an Outcome, and reasons for missing fields
NOT_CAUSAL = "only defined for models that predict the next token"
DIVERGED = "the changed model diverged: its predictions are not finite"


@dataclass
class Differences:
    """Differences between one variant of a model and the original, collected batch by batch."""

    task: Task  # prediction task
    noise: bool  # True if the input is noise: predictions are then compared without a loss
    design: Design  # how the sequences were sampled
    before: list[Tensor] = field(default_factory=list)  # mean loss per sequence with predictions under the original
    after: list[Tensor] = field(default_factory=list)  # mean loss per sequence with predictions under the variant
    counts: list[Tensor] = field(default_factory=list)  # number of predicted tokens per sequence with predictions
    predicting: list[Tensor] = field(default_factory=list)  # False for sequences without predictions
    divergences: list[Tensor] = field(default_factory=list)  # mean KL(original ‖ variant) per sequence with predictions
    token_divergences: list[Tensor] = field(default_factory=list)  # KL of each prediction
    agreeing: list[Tensor] = field(default_factory=list)  # share of equal top predictions per sequence with predictions
    classes: int = 1  # number of tokens or classes that a prediction chooses from
    cosines: list[Tensor] = field(default_factory=list)  # mean cosine of original and new hidden states per sequence
    real: list[Tensor] = field(default_factory=list)  # number of real tokens per sequence with hidden states
    by_token: TokenLosses = field(default_factory=TokenLosses)  # loss of each predicted token, for causal models
    directionless: bool = False  # True if a hidden state is zero, so that its angle is undefined
    cka: LinearCKA | None = None  # linear CKA of original and new hidden states; None without states
    seconds: list[float] = field(default_factory=list)  # duration of each forward pass of the variant
    original_seconds: list[float] = field(default_factory=list)  # duration of each forward pass of the original
    sizes: list[int] = field(default_factory=list)  # number of tokens in each pass

    def add(
        self, original: PassOutputs, new: PassOutputs, targets: Tensor | None, sizes: int, ids: Tensor | None = None
    ) -> None:
        """Add both models' outputs on a batch of `sizes` tokens; `ids` are its tokens, needed for causal models."""
        self.seconds.append(new.seconds)
        self.original_seconds.append(original.seconds)
        self.sizes.append(sizes)
        if original.logits is not None and new.logits is not None:
            self._add_predictions(original.logits, new.logits, targets, ids)
        if original.hidden is not None and original.owners is not None and new.hidden is not None:
            self._add_hidden(original.hidden, new.hidden, original.owners)

    def _add_predictions(self, original: Tensor, new: Tensor, targets: Tensor | None, ids: Tensor | None) -> None:
        if targets is None:
            targets = original.argmax(-1, keepdim=True)
        predicted, self.classes = targets != NOTHING, new.shape[-1]
        self.predicting.append(predicted.any(1).cpu())
        losses = [outputs.token_losses(logits, targets) for logits in (original, new)]
        (before, counts), (after, _) = (outputs.sequence_means(each, predicted) for each in losses)
        self.before.append(before)
        self.after.append(after)
        self.counts.append(counts)
        if ids is not None and self.task == "causal":
            self.by_token.add(losses, targets, ids)
        divergences, equal = outputs.divergence(original, new), original.argmax(-1) == new.argmax(-1)
        self.token_divergences.append(divergences.float().cpu())
        self.divergences.append(outputs.sequence_means(divergences, predicted)[0])
        self.agreeing.append(outputs.sequence_means(equal, predicted)[0])

    def _add_hidden(self, original: Tensor, new: Tensor, owners: Tensor) -> None:
        if original.shape != new.shape:  # a model that predicts the length of its output (FastSpeech)
            problem = f"The changed model returns {len(new)} hidden states instead of {len(original)}."
            raise ModelError(problem, "Use `attnlens inspect`: the outputs can't be compared token by token.")
        original, new = original.double(), new.double()
        self.directionless |= not bool((original.any(-1) & new.any(-1)).all())
        cosines = torch.cosine_similarity(original, new, dim=-1)
        means, counts = outputs.average_by_sequence(cosines, owners, int(owners.max()) + 1)
        self.cosines.append(means)
        self.real.append(counts)
        self.cka = self.cka or LinearCKA(original.shape[-1], original.device)
        self.cka.add(original, new)

    def outcome(self, seed: int, texts: Sequence[str], window: int | str | None = None) -> Outcome:
        """Build the record of the collected differences; `texts` are the names of the texts in the design.

        `window` is the number of tokens beyond which the loss is reported separately, or the reason if there is none.
        If `window` is None, losses by position and beyond a window are omitted.
        """
        fields, reasons = self._prediction_fields(seed, texts)
        state_fields, state_reasons = self._state_fields(seed, texts)
        fields |= state_fields
        if window is not None:
            problem = reasons.get("loss")
            if self.task != "causal" or not (problem or self.by_token.before):
                problem = NOT_CAUSAL
            if problem is None:
                fields["loss_by_position"] = self.by_token.by_position(self.design, seed)
            width = problem or window
            beyond = width if isinstance(width, str) else self.by_token.beyond(width, self.design, seed)
            if isinstance(beyond, str):
                state_reasons["beyond_window"] = beyond
            else:
                fields["beyond_window"] = beyond
        return Outcome.model_validate(fields | {"reasons": reasons | state_reasons})

    def _prediction_fields(self, seed: int, texts: Sequence[str]) -> Fields:
        names = ("loss", "perplexity", "kl", "kl_ci95", "top1_agreement")
        if not self.before:
            return {}, dict.fromkeys(names, f"the model has {HEADLESS}")
        if not torch.cat((*self.divergences, *self.after)).isfinite().all():
            return {"diverged": True}, dict.fromkeys(names, DIVERGED)
        counts = torch.cat(self.counts)
        _, interval = _mean(torch.cat(self.divergences), counts, self.sampled, (0.0, math.inf), seed)
        predictions = self._prediction_change()
        fields: dict[str, object] = {
            "kl": predictions.mean,
            "kl_ci95": interval,
            "predictions": predictions,
            "top1_agreement": predictions.same_top,
        }
        reasons = dict.fromkeys(("loss", "perplexity"), NO_LOSS) if self.noise else {}
        if not self.noise:
            loss, perplexity = self._changes(seed)
            by_text = []
            for name, rows in _by_text(self.sampled, texts):
                change, other = self._changes(seed, rows)
                by_text.append(TextChange(name=name, sequences=len(rows), change=change, perplexity=other))
            fields |= {"loss": loss, "loss_by_text": by_text, "perplexity": perplexity}
            fields["destroyed"] = loss.before <= math.log(self.classes) < loss.after
            if perplexity is None:
                reasons["perplexity"] = "exp(loss) overflows"
            if loss.ci95 is None:
                reasons |= dict.fromkeys(("loss.ci95", "perplexity.ci95"), self._no_interval)
        if interval is None:
            reasons["kl_ci95"] = self._no_interval
        return fields, reasons

    def _prediction_change(self) -> PredictionChange:
        """Summarise KL, top-1 agreement and the change in perplexity, with standard errors over windows or texts."""
        counts = torch.cat(self.counts)

        def mean_with_error(parts: list[Tensor]) -> tuple[float, float | None]:
            """Return the mean over tokens and its standard error (linearised ratio of sums; None if unknown)."""
            means = torch.cat(parts)  # of each sequence
            mean = (means * counts).sum() / counts.sum()
            se = float(standard_error((means - mean) * counts / counts.mean(), self.sampled))
            return float(mean), se if math.isfinite(se) else None

        # rounding errors have either sign if both models are equal
        tokens = torch.cat(self.token_divergences).clamp(min=0).numpy()
        median, q95, q99, q999 = np.quantile(tokens, (0.5, 0.95, 0.99, 0.999)).tolist()
        (mean, mean_se), (same, same_se) = map(mean_with_error, (self.divergences, self.agreeing))
        changes = [after - before for before, after in zip(self.before, self.after, strict=True)]
        change, change_se = mean_with_error(changes)
        ratio = None if self.noise or change > outputs.LARGEST_LOSS else math.exp(change)
        return PredictionChange(
            tokens=len(tokens),
            mean=max(mean, 0.0),  # rounding errors can make the mean negative
            mean_se=mean_se,
            largest=float(tokens.max()),
            q999=q999,
            q99=q99,
            q95=q95,
            median=median,
            same_top=same,
            same_top_se=same_se,
            perplexity_ratio=ratio,
            perplexity_ratio_se=None if ratio is None or change_se is None else ratio * change_se,
        )

    def _state_fields(self, seed: int, texts: Sequence[str]) -> Fields:
        names = ("hidden_cosine", "hidden_cosine_ci95", "hidden_cka")
        if self.cka is None:
            return {}, dict.fromkeys(names, "the model returns no hidden states")
        cosines, real = torch.cat(self.cosines), torch.cat(self.real)
        if not cosines.isfinite().all():
            return {"diverged": True}, dict.fromkeys(names, DIVERGED)
        if self.directionless:
            return {}, dict.fromkeys(names, "a hidden state is zero and has no direction")
        cosine, interval = _mean(cosines, real, self.design, (-1.0, 1.0), seed)
        by_text = []
        for name, rows in _by_text(self.design, texts):
            mean, ci95 = _mean(cosines[rows], real[rows], Design.plain(len(rows)), (-1.0, 1.0), seed)
            by_text.append(TextCosine(name=name, sequences=len(rows), cosine=mean, ci95=ci95))
        cka = self.cka.value
        reasons = {} if cka is not None else {"hidden_cka": "one model's hidden states are the same at all tokens"}
        if interval is None:
            reasons["hidden_cosine_ci95"] = self._no_interval
        fields: dict[str, object] = {"hidden_cosine": cosine, "hidden_cosine_ci95": interval, "hidden_cka": cka}
        return fields | {"hidden_cosine_by_text": by_text}, reasons

    def compare_loss(self, other: Differences, seed: int) -> Change | None:
        """Return the change in loss from `other` to this variant.

        Return None if the input is noise, there are no predictions, or a loss is not finite.
        """
        if self.noise or not self.before or not torch.cat((*other.after, *self.after)).isfinite().all():
            return None
        before, after, counts = (torch.cat(part) for part in (other.after, self.after, self.counts))
        return outputs.paired_change(before, after, counts, self.sampled, seed)

    @property
    def sampled(self) -> Design:
        """Sampling design of the sequences with at least one prediction."""
        return self.design.select(torch.cat(self.predicting).nonzero()[:, 0].tolist())

    @property
    def _no_interval(self) -> str:
        return "a single text has no spread" if self.design.clustered else "one window has no spread"

    def _changes(self, seed: int, rows: Tensor | None = None) -> tuple[Change, Change | None]:
        """Return the changes in loss and in perplexity (None if it overflows) over all sequences or those in `rows`."""
        parts = [torch.cat(part) for part in (self.before, self.after, self.counts)]
        before, after, counts = parts if rows is None else [part[rows] for part in parts]
        design = self.sampled if rows is None else Design.plain(len(rows))
        loss = outputs.paired_change(before, after, counts, design, seed)
        overflows = loss.after >= outputs.LARGEST_LOSS
        return loss, None if overflows else outputs.paired_change(before, after, counts, design, seed, torch.exp)


def _mean(
    means: Tensor, counts: Tensor, design: Design, bounds: tuple[float, float], seed: int
) -> tuple[float, tuple[float, float] | None]:
    """Return the mean weighted by `counts`, and its 95 % interval clipped to `bounds` (None for one sampling unit)."""
    value, low, high = paired_difference(torch.zeros_like(means), means, design, weights=counts, seed=seed)
    return value, (max(low, bounds[0]), min(high, bounds[1])) if low == low else None


def _by_text(design: Design, texts: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return (name, indices of sequences) for each text with sequences; [] if there is only one such text."""
    numbers = torch.tensor(design.texts)
    pairs = [(name, (numbers == number).nonzero()[:, 0]) for number, name in enumerate(texts)]
    nonempty = [pair for pair in pairs if len(pair[1])]
    return nonempty if len(nonempty) > 1 else []


def compare(
    model: PreTrainedModel,
    batches: Sequence[Fed],
    variants: Mapping[Name, Variant],
    task: Task,
    progress: AddSteps,
    design: Design,
) -> dict[Name, Differences]:
    """Compare each variant with the original model on the same batches; return the differences keyed by variant."""
    differences = {name: Differences(task, batches[0].noise, design) for name in variants}
    for fed in batches:
        original = run(model, fed, task)
        for name, variant in variants.items():
            with variant():
                new = run(model, fed, task)
            differences[name].add(original, new, fed.targets, tokens_in(fed), fed.inputs.get("input_ids"))
            progress(tokens_in(fed))
    return differences


def mean_loss(model: PreTrainedModel, batches: Sequence[Fed], task: Task) -> float | None:
    """Return the loss in nats per predicted token; None without targets, for noise input, or if it is not finite."""
    total, count = 0.0, 0.0
    for fed in batches:
        logits = run(model, fed, task).logits
        if logits is None or fed.targets is None or fed.noise:
            return None
        means, counts = outputs.sequence_losses(logits, fed.targets)
        total, count = total + float((means * counts).sum()), count + float(counts.sum())
    return total / count if count and math.isfinite(total) else None


COLUMNS = {  # Name of each value per window, in the order of output, and the field of Differences that contains it
    **{"loss.before": "before", "loss.after": "after", "kl": "divergences", "tokens": "counts"},
    **{"hidden_cosine": "cosines", "hidden_tokens": "real"},
}


def tabulate_windows(differences: Sequence[Differences]) -> dict[str, Tensor]:
    """Return a table (windows, differences) for each name in COLUMNS for which all `differences` have values."""

    def column(each: Differences, name: str) -> Tensor:
        values = torch.cat(getattr(each, COLUMNS[name])).double()
        if name.startswith("hidden"):
            return values
        predicts = torch.cat(each.predicting)
        empty = torch.full(predicts.shape, torch.nan, dtype=torch.float64)  # NaN for windows without predictions
        empty[predicts] = values
        return empty

    present = [name for name, parts in COLUMNS.items() if all(getattr(each, parts) for each in differences)]
    return {name: torch.stack([column(each, name) for each in differences], 1) for name in present}
