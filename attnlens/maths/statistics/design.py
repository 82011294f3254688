"""Sampling of windows from texts, and standard errors under this design; running means and linear CKA over batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    PerWindow = Float[Tensor, "*batch windows"]
    Draws = Float[Tensor, "draws units"]
    Samples = Float[Tensor, "draws windows"]

FEWEST_TEXTS = 5  # Fewest texts for intervals over texts: fewer texts do not show how texts differ


class Stream:
    """Running mean of each entry of tensors that arrive in batches and are not stored (Welford, Chan).

    `count_and_mean` reduces a batch and ignores its NaN. Curves can differ in length between batches; each step is
    averaged over the curves that reach it.
    """

    def __init__(self) -> None:
        self.count: Tensor = torch.zeros(())  # Number of values averaged in each entry
        self._mean: Tensor = torch.zeros(())
        self._started = False

    def merge(self, count: Float[Tensor, "*shape"], mean: Float[Tensor, "*shape"]) -> None:
        """Add a batch, given by the count and the mean of each entry."""
        if not self._started:
            self.count, self._mean, self._started = count, mean, True
            return
        count_before, count = _pad_to_same_length(self.count, count)
        mean_before, mean = _pad_to_same_length(self._mean, mean)
        self.count = count_before + count
        self._mean = mean_before + (mean - mean_before) * count / self.count.clamp(min=1)

    @property
    def mean(self) -> Tensor:
        """Mean of each entry; NaN if there were no values."""
        return torch.where(self.count > 0, self._mean, torch.nan)


def count_and_mean(values: Float[Tensor, "samples ..."]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return, entry by entry, the number of samples that are not NaN and their mean (0 if there are none)."""
    values = values.double()
    present = ~values.isnan()
    count = present.sum(0).double()
    return count, torch.where(present, values, 0.0).sum(0) / count.clamp(min=1)


def _pad_to_same_length(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the last axis of the shorter tensor with zeros to equal length; pad nothing if `first` is a scalar."""
    if first.dim() == 0 or first.shape == second.shape:
        return first, second
    steps = max(first.shape[-1], second.shape[-1])
    first, second = (torch.nn.functional.pad(part, (0, steps - part.shape[-1])) for part in (first, second))
    return first, second


class LinearCKA:
    """Linear CKA ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of two models' centred hidden states X and Y (Kornblith et al. 2019, Eq. 4).

    The products are summed over batches.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._products = [torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(3)]
        self._sums = [torch.zeros(width, dtype=torch.float64, device=device) for _ in range(2)]
        self._count = 0

    def add(self, x: Float[Tensor, "tokens d_model"], y: Float[Tensor, "tokens d_model"]) -> None:
        """Add a batch: the hidden states of the same tokens in both models."""
        for product, left, right in zip(self._products, (x, x, y), (y, x, y), strict=True):
            product += left.mT @ right
        for total, part in zip(self._sums, (x, y), strict=True):
            total += part.sum(0)
        self._count += len(x)

    @property
    def value(self) -> float | None:
        """CKA in [0, 1], which is 1 if Y is X rotated and scaled; None if all states of one model are equal."""
        x, y = self._sums
        pairs = ((x, y), (x, x), (y, y))
        cross, x_norm, y_norm = (
            float((product - torch.outer(left, right) / self._count).norm())
            for product, (left, right) in zip(self._products, pairs, strict=True)
        )
        return cross**2 / (x_norm * y_norm) if x_norm * y_norm > 0 else None


@dataclass(frozen=True)
class Design:
    """Sampling of windows from texts, and the population to which errors refer (Cochran 1977, chapters 5 and 9A).

    over="windows": the texts are strata, and errors refer to other windows of these texts. If a text has a single
    window, whose spread is unknown, all windows form one sample, and errors include differences between texts.
    over="texts": the texts are clusters, and errors refer to other texts of this kind.
    """

    texts: tuple[int, ...]  # index of each window's text
    over: Literal["windows", "texts"] = "windows"  # the sampled units

    @classmethod
    def of(cls, names: Sequence[object], over: Literal["windows", "texts"] | None = None) -> Design:
        """Build the design from the name of each window's text; by default, over="texts" for five or more texts."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        over = over or ("texts" if len(numbers) >= FEWEST_TEXTS else "windows")
        return cls(tuple(numbers[name] for name in names), over)

    @classmethod
    def plain(cls, count: int) -> Design:
        """Build the design of `count` windows of one text."""
        return cls((0,) * count)

    @property
    def count(self) -> int:
        """Number of windows."""
        return len(self.texts)

    @property
    def clustered(self) -> bool:
        """True if the sampled units are texts."""
        return self.over == "texts"

    @property
    def units(self) -> int:
        """Number of independent draws: the texts if texts were sampled, else the windows."""
        return len(set(self.texts)) if self.clustered else self.count

    @property
    def exchangeable(self) -> int:
        """Number of exchangeable draws: the texts if texts were sampled, else the windows of the smallest stratum."""
        return self.units if self.clustered else min(Counter(self.strata).values(), default=0)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of a variance: texts − 1 if texts were sampled, else windows − strata."""
        groups = len(set(self.strata))
        return groups - 1 if self.clustered else self.count - groups

    @cached_property
    def strata(self) -> tuple[int, ...]:
        """Index of each window's stratum or cluster."""
        has_single_window = 1 in Counter(self.texts).values()
        return (0,) * self.count if has_single_window and not self.clustered else self.texts

    @cached_property
    def members(self) -> Float[Tensor, "strata windows"]:
        """Indicator matrix: 1 if the window belongs to the stratum or cluster, else 0."""
        indicator: Tensor = torch.tensor(self.strata)[None] == torch.tensor(sorted(set(self.strata)))[:, None]
        return indicator.double()

    def select(self, windows: Sequence[int]) -> Design:
        """Return the design of the windows at these indices."""
        return Design(tuple(self.texts[window] for window in windows), self.over)

    def draws(self, count: int, seed: int = 0) -> Samples:
        """Return how often each window occurs in each of `count` bootstrap samples.

        A sample consists of texts if texts were sampled, else of windows drawn within strata.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.clustered:
            texts = len(self.members)
            picks = torch.randint(texts, (count, texts), generator=generator)
            return _count_picks(picks, texts) @ self.members
        drawn = torch.zeros(count, self.count, dtype=torch.float64)
        for text in self.members:
            (windows,) = text.nonzero(as_tuple=True)
            picks = torch.randint(len(windows), (count, len(windows)), generator=generator)
            drawn[:, windows] = _count_picks(picks, len(windows))
        return drawn

    @property
    def widening(self) -> Float[Tensor, " windows"]:
        """Factor √(n/(n − 1)) for each window, by which bootstrap deviations must be multiplied.

        n is the number of texts if texts were sampled, else the number of windows in the window's stratum.
        """
        sizes = Counter(self.strata)
        counts = [self.units if self.clustered else sizes[stratum] for stratum in self.strata]
        return torch.tensor([count / (count - 1) for count in counts], dtype=torch.float64).sqrt()

    def variance(self, residuals: PerWindow, times: PerWindow) -> Float[Tensor, "*batch"]:
        """Return the variance of Σ times · residuals; `times` counts each window's occurrences (0 if it has no value).

        Over windows it is Σ_t n_t/(n_t − 1) Σ_{i in t} (r_i − r̄_t)² for strata t of n_t windows; over T texts t it is
        T/(T − 1) Σ_t (Σ_{i in t} r_i)². Residuals are deviations from a mean, divided by the mean's denominator. NaN
        for fewer than two texts or, over windows, for fewer than two windows in all or exactly one window in a stratum.
        """
        sums = (times * residuals) @ self.members.mT
        if self.clustered:
            copies = (times[..., None, :] * self.members).amax(-1)
            total = copies.sum(-1)
            squares = (sums.square() / copies.clamp(min=1)).sum(-1)
            return torch.where(total > 1, squares * total / (total - 1).clamp(min=1), torch.nan)
        counts = times @ self.members.mT
        squares = (times * residuals.square()) @ self.members.mT
        spread = (squares - sums.square() / counts.clamp(min=1)).clamp(min=0)  # rounding can leave it below 0
        variance = (spread * counts / (counts - 1).clamp(min=1)).sum(-1)
        # the spread within a text is unknown from a single window
        return torch.where((counts == 1).any(-1) | (counts.sum(-1) < 2), torch.nan, variance)

    def weighted_means(
        self, values: Float[Tensor, "units windows"], size: Float[Tensor, " windows"], times: Samples
    ) -> tuple[Draws, Draws]:
        """Return the mean over tokens of every unit (row of `values`) in every sample, and its standard error.

        `values` are the windows' means, and `size` is each window's number of tokens. The standard error is √`variance`
        of the residuals size · (value − mean)/Σ times · size (Cochran 1977, ratio estimators). It is computed from
        matrix products, because the residuals of all draws, units and windows do not fit in memory.
        """
        drawn = times * size
        total = drawn.sum(-1, keepdim=True)
        mean = drawn @ values.mT / total
        if self.clustered:
            copies = (times[:, None] * self.members).amax(-1)
            count = copies.sum(-1, keepdim=True)
            sums = ((drawn * text) @ values.mT - mean * (drawn @ text)[:, None] for text in self.members)
            squares = sum(part.square() / copies[:, [text]].clamp(min=1) for text, part in enumerate(sums))
            variance = torch.where(count > 1, squares * count / (count - 1).clamp(min=1), torch.nan)
            return mean, variance.sqrt() / total
        variance = torch.zeros_like(mean)
        for stratum in self.members:
            in_stratum, squared, count = drawn * stratum, drawn * size * stratum, (times @ stratum)[:, None]
            sums = in_stratum @ values.mT - mean * in_stratum.sum(-1, keepdim=True)
            spread = squared @ values.square().mT - 2 * mean * (squared @ values.mT)
            spread = spread + mean.square() * squared.sum(-1, keepdim=True) - sums.square() / count.clamp(min=1)
            in_total = spread.clamp(min=0) * count / (count - 1).clamp(min=1)  # rounding can leave a spread below 0
            variance += torch.where(count == 1, torch.nan, in_total)
        return mean, torch.where(times.sum(-1, keepdim=True) < 2, torch.nan, variance.sqrt() / total)


def _count_picks(picks: Tensor, size: int) -> Float[Tensor, "draws size"]:
    """Count how often each number below `size` occurs in each row of `picks`."""
    counts, ones = torch.zeros(len(picks), size, dtype=torch.float64), torch.ones_like(picks, dtype=torch.float64)
    return counts.scatter_add_(1, picks, ones)
