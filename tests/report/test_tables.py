"""Tests that tables show the report's numbers on any page, with other people's strings as nothing but text."""

from __future__ import annotations

import csv as standard
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import views
from experiment_reports import series_report
from reports import CROSS, synthetic_report
from rich.console import Console

from attnlens.analyzers.registry import Analyzer, MeasureInfo
from attnlens.kernels import FILTERS, TIES, kernels
from attnlens.kernels.registry import KernelInfo
from attnlens.records import Settings
from attnlens.report import export
from attnlens.report.render import terminal
from attnlens.report.render.markdown import escape_text
from attnlens.report.report import Report
from attnlens.report.sections import reference as lists
from attnlens.report.sections import section as sections
from attnlens.report.sections.checked import site_checks
from attnlens.report.shapes import Shapes
from attnlens.wording import format_error

HOSTILE = "=cmd|' /C calc'!A0 <script>x</script> [red]b[/red] `c` | d\x1b[2J\u202e\n# e @team www.evil.example"


def medians(report: Report, name: str) -> dict[int, float]:
    """The naive median over the heads of each layer."""
    layers: dict[int, list[float]] = {}
    for head in report.heads:
        value = head.measures[name].value
        if value is not None:
            layers.setdefault(head.layer, []).append(value)
    return {layer: float(np.median(values)) for layer, values in layers.items()}


def rows_of(text: str) -> dict[str, list[str]]:
    """Rows of the layers' table by their first cell."""
    table = text.split("Rows are medians")[0].splitlines()
    return {line.split()[0]: line.split()[1:] for line in table if re.match(r" *(\d+(–\d+)?|all|null)  ", line)}


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_page_and_no_number_is_cut(width: int) -> None:
    report = synthetic_report(12, 12, missing=[(3, 1), (5, 2)])
    text = views.summary(report, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    rows = rows_of(text)
    for layer, median in medians(report, "weights.symmetry").items():
        assert rows[str(layer)][0] == f"{median:.3f}"
    for layer, median in medians(report, "weights.definiteness").items():
        assert rows[str(layer)][1] == f"{median:.3f}"


def test_a_wider_page_shows_more_measures_and_a_narrow_one_says_what_it_hides() -> None:
    report = synthetic_report(4, 4)
    columns = [len(rows_of(views.summary(report, width))["0"]) for width in (60, 80, 120, 200)]
    assert columns == sorted(set(columns))
    assert f"{columns[1]} of 21 columns fit" in views.summary(report, 80)
    assert "columns fit" not in views.summary(report, 400)


def test_both_sources_are_shown_even_on_a_narrow_page() -> None:
    lines = views.summary(synthetic_report(4, 4), 80).splitlines()
    assert any("weights ─" in line and "tokens ─" in line for line in lines)


def test_the_null_stands_under_the_medians_and_the_error_beside_them() -> None:
    report = synthetic_report(4, 4)
    text = views.summary(report, 80)
    rows = rows_of(text)
    assert rows["null"][0] == "0.001"
    sd = report.summary.median_nulls["weights.symmetry"].sd
    assert re.search(rf"± sd +±{format_error(sd, 3)}", text), "the null of the median, and not of one head"
    error = report.summary.layer_errors[2]["tokens.share_positive"]
    value = medians(report, "tokens.share_positive")[2]
    assert f"{value:.3f}±{error:.3f}" in rows["2"]


def test_the_null_of_a_head_keeps_two_digits_of_its_sd_whatever_the_column_shows() -> None:
    report = synthetic_report(4, 4, d_model=4096)
    text = views.all_heads(report, 300)
    assert re.search(r"null +0\.00024 ", text)
    assert re.search(r"± sd +±0\.00035 ", text)
    assert "<0." not in text.split("± sd")[1]


def test_what_was_found_explains_chance_only_beside_a_chance() -> None:
    explained = "above, below: heads that differ from chance"
    assert explained in views.page(synthetic_report(2, 2))
    assert explained not in views.page(synthetic_report(2, 2, source="tokens"))


def test_measures_that_all_heads_share_are_one_line_and_no_column() -> None:
    text = views.summary(synthetic_report(4, 4), 300)
    assert "The same for every head: weights.inertia_positive 64, weights.inertia_negative 64." in text
    assert "inertia" not in text.split("The same")[0]


def test_every_layer_has_a_row() -> None:
    report = synthetic_report(80, 3)
    rows = rows_of(views.summary(report))
    assert len(rows) == 80 + 2  # and `all` and `null`
    layer = [head.measures["weights.symmetry"].value for head in report.heads if head.layer == 6]
    assert rows["6"][0] == f"{np.median(layer):.3f}"


def test_the_head_of_the_page_names_model_settings_and_coverage() -> None:
    report = synthetic_report(3, 4, missing=[(1, 2)])
    text = views.summary(report, 200)
    first = text.splitlines()[0]
    for fact in (
        "bert-base-uncased",
        "BertForMaskedLM",
        "110 M parameters",
        "revision 86b5e0934494",
        "32 × 128 tokens",
    ):
        assert fact in first
    assert "PARTIAL: 11 of 12 heads, because the weights are not finite" in text
    assert "COMPLETE: 12 of 12 heads" in views.summary(synthetic_report(3, 4))


def test_extremes_are_ranks_and_skipped_parts_have_reasons() -> None:
    text = views.summary(synthetic_report(3, 4, missing=[(1, 0), (1, 2)]), 150)
    assert "layer 0 head 0  largest weights.symmetry of them: 0.9" in text
    assert "the weights are not finite: bert.encoder.layer.1.attention.self heads 0, 2 (weights)" in text
    assert re.search(r"weights\.symmetry, .*: 2 heads, because the weights are not finite", " ".join(text.split()))


def test_what_one_row_says_is_not_said_twice() -> None:
    one_layer, one_head = (views.summary(synthetic_report(1, heads), 150) for heads in (3, 1))
    for text in (one_layer, one_head):
        assert not re.search(r"^ +all ", text, re.MULTILINE)
        assert re.search(r"^ +null ", text, re.MULTILINE)
    assert "Rows are medians over heads" in one_layer
    assert "medians" not in one_head
    assert "± is the standard error (" in one_head or "± is the standard error;" in one_head
    assert re.search(r"^ +all ", views.summary(synthetic_report(2, 3), 150), re.MULTILINE), "the control"


def test_measures_that_do_not_exist_read_as_a_dash_with_the_reason() -> None:
    text = views.summary(synthetic_report(4, 2, parts=["encoder", "encoder", "decoder", "cross"]), 120)
    assert rows_of(text)["3"][:2] == ["cross", "–"]
    assert f"2 heads, because {CROSS}" in " ".join(text.split())


def test_colour_carries_no_meaning_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    report = synthetic_report(3, 3)
    coloured = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False)
    coloured.print(terminal.document(export.summary(report)))
    text = coloured.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == views.summary(report)


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
@pytest.mark.parametrize(("columns", "expected"), [(None, "100"), ("140", "140")])
def test_a_pipe_is_a_hundred_columns_wide(terminal: str, columns: str | None, expected: str) -> None:
    # an explicit environment: readline, which pytest loads, sets COLUMNS behind Python's back
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": terminal}
    if columns is not None:
        environment["COLUMNS"] = columns
    code = "from attnlens.report.render.terminal import console; console().rule(); console(stderr=True).rule()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert [len(done.stdout.rstrip()), len(done.stderr.rstrip())] == [int(expected), int(expected)]


def test_strings_from_strangers_reach_the_terminal_as_text_only() -> None:
    report = synthetic_report(2, 2, model=HOSTILE)
    text = views.summary(report, 300)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]b[/red]" in text  # rich's own markup is not obeyed either


def test_all_heads_shows_every_head_and_measure_within_the_page() -> None:
    report = synthetic_report(3, 5, missing=[(1, 1)])
    text = views.all_heads(report, 120)
    assert max(map(len, text.splitlines())) <= 120
    words = text.replace("\n", " ").split()
    for head in report.heads:
        for measure in head.measures.values():
            assert measure.label is None or measure.label.split()[0] in words
        symmetry = head.measures["weights.symmetry"].value
        assert symmetry is None or f"{symmetry:.3f}" in words
        entropy = head.measures["tokens.entropy"]
        assert f"{entropy.value:.3f}±{entropy.se:.3f}" in words
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    blocks = [row[:2] for row in rows]
    assert blocks.count(["1", "1"]) == text.count("layer  head") >= 3
    assert next(row for row in rows if row[:2] == ["1", "1"])[2] == "–"
    assert "1 head, because the weights are not finite" in views.summary(report, 120), "told once, above the tables"


def test_markdown_holds_the_same_numbers() -> None:
    report = synthetic_report(3, 4)
    text = views.markdown(report)
    line = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    assert line.split(" | ")[1] == f"{medians(report, 'weights.symmetry')[1]:.3f}"
    assert "**COMPLETE&#58; 12 of 12 heads**" in text
    assert "### weights" in text
    assert "### tokens" in text


def test_markdown_escapes_whatever_a_stranger_wrote() -> None:
    report = synthetic_report(2, 2, model=HOSTILE)
    heads = [head.model_copy(update={"measures": {HOSTILE: head.measures["weights.norm"]}}) for head in report]
    text = views.markdown(report.model_copy(update={"heads": heads}))
    for raw in ("<", "`", "@", "www.", "\x1b", "\u202e", "[", "\n# e"):
        assert raw not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [3] * 10  # two tables of two columns, five lines each


def test_escaping_leaves_ordinary_names_readable() -> None:
    assert escape_text("bert.layer.0 effective_rank (95 %), -0.1 ± 2") == "bert.layer.0 effective_rank (95 %), -0.1 ± 2"
    assert escape_text("_a_ *b*") == "&#95;a&#95; &#42;b&#42;"


def test_csv_is_the_dataframe_without_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    report = synthetic_report(3, 4, missing=[(1, 1)])
    ours = pandas.read_csv(io.StringIO(views.csv(report)))
    theirs = report.to_dataframe()
    assert list(ours.columns) == list(theirs.columns)
    for name in theirs.columns:
        if theirs[name].dtype.kind == "f":
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-8)
    assert ours["weights.kind"][0] == theirs["weights.kind"][0]


def test_csv_holds_no_formula_and_keeps_negative_numbers() -> None:
    report = synthetic_report(2, 2)
    heads = [
        head.model_copy(update={"site": HOSTILE, "measures": {"+x": head.measures["weights.symmetry"]}})
        for head in report
    ]
    heads[0] = heads[0].model_copy(
        update={"measures": {"+x": heads[0].measures["+x"].model_copy(update={"value": -0.5})}}
    )
    rows = list(standard.reader(io.StringIO(views.csv(report.model_copy(update={"heads": heads})))))
    assert len(rows) == 1 + 4
    assert rows[0][5] == "'+x"
    assert rows[1][0].startswith("'=cmd")
    assert rows[1][5] == "-0.5"
    for row in rows:
        for cell in row:
            assert not cell.startswith(("=", "+", "@")) or re.fullmatch(r"-?[\d.e+-]+", cell)


@dataclass(frozen=True)
class Checked:
    site: str
    part: str
    heads: int
    route: str
    tokens_error: float | None
    weights_error: float | None
    reason: str | None
    verdict: str


@pytest.mark.parametrize("width", [80, 120])
def test_doctor_says_its_verdict_in_words(width: int) -> None:
    rows = [
        Checked("h.0.attn", "decoder", 8, "attention interface", 3.2e-7, 4.1e-7, None, "agrees"),
        Checked("h.1.attn", "decoder", 8, "attention interface", 2e-3, None, "softcap is dropped", "differs"),
        Checked("h.2.attn", "cross", 8, "none", None, None, "written by hand", "not checked"),
        Checked("h.3.attn", "decoder", 8, "none", 3.2e-7, None, "no affine function", "partly checked"),
    ]
    settings = Settings(notes=["Computed in float32."])
    report = SimpleNamespace(doctor=rows, settings=settings)
    text = views.printed(views.alone(*site_checks(SimpleNamespace(report=report), "terminal")), width)
    assert "Computed in float32." in text
    assert max(map(len, text.splitlines())) <= width
    for fact in ("3.2e-07", "4.1e-07", "agrees", "2.0e-03", "DIFFERS", "not checked", "partly"):
        assert fact in text
    assert text.index("agrees") < text.index("DIFFERS") < text.index("not checked")


def test_a_section_is_registered_by_its_decorator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "_BUILDERS", {key: [*entries] for key, entries in sections._BUILDERS.items()})

    @sections.section(45, "inspection")
    def extra(shapes: Shapes, view: sections.View) -> Iterator[sections.Section]:
        yield sections.Section(f"{view}: {len(shapes.layers)} layers")

    report = synthetic_report(3, 4)
    texts = {"terminal": views.summary(report), "markdown": views.markdown(report), "page": views.page(report)}
    for view, text in texts.items():
        assert f"{view}: 3 layers" in text.replace("&#58;", ":")
    assert "3 layers" not in views.summary(series_report(3, 4))  # the control: another kind


def test_lists_of_measures_and_analyzers_say_range_and_meaning() -> None:
    infos = (
        MeasureInfo("weights.symmetry", "how symmetric", "tr(CC)/tr(GG)", low=-1, high=1),
        MeasureInfo("weights.singular_values", "singular values", "σ(M)", low=0, curve=True),
        MeasureInfo("weights.decay", "the law", "AIC", labels=("power", "flat")),
    )
    text = views.printed(views.alone(lists.measure_list(infos)), 120)
    for fact in ("weights.symmetry", "-1 to 1", "how symmetric", "tr(CC)/tr(GG)", "curve over index", "power | flat"):
        assert fact in text
    entry = Analyzer("symmetry", "weights", "Is it symmetric?", infos, lambda _: {})
    listing = views.printed(views.alone(lists.analyzer_list([entry])), 120)
    assert "Is it symmetric?" in listing
    assert "symmetry, singular_values, decay" in listing


@pytest.mark.parametrize("width", [80, 120])
def test_list_of_kernels_says_how_to_type_them_and_what_they_are(width: int) -> None:
    listing = views.printed(views.alone(*lists.kernel_list(kernels().values(), TIES.values(), FILTERS.values())), width)
    assert max(map(len, listing.splitlines())) <= width
    assert "…" not in re.sub(r"[:,]\w+=…", "", listing)
    words = re.sub(r"\s+", " ", listing)
    for name in (*kernels(), *TIES, *FILTERS):
        assert re.search(rf"^{name} ", listing, re.MULTILINE)
    for info in kernels().values():
        assert info.formula.split()[0] in listing
    for fact in (
        ":degree=2",
        ",offset=0",
        ":rank=…",
        "the power p (even, ≥ 1)",
        "must be fitted:",
        "trained by heal: the maps W of queries and keys",
        "--fit: the β of each",
    ):
        assert fact in words
    facts = {line.split()[0]: line.split()[-3:] for line in listing.splitlines() if line[:1].isalpha()}
    assert facts["rbf"] == ["yes", "yes", "infinite"]
    assert facts["linear"] == ["no", "yes", "finite"]
    assert facts["rank"] == ["yes", "no", "infinite"]
    assert facts["hard"] == ["yes", "yes", "none"]


def test_a_hostile_kernel_is_listed_as_text() -> None:
    info = KernelInfo(HOSTILE, HOSTILE, HOSTILE, HOSTILE, True, True, "none", "score", lambda score: score)
    listing = views.printed(views.alone(*lists.kernel_list([info], (), ())))
    assert "\x1b" not in listing
    assert "\u202e" not in listing
    assert "[red]b[/red]" in listing


def test_details_say_what_is_needed_to_repeat_the_run() -> None:
    report = synthetic_report(2, 2).model_copy(update={"timings": {"tokens": 1.234}, "peak_memory_bytes": 3 * 2**30})
    text = views.details(report, 120)
    for fact in ("attnlens 0.1.0", "torch 2.13.0", "Linux x86_64", "sha256 000", "tokens: 1.23 s", "at most 3,072 MiB"):
        assert fact in text


def test_a_report_without_heads_still_says_what_happened() -> None:
    report = synthetic_report(1, 1).model_copy(update={"heads": []})
    assert "bert-base-uncased" in views.summary(report)
    assert views.markdown(report).startswith("## attnlens inspect")
    assert views.csv(report) == "\n"
    assert views.all_heads(report).strip() == ""
