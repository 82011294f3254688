"""Swap: the exchanged kernel, its effect on the model, healing, and predictors of the harm."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import AliasChoices, Field

from attnlens.choices import ControlRole, HealingGoal, HealingStage, Part
from attnlens.records.measures import Count, Number, Record


class Predictor(Record):
    """One measure against the harm of one kernel, over heads."""

    measure: str
    """Qualified name (`tokens.entropy`)."""
    rho: Number
    """Spearman's ρ of the measure with the harm, −1 to 1."""
    heads: Count
    """Number of heads that have both."""
    left_out: Count = 0
    """Number of heads that lack the measure or diverged."""
    heads_ci95: tuple[Number, Number] | None = None
    """95 % interval over heads: bootstrap of heads (those of a shared module together)."""
    layers_ci95: tuple[Number, Number] | None = None
    """95 % interval over layers: bootstrap of whole layers."""
    sequences_ci95: tuple[Number, Number] | None = None
    """95 % interval over windows (or texts): the harm, and a measure of the text, read anew in each sample."""
    p_value: Number | None = None
    """Two-sided, by permutations of heads, of this measure alone."""
    p_corrected: Number | None = None
    """The same corrected for all measures looked at (maxT, Westfall & Young 1993)."""
    holds: bool = False
    """True if p_corrected < 0.05, and the interval over layers lies on one side of 0."""
    values: list[Number | None] = []
    """The measure of each head, in the order of the sweep."""
    reasons: dict[str, str] = {}
    """Reason for each null field of this record, by field name."""


class Prediction(Record):
    """Scope of the search for measures that predict the harm of one kernel."""

    heads: Count
    """Number of heads examined: all swept heads."""
    diverged: Count = 0
    """Number of these that diverged and have no harm."""
    measures: Count
    """Number of measures compared; p-values are corrected for it."""
    permutations: Count
    """Permutations of heads behind each p-value."""
    reliability: Number | None = None
    """2r/(1 + r), r Spearman's ρ over heads of the harms on two halves of the windows; at least 0."""
    ceiling: Number | None = None
    """√reliability: the expected ρ of a measure that predicts the harm perfectly apart from noise between windows."""
    left_out: dict[str, str] = {}
    """Measures that were not compared, and why."""
    reasons: dict[str, str] = {}
    """Reason for each null field of this record, by field name."""


class Change(Record):
    """A quantity of the original model and of the changed one, paired."""

    before: Number
    """For the original model."""
    after: Number
    """For the changed model."""
    delta: Number
    """after − before."""
    ci95: tuple[Number, Number] | None = None
    """95 % interval of delta: studentised paired bootstrap over windows, or from five texts on over texts."""


class Pair(Record):
    """A cost of the original model and of the changed one."""

    before: Number | None
    """Of the original model under its own attention implementation."""
    after: Number | None
    """For the changed model."""


class TextChange(Record):
    """How the loss changed on one text alone."""

    name: str
    """The text's name."""
    sequences: int
    """Number of its sequences."""
    change: Change
    """The loss, with its interval over this text's sequences."""
    perplexity: Change | None = None
    """exp(loss), its interval from the same draws; None if it overflows, or an older attnlens wrote
    the record."""


class PositionChange(Record):
    """How the loss changed on the tokens at some places of their sequences."""

    first: int
    """The first of these places, counted from 1 over a sequence's predicted tokens."""
    last: int
    """The last one."""
    tokens: int
    """Number of tokens over all sequences."""
    change: Change
    """Change of the loss."""


class BeyondWindow(Record):
    """How the loss changed on tokens whose evidence lies further back than a window reaches.

    These are the tokens whose bigram (previous token, token) occurred earlier in the sequence, most recently more than
    `window` tokens back.
    """

    window: int
    """Keys in the window, including that of the query: the window of the kernel, else of its sink-window control,
    else 64; of several kernels the widest of these beyond which there are enough tokens."""
    tokens: int
    """Number of such tokens."""
    change: Change
    """Change of the loss on these tokens."""


class Agreement(Record):
    """For how long two models continue the same prompts with the same tokens, each choosing its likeliest."""

    prompts: int
    """Number of prompts."""
    source: str
    """What they are: `windows` (the first halves of evaluated ones), or the name of their file."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    tokens: int
    """Maximum number of generated tokens."""
    until: list[int]
    """Of each prompt, the tokens until the first that differs; `tokens` where none does, also where both texts ended
    alike before."""
    median: Number
    """Lower median; if it equals `tokens`, at least half of the prompts never differ."""
    quartiles: tuple[Number, Number]
    """Their lower quartiles."""
    never: int
    """Prompts whose continuations never differ."""


class TextCosine(Record):
    """How alike the last hidden states are on one text alone."""

    name: str
    """The text's name."""
    sequences: int
    """Number of its sequences."""
    cosine: Number
    """Mean over its tokens."""
    ci95: tuple[Number, Number] | None = None
    """95 % interval over this text's sequences."""


class Outcome(Record):
    """How a changed model's predictions and hidden states differ from the original's."""

    loss: Change | None = None
    """Nats per predicted token over all sequences; None if there is nothing to predict, or it diverged."""
    loss_by_text: list[TextChange] = []
    """The same per text, if there are several."""
    loss_by_position: list[PositionChange] = []
    """The same by place in the sequence, from the front, of causal models."""
    beyond_window: BeyondWindow | None = None
    """The same on tokens whose evidence no window reaches, of causal models."""
    perplexity: Change | None = None
    """exp(loss)."""
    kl: Number | None = None
    """KL(original ‖ changed) of the predictions, nats per predicted token."""
    kl_ci95: tuple[Number, Number] | None = None
    """95 % interval: studentised bootstrap over windows, or from five texts on over texts, as that of the loss."""
    top1_agreement: Number | None = None
    """Share of predicted tokens on which both have the same first choice."""
    hidden_cosine: Number | None = None
    """Mean cosine of the last hidden states, token by token."""
    hidden_cosine_ci95: tuple[Number, Number] | None = None
    """95 % interval, as that of KL."""
    hidden_cosine_by_text: list[TextCosine] = []
    """The same per text, if there are several."""
    hidden_cka: Number | None = None
    """Linear CKA of the last hidden states (Kornblith et al. 2019)."""
    agreement: Agreement | None = None
    """For how long greedy continuations are the original's, with a key-value cache; None if nothing is generated."""
    diverged: bool = False
    """True if the changed model's predictions or hidden states are not finite."""
    reasons: dict[str, str] = {}
    """Reason for each null field of this record, by field name."""


class Stage(Outcome):
    """The changed model at one stage: as swapped, with fitted parameters, healed."""

    name: Literal["swapped", "fitted", "healed"]
    """Name of the stage."""


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
    some keep all keys); None if there is none, see `reasons`."""
    state: Number | None = None
    """Numbers that a head keeps of a whole window's tokens, mean over sites."""


class HealingStep(Record):
    """The healing at one step."""

    step: int
    """Optimiser steps done."""
    validation: Number | None
    """Distance to the original on calibration text kept back from training: KL in nats per token, or 1 − cosine."""
    loss: Number | None = None
    """Loss on the evaluation text, at the steps drawn; it is never used to choose."""
    tokens: int | None = None
    """Tokens trained on so far, repetitions counted; None in reports of before it was kept."""
    stage: HealingStage | None = None
    """In which stage: attention transfer, or the whole model."""


class HealingRate(Record):
    """One learning rate that the range test tried."""

    rate: Number
    """Of AdamW."""
    validation: Number | None
    """After a few steps at it, on text kept back: Σ over sites of ‖new − own‖² / ‖own‖² (transfer), or the distance
    (whole); None if it is not finite."""


class HealingTraining(Record):
    """One stage of a healing."""

    stage: HealingStage
    """transfer: each site's output against its own; whole: the models' predictions, or the text."""
    steps: int
    """Optimiser steps."""
    tokens: int
    """Tokens trained on, those of the range test not: up to eight steps at each of its rates."""
    seconds: Number
    """What the steps took, without range test and checks."""
    tokens_per_second: Number | None = None
    """tokens / seconds; None if nothing was trained."""
    learning_rate: Number
    """Largest learning rate of AdamW; 0 if none that was tried led nearer, so that the stage was left out."""
    lowered_from: Number | None = None
    """The one that the range test chose, where no check at it was nearer than the stage's start and the stage began
    again with smaller steps; None if it was not lowered."""
    rates: list[HealingRate] = []
    """What the range test tried, in its order."""
    stopped: bool = False
    """True if it was left out, or ended early because the 95 % interval of the last gain contained 0."""


class HealingControl(Record):
    """A copy of the original model whose same numbers were trained equally long on the same text."""

    best: int
    """The step whose numbers were kept."""
    tokens: int
    """Tokens trained on."""
    learning_rate: Number
    """Largest learning rate of AdamW."""
    loss: Change
    """Nats per token of the evaluation text: the original, and the original trained."""
    perplexity: Change
    """exp(loss)."""
    ratio: Number
    """Perplexity of the healed model over that of the trained original."""
    ratio_ci95: tuple[Number, Number] | None = None
    """95 % interval, paired as that of the loss."""


class Healing(Record):
    """How W_Q and W_K were fine-tuned towards the original model."""

    steps: int
    """Requested steps, or the steps done if tokens or a time were requested."""
    best: int
    """The step whose weights were kept: the least validation distance."""
    parameters: int
    """Number of trained parameters."""
    learning_rate: Number
    """Largest learning rate of AdamW in the last stage that trained."""
    curve: list[HealingStep]
    """Step by step, as far as it was measured."""
    eta: Number | None = None
    """Weight η of the KSVD regulariser in the training loss; None for kernels without one."""
    ksvd_convention: Literal["paper", "code"] | None = None
    """How its objective J is counted: the paper's sums, or the published code's means with Λ²."""
    amount: str | None = Field(None, validation_alias=AliasChoices("asked", "amount"), serialization_alias="asked")
    """Requested amount: `200 steps`, `2,000,000 tokens`, `1,800 seconds`."""
    goal: HealingGoal = "teacher"
    """Training target: the original model's predictions, or the text."""
    rank: int | None = None
    """Rank of each weight's change; None if it was free."""
    batch: int | None = None
    """Sequences of a training step."""
    tokens: int | None = None
    """Tokens trained on, repetitions counted; those of the range tests not, which train up to eight steps at each of up
    to five rates in a stage (and at smaller ones where none gains) and put the numbers back."""
    seconds: Number | None = None
    """All of it: range tests, steps, checks."""
    stages: list[HealingTraining] = []
    """Attention transfer, then the whole model."""
    peak_memory_bytes: int | None = None
    """Largest memory meanwhile: resident (CPU) or allocated (GPU)."""
    control: HealingControl | None = None
    """The original model trained for as many steps, if requested."""
    interrupted: bool = False
    """True if the user interrupted it."""
    reasons: dict[str, str] = {}
    """Reason for each null field of this record, by field name."""


PARTS: tuple[Part, ...] = get_args(Part)
"""Order of parts, which keeps the layers of one part together."""
Task = Literal["causal", "masked", "seq2seq", "classification", "hidden"]


class SiteSwap(Record):
    """One site whose kernel was exchanged."""

    site: str
    """The site's name."""
    layer: int
    """Index, from 0."""
    part: Part
    """encoder, decoder or cross."""
    heads: list[int]
    """Query heads that have the new kernel."""
    path: str
    """Computation path: sdpa, running sums, row tiles, …"""
    output_error: Number | None = None
    """‖new − own‖ / ‖own‖ of the site's output on the original model's queries, keys and values."""
    off_simplex: Number | None = None
    """Share of the attention's mass that is negative, Σ max(−w, 0) / Σ |w|; 0 for positive kernels."""


class Effect(Record):
    """Effect on the loss of swapping a single head or layer (`--sweep`)."""

    layer: int
    """The site's running number."""
    head: int | None = None
    """The query head; None for the whole layer."""
    part: Part
    """encoder, decoder or cross."""
    delta: Number | None
    """Change of the loss, or of the distance used instead (Swap.judged_by); None if it diverged."""
    ci95: tuple[Number, Number] | None = None
    """95 % interval."""
    p_value: Number | None = None
    """Two-sided, of no change, by a studentised bootstrap over windows (or texts); None for a distance."""
    significant: bool = False
    """True if it is significant at a false discovery rate of 5 % (Benjamini & Hochberg 1995)."""


class Swap(Outcome):
    """Effect of one kernel on the model; the top-level fields describe its last stage."""

    kernel: str
    """As typed, with its parameters: `rbf:gamma=0.5+window:64`."""
    formula: str
    """log k(q, k), or the whole output if the kernel is not a function of queries and keys."""
    formula_of: Literal["log k", "output"] = "log k"
    """Quantity that `formula` describes."""
    parameters: dict[str, Number] = {}
    """Parameters, including defaults."""
    fitted: list[str] = []
    """Parameters that were chosen per head from calibration text."""
    task: Task
    """What is predicted."""
    noise: bool = False
    """True if the input is random noise generated by attnlens, so that losses are meaningless."""
    sites: list[SiteSwap]
    """Sites where the kernel was replaced: all requested sites."""
    identity_error: Number
    """Relative change of the outputs when attention is recomputed with the model's own kernel; at most 1e-5."""
    causality_error: Number | None = None
    """Relative change of outputs before a position when the tokens after it change; 0 if nothing leaks."""
    mask_error: Number | None = None
    """Relative change of outputs at real tokens when the padding's content changes; 0 if nothing leaks."""
    off_simplex: Number | None = None
    """Share of the attention's mass that is negative, mean over the exchanged sites."""
    tokens_per_second: Pair
    """Forward passes of the evaluation, median over batches."""
    peak_memory_bytes: Pair
    """Largest memory during the evaluation's forward passes: resident (CPU) or allocated (GPU)."""
    stages: list[Stage]
    """Results after swapping, fitting and healing, as far as requested."""
    healing: Healing | None = None
    """Healing results."""
    state: Number | None = None
    """Numbers that a swapped head keeps of a whole window's tokens, mean over sites: m·(value_dim + 1) by running sums
    over m features, head_dim + value_dim for each key that a filter leaves in sight, or for each token without one."""
    controls: list[Control] = []
    """Simple alternatives, measured on the same windows."""
    sweep: list[Effect] = []
    """Each head or layer swapped alone, the most harmful first."""
    predictors: list[Predictor] = []
    """How each measure of `inspect` goes with the effects of single heads, the surest first."""
    prediction: Prediction | None = None
    """Scope of the search for them."""
    notes: list[str] = []
    """What a reader must know: what a softcap, a bias, a QK-norm does to this kernel."""

    @property
    def judged_by(self) -> Literal["loss", "kl", "hidden"]:
        """Quantity that ranks the sweep and is drawn: loss; KL on noise; 1 − cosine of hidden states without a head."""
        return "hidden" if self.task == "hidden" else "kl" if self.noise else "loss"
