"""Beam search: the likeliest sentences that an encoder-decoder writes, by mean log-probability a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

WIDTH = 4
"""Beams, as in the papers' translation tables."""


class Translator(Protocol):
    """What is searched: an encoder and a decoder."""

    def encode(self, inputs: Tensor, kept: Tensor | None) -> Tensor:
        """States of the source (batch, tokens, d_model)."""

    def decode(self, given: Tensor, memory: Tensor, kept: Tensor | None) -> Tensor:
        """Logits (batch, target tokens, outputs) of the token after each of `given`."""


@dataclass(frozen=True)
class SpecialIds:
    """Which ids have a meaning of their own."""

    begin: int
    """The first that the decoder reads."""
    end: int
    """The one that a sentence ends with."""
    barred: tuple[int, ...] = ()
    """Those that no sentence holds, as padding; `begin` is barred too."""


@dataclass(eq=False)
class _Search:
    """The sentences that are still searched."""

    rows: list[int]
    """Their numbers."""
    memory: Float[Tensor, "beams tokens d_model"]
    kept: Bool[Tensor, "beams tokens"] | None
    given: Int[Tensor, "beams tokens"]
    """What each beam has written, `width` beams a sentence side by side."""
    totals: Float[Tensor, "sentences width"]
    """Σ log p of each."""
    ended: dict[int, list[tuple[float, list[int]]]] = field(default_factory=dict)
    """Of each sentence those that ended: the mean of log p, and the ids between `begin` and `end`."""


@torch.no_grad()
def beam_search(
    model: Translator, inputs: Tensor, kept: Tensor | None, ids: SpecialIds, *, most: int, width: int = WIDTH
) -> list[list[int]]:
    """Of each source the sentence y of at most `most` tokens, `end` included, with the largest log p(y | x)/|y| found.

    Each step keeps the `width` likeliest beginnings; of the continuations as likely as these, those that end are set
    aside, and a source is done when `width` have. At token `most` a sentence can only end. With as many beams as there
    are beginnings nothing is lost. The result lacks `begin` and `end`, in the order of `inputs` (batch, tokens).
    """
    count = len(inputs)
    totals = torch.full((count, width), -torch.inf, device=inputs.device)
    totals[:, 0] = 0  # all beams begin alike, so that one of them goes on
    search = _Search(
        rows=list(range(count)),
        memory=model.encode(inputs, kept).repeat_interleave(width, 0),
        kept=None if kept is None else kept.repeat_interleave(width, 0),
        given=torch.full((count * width, 1), ids.begin, device=inputs.device),
        totals=totals,
        ended={number: [] for number in range(count)},
    )
    for step in range(1, most + 1):
        scores = _scores(model, search, ids, last=step == most)
        _extend(search, scores, ids.end, step)
        _drop_done(search, width)
        if not search.rows:
            break
    return [max(found, default=(0.0, list[int]()))[1] for _, found in sorted(search.ended.items())]


def _scores(
    model: Translator, search: _Search, ids: SpecialIds, *, last: bool
) -> Float[Tensor, "sentences width outputs"]:
    """Σ log p of each beam with each next token."""
    logits = model.decode(search.given, search.memory, search.kept)[:, -1].float()
    scores = logits.log_softmax(-1)
    scores[:, [ids.begin, *ids.barred]] = -torch.inf
    if last:
        ends = scores[:, ids.end].clone()
        scores.fill_(-torch.inf)
        scores[:, ids.end] = ends
    return search.totals[..., None] + scores.view(*search.totals.shape, -1)


def _extend(search: _Search, scores: Float[Tensor, "sentences width outputs"], end: int, step: int) -> None:
    """Set aside what ends among the `width` likeliest continuations, and go on with the likeliest that do not."""
    count, width, outputs = scores.shape
    best, places = scores.flatten(1).topk(width)
    written = search.given.view(count, width, -1)
    for row, number in enumerate(search.rows):
        for total, place in zip(best[row].tolist(), places[row].tolist(), strict=True):
            if place % outputs == end and total > -torch.inf:
                search.ended[number].append((total / step, written[row, place // outputs, 1:].tolist()))
    scores[..., end] = -torch.inf
    search.totals, places = scores.flatten(1).topk(width)
    beams = places // outputs + width * torch.arange(count, device=places.device)[:, None]
    search.given = torch.cat((search.given[beams.flatten()], (places % outputs).view(-1, 1)), 1)


def _drop_done(search: _Search, width: int) -> None:
    """Leave out the sentences of which `width` have ended, or none can go on."""
    alive = (search.totals[:, 0] > -torch.inf).tolist()
    going = [at for at, number in enumerate(search.rows) if alive[at] and len(search.ended[number]) < width]
    if len(going) < len(search.rows):
        beams = _beams(going, width)
        search.rows = [search.rows[at] for at in going]
        search.memory, search.given = search.memory[beams], search.given[beams]
        search.kept = None if search.kept is None else search.kept[beams]
        search.totals = search.totals[going]


def _beams(rows: Sequence[int], width: int) -> list[int]:
    return [row * width + beam for row in rows for beam in range(width)]
