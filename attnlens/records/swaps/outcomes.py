"""How a changed model's predictions and hidden states differ from the original's."""

from __future__ import annotations

from typing import Literal

from attnlens.choices import ControlRole
from attnlens.records.measures import Number, Record


class Change(Record):
    """A quantity of the original model and of the changed one, paired."""

    before: Number
    """Of the original model."""
    after: Number
    """Of the changed one."""
    delta: Number
    """after − before."""
    ci95: tuple[Number, Number] | None = None
    """95 % interval of delta: studentised paired bootstrap over windows, or from five texts on over texts."""


class Pair(Record):
    """A cost of the original model and of the changed one."""

    before: Number | None
    """Of the original model under its own attention implementation."""
    after: Number | None
    """Of the changed one."""


class TextChange(Record):
    """How the loss changed on one text alone."""

    name: str
    """The text's name."""
    sequences: int
    """How many of the sequences are its."""
    change: Change
    """The loss, with its interval over this text's sequences."""
    perplexity: Change | None = None
    """exp(loss), its interval from the same draws; None where it is too large for a number, or an older attnlens wrote
    the record."""


class PositionChange(Record):
    """How the loss changed on the tokens at some places of their sequences."""

    first: int
    """The first of these places, counted from 1 over a sequence's predicted tokens."""
    last: int
    """The last one."""
    tokens: int
    """How many tokens there are, over all sequences."""
    change: Change
    """Their loss."""


class BeyondWindow(Record):
    """How the loss changed on tokens whose evidence lies further back than a window reaches.

    That are those whose pair (token before, token) stood in the sequence before, and last so that it ends more than
    `window` tokens back.
    """

    window: int
    """Keys that the window holds, the query's own included: the kernel's own, else that of its sink-window control,
    else 64; of several kernels the widest of these beyond which there are enough tokens."""
    tokens: int
    """How many such tokens there are."""
    change: Change
    """Their loss."""


class Agreement(Record):
    """For how long two models continue the same prompts with the same tokens, each choosing its likeliest."""

    prompts: int
    """How many prompts there are."""
    source: str
    """What they are: `windows` (the first halves of evaluated ones), or the name of their file."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    tokens: int
    """How many tokens were generated at most."""
    until: list[int]
    """Of each prompt, the tokens until the first that differs; `tokens` where none does, also where both texts ended
    alike before."""
    median: Number
    """Their lower median; at `tokens` it says no more than that half of the prompts never differ."""
    quartiles: tuple[Number, Number]
    """Their lower quartiles."""
    never: int
    """Prompts whose continuations never differ."""


class TextCosine(Record):
    """How alike the last hidden states are on one text alone."""

    name: str
    """The text's name."""
    sequences: int
    """How many of the sequences are its."""
    cosine: Number
    """Mean over its tokens."""
    ci95: tuple[Number, Number] | None = None
    """Its 95 % interval over this text's sequences."""


class Outcome(Record):
    """How a changed model's predictions and hidden states differ from the original's."""

    loss: Change | None = None
    """Nats per predicted token over all sequences; None where there is nothing to predict, or it diverged."""
    loss_by_text: list[TextChange] = []
    """The same for each text, where there are several."""
    loss_by_position: list[PositionChange] = []
    """The same by place in the sequence, from the front, of causal models."""
    beyond_window: BeyondWindow | None = None
    """The same on tokens whose evidence no window reaches, of causal models."""
    perplexity: Change | None = None
    """exp(loss)."""
    kl: Number | None = None
    """KL(original ‖ changed) of the predictions, nats per predicted token."""
    kl_ci95: tuple[Number, Number] | None = None
    """Its 95 % interval: studentised bootstrap over windows, or from five texts on over texts, as that of the loss."""
    top1_agreement: Number | None = None
    """Share of predicted tokens on which both have the same first choice."""
    hidden_cosine: Number | None = None
    """Mean cosine of the last hidden states, token by token."""
    hidden_cosine_ci95: tuple[Number, Number] | None = None
    """Its 95 % interval, as that of KL."""
    hidden_cosine_by_text: list[TextCosine] = []
    """The same for each text, where there are several."""
    hidden_cka: Number | None = None
    """Linear CKA of the last hidden states (Kornblith et al. 2019)."""
    agreement: Agreement | None = None
    """For how long greedy continuations are the original's, with a key-value cache; None where nothing is generated."""
    diverged: bool = False
    """Whether the changed model's predictions or hidden states are not finite."""
    reasons: dict[str, str] = {}
    """Why a field of this record is null, by its name."""


class Stage(Outcome):
    """The changed model at one stage: as swapped, with fitted parameters, healed."""

    name: Literal["swapped", "fitted", "healed"]
    """Which."""


class Control(Outcome):
    """What a simple alternative to a kernel does to the model, at the same sites and heads, without any training.

    Only `far part, healed` is trained, as a part of its hybrid.
    """

    role: ControlRole
    """`same size`: some first tokens and the nearest ones, in a cache of the kernel's size (64 with 4 first tokens
    where it is not bounded); `one key`: that of the largest score; `floor`: the mean of the values; of a kernel behind
    a filter, and of a hybrid, its two branches, `filter alone` with the model's own kernel, and `without filter`; of a
    healed hybrid `far part, healed`: its far kernel for all keys, with the maps and weights as trained."""
    kernel: str | None
    """As it can be typed; where sites differ the range of each number (`sink-window:4,68–80 by layer`, `4,68–all` where
    some keep all keys); None where there is none, see `reasons`."""
    state: Number | None = None
    """Numbers that a head keeps of a whole window's tokens, mean over sites."""
