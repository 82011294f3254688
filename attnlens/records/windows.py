"""What each window read: the values that standard errors and intervals rest on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Windows:
    """Values of every window, unit by unit: heads (`inspect`), or kernels and stages (`swap-kernel`)."""

    windows: Sequence[tuple[str, int]]
    """The name of each window's text, and its number there; in the order of the sequences."""
    units: Sequence[Mapping[str, str | int]]
    """What is measured in each window, as columns: `layer`, `head`, or `kernel`, `stage`."""
    values: Mapping[str, Float[Tensor, "windows units"]]
    """By measure; NaN where there is none."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Windows) and all(one == two for one, two in zip_longest(self.rows(), other.rows()))

    def rows(self) -> Iterator[dict[str, str | int | float]]:
        """A row a window and unit: text, window, the unit's columns, then the measures that have a value."""
        read = {name: part.tolist() for name, part in self.values.items()}
        for place, (text, number) in enumerate(self.windows):
            for column, unit in enumerate(self.units):
                found = {name: part[place][column] for name, part in read.items()}
                yield {
                    "text": text,
                    "window": number,
                    **unit,
                    **{name: value for name, value in found.items() if value == value},
                }
