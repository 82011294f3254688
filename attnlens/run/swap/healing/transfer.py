"""Attention transfer: each site's output under its new kernel against its own, on the original model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlens import hooks
from attnlens.records import Call, Site
from attnlens.run.swap.healing.healer import Healer

SMALLEST = 1e-30
"""‖own‖² below which a site's output counts as this: a site that gives nothing has no relative error."""


class _Seen(Exception):  # noqa: N818  # no error: it ends a pass whose rest nobody needs
    """All attention modules that are trained have run."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of an attention module in the original model."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def transfer(healer: Healer, inputs: Mapping[str, Tensor], weight: float = 1.0) -> float:
    """Σ_sites ‖new − own‖² / ‖own‖² of softmax(…)V, mean over sequences; the leaves gain its gradient times `weight`.

    (Zhang et al. 2024, LoLCATs, Eq. 6, with relative errors, so that every site counts.) The original model runs once,
    up to the last site that is trained; each module then runs again by itself on what it was given there, so that
    nothing is derived through the model, and one module's graph is held at a time. Primal attention: + its regulariser.
    """
    total = 0.0
    with torch.enable_grad():
        for pairs, penalties in _pairs(healer, inputs):
            errors = [_relative_errors(*pair, inputs).mean() for pair in pairs]
            loss = sum(errors, torch.zeros((), device=errors[0].device)) + _penalty(healer, penalties)
            if loss.requires_grad:  # a site whose weights others share may have nothing to train
                (weight * loss).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def transferred(healer: Healer, inputs: Mapping[str, Tensor]) -> Tensor:
    """The same sum for each sequence, without gradient or regulariser."""
    with torch.no_grad():
        each = [_relative_errors(*pair, inputs) for pairs, _ in _pairs(healer, inputs) for pair in pairs]
    alike = [found for found in each if len(found) == len(each[0])]
    return torch.stack(alike).double().sum(0).cpu()


def _pairs(healer: Healer, inputs: Mapping[str, Tensor]) -> Iterator[tuple[list[tuple[Tensor, Tensor]], list[Tensor]]]:
    """Module by module: what its sites answer and what they answered in the original model, and its regularisers."""
    new, penalties = dict[Site, Tensor](), list[Tensor]()
    paths = {healer.loaded.model.get_submodule(site.path): site.path for site in healer.swaps}
    calls, own = _passed(healer, inputs, paths)
    with _students(healer, new, penalties):
        for passed in calls:
            local = _local(healer, paths[passed.module])
            torch.func.functional_call(passed.module, local, passed.args, passed.kwargs)
            yield [(found, own[site]) for site, found in new.items()], penalties
            new.clear()
            penalties.clear()


def _passed(
    healer: Healer, inputs: Mapping[str, Tensor], paths: Mapping[nn.Module, str]
) -> tuple[list[ModuleCall], dict[Site, Tensor]]:
    """The calls of these modules in the original model, in their order, and what their sites answer."""
    calls, own = list[ModuleCall](), dict[Site, Tensor]()
    expected = sum(site.path in paths.values() for site in healer.sites)

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModuleCall(module, args, kwargs))

    def answered(site: Site, found: Tensor) -> None:
        if site.path in paths.values():
            own[site] = found
        if len(own) == expected:
            raise _Seen

    handles = [module.register_forward_pre_hook(entered, with_kwargs=True) for module in paths]
    try:
        with torch.no_grad(), hooks.watch(healer.loaded.model, healer.sites, lambda _site, _call: None, answered):
            hooks.forward(healer.loaded.model, inputs)
    except _Seen:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return calls, own


@contextmanager
def _students(healer: Healer, new: dict[Site, Tensor], penalties: list[Tensor]) -> Iterator[None]:
    """Inside the block modules that are run alone have the new kernels; their answers and regularisers are gathered."""

    def visit(site: Site, call: Call) -> None:
        if healer.eta:
            penalties.append(healer.regulariser(call, swaps[site]))

    swaps, store = healer.healed_swaps(), new.__setitem__
    with hooks.replace(healer.loaded.model, healer.sites, swaps, healer.path, visit=visit, answered=store):
        yield


def _local(healer: Healer, path: str) -> dict[str, Tensor]:
    """The trained weights of a module under the names that it knows them by."""
    begin = f"{path}."
    return {name.removeprefix(begin): part.value for name, part in healer.weights.items() if name.startswith(begin)}


def _penalty(healer: Healer, penalties: list[Tensor]) -> Tensor | float:
    found = healer.penalty(penalties)
    return found if healer.convention == "paper" else found / len(healer.swaps)


def _relative_errors(new: Tensor, own: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Of each sequence ‖new − own‖² / ‖own‖² over real tokens, whatever else is in its batch."""
    real = hooks.real_tokens(own, inputs)
    missed, whole = ((part.float().square().flatten(2).sum(-1) * real).sum(1) for part in (new - own, own))
    return missed / whole.clamp_min(SMALLEST)
