"""Names of an experiment's figures and curves in words."""

from __future__ import annotations

import re

from attnlens.wording import clean

SIZE = re.compile("([nTd])([0-9]+)")
"""A part of a figure's name that tells a size, as in `n5_T10_d9`."""
PROPER = (
    (re.compile(r"\bW mm\b"), "W_mm"),
    (re.compile(r"\bhalf square\b"), "½‖p‖²"),
    (re.compile(r"\bfrobenius\b"), "Frobenius"),
    (re.compile(r"\bsvm\b"), "SVM"),
    (re.compile(r"^nuclear least$"), "nuclear, least mean"),
    (re.compile(r"^nuclear most$"), "nuclear, largest mean"),
    (re.compile(r"^beyond bound$"), "largest rank − min(n, d)"),
    (re.compile(r"(?<!,) longer$"), ", longer"),
    (re.compile(r"^rank s error$"), "rank-s error"),
    (re.compile(r"^J perturbed$"), "J perturbed, the control"),
    (re.compile(r"^(running cosine|cosine|attention|loss) (?=\w)"), r"\1, "),
    (re.compile(r", (first|middle|last)$"), r", \1 third"),
    (re.compile(r" minus "), " − "),
    (re.compile(r", holds$"), ", claim holds"),
    (re.compile(r"^norm(?=, from |: from )"), "‖W‖ / ‖W_mm‖"),
)
"""How the field writes what an identifier can't."""
CORRELATION, COMPLEMENT = "correlation", "1 − correlation"
QUANTITIES = (
    (re.compile(r"^multi-token: (svm equivalent|W mm|single token)$"), COMPLEMENT),
    (re.compile(r"^rank: (nuclear|frobenius)$"), "rank"),
    (re.compile(r"^feasibility: n=[0-9]+, T=[0-9]+$"), "share separable"),
    (re.compile(r": all best tokens selected$"), "share of trials"),
    (re.compile(r": selection kept(, from .*|: from .*)?$"), "share of queries"),
    (re.compile(r"^decay by (depth|training): "), "share of Σσ"),
    (re.compile(r": norm([,:] from .*)?$"), "‖W‖ / ‖W_mm‖"),
    (re.compile(r": KL\b"), "KL, nats"),
    (re.compile(r"\bfinite part$"), "distance"),
    (re.compile(r": correlation([,:] from .*)?$"), CORRELATION),
    (re.compile(r"\bto (the graph SVM|[Ff]robenius|nuclear)(, longer)?$"), CORRELATION),
)
"""What stands for an experiment's name and its curve's → the quantity that the curve shows."""


def worded(name: str) -> str:
    """A figure's or a curve's name as words: `W_mm_d4` becomes `W_mm, d = 4`, and ‖W‖_F stays."""
    sizes: list[str] = []
    words = clean(name)
    if name.isidentifier() and name.isascii():
        parts = name.split("_")
        sizes = [f"{found[1]} = {found[2]}" for found in map(SIZE.fullmatch, parts) if found]
        words = " ".join(part for part in parts if not SIZE.fullmatch(part))
    for written, proper in PROPER:
        words = written.sub(proper, words)
    return ", ".join(filter(None, [words.strip(), *sizes]))


def setting(name: str, value: object) -> str:
    """A setting in words: `lr 0.1`, `d 2 4 10`, `accepted, d = 4: 0.2`."""
    words = worded(name)
    return f"{words}{':' * (' = ' in words)} {_value(value)}"


def quantity_of(experiment: str, curve: str) -> str:
    """What a curve of an experiment shows, with its unit; empty where that is not known."""
    both = f"{clean(experiment)}: {clean(curve)}"
    return next((quantity for name, quantity in QUANTITIES if name.search(both)), "")


def bounded(quantity: str) -> bool:
    """Whether the quantity ends at 1 by its nature, so that a linear axis shows it whole."""
    return quantity == CORRELATION or quantity.startswith("share ")


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
