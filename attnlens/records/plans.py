"""Which rank does each head get within a loss budget? A Plan: the ranks, what was promised, measured and saved."""

from __future__ import annotations

from pathlib import Path

from attnlens.files import write_atomically
from attnlens.records.measures import Count, Number, Record, read_record
from attnlens.records.swaps import Pair
from attnlens.records.tensors import Part


class KeyRank(Record):
    """The rank of one key head, and of every query head that reads it."""

    site: str
    """The site's name."""
    layer: Count
    """Its running number."""
    part: Part
    """encoder, decoder or cross."""
    kv_head: Count
    """The key head."""
    heads: list[Count]
    """The query heads that read it; they share its basis, so that the cached key shrinks."""
    rank: Count
    """How many directions are kept; 0 where the head attends evenly."""
    head_dim: Count
    """Of how many."""


class Rise(Record):
    """How much a loss rises, as a share of itself: after / before − 1."""

    share: Number
    """0.01 is 1 %."""
    ci95: tuple[Number, Number] | None = None
    """95 % interval: percentile bootstrap over sequences, paired (Efron 1979)."""
    sequences: Count
    """Over how many sequences."""


class PlanStep(Record):
    """One of the nested plans that were measured on the way."""

    mean_rank: Number
    """Mean over query heads."""
    predicted: Number
    """The sum of the heads' sensitivities, as a share of the loss."""
    rise: Rise
    """What was measured, on calibration text kept apart from the fit."""


class Plan(Record):
    """The cheapest ranks found whose measured rise of the loss stays within the budget."""

    budget: Number
    """Largest rise of the loss, as a share of it: 0.01 is 1 %."""
    ranks: list[KeyRank]
    """Key head by key head, in the order of execution."""
    mean_rank: Number
    """Mean over query heads."""
    head_dim: Number
    """Mean over query heads of what the rank is of."""
    promised: Rise
    """On calibration text kept apart from the fit, by which the plan was chosen."""
    measured: Rise | None
    """On the evaluation text, which chose nothing; None where the model diverged there."""
    healed: Rise | None = None
    """The same after healing."""
    steps: list[PlanStep]
    """The nested plans that were measured, the largest ranks first."""
    tokens: Count
    """Length of a sequence for which FLOPs are counted."""
    parameters: Pair
    """Numbers that make the queries and keys of these heads: W_Q, W_K and biases, or those and the maps behind them."""
    flops_per_token: Pair
    """Floating-point operations for queries, keys and scores of these heads, mean over a sequence's tokens."""
    cache_bytes_per_token: Pair
    """What a key-value cache keeps of a token at these sites, keys and values."""
    keys_to_gain: Number | None = None
    """How many keys a query must see before operations fall: the maps behind a rotation cost some; None: from the first
    on, or where nothing is cut."""
    reasons: dict[str, str] = {}
    """Why a field is null, or no better, by its name."""
    text: str
    """The evaluation text, by name."""
    calibration: str
    """The calibration text, by name."""

    @property
    def kept(self) -> bool:
        """Whether the rise on the evaluation text stays within the budget."""
        return self.measured is not None and self.measured.share <= self.budget

    def to_json(self) -> str:
        """The plan as JSON text."""
        return self.model_dump_json(indent=1) + "\n"

    def write_json(self, path: str | Path) -> None:
        """Write the plan through a temporary file and a rename; raises OutputError where it can't be written."""
        write_atomically(Path(path), self.to_json().encode())


def read_plan(path: str | Path) -> Plan:
    """Read a plan from --plan; raises UsageError where the file is missing or is no plan."""
    return read_record(Plan, path, "no plan", "Give the path of a plan from --plan.")
