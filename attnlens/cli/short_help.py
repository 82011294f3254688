"""Help that fits on one screen: for `attnlens` without arguments, and for each command with `-h`."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from inspect import Parameter
from typing import get_args

from typer.models import ArgumentInfo

GROUPS: dict[str, dict[str, str]] = {  # Commands by purpose, each with the question that it answers
    "Look": {
        "inspect": "What does each head compute, and which results exceed chance?",
        "compare": "What changed between two models, and in which heads?",
        "check": "Does a model pass rules and match a baseline? (for CI)",
        "doctor": "Does attnlens read the model correctly? Are backends and masks correct?",
    },
    "Change": {
        "swap-kernel": "How much worse does the model get with a different attention kernel?",
        "ranks": "How small can the keys be within a loss budget?",
        "heal": "How much of the loss added by a new kernel does training recover?",
    },
    "Papers": {
        "converge": "Does training make attention select the same tokens as a max-margin SVM?",
        "reproduce": "Can the papers' experiments and tables be reproduced?",
    },
    "Reference": {
        "report": "Show, draw or convert a saved report",
        "list": "List kernels, analyzers, measures or model types, or print the JSON Schema",
        "explain": "Explain one measure, kernel or term",
    },
}
OPTIONS: dict[str, str] = {  # Options that `-h` shows, in this order
    "inspect": "text windows length source analyzer layers heads head table json html figure",
    "compare": "text windows length source layers table json html figure fdr adapter dtype",
    "check": "rule rules baseline update_baseline relative fdr annotations junit json markdown text windows",
    "doctor": "backends masks text windows layers device dtype table json junit strict",
    "swap-kernel": "kernel sweep fit layers heads text windows calibration save json html figure",
    "ranks": "budget latents plan ranks generate calibration text windows save json html figure",
    "heal": "kernel train learn control save layers calibration text windows json html figure",
    "converge": "head checkpoints revisions experiment trials iterations seed json html figure table",
    "reproduce": "scale seeds text pairs series jobs work json html figure",
    "report": "table html figure csv markdown json",
    "list": "markdown",
    "explain": "markdown",
}
EXAMPLES: dict[str, tuple[str, ...]] = {
    "inspect": (
        "attnlens inspect",
        "attnlens inspect demo --source weights --html heads.html",
        "attnlens inspect demo --head 3.6 --analyzer selection --show selection",
    ),
    "compare": (
        "attnlens swap-kernel demo --kernel rbf --save rbf",
        "attnlens compare demo rbf --html changes.html",
        "attnlens compare before.json after.json",
    ),
    "check": (
        "attnlens check demo --rule 'tokens.entropy: min > 0.05'",
        "attnlens check report.json --baseline accepted.json --update-baseline",
        "attnlens check report.json --baseline accepted.json",
    ),
    "doctor": (
        "attnlens doctor",
        "attnlens doctor demo --backends eager,sdpa --masks causal,cache",
        "attnlens doctor demo --json -",
    ),
    "swap-kernel": (
        "attnlens swap-kernel demo --kernel rbf",
        "attnlens swap-kernel demo --kernel linear --kernel window:16 --windows 8",
        "attnlens swap-kernel demo --kernel rbf --sweep layers --windows 8",
    ),
    "ranks": (
        "attnlens ranks demo --budget loss:1%",
        "attnlens ranks demo --budget loss:1% --plan plan.json",
        "attnlens ranks demo --ranks plan.json --save smaller",
    ),
    "heal": (
        "attnlens heal demo --kernel rbf --train 20ktok",
        "attnlens heal demo --kernel rbf --train 20ktok --layers 3 --save healed",
        "attnlens heal demo --kernel linear --train 20ktok --learn text --control",
    ),
    "converge": (
        "attnlens converge --experiment local-convergence",
        "attnlens converge demo --head 3.6",
        "attnlens converge --checkpoints --head 3.6 --figure training.png",
    ),
    "reproduce": (
        "attnlens reproduce claims",
        "attnlens reproduce kernels --scale tiny",
        "attnlens reproduce dimension --scale tiny --figure dimension.pdf",
    ),
    "report": (
        "attnlens report report.json",
        "attnlens report report.json --html page.html",
        "attnlens report report.json --bare --figure weights.symmetry.pdf",
    ),
    "list": ("attnlens list", "attnlens list kernels", "attnlens list architectures gemma"),
    "explain": ("attnlens explain symmetry", "attnlens explain tokens.entropy", "attnlens explain rbf"),
}
VARIABLES = "Environment variables, such as ATTNLENS_WINDOWS=8, and the file attnlens.toml also set options."


def overview() -> str:
    """Return the help that `attnlens` without arguments prints: a question and an example for each command."""
    lines = ["attnlens analyses the attention of pretrained transformers as kernel machines."]
    for group, commands in GROUPS.items():
        lines += ["", group]
        for name, question in commands.items():
            own = next(at for at, example in enumerate(EXAMPLES[name]) if example.split()[1] == name)
            needed = EXAMPLES[name][: own + 1]  # an example of `compare` needs the model that the first example saves
            lines += [f"  {name:12} {question}", *(f"{'':15}{example}" for example in needed)]
    return "\n".join([*lines, "", "attnlens COMMAND -h shows the main options, attnlens COMMAND --help all of them."])


def short_help(name: str, parameters: Mapping[str, Parameter]) -> str:
    """Return the help of a command on one screen: usage, main options, examples."""
    arguments, rows = [], []
    for parameter in parameters.values():
        kind, declared, *_ = get_args(parameter.annotation) or (None, None)
        if isinstance(declared, ArgumentInfo):
            place = declared.metavar or parameter.name.upper()
            arguments.append(place if parameter.default is Parameter.empty else f"[{place}]")
    for option in OPTIONS[name].split():
        kind, declared = get_args(parameters[option].annotation)[:2]
        flags = (declared.default, *declared.param_decls)  # typer moves the default to the flags only later
        flag = next(flag for flag in flags if str(flag).startswith("--")).split("/")[0]
        value = "" if kind is bool else f" {declared.metavar or ('N' if int in (kind, *get_args(kind)) else 'NAME')}"
        rows.append((flag + value, declared.help))
    wide = min(30, max(len(left) for left, _ in rows))
    lines = [f"Usage: attnlens {name} {' '.join(arguments)} [options]".replace("  ", " "), ""]
    lines += [next(commands[name] for commands in GROUPS.values() if name in commands), ""]
    room = min(100, shutil.get_terminal_size().columns) - wide - 4
    for left, text in rows:
        first, *others = _describe_option(text, room)
        lines += [f"  {left:{wide}}  {first}", *(f"  {'':{wide}}  {other}" for other in others)]
    lines += ["", "Examples", *(f"  {example}" for example in EXAMPLES[name]), ""]
    return "\n".join([*lines, f"attnlens {name} --help shows all options."])


CLAUSE = re.compile(r"; |: | \(|, (?=(?:e\.g\.|in|or|and|as|such as) )")
"""Separators at which a sentence can be cut off."""


def _describe_option(text: str, width: int) -> list[str]:
    """Return the lines of a text's first sentence: cut after the last clause that fits on one line, else wrapped."""
    sentence = re.split(r"\.\s+(?=[A-Z[])", " ".join(text.replace("`", "").split()))[0].rstrip(".")
    if len(sentence) <= width:
        return [sentence]
    starts = [sentence[: match.start()] for match in CLAUSE.finditer(sentence) if match.start() <= width]
    whole = [start for start in starts if start.count("(") == start.count(")")]
    # a list after a colon must not end at the remark on its first member
    ends = [start for start in whole if ": " not in start or not sentence[len(start) :].startswith(" (")]
    return ends[-1:] or textwrap.wrap(sentence, width)
