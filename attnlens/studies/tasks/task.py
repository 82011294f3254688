"""A batch of examples, and what a task is: where examples come from, and how a model's answers are judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

TaskForm: TypeAlias = Literal["language", "translation", "classification"]
"""What a model is to do: predict the next token, write a sentence for a sentence, or name a class."""
Split: TypeAlias = Literal["validation", "test"]
"""What a model is judged on: while settings are chosen, or once at the end."""
NOTHING = -100
"""The target where nothing is to be predicted, which torch's cross-entropy leaves out."""


@dataclass(frozen=True, eq=False)
class Examples:
    """One batch: what a model reads and what it is to predict."""

    inputs: Tensor
    """Ids (batch, tokens), int64; or a series (batch, steps, channels), float32."""
    kept: Tensor | None
    """(batch, tokens), bool, False for padding, which stands on the right; None: there is none."""
    targets: Tensor
    """Ids to predict (batch, tokens), NOTHING where nothing is; or class numbers (batch,)."""
    given: Tensor | None = None
    """What the decoder of an encoder-decoder reads: ids (batch, target tokens), the first begins a sentence."""

    def single(self, row: int) -> Examples:
        """One example without its padding, as a batch of one."""
        size = None if self.kept is None else int(self.kept[row].sum())
        meant = None if self.given is None else int((self.targets[row] != NOTHING).sum())
        return Examples(
            self.inputs[row : row + 1, :size],
            None,
            self.targets[row : row + 1] if meant is None else self.targets[row : row + 1, :meant],
            None if self.given is None else self.given[row : row + 1, :meant],
        )

    def to(self, device: torch.device | str) -> Examples:
        """The same on that device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            kept=None if self.kept is None else self.kept.to(device),
            targets=self.targets.to(device),
            given=None if self.given is None else self.given.to(device),
        )


class StudyTask(Protocol):
    """Examples to train on, examples to be judged on, and how; frozen dataclasses implement it."""

    @property
    def name(self) -> str:
        """What the task is called in tables."""

    @property
    def form(self) -> TaskForm:
        """What a model is to do."""

    @property
    def vocabulary(self) -> int:
        """How many ids the inputs have; 0 for a series."""

    @property
    def outputs(self) -> int:
        """How many ids a target may have, or how many classes there are; in a language, as many as inputs."""

    @property
    def channels(self) -> int:
        """How many numbers a step of a series has; 0 for ids."""

    @property
    def length(self) -> int:
        """The most tokens or steps of a sequence, of either side."""

    @property
    def metric(self) -> str:
        """The name in `score`'s result by which models are compared: perplexity, BLEU or accuracy."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a better model has more of it."""

    @property
    def files(self) -> Mapping[str, str]:
        """SHA-256 of each file's content by its name; empty for built-in data."""

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Batches of `size` examples (all, where there are fewer) without end, shuffled: a function of `seed` alone."""

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """The same batches at each call, of at most `size` examples."""


class LanguageTask(StudyTask, Protocol):
    """A task of next tokens."""

    @property
    def widths(self) -> Float[Tensor, " vocabulary"] | None:
        """How many bytes of text each id stands for; None where ids are no text."""


class SpecialIds(Protocol):
    """Which ids have a meaning of their own."""

    @property
    def padding(self) -> int:
        """The id that stands for nothing."""

    @property
    def begin(self) -> int:
        """The id that a decoder reads first."""

    @property
    def end(self) -> int:
        """The id that a sentence ends with."""


class TranslationTask(StudyTask, SpecialIds, Protocol):
    """A task of sentences for sentences, with padding, beginnings and ends of their own ids."""

    def written(self, ids: Sequence[int]) -> str:
        """The text of ids, without those that begin, end or pad."""
