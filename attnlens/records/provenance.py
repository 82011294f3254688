"""What does a result come from? The program, the model with its files, what was asked for and what was fed."""

from __future__ import annotations

from typing import Literal

from attnlens.records.measures import Count, Record


class Tool(Record):
    """What wrote the report."""

    name: str = "attnlens"
    """The program."""
    version: str
    """Its version."""


class File(Record):
    """A file that went into the result."""

    name: str
    """Its name, without the folder."""
    sha256: str
    """The SHA-256 of its content, in hex."""


class Conventions(Record):
    """How the model's attention is put together, as far as it changes what the measures mean."""

    position: Literal["absolute", "rotary", "bias"]
    """How positions enter the scores: through the inputs if at all, as a rotation, or as an added bias."""
    qk_norm: bool
    """Whether queries and keys are normalised per token (the per-token scalar is then dropped from weights.*)."""
    bias: Literal["excluded", "none"]
    """Whether query/key biases exist; they are excluded from weights.* and included in tokens.*."""
    scale: Literal["included"] = "included"
    """weights.* include the scale as the model applies it."""
    notes: list[str] = []
    """Facts that a reader of the numbers must know, one sentence each."""


class ModelInfo(Record):
    """Which model was read."""

    id: str
    """As given: hub id, folder, file or `demo`."""
    revision: str | None = None
    """Commit of a hub model."""
    architecture: str
    """The transformers class."""
    parameters: Count
    """How many parameters it has."""
    files: list[File] = []
    """The weight files read."""
    conventions: Conventions | None = None
    """How its attention is put together."""


class Text(Record):
    """Which text was fed."""

    name: str
    """File name, `stdin`, `built-in sample` or `random pixels`; several are joined by +."""
    sha256: str
    """SHA-256 of what was fed."""


class Settings(Record):
    """What was asked for, and what was fed."""

    seed: int = 0
    """Seed of everything random."""
    device: str = "cpu"
    """Device of the forward passes."""
    dtype: str = "float32"
    """Type of the model's weights; measures are computed in float64."""
    source: Literal["weights", "tokens", "both"] = "both"
    """Which sources were analysed."""
    analyzers: list[str] = []
    """Which analyzers ran."""
    text: Text | None = None
    """The text, where one was fed."""
    noise: Text | None = None
    """The random pixels or sound, where the model reads no text."""
    calibration: Text | None = None
    """The text from which parameters were fitted or weights healed; it is no part of what was evaluated."""
    sequences: Count | None = None
    """How many windows, lines, images or sounds were fed (fewer than asked for, where the text ended or the run was
    interrupted); None where none were."""
    tokens: Count | None = None
    """Tokens of a window; the most that a line may have (`pack` false); those that the attention saw of an image."""
    pack: bool | None = None
    """Whether running text was cut into windows (else: one line, one sequence); None where no text was fed."""
    layers: list[Count] | None = None
    """Which layers were asked for; None means all."""
    heads: list[Count] | None = None
    """Which heads were asked for; None means all."""
    select: str | None = None
    """Which tokens a query counts as selecting, `argmax` or `top-p:0.9`; None where selection was not looked at."""

    @property
    def fed(self) -> str:
        """What went through the model, in how many pieces of which length; empty where nothing did."""
        count = self.sequences or 0
        plural = "" if count == 1 else "s"
        if self.noise is not None and self.text is None:
            kind = "image" if "pixels" in self.noise.name else "recording"
            return f"{self.noise.name}, {count} {kind}{plural} of {self.tokens} tokens each"
        if self.text is None:
            return ""
        if self.pack is False:
            return f"{self.text.name}, {count} line{plural} of at most {self.tokens} tokens"
        return f"{self.text.name}, {count} × {self.tokens} tokens"
