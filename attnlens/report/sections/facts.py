"""Sentences and sections for any report: model, input, notes, missing values, and what the standard errors cover."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attnlens.choices import KINDS
from attnlens.records import Report, Text
from attnlens.records.comparison import count_checks
from attnlens.records.studies import Origin
from attnlens.report.sections.section import TEXTS, Heading, Section, View, section
from attnlens.report.shapes import Shapes
from attnlens.wording import big, clean, decimals_for, format_count, format_number, group_pairs, join_items, model_name


def title(report: Report) -> str:
    """Return the title of the report: the names of the models or studies."""
    if report.comparison is not None:
        models = report.comparison.base, report.model
        titles = [model.title for model in models]
        return " → ".join(titles if titles[0] != titles[1] else [clean(model.id) for model in models])
    if report.studies:
        return clean("kernel study: " + ", ".join(study.name for study in report.studies))
    others = dict.fromkeys(experiment.model for experiment in report.experiments if experiment.model)
    return " + ".join([report.model.title, *map(model_name, others)])


def standing(report: Report) -> tuple[str, bool]:
    """Return a sentence on coverage, studies or experiments and on rules, and whether nothing is missing or failed."""
    sentence, sound = _standing_without_rules(report)
    broken = sum(not check.passed for check in report.checks)
    if broken:
        sentence = f"{sentence.removesuffix('.')}; FAILED: {broken} of {count_checks(report.checks)}"
    return sentence, sound and not broken


def _standing_without_rules(report: Report) -> tuple[str, bool]:
    if report.studies:
        cells = [cell for study in report.studies for cell in study.cells]
        failed = [cell for cell in cells if cell.problem]
        names = join_items((cell.name for cell in failed), between="; ")
        verdict = f"did not converge: {names}" if failed else "all converged"
        trained = f"{format_count(len(cells), 'cell')} trained, {sum(len(cell.runs) for cell in cells)} runs"
        # a cell that did not converge is acceptable if the paper's cell did not converge either
        return f"{trained}; {verdict}.", all(cell.published_diverged for cell in failed)
    if report.coverage.heads or report.kind != "experiments":
        return clean(report.coverage.sentence), report.coverage.complete
    missed = [clean(experiment.name) for experiment in report.experiments if experiment.passed is False]
    total = format_count(len(report.experiments), "experiment")
    if not any(experiment.published for experiment in report.experiments):
        return f"{total}; no published values to compare with.", True
    agreeing = sum((experiment.agreeing for experiment in report.experiments), Counter[Origin]())
    untested = state_untested(sum(len(experiment.untested) for experiment in report.experiments))
    verdict = f"; some differ: {join_items(missed)}" if missed else ""
    values = f"{format_count(agreeing.total(), 'value')} {'agrees' if agreeing.total() == 1 else 'agree'}"
    return f"{total}; {values}{count_origins(agreeing)}{verdict}{untested}.", not missed


def count_origins(counts: Counter[Origin]) -> str:
    """Format the number of values by origin: ` (2 published, 1 of a reimplementation)`; return "" without values."""
    others: tuple[Origin, ...] = ("reimplementation", "control")
    parts = [f"{counts['published']} published"] if counts["published"] else []
    parts += [f"{counts[origin]} of a {origin}" for origin in others if counts[origin]]
    return f" ({join_items(parts)})" if parts else ""


def state_untested(count: int) -> str:
    """Return a clause on `count` values whose tolerances are too wide for a verdict; "" if `count` is 0."""
    return f"; {count} not tested (tolerance above a third of the reference)" if count else ""


def null_cell(mean: float, sd: float) -> str:
    """Format mean ± sd of a null, with two significant digits of the sd."""
    decimals = decimals_for([sd or mean], figures=2)
    return f"{format_number(mean, decimals)} ± {format_number(sd, decimals)}"


def no_errors(report: Report) -> str:
    """State why there are no standard errors if only one window was read; otherwise return ""."""
    return f"no errors: only one {_unit(report)} was read" if report.settings.windows == 1 else ""


def population(report: Report, counted: str = "") -> str:
    """State the population to which the standard errors apply; return "" if no text or file was read.

    `counted` names the units that have equal weight; the default is the window or line.
    """
    settings, texts, unit = report.settings, _texts_in_windows(report), _unit(report)
    if not texts:
        return f"errors reflect {len(settings.texts)} files and apply to similar files" if settings.texts else ""
    first, names = settings.placement == "first", join_items([text.name for text in texts], 4)
    counts = [len(text.windows) for text in texts]
    if settings.intervals == "texts":
        scope = f"are computed over {len(texts)} texts and apply to {'beginnings of ' * first}similar texts"
    elif first:  # consecutive windows from the beginning do not represent the rest of their text
        scope = f"are computed over the first {sum(counts)} {unit}s and apply to similar {unit}s, not to all of {names}"
    else:
        total = sum(text.available or 0 for text in texts)
        scope = f"reflect which {sum(counts)} of the {total} {unit}s of {names} were read, and do not cover other texts"
    if len(texts) > 1:
        scope += f"; every {counted or unit} has equal weight; the texts have {join_items(counts)} {unit}s"
    if len(texts) < len(settings.texts) and settings.noise is None:
        scope += "; errors of heads that do not read the text reflect the other input only"
    return f"errors {scope}"


def _unit(report: Report) -> str:
    """Return the noun for the sequences that the model read: `window`, `line`, or `input` if it read no text."""
    return "input" if not _texts_in_windows(report) else "line" if report.settings.pack is False else "window"


def _texts_in_windows(report: Report) -> list[Text]:
    """Return the texts that were read as windows or lines, excluding images, sounds and noise."""
    return [text for text in report.settings.texts if text.available is not None]


def ran_on(report: Report) -> str:
    """State which experiments ran on which model; return "" if all ran on the report's model."""
    by_model = group_pairs((experiment.model, clean(experiment.name)) for experiment in report.experiments)
    default = by_model.pop(None, [])
    texts = [f"{join_items(names, 5)}: {clean(model or '')}" for model, names in by_model.items()]
    return "; ".join([*texts, f"all others: {report.model.title}"] if texts and default else texts)


def build_heading(report: Report, whole: bool) -> Heading:
    """Build a document's title block; `whole` adds the model's size, and number type and device even if usual."""
    model, settings, error = report.model, report.settings, report.summary.identity_error
    usual = (settings.dtype, settings.device) == ("float32", "cpu")
    facts = [
        model.architecture + _grid(report),
        f"{big(model.parameters)} parameters" * whole,
        f"decoded from {model.quantised}" if model.quantised else "",
        f"with a {model.adapter.kind} adapter" if model.adapter else "",
        f"revision {model.revision[:12]}" if model.revision else "",
        f"kernel {report.swaps[0].kernel}" if len(report.swaps) == 1 else "",
        f"{len(report.swaps)} kernels" if len(report.swaps) > 1 else "",
        settings.input_summary,
        f"{settings.dtype} on {settings.device}" * (whole or not usual),
        ""
        if error is None
        else f"recomputed outputs agree to {error:.0e}"
        if error
        else "recomputed outputs agree exactly",
    ]
    verdict, sound = standing(report)
    return Heading(
        title=title(report),
        command=report.command,
        facts=" · ".join(clean(fact) for fact in facts if fact),
        notes=[clean(note) for note in (ran_on(report), *settings.notes, *other_base(report)) if note],
        standing=verdict,
        sound=sound,
    )


def _grid(report: Report) -> str:
    """Format the layers and heads per layer, `, 4 layers × 8 heads`; return "" if layers differ in number of heads."""
    counts = Counter(head.layer for head in report.heads)
    if len(set(counts.values())) != 1:
        return ""
    return f", {format_count(len(counts), 'layer')} × {format_count(counts.popitem()[1], 'head')}{state_whole(report)}"


def state_whole(report: Report) -> str:
    """Format the whole model's size, ` (of 4 layers, 32 heads in total)`; return "" if all heads were requested."""
    coverage = report.coverage
    if coverage.model_sites is None or coverage.model_heads in (None, coverage.heads):
        return ""
    layers, heads = format_count(coverage.model_sites, "layer"), format_count(coverage.model_heads, "head")
    return f" (of {layers}, {heads} in total)"


def conventions(report: Report) -> str:
    """State how the measures treat positions, normalisation and biases; return "" if unknown."""
    if (record := report.model.conventions) is None:
        return ""
    parts = [f"positions: {record.position}"]
    parts += ["queries and keys are normalised per token"] * record.qk_norm
    parts += ["biases are left out of weights.*"] * (record.bias == "excluded")
    return "; ".join(parts)


def notes(report: Report) -> list[str]:
    """List caveats on measures of this model, and a sentence on stored tensors that the model does not use."""
    of_model = [] if report.model.conventions is None else report.model.conventions.notes
    return [clean(note) for note in (*of_model, *state_unexpected(report))]


def other_base(report: Report) -> list[str]:
    """Return a list with a warning if the adapter's base and the model have different names; otherwise []."""

    def last(name: str) -> str:
        return name.replace("\\", "/").rstrip("/").rpartition("/")[2].partition("@")[0].lower()

    record, model = report.model.adapter, report.model.id
    if record is None or record.base is None or last(record.base) == last(model):
        return []
    return [clean(f"The adapter's base is {record.base}; the adapter was merged into {model}, whose shapes match.")]


def state_unexpected(report: Report) -> list[str]:
    """Return a list with a sentence on stored tensors that the model does not use; [] if there are none."""
    names = report.model.unexpected
    count = format_count(len(names), "tensor")
    return [f"{report.model.architecture} does not use {count} of the files: {join_items(names)}."] if names else []


@section(60, views=(*TEXTS, "opening", "page"))
def missing_sections(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield lists of skipped sites and of measures without a value, with one line per reason.

    A page begins with the skipped sites; the measures without a value follow below its tables.
    """
    places = []
    for entry in shapes.report.coverage.skipped:
        heads = f" {'head' if len(entry.heads) == 1 else 'heads'} {join_items(entry.heads, 12)}" if entry.heads else ""
        places.append((entry.reason, f"{entry.site}{heads}{f' ({entry.measure})' if entry.measure else ''}"))
    skipped = [f"{clean(reason)}: {join_items(sites, 4)}" for reason, sites in group_pairs(places).items()]
    for heading, lines, absent in (("Skipped", skipped, "page"), ("No value", without_value(shapes), "opening")):
        if lines and view != absent:
            yield Section(heading, items=lines)


def without_value(shapes: Shapes) -> list[str]:
    """List measures that lack a value in some or all heads, with one line per reason and number of heads."""
    pairs = []
    for name in shapes.report.measure_names():
        if name in shapes.readings:
            counts = shapes.readings[name].reasons
            pairs += [((reason, format_count(count, "head")), name) for reason, count in counts.items()]
        else:  # missing in all heads
            first = next(head.measures[name] for head in shapes.report.heads if name in head.measures)
            pairs.append(((first.reason or "", "all heads"), name))
    groups = group_pairs(pairs).items()
    return [f"{join_items(names, 5)}: {heads}, because {clean(reason)}" for (reason, heads), names in groups]


@section(90, views=("markdown",))
def note_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the conventions and caveats for measures of this model."""
    if lines := [*filter(None, [conventions(shapes.report)]), *notes(shapes.report)]:
        yield Section("Notes", items=lines)


@section(90, [kind for kind in KINDS if kind != "doctor"], ("verbose",))
@section(95, views=("page",))
def provenance_section(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield the tool, environment, settings, checksums and notes of a report; on a terminal also times and memory."""
    report, versions, settings = shapes.report, shapes.report.environment, shapes.report.settings
    files = [("text", settings.text), ("noise", settings.noise), *(("file", file) for file in report.model.files)]
    items = [
        ("tool", f"{report.tool.name} {report.tool.version}"),
        ("python", f"{versions.python}, torch {versions.torch}, transformers {versions.transformers}"),
        ("platform", versions.platform),
        ("source", settings.source),
        ("seed", str(settings.seed)),
        *([("analyzers", join_items(settings.analyzers, 20))] if settings.analyzers else []),
        *((kind, f"{file.name}, sha256 {file.sha256}") for kind, file in files if file is not None),
    ]
    items += [("conventions", conventions(report))] if conventions(report) else []
    items += [("note", note) for note in notes(report)]
    if view == "verbose":
        items += [("time", f"{stage}: {seconds:.2f} s") for stage, seconds in report.timings.items()]
        items.append(("memory", f"at most {report.peak_memory_bytes / 2**20:,.0f} MiB"))
    yield Section("Details" if view == "verbose" else "How this report was made", items=items)
