"""Values that options choose from, each defined once; imports nothing, so that every module can use them."""

from typing import Literal, get_args

Kind = Literal["inspection", "swap", "comparison", "doctor", "experiments", "studies"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # Kinds of reports; a report's body is in the field of that name
Sources = Literal["weights", "tokens", "both"]  # Source that a run reads
Placement = Literal["spread", "first", "random"]  # Position of the windows in a text: evenly spread, first, or drawn
Intervals = Literal["windows", "texts"]  # Population of errors and intervals: windows of these texts, or similar texts
Part = Literal["encoder", "decoder", "cross", "vision", "audio", "text"]
"""Part of a model that an attention computation belongs to; several encoders are distinguished by their input."""
Sweep = Literal["heads", "layers"]  # Units that are swapped individually
Unit = Literal["loss", "ppl"]  # Quantity that a budget limits: the loss in nats, or its exponential, the perplexity
Route = Literal["auto", "eager", "fused"]  # Path that computes attention: the fastest exact one, row tiles, or fused
Convention = Literal["paper", "code"]  # Chen et al. 2023, Eq. 6 and section 4; or their code: means and squared Λ
Engine = Literal["local", "ray"]  # Where units are computed: processes on this machine, or nodes of a Ray cluster
Space = Literal["input", "projected"]  # Space in which a selection problem is posed
WHERE_POSED: dict[Space, str] = {"input": "on the module's inputs", "projected": "on queries and keys"}
"""The spaces in words; the queries and keys are those after rotation."""
ETA = 0.1  # η of the published code for language modelling; 0.01 for Long Range Arena
KERNEL, BUDGETED = "rbf", "rank"  # Default kernel of a swap, and the kernel whose ranks a budget chooses
SHOWN = "selection"  # Analyzer whose findings can be shown per head; a series of checkpoints runs it too
ATTENTION = "attention"  # Name under which the attention rows of many heads on one sequence can be shown
ControlRole = Literal["same size", "one key", "floor", "filter alone", "without filter", "far part, healed"]
"""Control of a swapped kernel: in a cache of its size (64 if unbounded), some first tokens and the nearest ones; the
key with the largest score; the mean of the values; branches of a filtered kernel or a hybrid: the filter with the
model's own kernel, and the kernel without the filter; the trained far part of a healed hybrid, applied to all keys."""
HealingUnit = Literal["steps", "tokens", "seconds"]  # Unit of a healing's length
HealingGoal = Literal["teacher", "text"]  # Training target: the original model's predictions, or the text's next tokens
HealingStage = Literal["transfer", "whole"]  # Compared outputs: each site's on the original's inputs, or whole models'
CLAIMS = "claims"  # Name that selects the papers' small experiments instead of a table
STUDIES = ("kernels", "positions", "order", "values", "dimension", "primal")  # Tables that a study trains, in order
KERNEL_TRANSFORMER = "attnlens_kernel_transformer"  # Model type of the models that `reproduce` saves
CHANGE = "change."  # Prefix of a measure's name in a comparison: the change of that measure
RELATIVE, FDR = 0.05, 0.05  # Defaults of `check`: relative tolerance of a head's value, and false-discovery rate
