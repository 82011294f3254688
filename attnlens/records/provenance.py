"""Records of the provenance of a result: program, model, options and input; converters for files of version 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Literal

from attnlens.choices import Intervals, Part, Placement, Sources
from attnlens.records.measures import Count, Number, Record
from attnlens.wording import format_count, model_name


class Tool(Record):
    """The program that wrote a report."""

    name: str = "attnlens"
    version: str


class File(Record):
    """Name and SHA-256 of a file."""

    name: str
    sha256: str


class FileInParts(Record):
    """A weight file from which individual tensors were read."""

    name: str
    bytes: Count
    header_sha256: str  # SHA-256 of the file's header: names, types, shapes and offsets of the tensors
    stamp: str = ""  # Version of the file: modification time, or the hub's identifier of the content


class Conventions(Record):
    """Properties of the model's attention that affect the meaning of the measures."""

    position: Literal["absolute", "rotary", "bias", "content–position", "unknown"]
    """Effect of positions on scores. absolute: none, or through the inputs; rotary: a rotation; bias: an added bias;
    content–position: products of contents and positions; unknown: the weights of a site can't be read."""
    qk_norm: bool  # True if queries and keys are normalised per token; weights.* omit each token's factor
    bias: Literal["excluded", "none"]  # excluded: biases exist; weights.* omit them, tokens.* include them
    scale: Literal["included"] = "included"  # weights.* include the model's scale of the scores
    notes: list[str] = []  # Facts that readers of the measures must know, one sentence each


class AdapterInfo(Record):
    """The adapter merged into the model."""

    id: str  # Hub id or folder, as the user typed it
    revision: str | None = None  # Commit of an adapter from the hub; None for a folder
    base: str | None = None  # Name of the base model in the adapter's configuration
    kind: str  # LoRA, rsLoRA, DoRA or rsDoRA
    rank: Count  # Default rank r, for modules without an entry in `rank_pattern`
    alpha: Number  # Default α, for modules without an entry in `alpha_pattern`
    modules: Count  # Number of modules changed by low-rank matrices
    replaced: list[str] = []  # Parameters that the adapter replaces entirely
    files: list[File] = []


class ModelInfo(Record):
    """The analysed model."""

    id: str  # Hub id, folder, file or `demo`, as the user typed it
    revision: str | None = None  # Commit of a model from the hub; None for other models
    architecture: str  # Name of the model's class
    parameters: Count  # Number of parameters
    files: list[File] = []
    files_in_parts: list[FileInParts] = []  # Weight files from which only the required tensors were read
    unexpected: list[str] = []  # Tensors in the files that the architecture does not use; `--strict` exits with 3
    quantised: str | None = None  # Format of decoded weights: `fp8`, `gptq` …; None if they are stored as plain numbers
    adapter: AdapterInfo | None = None
    conventions: Conventions | None = None
    layer_names: list[str] = []
    """Names of all layers, such as `decoder.2`, in models with several parts; empty for models with a single part."""

    def layer_name(self, layer: int) -> str:
        """Return the name under which a layer is displayed: `2`, or `decoder.2` in models with several parts."""
        return self.layer_names[layer] if layer < len(self.layer_names) else str(layer)

    def layer_number(self, layer: int) -> str:
        """Return the number of a layer within its part, as text."""
        return self.layer_name(layer).rpartition(".")[2]

    def layer_choices(self, layer: int, part: Part) -> set[int | str]:
        """Return the values with which options and rules can select a layer, such as 2 and `decoder.2`."""
        number = self.layer_number(layer)
        return {int(number), f"{part}.{number}"}

    @property
    def title(self) -> str:
        """Model name for a heading, followed by the adapter's name if there is an adapter."""
        return " + ".join(model_name(part.id) for part in (self, self.adapter) if part is not None)


class Text(Record):
    """A text, or noise, that the model reads."""

    name: str  # File name, `stdin`, title of a built-in text, or `random pixels`; names of several texts joined by +
    sha256: str  # SHA-256 of the text in UTF-8 or of the noise; for several texts, of their joined digests
    windows: list[Count] = []  # Indices of the windows (or lines) read, from 0; empty for several texts
    available: Count | None = None  # Number of windows (or lines) in the whole text; None if unknown

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Text:
        """Describe several texts as one text, omitting their windows."""
        if len(texts) == 1:
            return cls(name=texts[0].name, sha256=texts[0].sha256)
        digest = sha256("".join(text.sha256 for text in texts).encode())
        return cls(name=" + ".join(text.name for text in texts), sha256=digest.hexdigest())


FEWEST_DRAWS = 8
"""Smallest number of sampled units (windows of each text, or texts) for a bootstrap. Student's t is more accurate for
fewer units: a bootstrap sample that contains one of two windows twice has no spread."""


class Settings(Record):
    """Options of the run, and the inputs that the model read."""

    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"  # Type of the model's weights; measures are computed in float64
    source: Sources = "both"
    analyzers: list[str] = []
    text: Text | None = None  # The text, if any; several texts are described as one
    texts: list[Text] = []  # The texts one by one
    placement: Placement | None = None  # Position of the windows (or lines) in each text; None if no text was read
    intervals: Intervals | None = None  # Population to which errors and intervals refer; None if no text was read
    noise: Text | None = None  # Random pixels or sound, if the model reads no text
    calibration: Text | None = None  # Text used to fit parameters or train weights, never for evaluation
    calibrations: list[Text] = []  # The calibration texts one by one
    windows_requested: Count | None = None  # Requested number of windows; None if the user did not set it
    windows: Count | None = None  # Number of windows, lines, images or sounds read; None if no input was read
    length: Count | None = None  # Tokens per window, per image, or at most per line (`pack` false)
    pack: bool | None = None  # True if text was cut into windows, False if read by line; None if no text was read
    layers: list[Count | str] | None = None  # Requested layers (`2` or `decoder.2`); None means all
    heads: list[Count] | None = None  # Requested heads; None means all
    select: str | None = None  # Tokens that a query selects, `argmax` or `top-p:0.9`; None if nothing is selected
    options: dict[str, bool | int | float | str] = {}  # Other options that the user set and that affect the results
    notes: list[str] = []  # Facts about the input that readers must know, one sentence each

    def freedom(self, count: int) -> int:
        """Return a standard error's degrees of freedom: `count` − 1, or the number of texts − 1 if it is over texts."""
        return (len(self.texts) if self.intervals == "texts" else count) - 1

    @property
    def interval_method(self) -> str:
        """Method used for intervals of paired differences: `bootstrap`, or `Student's t, 2 windows`."""
        counts = [len(text.windows) for text in self.texts if text.windows] or [self.windows or 0]
        total, unit = (len(self.texts), "text") if self.intervals == "texts" else (sum(counts), "window")
        # texts are strata of windows, unless a text has a single window
        draws = total if unit == "text" or 1 in counts else min(counts)
        return "bootstrap" if draws >= FEWEST_DRAWS else f"Student's t, {format_count(total, unit)}"

    @property
    def input_summary(self) -> str:
        """Description of the input: number and length of the sequences, and their texts; empty if there is none."""
        count = self.windows or 0
        if self.text is None:
            if self.noise is None:
                return ""
            kind = "image" if "pixels" in self.noise.name else "recording"
            return f"{self.noise.name}, {format_count(count, kind)} of {self.length} tokens each"
        if self.length is None:
            return f"{format_count(count, 'file')}: {self.text.name}"
        where = {"spread": "spread over", "first": "from the beginning of", "random": "drawn from", None: "of"}
        size = f"{count} ×" if self.pack is not False else f"{format_count(count, 'line')} of at most"
        return f"{size} {self.length} tokens {where[self.placement]} {self.text.name}"


# Converters of version 1 take and return parsed JSON. They keep values of unexpected types unchanged, so that the
# records of version 2 reject these values and name their fields.
Fields = Mapping[str, object]

SETTINGS = {"sequences": "windows", "sequences_asked": "windows_requested", "tokens": "length", "windows": "placement"}
"""Name of a setting in version 1 → its name in version 2; `windows` was the placement and is now the count."""
BODIES = ("selections", "attention", "swap", "more_swaps", "plan", "comparison", "doctor", "experiments", "studies")
"""Fields of a report of version 1 that version 2 moves to the body of its kind."""
KIND_OF_COMMAND = {"converge": "experiments", "verify": "experiments", "study": "studies", "doctor": "doctor"}
"""Command → kind of its version-1 report if the body is empty; `inspection` for all other commands."""


def convert_report(report: Fields) -> Fields:
    """Return a report of version 2 with the content of a report of version 1."""
    names = ("swap", "comparison", "doctor", "experiments", "studies")
    bodies = {name: report[name] for name in names if report.get(name)}
    kind = next(iter(bodies), KIND_OF_COMMAND.get(str(report.get("command")), "inspection"))
    inspection = {name: report[name] for name in ("selections", "attention") if report.get(name)}
    if inspection or kind == "inspection":
        bodies["inspection"] = inspection
    if isinstance(swap := bodies.get("swap"), Mapping):
        bodies["swap"] = {**swap, "others": report.get("more_swaps", []), "plan": convert_plan(report.get("plan"))}
    common = {name: field for name, field in report.items() if name not in BODIES}
    return {**convert_settings_in(common), "schema_version": "2", "kind": kind, **bodies}


def convert_baseline(baseline: Fields) -> Fields:
    """Return a baseline of version 2 with the content of a baseline of version 1."""
    return {**convert_settings_in(baseline), "schema_version": "2"}


CHOSEN_BY = "the plan was written by an older attnlens, which measured the rise on the text used to choose the ranks"


def convert_plan(plan: object) -> object:
    """Convert a plan of version 1; if it lacks an `estimated` rise, its `promised` rise becomes the `estimated` one."""
    if not isinstance(plan, Mapping):
        return plan
    converted = {**convert_settings_in(plan), "schema_version": "2"}
    reasons = plan.get("reasons", {})
    if "estimated" not in plan and plan.get("promised") is not None and isinstance(reasons, Mapping):
        reasons = {**reasons, "promised": CHOSEN_BY}
        converted |= {"estimated": plan["promised"], "promised": None, "reasons": reasons}
    return converted


def convert_settings_in(record: Fields) -> dict[str, object]:
    """Return a copy of a version-1 record, with the settings renamed as in version 2."""
    settings = record.get("settings")
    if not isinstance(settings, Mapping):
        return {**record}
    return {**record, "settings": {SETTINGS.get(name, name): value for name, value in settings.items()}}
