"""Survey a model before it is measured: find its sites, verify that they are read rightly, and list the units to read.

The result is a frozen `Inspection`, from which any process can read any unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from attnlens.analyzers.registry import Analyzer, Gathering
from attnlens.choices import ATTENTION
from attnlens.errors import FAILURES, ModelError, TextError
from attnlens.maths.linalg.long import LONG
from attnlens.models import hooks, loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.loading.deferred import mute_shape_errors
from attnlens.records import Settings, Site, Skipped
from attnlens.runs import checks, feeding
from attnlens.runs.checks import attention, no_loss, refuse_initialised
from attnlens.runs.feeding import LOSS, predicts_text
from attnlens.runs.inspect.attention_rows import refuse_many_rows
from attnlens.runs.inspect.results import merge_skipped
from attnlens.runs.inspect.units import SiteFactors, Unit, UnitReader
from attnlens.runs.progress import Progress, silent, time_stage
from attnlens.runs.provenance import content_of
from attnlens.runs.store import versions

BY_HAND = "the module has its own attention code, which must be traced on actual values, so the model must be loaded"
"""Reason why a site of a meta-device model is not read."""
GATHERED_TOGETHER = 4
"""Sites that gatherers read in one pass through the texts: a pass per site would be slow, and one pass for all sites
would keep the tokens of all."""


@dataclass(frozen=True)
class WorkUnit:
    """Part of an inspection that is read independently of the others."""

    stage: Literal["weights", "tokens", "gathered"]  # what it reads
    sites: tuple[Site, ...]  # its sites
    batch: int | None = None  # its batch; None if it reads weights, or all batches

    @property
    def name(self) -> str:
        """Name that is unique within the run and readable."""
        if self.stage == "tokens":
            return f"tokens of batch {self.batch}"
        layers = f"{self.sites[0].layer}" if len(self.sites) == 1 else f"{self.sites[0].layer}–{self.sites[-1].layer}"
        return f"{self.stage} of layer{'s' * (len(self.sites) > 1)} {layers}"


@dataclass(frozen=True)
class Inspection:
    """A surveyed model with its inputs, which is measured unit by unit."""

    reader: UnitReader
    reached: Sequence[SiteCall]
    """Requested sites."""
    inputs: texts.Batches | None
    """Batches that the model reads; None for weights alone."""
    skipped: list[Skipped]
    """What the survey found but can't read."""
    identity_error: float | None
    """Change of the model's outputs if its attention is recomputed; None if it is unknown."""
    timings: dict[str, float]
    """Seconds per stage so far."""

    @property
    def loaded(self) -> loading.Loaded:
        """The loaded model."""
        return self.reader.loaded

    @property
    def settings(self) -> Settings:
        """Settings of the run, with those that depend on the model and its inputs."""
        return self.reader.settings

    @property
    def batches(self) -> tuple[texts.Batch, ...]:
        """Batches that the model reads; empty for weights alone."""
        return () if self.inputs is None else self.inputs.batches

    @property
    def window_texts(self) -> list[str]:
        """Name of the text of each sequence; empty for inputs that are not texts."""
        return [] if self.inputs is None else list(self.inputs.parts)

    @property
    def all_sites(self) -> tuple[Site, ...]:
        """All sites of the model."""
        return self.reader.sites

    @cached_property
    def key_heads(self) -> dict[Site, list[int]]:
        """Key head of each query head, by requested site."""
        return {each.site: list(each.call.key_heads) for each in self.reached}

    @property
    def from_files(self) -> bool:
        """True if the model was never loaded, and so never run."""
        return self.loaded.deferred is not None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that determine the results of the units."""
        reader = self.reader
        return {
            "command": "inspect",
            "versions": versions(),
            "model": self.loaded.info.model_dump(mode="json", exclude={"id"}),  # a moved folder holds the same model
            "from_files": self.from_files,
            "settings": self.settings.model_dump(mode="json", exclude={"notes"}),  # notes don't affect numbers
            "show": reader.show,
            "weights": reader.reads_weights,
            "analyzers": [[each.name, each.source] for each in reader.analyzers],
            "sites": [asdict(site) for site in self.key_heads],
            "key_heads": list(self.key_heads.values()),
            "parts": self.window_texts,
            "batches": [batch.size for batch in self.batches],
            "content": content_of(self.loaded, self.reached, self.inputs, reader.analyzers),
        }

    @cached_property
    def units(self) -> dict[str, WorkUnit]:
        """Units of the run by name, in the order in which they enter the report."""
        sites = tuple(self.key_heads)
        units = [WorkUnit("weights", (site,)) for site in sites if self.reader.reads_weights]
        units += [WorkUnit("tokens", sites, batch) for batch in range(len(self.batches))]
        if self.batches and any(isinstance(each, Gathering) for each in self.reader.analyzers):
            blocks = range(0, len(sites), GATHERED_TOGETHER)
            units += [WorkUnit("gathered", sites[start : start + GATHERED_TOGETHER]) for start in blocks]
        return {unit.name: unit for unit in units}

    def read_unit(self, unit: WorkUnit) -> Unit:
        """Read one unit. Raise Stopped if the user interrupts it and its results so far are usable by themselves."""
        with time_stage(self.timings, unit.stage):
            return self._compute_unit(unit)

    def _compute_unit(self, unit: WorkUnit) -> Unit:
        if unit.stage == "weights" or self.inputs is None:  # without inputs, a run has no other units
            return self.reader.read_weights(unit.sites[0])
        if unit.batch is None:
            return self.reader.read_gathered(self.inputs, unit.sites, unit.name)
        return self.reader.read_tokens(self.inputs, unit.batch, unit.sites)


@dataclass(frozen=True)
class PreparedRun:
    """A loaded model, and everything that its survey needs."""

    loaded: loading.Loaded
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    contents: Sequence[texts.Content] = ()
    """Texts to read."""
    cut: texts.Cut = field(default_factory=texts.Cut)
    """How they are cut into sequences."""
    progress: Progress = silent
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per stage so far."""
    show: str | None = None

    @property
    def weights_model(self) -> loading.Loaded:
        """Model whose weights are read: on the meta device if the model is spread over devices."""
        return self.loaded.shapes or self.loaded


def survey(run: PreparedRun, factors: dict[Site, SiteFactors] | None = None) -> Inspection:
    """Cut the texts, find the model's sites, and verify that recomputed attention changes nothing.

    `factors` is filled with the factors of each site's weights when they are read. Raise ModelError, IdentityError,
    TextError and UsageError.
    """
    loaded, weights_model = run.loaded, run.weights_model
    settings, inputs, no_text = _cut_inputs(run)
    with (
        time_stage(run.timings, "survey"),
        mute_shape_errors() if weights_model.deferred is not None else nullcontext(),
    ):
        sample = _sample(loaded, settings)
        result = checks.survey_model(loaded, sample) if loaded.deferred is None else survey_shapes(loaded, sample)
        identity_error, skipped = _prove_identity(loaded, result.sites, sample, inputs)
        refuse_initialised(weights_model, sample, attention)
        if inputs is not None and predicts_text(loaded) and (lacking := no_loss(weights_model, sample, "causal")):
            skipped.append(Skipped(site=lacking[0], measure=LOSS, reason=lacking[1]))
        layers = settings.layers
        checks.check_chosen(layers, settings.heads, result.sites)
        settings = feeding.record_length(settings, loaded, result.sites)
        reached = [each for each in result.sites if layers is None or each.site.layer in layers]
        if run.show == ATTENTION:
            refuse_many_rows(reached, settings.heads)
        if no_text:
            skipped += [Skipped(site=each.site.name, measure="tokens", reason=no_text) for each in reached]
        for entry in checks.out_of_reach(loaded, result):
            unseen = loaded.deferred is not None and entry.reason == hooks.UNTRACED
            skipped.append(Skipped(site=entry.site, reason=BY_HAND if unseen else entry.reason))
        reader = make_reader(replace(run, settings=settings), result.sites, factors)
        return Inspection(reader, reached, inputs, merge_skipped(skipped), identity_error, run.timings)


def make_reader(
    run: PreparedRun, all_sites: Sequence[SiteCall], factors: dict[Site, SiteFactors] | None = None
) -> UnitReader:
    """Prepare the reader of a model's units: find all its sites as text alone reaches them."""
    weights_model, settings, sites = run.weights_model, run.settings, list(all_sites)
    if run.loaded.shapes is not None:
        shapes = survey_shapes(weights_model, _sample(weights_model, settings))
        sites = _match_sites(all_sites, shapes.sites, weights_model)
    one_token = checks.of_one_token(weights_model, sites, settings.seed)
    return UnitReader(
        loaded=run.loaded,
        weights_model=weights_model,
        settings=settings,
        analyzers=run.analyzers,
        show=run.show,
        all_sites=all_sites,
        one_token=checks.text_alone(weights_model, one_token, 1, settings.seed),
        window=checks.text_alone(weights_model, sites, settings.length or 2, settings.seed),
        progress=run.progress,
        factors=factors,
    )


def _cut_inputs(run: PreparedRun) -> tuple[Settings, texts.Batches | None, str | None]:
    """Cut the texts into batches; return the settings that describe them, and why none are read if they should be.

    None are read for weights alone, or if both sources are read and no tokenizer exists.
    """
    loaded, settings, cut = run.loaded, run.settings, run.cut
    without_input = settings.model_copy(update=feeding.NOTHING_FED)
    if not run.contents or not any(analyzer.source == "tokens" for analyzer in run.analyzers):
        return without_input, None, None
    try:
        batches = texts.batches(loaded, run.contents, cut)
    except TextError as error:
        readable = loaded.tokenizer is not None or not texts.reads_text(loaded) or cut.image or cut.audio
        if readable or settings.source == "tokens":
            raise
        return without_input, None, error.problem
    feeding.design_of(settings, batches)  # refuses too few texts
    return feeding.describe_input(settings, batches, loaded), batches, None


def _sample(loaded: loading.Loaded, settings: Settings) -> dict[str, Tensor]:
    """Return random ids as long as a window."""
    return texts.placeholder(loaded, settings.length or 2, settings.seed).batches[0].inputs


def _prove_identity(
    loaded: loading.Loaded, reached: Sequence[SiteCall], sample: Mapping[str, Tensor], inputs: texts.Batches | None
) -> tuple[float | None, list[Skipped]]:
    """Verify that recomputed attention changes nothing; with NaN in its weights, the model can't be compared.

    A model whose weights stay in their files can't run: each of its sites is verified when it is read.
    """
    if loaded.deferred is not None:
        return None, []
    # one long sequence is sufficient, and its predictions alone take gigabytes
    long = any(each.call.query.shape[2] * each.call.key.shape[2] > LONG for each in reached)
    probe = sample if inputs is None else texts.first(inputs.batches[0].inputs, 1 if long else 2)
    error, broken = checks.prove_identity(loaded, probe)
    if broken is None:
        return error, []
    return error, [
        Skipped(site=broken, reason=f"{broken} contains NaN or Inf, so the model's outputs cannot be verified")
    ]


def survey_shapes(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Survey:
    """Survey a model on the meta device (shapes only), whose attention all runs through transformers' interface."""
    try:
        result = hooks.run_survey(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else loading.first_line(error)
        raise ModelError(
            f"{loaded.info.id} can't be analysed from its files alone: its forward pass depends on actual values "
            f"({first})",
            "Omit --device files or spread: this architecture must be loaded.",
        ) from error
    if any(each.site.traced for each in result.sites):
        raise ModelError(
            f"{loaded.info.id} can't be analysed from its files alone: {BY_HAND}.",
            "Omit --device files or spread: this architecture must be loaded.",
        )
    return result


def _match_sites(reached: Sequence[SiteCall], shapes: Sequence[SiteCall], loaded: loading.Loaded) -> list[SiteCall]:
    """Return the sites of the meta-device model under the names of the same sites in the model that ran."""
    by_call = {(each.site.path, each.site.ordinal): each for each in shapes}
    calls = [(each.site.path, each.site.ordinal) for each in reached]
    if list(by_call) != calls:
        raise ModelError(
            f"{loaded.info.id} runs attention that a pass without values does not reveal.", "Leave out --device spread."
        )
    return [replace(by_call[call], site=each.site) for call, each in zip(calls, reached, strict=True)]
