"""Records of swaps: the new kernel, its effect on the model, healing, and predictors of the harm."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from attnlens.choices import ControlRole, HealingGoal, HealingStage, Part
from attnlens.records.measures import Count, Interval, Number, Reasons, Record


class Predictor(Record):
    """Rank correlation over heads between one measure and the harm that one kernel does."""

    measure: str  # Qualified name (`tokens.entropy`)
    rho: Number  # Spearman's ρ of the measure with the harm, −1 to 1
    heads: Count  # Number of heads with a value of the measure and a finite harm
    left_out: Count = 0  # Number of heads that lack the measure or diverged
    heads_ci95: Interval | None = None  # Interval of ρ by bootstrap of heads (those of a shared module together)
    layers_ci95: Interval | None = None  # Interval of ρ by bootstrap of whole layers
    sequences_ci95: Interval | None = None  # Interval of ρ by bootstrap of windows (or texts)
    p_value: Number | None = None  # Two-sided p-value by permutations of heads, not corrected for other measures
    p_corrected: Number | None = None  # p_value corrected for all measures compared (maxT, Westfall & Young 1993)
    holds: bool = False  # True if p_corrected < 0.05 and the interval over layers excludes 0
    values: list[Number | None] = []  # The measure of each head, in the order of the sweep
    reasons: Reasons = {}


class Prediction(Record):
    """Scope and limits of the search for measures that predict the harm that one kernel does."""

    heads: Count  # Number of heads in the sweep
    diverged: Count = 0  # Number of these heads that diverged, so that their harm is undefined
    measures: Count  # Number of measures compared, for which p-values are corrected
    permutations: Count  # Number of permutations of heads
    reliability: Number | None = None  # 2r/(1 + r) ≥ 0, where r is Spearman's ρ of harms between halves of the windows
    ceiling: Number | None = None  # √reliability: expected ρ of a perfect predictor, given noise between windows
    left_out: dict[str, str] = {}  # Reasons why measures were not compared, by measure
    reasons: Reasons = {}


class Change(Record):
    """Paired values of a quantity in the original and in the changed model."""

    before: Number  # Value in the original model
    after: Number  # Value in the changed model
    delta: Number  # after − before
    ci95: Interval | None = None  # Interval of delta, over windows or at least five texts, by Settings.interval_method


class Pair(Record):
    """A cost of the original and of the changed model."""

    before: Number | None  # Cost of the original model with its own attention implementation; None if unknown
    after: Number | None  # Cost of the changed model; None if unknown


class TextChange(Record):
    """Change in the loss on one text."""

    name: str  # Name of the text
    sequences: int  # Number of sequences read from the text
    change: Change  # Change in nats per predicted token
    perplexity: Change | None = None  # Change in exp(loss), with intervals from the same draws; None on overflow


class PositionChange(Record):
    """Change in the loss on the tokens at a range of positions in their sequences."""

    first: int  # First position of the range, counted from 1 over a sequence's predicted tokens
    last: int  # Last position of the range
    tokens: int  # Number of tokens at these positions
    change: Change  # Change in nats per token


class BeyondWindow(Record):
    """Change in the loss on tokens whose bigram with the previous token last occurred more than `window` tokens ago."""

    window: int
    """Width of the window in keys, including the query's own key: that of the kernel, else of its sink-window control,
    else 64. For several kernels, it is the widest of their windows beyond which there are enough tokens."""
    tokens: int  # Number of these tokens
    change: Change  # Change in nats per token


class Agreement(Record):
    """Number of tokens for which the greedy continuations of two models agree."""

    prompts: int  # Number of prompts
    source: str  # Origin of the prompts: `windows` (first halves of evaluated windows), or a file name
    prompt_tokens: int  # Number of tokens of a prompt
    tokens: int  # Maximum number of generated tokens
    until: list[int]  # Number of generated tokens, per prompt, before the first that differs; `tokens` if none does
    median: Number  # Lower median; if it equals `tokens`, at least half of the prompts never differ
    quartiles: Interval  # First and third quartile of `until`, rounded down to values that occur
    never: int  # Number of prompts whose continuations never differ


class TextCosine(Record):
    """Similarity between the last hidden states of the original and the changed model on one text."""

    name: str  # Name of the text
    sequences: int  # Number of sequences read from the text
    cosine: Number  # Mean cosine over the text's tokens
    ci95: Interval | None = None


class PredictionChange(Record):
    """Statistics of the change in predictions, as printed by llama.cpp's perplexity tool for quantised models.

    Standard errors are over windows, or over texts if there are at least five; None if only one window was read.
    """

    tokens: Count  # Number of predictions compared
    mean: Number  # Mean of KL(original ‖ changed) over predictions, in nats
    mean_se: Number | None  # Standard error of the mean
    largest: Number  # Largest KL of a prediction, in nats
    q999: Number  # 99.9 % quantile of the KL over predictions, in nats
    q99: Number  # 99 % quantile
    q95: Number  # 95 % quantile
    median: Number  # Median
    same_top: Number  # Share of predictions whose likeliest token or class is the same
    same_top_se: Number | None  # Standard error of this share
    perplexity_ratio: Number | None  # Perplexity of the changed model / that of the original; None if unknown
    perplexity_ratio_se: Number | None  # Standard error of the ratio


class Outcome(Record):
    """Differences in predictions and hidden states between a changed model and the original."""

    loss: Change | None = None  # Nats per predicted token; None if nothing is predicted, or if the model diverged
    loss_by_text: list[TextChange] = []
    loss_by_position: list[PositionChange] = []  # Loss by position in the sequence; causal models only
    beyond_window: BeyondWindow | None = None  # Loss on tokens that depend on distant context; causal models only
    perplexity: Change | None = None  # exp(loss); None if `loss` is None or on overflow
    kl: Number | None = None  # KL(original ‖ changed) of the predictions, nats per predicted token
    kl_ci95: Interval | None = None  # Studentised bootstrap over windows, or over at least five texts
    predictions: PredictionChange | None = None  # Distribution of this KL; None if nothing is predicted
    top1_agreement: Number | None = None  # Share of predictions with the same likeliest token or class in both models
    hidden_cosine: Number | None = None  # Cosine of both models' last hidden states, mean over tokens
    hidden_cosine_ci95: Interval | None = None
    hidden_cosine_by_text: list[TextCosine] = []
    hidden_cka: Number | None = None  # Linear CKA of the last hidden states (Kornblith et al. 2019)
    agreement: Agreement | None = None  # Agreement of greedy continuations; None if nothing is generated
    diverged: bool = False  # True if the changed model's predictions or hidden states are not finite
    destroyed: bool = False  # True if the loss exceeds that of uniform predictions, and the original's does not
    reasons: Reasons = {}


class Stage(Outcome):
    """Effect of the swap at one stage: after the swap, after fitting parameters, or after healing."""

    name: Literal["swapped", "fitted", "healed"]


class Control(Outcome):
    """Effect of a simple alternative to the kernel in the swapped heads; only `far part, healed` is trained."""

    role: ControlRole
    kernel: str | None  # Spelling of the kernel; ranges if sites differ: `sink-window:4,68–80 by layer`, `4,68–all`
    state: Number | None = None  # Numbers that a head stores for the tokens of one window, mean over sites
    difference: Change | None = None  # Loss of the alternative (before) and of the swapped model (after)


class HealingStep(Record):
    """Losses of a healing run at one step."""

    step: int
    validation: Number | None  # Distance to the original on held-out text: KL in nats per token, or 1 − cosine
    loss: Number | None = None  # Loss on the evaluation text, at the plotted steps; never used to choose a step
    tokens: int | None = None  # Number of tokens trained on so far, with repetitions; None in older reports
    stage: HealingStage | None = None  # Training stage of the step; None in older reports


class HealingRate(Record):
    """One learning rate that the range test tried."""

    rate: Number  # Largest learning rate of AdamW
    validation: Number | None  # Held-out distance; in `transfer` Σ ‖new − old‖²/‖old‖² over sites; None if diverged


class HealingTraining(Record):
    """One training stage of `heal`."""

    stage: HealingStage  # transfer: trained on outputs of each site; whole: on the model's predictions or the text
    steps: int
    tokens: int  # Number of tokens trained on, without the range test, which takes up to eight steps at each rate
    seconds: Number  # Duration of the steps, without range test and checks
    tokens_per_second: Number | None = None
    learning_rate: Number  # Largest learning rate of AdamW; 0 if the stage was left out because no rate helped
    lowered_from: Number | None = None  # Rate chosen by the range test, if it was lowered because no check improved
    rates: list[HealingRate] = []
    stopped: bool = False  # True if the stage was left out, or ended when the last gain's 95 % interval contained 0


class HealingControl(Record):
    """Control for healing: the original model, trained in the same way and on the same text as the swapped model."""

    best: int  # Step with the least validation loss, whose weights were kept
    tokens: int  # Number of tokens trained on, with repetitions
    learning_rate: Number  # Largest learning rate of AdamW
    loss: Change  # Nats per token of the evaluation text, before and after this training
    perplexity: Change
    ratio: Number  # Perplexity of the healed model over that of the trained original
    ratio_ci95: Interval | None = None


class Healing(Record):
    """Training of W_Q, W_K and the kernel's parameters after a swap, on the original model's predictions or on text."""

    steps: int  # Number of requested steps, or of steps done if tokens or a time were requested
    best: int  # Step with the least validation distance, whose weights were kept
    parameters: int  # Number of trained parameters
    learning_rate: Number  # Largest learning rate of AdamW in the last stage that trained
    curve: list[HealingStep]
    eta: Number | None = None  # Weight η of the KSVD regulariser in the training loss; None for kernels without one
    ksvd_convention: Literal["paper", "code"] | None = None  # KSVD objective: sums, or the code's means with Λ²
    amount: str | None = Field(None, validation_alias=AliasChoices("asked", "amount"), serialization_alias="asked")
    """Requested amount: `200 steps`, `2,000,000 tokens`, `1,800 seconds`."""
    goal: HealingGoal = "teacher"
    rank: int | None = None  # Rank of each weight's change; None if it was free
    batch: int | None = None  # Number of sequences per step
    tokens: int | None = None  # Number of tokens trained on, with repetitions, without range tests
    seconds: Number | None = None  # Duration of range tests, steps and checks
    stages: list[HealingTraining] = []
    peak_memory_bytes: int | None = None  # Peak memory during healing: resident (CPU) or allocated (GPU)
    control: HealingControl | None = None
    interrupted: bool = False
    reasons: Reasons = {}


Task = Literal["causal", "masked", "seq2seq", "classification", "hidden"]


class SiteSwap(Record):
    """Site whose kernel was replaced."""

    site: str
    layer: int
    part: Part
    heads: list[int]  # Query heads whose kernel was replaced
    path: str  # Route by which attention was computed: sdpa, running sums, row tiles, …
    output_error: Number | None = None  # ‖new − old‖/‖old‖ of the site's output on the original's inputs
    off_simplex: Number | None = None  # Negative share of the attention's mass, Σ max(−w, 0)/Σ |w|


class Effect(Record):
    """Effect of swapping a single head or layer (`--sweep`)."""

    layer: int
    head: int | None = None  # Query head; None for the whole layer
    part: Part
    delta: Number | None  # Change in the loss, or in the distance used instead (Swap.judged_by); None: model diverged
    ci95: Interval | None = None
    p_value: Number | None = None  # Two-sided p-value of the change, by studentised bootstrap; None for a distance
    significant: bool = False  # True if significant at a false discovery rate of 5 % (Benjamini & Hochberg 1995)


class Swap(Outcome):
    """Effect of one kernel on the model; the top-level fields describe its last stage."""

    kernel: str  # As typed, with its parameters: `rbf:gamma=0.5+window:64`
    formula: str  # log k(q, k), or the whole output if the kernel is not a function of queries and keys
    formula_of: Literal["log k", "output"] = "log k"
    parameters: dict[str, Number] = {}  # Parameters of the kernel, including defaults
    fitted: list[str] = []  # Parameters that were chosen per head from calibration text
    task: Task
    noise: bool = False  # True if the input is random noise, so that losses are meaningless
    sites: list[SiteSwap]
    identity_error: Number  # Relative change in the outputs if the model's own kernel is recomputed; at most 1e-5
    causality_error: Number | None = None  # Relative change in outputs if later tokens change; 0 is ideal
    mask_error: Number | None = None  # Relative change in tokens' outputs if padding changes; 0 is ideal
    off_simplex: Number | None = None  # Share of the attention's mass that is negative, mean over the swapped sites
    tokens_per_second: Pair  # Speed of the evaluation's forward passes, median over batches
    peak_memory_bytes: Pair  # Largest memory during the evaluation's forward passes: resident (CPU) or allocated (GPU)
    stages: list[Stage]  # The model at each stage: swapped, fitted, healed
    healing: Healing | None = None
    state: Number | None = None
    """Numbers that a swapped head stores for a window, mean over sites: m·(value_dim + 1) if it stores running sums
    over m features, else head_dim + value_dim for each token, or for each key that a filter keeps."""
    cache_bytes_per_token: Pair | None = None
    """Bytes per token in the swapped heads' key-value cache; None unless these are heads of the decoder's
    self-attention, the kernel stores every key with fewer numbers (`rank`), and no other head reads the same keys."""
    controls: list[Control] = []
    sweep: list[Effect] = []  # Each head or layer swapped alone, the most harmful first
    predictors: list[Predictor] = []  # Correlation of each measure with the effects of single heads, smallest p first
    prediction: Prediction | None = None
    notes: list[str] = []  # Caveats, such as the effect of a softcap, a bias or QK-norm on this kernel

    @property
    def judged_by(self) -> Literal["loss", "kl", "hidden"]:
        """Quantity by which effects are ranked: loss, KL if the input is noise, 1 − cosine if nothing is predicted."""
        return "hidden" if self.task == "hidden" else "kl" if self.noise else "loss"
