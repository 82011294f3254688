"""The healing of one swap: training, a control trained equally long, and what decides whether a state is its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlens import hooks
from attnlens.errors import UsageError
from attnlens.kernels import OWN
from attnlens.models import Loaded
from attnlens.records import Healing, HealingControl, Site, Task
from attnlens.requests.healing import HealOptions
from attnlens.requests.swap import SwapOptions
from attnlens.run.outcomes.differences import Differences, mean_loss
from attnlens.run.swap.healing.course import STAGES
from attnlens.run.swap.healing.descent import heal
from attnlens.run.swap.healing.healer import Healer
from attnlens.run.swap.healing.state import HealingState
from attnlens.run.swap.resources import peak_of
from attnlens.runs.progress import Tell
from attnlens.runs.work import Store, key_of
from attnlens.statistics import paired_difference
from attnlens.texts import Batches
from attnlens.texts.targets import Fed

NO_PEAK = "this platform does not tell it"
DIVERGED = "it diverged"


@dataclass(frozen=True)
class Procedure:
    """The healing of one swap, as a run asks for it."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: hooks.Swaps
    """What is healed."""
    task: Task
    options: SwapOptions
    asked: HealOptions
    calibrated: Batches
    fed: Sequence[Fed]
    """What is evaluated."""
    seed: int
    teller: Callable[[str, int], Tell]
    parts: Store | None = None
    """Where the state is kept."""

    def run(self) -> tuple[Healing, Healer]:
        """The swap healed."""
        self._check_goal()
        return self._heal(self.swaps, "heal")

    def run_control(self) -> tuple[Healing, Healer] | None:
        """The original model trained on the same batches, equally long, all of it on the text; None if not asked for.

        Its attention has nothing to learn from itself: what the swap spends on attention transfer, the control spends
        on the text.
        """
        if not self.asked.control:
            return None
        own = {site: hooks.Replacement(OWN, swap.heads) for site, swap in self.swaps.items()}
        return self._heal(own, "control")

    def _heal(self, swaps: hooks.Swaps, name: str) -> tuple[Healing, Healer]:
        asked, options, control = self.asked, self.options, name == "control"
        healer = Healer(
            self.loaded,
            self.sites,
            swaps,
            self.task,
            options.path,
            None if control else options.eta,
            options.convention,
            goal=asked.goal,
            rank=asked.rank,
            seed=self.seed,
            recompute=asked.checkpointing,
        )
        state = None if self.parts is None else HealingState(self.parts, f"{name} {key_of(self._facts(swaps))}")
        found: list[Healing] = []
        tell = self.teller(name, int(asked.amount.number))
        evaluate = lambda: mean_loss(self.loaded.model, self.fed, self.task)  # noqa: E731  # one expression
        work = self.calibrated, asked, self.seed, evaluate, tell, state, STAGES[1:] if control else STAGES
        peak = peak_of(self.loaded.model, lambda: found.append(heal(healer, *work)))
        reasons = {} if peak is not None else {"peak_memory_bytes": NO_PEAK}
        return found[0].model_copy(update={"peak_memory_bytes": peak, "reasons": reasons}), healer

    def _check_goal(self) -> None:
        """Raise UsageError where there is no text to learn."""
        if self.asked.goal == "text" and (self.task in ("hidden", "classification") or self.calibrated.made_up):
            raise UsageError(
                "--heal-on text: this model predicts no token of a text.", "Leave it out: the original model teaches."
            )

    @staticmethod
    def _facts(swaps: hooks.Swaps) -> list[Any]:
        """Return what determines the numbers of a healing beside the model, texts and options of the run."""
        return [
            [site.name, swap.kernel.spelling, swap.heads, digest_of(dict(swap.kernel.fitted))]
            for site, swap in swaps.items()
        ]


def control_of(trained: Healing, control: Differences, healed: Differences, seed: int) -> HealingControl | None:
    """The control's record; None where one of the two models has no finite loss."""
    changed, own = control.outcome(seed, []), healed.outcome(seed, [])
    if changed.get("perplexity") is None or own.get("perplexity") is None:
        return None
    first, second = (torch.cat(one.after) for one in (control, healed))
    delta, low, high = paired_difference(first, second, healed.sampled, weights=torch.cat(healed.counts), seed=seed)
    return HealingControl(
        best=trained.best,
        tokens=trained.tokens or 0,
        learning_rate=trained.learning_rate,
        loss=changed["loss"],
        perplexity=changed["perplexity"],
        ratio=math.exp(delta),
        ratio_ci95=None if math.isnan(low) else (math.exp(low), math.exp(high)),
    )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names and numbers."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
