"""How the figures, curves and pictures of the project's own experiments are written."""

from __future__ import annotations

from attnlens.records import Experiment
from attnlens.report.pictures.experiments import groups
from attnlens.report.sections.experiments import format_label

SIZES = [*((5, 5, d) for d in (1, 2, 3, 4, 5)), *((10, 5, d) for d in (1, 2, 3, 4, 5, 10))]
SIZES += [(5, 10, d) for d in (1, 2, 3, 4, 5, 9)]
WAYS = ("canonical", "primal", "difference")
THIRDS = ("first third", "middle third", "last third")
STARTS = ("from zero", "from the head")
NEXT_TOKEN = ("acyclic to SVM", "cyclic to SVM", "cyclic finite distance")
IDENTITIES = ("eigen residual", "primal − dual", "Λe − h", "J", "Σe² − σ²", "rank-s error")
FIGURES = {
    "local convergence": [
        f"{way} {what}" for way in ("W", "KQ") for what in ("to Frobenius", "to nuclear", "largest weight")
    ],
    "global selection": ["d = 2", "d = 4", "d = 10"],
    "feasibility": [
        *(f"n = {n}, T = {T}, d = {d}" for n, T, d in SIZES),
        *(f"d = max(n, T − 1), {size}" for size in ("n = 5, T = 5", "n = 10, T = 5", "n = 5, T = 10")),
    ],
    "rank": [
        *("nuclear, d = 6", "Frobenius, d = 6", "nuclear, d = 10", "Frobenius, d = 10"),
        *("nuclear, smallest mean", "nuclear, largest mean", "largest rank − min(n, d)"),
    ],
    "multi-token": [f"{what}, d = {d}" for d in (4, 6) for what in ("SVM equivalent", "W_mm", "single token")],
    "next-token": [*NEXT_TOKEN, "acyclic label weight", "cyclic component weight"],
    "golden instances": [
        *(f"prompt {letter} ½‖p‖²" for letter in "abcd"),
        *("vis1 Frobenius", "vis1 nuclear", "vis1 rank", "vis2 Frobenius", "vis2 nuclear"),
        *("local 0 Frobenius", "local 0 nuclear", "local 1 Frobenius", "local 1 nuclear"),
    ],
    "binary kernel by width": [
        *(f"{what}, m = {m}" for what in ("two networks", "one network", "best rank") for m in (2, 4, 8, 16, 32)),
        *("floor of one network", "two networks / best rank, minimum", "two networks / floor, maximum"),
        "one network (control) / floor, minimum",
    ],
    "binary kernel by samples": [
        *(f"two networks, n = {n}" for n in (8, 16, 32, 64)),
        *("floor of one network", "two networks / floor, maximum"),
    ],
    "KSVD identities": [*IDENTITIES, "J perturbed (control)"],
    "decay by depth": [
        *(f"{name}, {what}" for name in ("attention", "cosine") for what in (*THIRDS, "last − first")),
        *("attention, claim holds", "cosine, claim holds"),
    ],
    "decay by training": [
        *(f"{name}, {way}" for name in ("loss", "attention", "cosine", "running cosine") for way in WAYS[:2]),
        *(f"{name}, difference" for name in ("loss", "attention", "cosine", "running cosine")),
        *(f"{name}, claim holds" for name in ("attention", "cosine", "running cosine")),
    ],
    "head 3.2": [
        *("efficiency", "gap"),
        *(f"{what}, {start}" for start in STARTS for what in ("correlation", "selection kept", "‖W‖ / ‖W of the SVM‖")),
        "correlation of the head",
    ],
    "head 3.2, hardening": ["KL, the head, c = 1", "KL, its SVM at the same norm, c = 1"],
}
"""Experiment → its figures as they are written, in their order."""
PICTURES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "local convergence": {"": ("correlation", ("W to Frobenius", "W to nuclear", "KQ to Frobenius", "KQ to nuclear"))},
    "global selection": {"": ("share of trials", ("all best tokens selected",))},
    "feasibility": {"": ("share separable", ("n=5, T=5", "n=10, T=5", "n=5, T=10"))},
    "rank": {"": ("rank", ("nuclear", "Frobenius"))},
    "multi-token": {"": ("1 − correlation", ("SVM equivalent", "W_mm", "single token"))},
    "next-token": {
        "": ("correlation", ("acyclic, to the graph SVM", "cyclic, to the graph SVM")),
        "cyclic, finite part": ("distance", ("cyclic, finite part",)),
    },
    "binary kernel by width": {
        "": ("relative L2 error", ("two networks", "one network", "best rank", "floor of one network"))
    },
    "binary kernel by samples": {"": ("relative L2 error", ("two networks", "floor of one network"))},
    "decay by depth": dict.fromkeys(("attention", "cosine"), ("share of Σσ", THIRDS)),
    "decay by training": dict.fromkeys(("attention", "cosine", "running cosine"), ("share of Σσ", WAYS[:2])),
    "head 3.2": {
        "correlation": ("correlation", STARTS),
        "selection kept": ("share of queries", STARTS),
        "norm": ("‖W‖ / ‖W of the SVM‖", STARTS),
    },
    "head 3.2, hardening": {"": ("KL of hard selection, nats", ("KL, the head", "KL, its SVM at the same norm"))},
}
"""Experiment → its pictures by title: the quantity beside the axis, and the names of the lines."""
LINEAR = {"correlation", "share of trials", "share separable", "share of queries", "share of Σσ"}
"""Quantities that end at 1."""


def assert_in_words(experiment: Experiment) -> None:
    """Every figure, picture, axis and line is written as it is listed here."""
    assert [format_label(experiment, name) for name in experiment.final] == FIGURES[experiment.name]
    pictures, expected = groups(experiment), PICTURES.get(experiment.name, {})
    assert pictures.keys() == expected.keys()
    for title, curves in pictures.items():
        quantity, lines = expected[title]
        assert {curve.quantity for curve in curves.values()} == {quantity}
        assert tuple(curve.label or format_label(experiment, name) for name, curve in curves.items()) == lines
    assert all(curve.bounded == (curve.quantity in LINEAR) for curve in experiment.curves.values())
