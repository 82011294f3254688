"""`Lens`: a model that is loaded once for several analyses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnlens.choices import KERNEL
from attnlens.errors import UsageError
from attnlens.lab.ranks.pipeline import find_ranks
from attnlens.models import loading
from attnlens.records import QueryKey
from attnlens.report.report import Report
from attnlens.runs.capture import capture
from attnlens.runs.compare.pipeline import compare
from attnlens.runs.feeding import require_model
from attnlens.runs.inspect.pipeline import inspect
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.wording import big, clean

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Lens:
    """A model that is loaded once for several analyses.

    `model` is a hub id, folder, file or `demo`, loaded by `load` with `load_options`; a result of `load`; or a
    transformers model in memory with its `tokenizer`. Raises the errors of `load`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | loading.Loaded | PreTrainedModel = "demo",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **load_options: Any,
    ) -> None:
        if isinstance(model, str | os.PathLike):
            model = loading.load(model, **load_options)
        self.loaded = require_model(model, tokenizer)
        self._report: Report | None = None  # value of `report`; None before the first `inspect`

    def inspect(self, **options: object) -> Report:
        """Measure each head; `options` are those of `attnlens.inspect`."""
        report = inspect(self.loaded, **options)
        if not options or self._report is None:
            self._report = report
        return report

    @property
    def report(self) -> Report:
        """Report of the last `inspect` call without options, else of the first call, which is made if needed."""
        return self.inspect() if self._report is None else self._report

    @property
    def heads(self) -> pandas.DataFrame:
        """Table of `report` with one row per head. Raises UsageError if pandas is not installed."""
        return self.report.to_dataframe()

    def plot(self) -> Figure:
        """Draw the overview of `report` as a matplotlib Figure. Raise UsageError if there is nothing to draw."""
        return self.report.plot()

    def swap(self, kernels: str | Sequence[str] = KERNEL, **options: object) -> Report:
        """Compare the model under other kernels with the original; `options` are those of `attnlens.swap_kernel`."""
        return swap_kernel(self.loaded, kernels, **options)

    def compare(self, other: str | os.PathLike[str] | Report | Lens | loading.Loaded, **options: object) -> Report:
        """Compare the heads of `other` with those of this model; `options` are those of `attnlens.compare`."""
        return compare(self.loaded, other.loaded if isinstance(other, Lens) else other, **options)

    def ranks(self, budget: str = "loss:1%", **options: object) -> Report:
        """Find each key head's smallest rank within a loss budget; `options` are those of `attnlens.find_ranks`."""
        return find_ranks(self.loaded, budget=budget, **options)

    def capture(self, text: str | Mapping[str, Tensor]) -> list[QueryKey]:
        """Return the queries and keys of every site for a text, or for a batch of the model's inputs.

        Raises UsageError for a text if the model has no tokenizer.
        """
        if not isinstance(text, str):
            return capture(self.loaded, text)
        if self.loaded.tokenizer is None:
            raise UsageError("The model has no tokenizer.", "Give a batch of the model's inputs instead of a text.")
        return capture(self.loaded, self.loaded.tokenizer(text, return_tensors="pt"))

    def __repr__(self) -> str:
        info = self.loaded.info
        return f"<Lens {clean(info.id)}: {info.architecture}, {big(info.parameters)} parameters>"

    def _repr_html_(self) -> str | None:
        """Return the findings of `report` as HTML; None (notebooks then show the repr) before the first `inspect`."""
        return None if self._report is None else self._report._repr_html_()
