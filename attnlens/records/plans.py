"""Records of a plan: the rank of each key head within a loss budget, and the estimated and measured rises in loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from attnlens.choices import Intervals, Part, Unit
from attnlens.records.measures import Count, Interval, Number, Reasons, Record, read_record
from attnlens.records.provenance import CHOSEN_BY, ModelInfo, Settings, Text, Tool, convert_plan
from attnlens.records.swaps import Pair


class KeyRank(Record):
    """Rank of the latent of one or several key heads, with the query heads that read these keys."""

    site: str
    layer: Count
    part: Part
    kv_head: Count
    heads: list[Count]  # Query heads that read these keys
    rank: Count  # Dimensions kept in the latent; 0 if the query heads attend uniformly
    head_dim: Count  # Total number of dimensions of the latent's key heads
    kv_heads: list[Count] = []  # Key heads that share the latent, if there are several; `kv_head` is the first of them

    @property
    def keys(self) -> int:
        """Number of key heads that share the latent."""
        return max(1, len(self.kv_heads))

    @model_validator(mode="after")
    def _check_rank(self) -> KeyRank:
        if self.rank > self.head_dim:
            raise ValueError(f"rank {self.rank} exceeds head_dim {self.head_dim}")
        return self


MARGIN = 2
"""A plan's estimated rise must lie below the budget by this many half-widths of its interval. With 1, the rise over all
windows also meets the budget, but the promised rise, measured on an equal amount of other text, exceeds the budget in a
third of the runs. With 2, it exceeds the budget in 5 % of the runs, and ranks are larger by 0.4 to 0.6 of 16
(benchmarks/promises.py)."""


class Rise(Record):
    """Relative rise in the loss or the perplexity: after / before − 1."""

    share: Number  # Rise as a share: 0.01 is 1 %
    ci95: Interval | None = None
    """Two-sided 95 % interval over sequences or whole texts, paired between the models: studentised bootstrap, or
    Student's t for fewer than eight pairs (Efron & Tibshirani 1993, section 12.5). None if the spread is unknown."""
    over: Intervals = "windows"  # Population of the interval: windows of these texts, or texts of this kind
    sequences: Count  # Number of sequences
    by_text: dict[str, Number] = {}  # Relative rise on each text, by name, if the sequences come from several texts
    ci95_by_text: dict[str, Interval] = {}  # Intervals of these rises
    further: Number | None = None  # One-sided 95 % prediction bound for a new text of this kind; None for a single text

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval, which the rise exceeds in 2.5 % of runs; `share` if there is no interval."""
        return self.ci95[1] if self.ci95 else self.share

    def bound(self, margin: float) -> float:
        """Return `share` + `margin` · (`high` − `share`), or the largest rise on a single text if that is larger.

        If a new text is exchangeable with n held-out texts, the rise on it exceeds the largest of their rises with
        probability 1/(n + 1). The mean over many texts does not bound the rise on a new text.
        """
        return max([self.share + margin * (self.high - self.share), *self.by_text.values()])


class FormTried(Record):
    """A form of latents, and the rise in loss if each latent keeps half of its full rank."""

    form: str  # Form as typed after `rank:`: `group=all,rotation=before,metric=attention`
    rise: Rise | None  # Rise on the calibration text used to choose; None if the model diverged


class PlanStep(Record):
    """A candidate plan that the search measured."""

    mean_rank: Number  # Rank per key head, mean over query heads
    predicted: Number  # Rise predicted by the sum of the latents' sensitivities, as a share of the loss or perplexity
    rise: Rise  # Rise on the calibration text used to choose among the steps


class Plan(Record):
    """Ranks that are chosen so that the estimated rise is within the budget, or that are read from a file."""

    schema_version: Literal["2"] = "2"
    tool: Tool
    model: ModelInfo
    settings: Settings
    kernel: str  # Spelling of the kernel
    budget: Number = Field(gt=0)  # Largest allowed rise, as a share of the loss or perplexity: 0.01 is 1 %
    unit: Unit = "loss"  # Quantity that the budget limits: the loss in nats, or perplexity
    form: str = ""  # Form of the latents as typed after `rank:`; empty: one latent per key head, of rotated keys
    forms: list[FormTried] = []  # Forms compared on the calibration text; empty if the form was requested
    held_out: bool = False  # True if `estimated` and `promised` use text to which the latents' maps were not fitted
    ranks: list[KeyRank] = Field(min_length=1)
    mean_rank: Number  # Number of values kept per key, mean over query heads
    head_dim: Number  # Number of values per key in the original model, mean over query heads
    estimated: Rise | None = None  # Rise on the text used to choose the plan (biased); None if the ranks were given
    promised: Rise | None  # Rise on text not used to fit or choose; None if the model diverged or the ranks were given
    measured: Rise | None  # Rise on the evaluation text; None if the model diverged on it, or was not evaluated
    healed: Rise | None = None  # Rise on the evaluation text after healing; None if not healed
    fitted_on: list[Text] = []  # Calibration texts used for directions and sensitivities
    chosen_on: list[Text] = []  # Calibration texts used for `estimated` and `steps`
    promised_on: list[Text] = []  # Calibration texts used for `promised`
    steps: list[PlanStep]
    parameters: Pair  # Number of parameters: W_Q, W_K and biases of these heads, and maps of queries and keys
    flops_per_token: Pair  # Operations for queries, keys and scores of these heads, mean over a sequence
    cache_bytes_per_token: Pair  # Bytes of a token's keys and values in the cache at these sites
    model_cache_bytes_per_token: Pair = Pair(before=None, after=None)  # Bytes of a token in the whole model's cache
    rebuilding_flops: Number | None = None
    """Operations that rebuild the keys of one cached token from latents of unrotated keys. They are needed for every
    key that a new token sees, unless the keys are cached too."""
    keys_to_gain: Number | None = None
    """Number of keys that a query must see before operations are saved, because the maps need operations too. None
    without a reason: operations are saved from the first key on. None with a reason: operations are never saved, or
    only up to some number of keys, or the number is unknown."""
    reasons: Reasons = {}

    @model_validator(mode="before")
    @classmethod
    def _convert(cls, fields: object) -> object:
        """Extract the plan from a report of `ranks`, and convert a plan of version 1, which lacks `schema_version`."""
        if isinstance(fields, Mapping) and isinstance(swap := fields.get("swap"), Mapping):
            fields = swap.get("plan") or fields
        old = isinstance(fields, Mapping) and fields.get("schema_version", "1") == "1"
        return convert_plan(fields) if old else fields

    @model_validator(mode="after")
    def _check_ranks(self) -> Plan:
        key_heads = [(key.site, key.kv_head) for key in self.ranks]
        if len(set(key_heads)) < len(key_heads):
            raise ValueError("a key head has two ranks")
        layers = self.settings.layers
        chosen = [layers is None or self.model.layer_choices(key.layer, key.part) & set(layers) for key in self.ranks]
        if not all(chosen):
            raise ValueError("ranks and settings name different layers")
        return self

    @property
    def part(self) -> Part | None:
        """Part of the model to which all ranks belong; None if they belong to several parts."""
        parts = {key.part for key in self.ranks}
        return parts.pop() if len(parts) == 1 else None

    @property
    def tokens(self) -> int:
        """Length of a sequence in tokens; 0 if unknown."""
        return self.settings.length or 0

    @property
    def text(self) -> str:
        """Name of the evaluation text; empty if unknown."""
        return self.settings.text.name if self.settings.text else ""

    @property
    def calibration(self) -> str:
        """Name of the calibration text; empty if unknown."""
        return self.settings.calibration.name if self.settings.calibration else ""

    @property
    def within_budget(self) -> bool:
        """True if the measured rise and, if a rise was promised, the promised rise's upper bound are within the budget.

        False if the model diverged, or if the rise was not measured.
        """
        if self.measured is None or self.measured.share > self.budget:
            return False
        if self.promised is not None:
            return self.promised.bound(1) <= self.budget
        return self.estimated is None or self.reasons.get("promised") == CHOSEN_BY  # nothing was promised


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file that --plan wrote, or from a report of `ranks`.

    Raise UsageError if the file is missing or is not a plan.
    """
    return read_record(
        Plan, path, "not a plan", "Create a plan with: attnlens ranks MODEL --budget loss:1% --plan FILE"
    )
