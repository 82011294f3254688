"""Allowed values of options. This module imports no other module of attnlens, so that any of them can import it."""

from typing import Literal, get_args

Kind = Literal["inspection", "swap", "comparison", "doctor", "experiments", "studies"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # Kinds of reports; the field named after the kind contains the report's body
Sources = Literal["weights", "tokens", "both"]  # Subject of an analysis: weights, tokens of a text, or both
Placement = Literal["spread", "first", "random"]  # Windows: evenly spaced, at the beginning, or random
Intervals = Literal["windows", "texts"]  # Population that intervals describe: windows of these texts, or similar texts
Part = Literal["encoder", "decoder", "cross", "vision", "audio", "text"]
"""Part of a model that an attention computation belongs to; several encoders are distinguished by their input."""
PARTS: tuple[Part, ...] = get_args(Part)  # Order of parts, which keeps the layers of one part together
Sweep = Literal["heads", "layers"]  # Units that a sweep swaps one at a time
Unit = Literal["loss", "ppl"]  # Quantity that a budget limits: the loss in nats, or its exponential, the perplexity
Route = Literal["auto", "eager", "fused"]  # Implementation of attention: the fastest exact one, row tiles, or fused
Convention = Literal["paper", "code"]  # KSVD objective: as in Chen et al. 2023 (sums), or their code (means, squared Λ)
Engine = Literal["local", "ray"]  # Where units are computed: processes on this machine, or nodes of a Ray cluster
Space = Literal["input", "projected"]  # Space in which a selection problem is posed
WHERE_POSED: dict[Space, str] = {"input": "on the module's inputs", "projected": "on queries and keys"}
"""Space of a selection problem → the space in words. Queries and keys are those after rotation (RoPE)."""
ETA = 0.1  # Weight η of the KSVD regulariser in the paper's code for language modelling (0.01 for Long Range Arena)
WINDOWS, LENGTH = 32, 128  # Defaults: number of windows, and tokens per window (fewer if the model allows fewer)
KERNEL, BUDGETED = "rbf", "rank"  # Default kernel of a swap, and the kernel that `ranks` uses
SHOWN = "selection"  # Analyzer that --show prints for a head; a series of checkpoints also runs this analyzer
ATTENTION = "attention"  # Value of --show that draws the attention of many heads on one sequence
ControlRole = Literal["same size", "one key", "floor", "filter alone", "without filter", "far part, healed"]
"""Simple alternative to a swapped kernel. `same size`: attend to as many of the first and nearest tokens as the kernel
caches (64 if unbounded); `one key`: attend to the key with the largest score; `floor`: attend to all keys equally;
`filter alone`: apply the kernel's filter to the model's kernel; `without filter`: omit the filter; `far part, healed`:
apply a hybrid kernel's trained part for distant keys to all keys."""
HealingUnit = Literal["steps", "tokens", "seconds"]  # Unit in which the length of training is given
HealingGoal = Literal["teacher", "text"]  # Training target: the original model's predictions, or the text's tokens
HealingStage = Literal["transfer", "whole"]  # Train each site on the original model's inputs, or the whole model
BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""transformers' attention implementations that `doctor` compares."""
MASKS = ("causal", "bidirectional", "padding-left", "padding-right", "packed", "window", "prefix", "cache")
"""Properties of attention masks that `doctor` tests."""
CLAIMS = "claims"  # Name that selects the papers' small experiments instead of a table
STUDIES = ("kernels", "positions", "order", "values", "dimension", "primal")  # Tables that `reproduce all` trains
KERNEL_TRANSFORMER = "attnlens_kernel_transformer"  # Model type of the models that `reproduce` saves
CHANGE = "change."  # Prefix of the name of a measure's change between two models: `change.tokens.entropy`
RELATIVE, FDR = 0.05, 0.05  # Defaults of `check`: relative tolerance of a head's value, and false-discovery rate
