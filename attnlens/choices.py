"""The words that options choose from, each set once; without any import, so that every room can name them."""

from typing import Literal

Sources = Literal["weights", "tokens", "both"]
"""What a run reads."""
Placement = Literal["spread", "first", "random"]
"""Where windows lie in each text: evenly spread over it, the first ones, or drawn at random."""
Intervals = Literal["windows", "texts"]
"""Over what errors and intervals are: the windows of the texts named, or texts like them."""
Part = Literal["encoder", "decoder", "cross", "vision", "audio", "text"]
"""The part of a model that an attention computation belongs to: where several towers encode, each by what it reads."""
Sweep = Literal["heads", "layers"]
"""What is swapped one by one."""
Unit = Literal["loss", "ppl"]
"""What a budget is a share of: the loss in nats, or its exponential, the perplexity."""
Route = Literal["auto", "eager", "fused"]
"""How attention is computed: by the fastest exact path there is; by row tiles; by a fused path or not at all."""
Convention = Literal["paper", "code"]
"""paper: Chen et al. 2023, Eq. 6 and section 4. code: their repository, which takes means and squares Λ."""
Engine = Literal["local", "ray"]
"""Where units of work are computed: in processes here, or on the nodes of a Ray cluster."""
Space = Literal["input", "projected"]
"""Where a selection problem is posed."""
WHERE_POSED: dict[Space, str] = {"input": "on the module's inputs", "projected": "on queries and keys"}
"""The same in words; the queries and keys are those after rotation."""
ETA = 0.1
"""η of the published code for language modelling; 0.01 for Long Range Arena."""
KERNEL, BUDGETED = "rbf", "rank"
"""The kernel that a swap takes where none is named, and the one whose ranks a budget chooses."""
SHOWN = "selection"
"""The analyzer whose findings can be shown head by head, and which a series of checkpoints runs too."""
ATTENTION = "attention"
"""What can be shown of many heads: their attention rows on one sequence."""
ControlRole = Literal["same size", "one key", "floor", "filter alone", "without filter", "far part, healed"]
"""What stands beside a swapped kernel: in a cache of its size some first tokens and the nearest ones; the key of the
largest score; the mean of the values; of a kernel behind a filter, the filter with the model's own kernel, and the
kernel without the filter; of a hybrid that was healed, what healing made of its far part, for all keys."""
HealingUnit = Literal["steps", "tokens", "seconds"]
"""What the length of a healing is counted in."""
HealingGoal = Literal["teacher", "text"]
"""What a healing learns: the original model's predictions, or the next tokens of the text."""
HealingStage = Literal["transfer", "whole"]
"""What a healing compares: each site's output with its own on the original's inputs, or the whole models' outputs."""
STUDIES = ("kernels", "positions", "order", "values", "dimension", "primal")
"""The papers' tables that a study trains again, in this order where all are asked for."""
KERNEL_TRANSFORMER = "attnlens_kernel_transformer"
"""The model type of what `study` saves."""
CHANGE = "change."
"""Prefix of a measure's name in a comparison: the change of that measure."""
RELATIVE, FDR = 0.05, 0.05
"""Defaults of `check`: how far a head may be from its baseline as a share of it, and the false discovery rate."""
