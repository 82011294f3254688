"""Forms of latents: how many key heads share one, whether keys are rotated, and what pairs are weighted by."""

from __future__ import annotations

from dataclasses import replace

from attnlens import hooks, texts
from attnlens.kernels import Kernel
from attnlens.kernels.lowrank import AFTER, ALL, BEFORE, OUTPUT
from attnlens.models import Loaded
from attnlens.records import Site
from attnlens.run.swap.ranks.preparation import turns

CHOICES = ("group", "rotation", "metric")
"""The parameters of the kernel `rank` that make its form."""


def possible_forms(loaded: Loaded, swaps: hooks.Swaps) -> list[Kernel]:
    """Every form there is at these sites, that of the kernel first.

    Key heads share a latent where there are several, and keys are taken before their rotation where that can be undone.
    """
    named = next(iter(swaps.values())).kernel
    groups = [1, ALL] if _several(loaded, list(swaps)) else [1]
    undone = not any(isinstance(turn, str) for turn in turns(loaded, list(swaps)).values())
    return [_with(named, group=group, rotation=r) for r in ([AFTER, BEFORE] if undone else [AFTER]) for group in groups]


def by_output(form: Kernel) -> Kernel:
    """The same form with pairs weighted by what they do to the output."""
    return _with(form, metric=OUTPUT)


def form_name(form: Kernel) -> str:
    """`group=all,rotation=before,metric=attention`: as it is typed behind `rank:`."""
    words = {p.name: {number: word for word, number in p.words} for p in form.info.parameters}
    values = {name: form.parameters[name] for name in CHOICES}
    return ",".join(f"{name}={words[name].get(value, f'{value:g}')}" for name, value in values.items())


def _with(kernel: Kernel, **parameters: float) -> Kernel:
    return replace(kernel, parameters={**kernel.parameters, **parameters})


def _several(loaded: Loaded, sites: list[Site]) -> bool:
    """Whether some of these sites has several key heads."""
    inputs = texts.placeholder(loaded, 2, 0).batches[0].inputs
    return any(found.call.key.shape[1] > 1 for found in hooks.survey(loaded.model, inputs) if found.site in sites)
