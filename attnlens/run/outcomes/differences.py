"""Compares a changed model with the original: both run on the same batches, and differences are paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attnlens.errors import ModelError
from attnlens.records import Change, Settings, Task, TextChange, TextCosine, Windows
from attnlens.run.outcomes.outputs import (
    LARGEST_LOSS,
    PassOutputs,
    TokenLosses,
    divergence,
    owned_means,
    paired_change,
    run,
    sequence_losses,
    sequence_means,
    token_losses,
    tokens_in,
)
from attnlens.runs.progress import Tell
from attnlens.statistics import Design, paired_difference
from attnlens.statistics.design import Likeness
from attnlens.texts.targets import HEADLESS, NO_LOSS, NOTHING, Fed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Name = TypeVar("Name")
Variant = Callable[[], AbstractContextManager[object]]
"""Makes a changed model of the original one, inside `with`."""
NOT_CAUSAL = "told of models that predict the next token alone"
DIVERGED = "it diverged: the changed model's predictions are not finite"


@dataclass
class Differences:
    """Differences of one variant to the original, gathered batch by batch."""

    task: Task
    """What is predicted."""
    noise: bool
    """Whether the input is noise, so that predictions are compared and have no loss."""
    design: Design
    """How the sequences were sampled."""
    before: list[Tensor] = field(default_factory=list)
    """Mean loss of each sequence under the original, one tensor a batch."""
    after: list[Tensor] = field(default_factory=list)
    """The same under the variant."""
    counts: list[Tensor] = field(default_factory=list)
    """How many tokens of each sequence are predicted."""
    kept: list[Tensor] = field(default_factory=list)
    """Whether each sequence has anything to predict; those that have none are in none of the three above."""
    divergences: list[Tensor] = field(default_factory=list)
    """Mean KL(original ‖ variant) of each of them."""
    agreeing: float = 0.0
    cosines: list[Tensor] = field(default_factory=list)
    """Mean cosine of each sequence's hidden states."""
    real: list[Tensor] = field(default_factory=list)
    """How many real tokens of each sequence were compared by these."""
    by_token: TokenLosses = field(default_factory=TokenLosses)
    """The loss of each predicted token, of causal models."""
    directionless: bool = False
    """Whether a hidden state is zero, so that no angle is formed with it."""
    likeness: Likeness | None = None
    seconds: list[float] = field(default_factory=list)
    """Of each of the variant's forward passes."""
    own_seconds: list[float] = field(default_factory=list)
    """Of each of the original's."""
    sizes: list[int] = field(default_factory=list)
    """Tokens of each pass."""

    def add(
        self, own: PassOutputs, new: PassOutputs, targets: Tensor | None, sizes: int, ids: Tensor | None = None
    ) -> None:
        """Take in one batch; `ids` are the tokens of a causal model."""
        self.seconds.append(new.seconds)
        self.own_seconds.append(own.seconds)
        self.sizes.append(sizes)
        if own.logits is not None and new.logits is not None:
            self._add_predictions(own.logits, new.logits, targets, ids)
        if own.hidden is not None and own.owners is not None and new.hidden is not None:
            self._add_hidden(own.hidden, new.hidden, own.owners)

    def _add_predictions(self, own: Tensor, new: Tensor, targets: Tensor | None, ids: Tensor | None) -> None:
        if targets is None:
            targets = own.argmax(-1, keepdim=True)
        there = targets != NOTHING
        self.kept.append(there.any(1).cpu())
        each = [token_losses(logits, targets) for logits in (own, new)]
        for losses, found in zip(each, (self.before, self.after), strict=True):
            means, counts = sequence_means(losses, there)
            found.append(means)
        self.counts.append(counts)
        if ids is not None and self.task == "causal":
            self.by_token.add(each, targets, ids)
        self.divergences.append(sequence_means(divergence(own, new), there)[0])
        self.agreeing += float((own.argmax(-1) == new.argmax(-1)).sum())

    def _add_hidden(self, own: Tensor, new: Tensor, owners: Tensor) -> None:
        if own.shape != new.shape:  # a model that says itself how long its output is (FastSpeech)
            raise ModelError(
                f"With another kernel the model's output has another length ({len(new)} states instead of {len(own)}).",
                "Its outputs can't be compared token by token; `attnlens inspect` reads its attention.",
            )
        own, new = own.double(), new.double()
        self.directionless |= not bool((own.any(-1) & new.any(-1)).all())
        means, counts = owned_means(
            torch.nn.functional.cosine_similarity(own, new, dim=-1), owners, int(owners.max()) + 1
        )
        self.cosines.append(means)
        self.real.append(counts)
        self.likeness = self.likeness or Likeness(own.shape[-1], own.device)
        self.likeness.add(own, new)

    def outcome(self, seed: int, texts: Sequence[str], window: int | str | None = None) -> dict[str, Any]:
        """The fields of an Outcome; `texts` are the names of the texts that the sequences are of.

        `window`: beyond how many keys some tokens' evidence lies, or why there is no such number; None: not asked.
        """
        predicted, states = self._predicted(seed, texts), self._states(seed, texts)
        placed: dict[str, Any] = {"reasons": {}}
        if window is not None:
            why = predicted["reasons"].get("loss") if self.task == "causal" else NOT_CAUSAL
            placed = self._placed(seed, window) if why is None else {"reasons": {"beyond_window": why}}
        reasons = predicted["reasons"] | states["reasons"] | placed["reasons"]
        return predicted | states | placed | {"reasons": reasons}

    def _placed(self, seed: int, window: int | str) -> dict[str, Any]:
        """The losses by place, and of tokens whose evidence lies beyond a window."""
        if not self.by_token.before:
            return {"reasons": {"beyond_window": NOT_CAUSAL}}
        placed = self.by_token.by_position(self.design, seed)
        beyond = self.by_token.beyond(window, self.design, seed) if isinstance(window, int) else window
        if isinstance(beyond, str):
            return {"loss_by_position": placed, "reasons": {"beyond_window": beyond}}
        return {"loss_by_position": placed, "beyond_window": beyond, "reasons": {}}

    def _predicted(self, seed: int, texts: Sequence[str]) -> dict[str, Any]:
        """Those of the predictions."""
        names = ("loss", "perplexity", "kl", "kl_ci95", "top1_agreement")
        if not self.before:
            return {"reasons": dict.fromkeys(names, f"the model has {HEADLESS}")}
        if not torch.cat((*self.divergences, *self.after)).isfinite().all():
            return {"diverged": True, "reasons": dict.fromkeys(names, DIVERGED)}
        kl, ends = self._mean(self.divergences, self.counts, self.sampled, (0.0, math.inf), seed)
        losses, reasons = self._losses(seed, texts)
        top = self.agreeing / float(torch.cat(self.counts).sum())
        lone = {} if ends else {"kl_ci95": self._lone}
        kl = max(kl, 0.0)  # a mean of rounding errors of either sign, where both are the same
        return losses | {"kl": kl, "kl_ci95": ends, "top1_agreement": top, "reasons": reasons | lone}

    def _states(self, seed: int, texts: Sequence[str]) -> dict[str, Any]:
        """Those of the hidden states."""
        names = ("hidden_cosine", "hidden_cosine_ci95", "hidden_cka")
        if self.likeness is None:
            return {"reasons": dict.fromkeys(names, "the model hands out no hidden states")}
        if not torch.cat(self.cosines).isfinite().all():
            return {"diverged": True, "reasons": dict.fromkeys(names, DIVERGED)}
        if self.directionless:
            return {"reasons": dict.fromkeys(names, "a hidden state is zero and has no direction")}
        cosine, ends = self._mean(self.cosines, self.real, self.design, (-1.0, 1.0), seed)
        by_text = []
        for name, own in _by_text(self.design, texts):
            mean, bounds = self._mean(self.cosines, self.real, Design.plain(len(own)), (-1.0, 1.0), seed, own)
            by_text.append(TextCosine(name=name, sequences=len(own), cosine=mean, ci95=bounds))
        cka = self.likeness.value
        reasons = {} if cka is not None else {"hidden_cka": "one model's hidden states are the same at all tokens"}
        return {
            "hidden_cosine": cosine,
            "hidden_cosine_ci95": ends,
            "hidden_cosine_by_text": by_text,
            "hidden_cka": cka,
            "reasons": reasons if ends else reasons | {"hidden_cosine_ci95": self._lone},
        }

    def _mean(
        self,
        parts: Sequence[Tensor],
        counts: Sequence[Tensor],
        design: Design,
        bounds: tuple[float, float],
        seed: int,
        some: Tensor | slice = slice(None),
    ) -> tuple[float, tuple[float, float] | None]:
        """The mean over the tokens of `some` sequences, and its 95 % interval within what such a number can be."""
        means, weights = torch.cat(list(parts))[some], torch.cat(list(counts))[some]
        value, low, high = paired_difference(torch.zeros_like(means), means, design, weights=weights, seed=seed)
        return value, (max(low, bounds[0]), min(high, bounds[1])) if low == low else None

    def _losses(self, seed: int, texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Loss and perplexity, as far as they mean something, the loss of each text, and why not."""
        if self.noise:
            return {}, dict.fromkeys(("loss", "perplexity"), NO_LOSS)
        found: dict[str, Any] = {"loss": self.loss(seed), "loss_by_text": self.by_text(seed, texts)}
        reasons: dict[str, str] = {}
        if found["loss"].after < LARGEST_LOSS:
            found["perplexity"] = self.perplexity(seed)
        else:
            reasons["perplexity"] = "it is too large for a number"
        if found["loss"].ci95 is None:
            reasons |= dict.fromkeys(("loss.ci95", "perplexity.ci95"), self._lone)
        return found, reasons

    def loss(self, seed: int) -> Change:
        """Mean loss per predicted token of both, and their difference with its interval over sequences."""
        return self._change(seed, lambda mean: mean)

    def perplexity(self, seed: int) -> Change:
        """exp(loss) of both, its interval from the same draws."""
        return self._change(seed, torch.exp)

    def by_text(self, seed: int, texts: Sequence[str]) -> list[TextChange]:
        """Loss and perplexity on each text alone, their intervals over that text's windows, where there are several."""
        changes = []
        for name, own in _by_text(self.sampled, texts):
            design = Design.plain(len(own))
            loss = self._change(seed, lambda mean: mean, own, design)
            powers = None if loss.after >= LARGEST_LOSS else self._change(seed, torch.exp, own, design)
            changes.append(TextChange(name=name, sequences=len(own), change=loss, perplexity=powers))
        return changes

    @property
    def sampled(self) -> Design:
        """How the sequences that have anything to predict were sampled."""
        return self.design.select(torch.cat(self.kept).nonzero()[:, 0].tolist())

    @property
    def _lone(self) -> str:
        """Why there is no interval."""
        return "one text has no spread" if self.design.clustered else "one window has no spread"

    def _change(
        self,
        seed: int,
        of: Callable[[Tensor], Tensor],
        some: Tensor | slice = slice(None),
        design: Design | None = None,
    ) -> Change:
        """A function of the mean loss of `some` sequences: before, after, and its difference with its interval."""
        before, after, counts = (torch.cat(part)[some] for part in (self.before, self.after, self.counts))
        return paired_change(before, after, counts, design or self.sampled, seed, of)


def _by_text(design: Design, texts: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Each text with the numbers of its sequences, where there are several."""
    numbers = torch.tensor(design.texts)
    every = [(name, (numbers == number).nonzero()[:, 0]) for number, name in enumerate(texts)]
    found = [(name, own) for name, own in every if len(own)]
    return found if len(found) > 1 else []


def compare(
    model: PreTrainedModel,
    batches: Sequence[Fed],
    variants: Mapping[Name, Variant],
    task: Task,
    progress: Tell,
    design: Design,
) -> dict[Name, Differences]:
    """Every variant against the original on the same batches; the original runs once a batch, by its own means."""
    found = {name: Differences(task, batches[0].noise, design) for name in variants}
    for fed in batches:
        own = run(model, fed, task)
        for name, variant in variants.items():
            with variant():
                new = run(model, fed, task)
            found[name].add(own, new, fed.targets, tokens_in(fed), fed.inputs.get("input_ids"))
            progress(tokens_in(fed))
    return found


def mean_loss(model: PreTrainedModel, batches: Sequence[Fed], task: Task) -> float | None:
    """Nats per predicted token of the model as it is; None where the input gives no targets, or it diverges."""
    total, count = 0.0, 0.0
    for fed in batches:
        logits = run(model, fed, task).logits
        if logits is None or fed.targets is None or fed.noise:
            return None
        means, counts = sequence_losses(logits, fed.targets)
        total, count = total + float((means * counts).sum()), count + float(counts.sum())
    return total / count if math.isfinite(total) else None


PREDICTED = ("loss.before", "loss.after", "kl", "tokens")
STATES = ("hidden_cosine", "hidden_tokens")
"""What is told of each window, in this order: of its predictions, and of its hidden states."""


def windows_of(found: Mapping[tuple[str, str], Differences], settings: Settings) -> Windows:
    """The paired losses, KL and hidden cosines by (kernel, stage), and over how many tokens of a window each is."""
    units = [{"kernel": kernel, "stage": stage} for kernel, stage in found]
    every = list(found.values())
    columns: dict[str, list[Tensor]] = {}
    if all(one.before for one in every):
        columns = {
            "loss.before": [_whole(one, one.before) for one in every],
            "loss.after": [_whole(one, one.after) for one in every],
            "kl": [_whole(one, one.divergences) for one in every],
            "tokens": [_whole(one, one.counts) for one in every],
        }
    if all(one.cosines for one in every):
        columns["hidden_cosine"] = [torch.cat(one.cosines) for one in every]
        columns["hidden_tokens"] = [torch.cat(one.real) for one in every]
    return placed_windows({name: torch.stack(parts, 1) for name, parts in columns.items()}, units, settings)


def placed_windows(
    columns: Mapping[str, Tensor], units: Sequence[Mapping[str, str | int]], settings: Settings
) -> Windows:
    """These columns with the text and number of each window; none where no window has a number."""
    placed = [(text.name, number) for text in settings.texts for number in text.windows]
    if not columns or not placed:
        return Windows([], units, {})
    return Windows(placed, units, {name: columns[name] for name in (*PREDICTED, *STATES) if name in columns})


def _whole(one: Differences, parts: list[Tensor]) -> Tensor:
    """One number a window; NaN where there is nothing to predict."""
    kept = torch.cat(one.kept)
    every = torch.full((len(kept),), torch.nan, dtype=torch.float64)
    every[kept] = torch.cat(parts).double()
    return every
