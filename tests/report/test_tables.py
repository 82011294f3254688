"""Tests that tables show the report's numbers at any width, and treat untrusted strings as text."""

import csv
import io
import re

import numpy as np
import pytest
import views
from experiment_reports import series_report
from hostile_reports import HOSTILE as STRANGE
from reports import CROSS, synthetic_report
from rich.console import Console
from views import absent

import attnlens
from attnlens.analyzers.registry import Analyzer, MeasureInfo
from attnlens.kernels import FILTERS, TIES, kernels
from attnlens.kernels.registry import KernelInfo
from attnlens.records import Settings, SiteCheck
from attnlens.records.provenance import Conventions
from attnlens.report import export
from attnlens.report.findings import find
from attnlens.report.findings.heads import HeadTests
from attnlens.report.render import terminal
from attnlens.report.render.markdown import escape_text
from attnlens.report.sections import reference as lists
from attnlens.report.sections import section as sections
from attnlens.report.sections.checked import site_checks
from attnlens.report.shapes import Shapes, drop_rotary
from attnlens.wording import format_error

HOSTILE = f"{STRANGE}\n# e"


def medians(report, name):
    """Compute the median over the heads of each layer naively."""
    layers = sorted({head.layer for head in report.heads})
    values = [[h.measures[name].value for h in report.heads if h.layer == layer] for layer in layers]
    return [float(np.median([value for value in row if value is not None])) for row in values]


def rows_of(text):
    """Map the first cell of each row of the table of layers to the other cells."""
    rows = {}
    for line in text.split("Rows are medians")[0].splitlines():
        if re.match(r" *(\d+(–\d+)?|all|null)  .*\.", line):  # values have decimals, the map's heads have none
            rows.setdefault(line.split()[0], line.split()[1:])  # of the first block
    return rows


@pytest.fixture(scope="module")
def report():
    return synthetic_report(4, 4)


def test_no_line_is_wider_than_the_page_and_a_narrow_one_shows_all_measures_in_blocks(report):
    large = synthetic_report(12, 12, missing=[(3, 1), (5, 2)], curves=False)
    for width in (80, 200):
        text = views.summary(large, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        rows = rows_of(text)
        for column, name in enumerate(("weights.symmetry", "weights.definiteness")):
            shown = [rows[str(layer)][column] for layer in range(12)]
            assert shown == [f"{median:.3f}" for median in medians(large, name)]
    for width in (60, 400):
        lines = [line.split() for line in views.summary(report, width).split("Rows are medians")[0].splitlines()]
        first = [words[1:] for words in lines if words[:1] == ["0"] and "." in words[1]]
        assert sum(map(len, first)) == 22, "every measure, whatever the width"
        assert (len(first) == 1) == (width == 400)
    text = views.summary(report, 80)
    assert any("weights ─" in line and "tokens ─" in line for line in text.splitlines()), "both sources"
    tall = synthetic_report(80, 3, curves=False)
    rows = rows_of(views.summary(tall))
    assert len(rows) == 80 + 2  # and `all` and `null`
    assert rows["6"][0] == f"{medians(tall, 'weights.symmetry')[6]:.3f}"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_the_name_of_a_group_is_never_cut(width):
    groups = ("selection", "weights", "selection, projected", "selection, projected", "tokens")
    columns = [sections.Column(f"m{place}", ["0.1", "0.2"], group=group) for place, group in enumerate(groups)]
    table = sections.Table([sections.Column("layer", ["0", "1"])], columns)
    page = Console(width=width, record=True, file=io.StringIO())
    page.print(terminal.FittedTable(table))
    text = page.export_text()
    assert max(map(len, text.splitlines())) <= width
    words = re.findall(r"[a-z]+,?(?= |$)", text, re.MULTILINE)
    assert {"selection", "weights", "selection,", "projected", "tokens"} == {*words} - {"layer"}
    assert re.findall(r"\bm\d", text) == [f"m{place}" for place in range(5)]


def test_a_column_that_fits_the_page_exactly_is_shown_beside_the_others():
    columns = [sections.Column(f"m{number}", ["1234567890"]) for number in range(3)]
    table = sections.Table([sections.Column("head", ["0"])], columns)
    exact = len("head") + 3 * (2 + 10)
    lines = [
        views.printed(views.alone(sections.Section(table=table)), width).count("1234567890\n")
        for width in (exact, exact - 1)
    ]
    assert lines == [1, 2]


def test_the_null_stands_under_the_medians_and_the_error_beside_them(report):
    text = views.summary(report, 80)
    rows = rows_of(text)
    assert rows["null"][0] == "0.001"
    sd = report.summary.median_nulls["weights.symmetry"].sd
    assert re.search(rf"± sd +±{format_error(sd, 3)}", text), "the null of the median, and not of one head"
    error = report.summary.layer_errors[2]["tokens.share_positive"]
    assert f"{medians(report, 'tokens.share_positive')[2]:.3f}±{error:.3f}" in rows["2"]
    heads = views.all_heads(synthetic_report(4, 4, d_model=4096), 300)
    assert re.search(r"null +0\.00024 ", heads), "of a head: two digits of its sd, whatever the column shows"
    assert re.search(r"± sd +±0\.00035 ", heads)
    assert "<0." not in heads.split("± sd")[1]


def test_the_summary_names_model_settings_coverage_extremes_and_reasons(report):
    text = views.summary(synthetic_report(3, 4, missing=[(1, 0), (1, 2)]), 200)
    facts = ("bert-base-uncased", "BertForMaskedLM, 3 layers × 4 heads", "revision 86b5e0934494", "32 × 128 tokens")
    assert not absent(text.splitlines()[0], *facts)
    assert not absent(
        " ".join(text.split()),
        "PARTIAL: 10 of 12 heads, because the weights are not finite",
        "layer 0 head 0 largest weights.symmetry of them: 0.9",
        "the weights are not finite: bert.encoder.layer.1.attention.self heads 0, 2 (weights)",
    )
    assert re.search(r"weights\.symmetry, .*: 2 heads, because the weights are not finite", " ".join(text.split()))
    text = views.summary(report, 300)
    same = "The same for every head: weights.inertia_positive 64, weights.inertia_negative 64."
    assert not absent(text, "COMPLETE: 16 of 16 heads", same)
    assert "inertia" not in text.split("The same")[0]
    text = views.summary(synthetic_report(4, 2, parts=["encoder", "encoder", "decoder", "cross"]), 120)
    assert rows_of(text)["3"][:2] == ["cross", "–"]
    assert f"2 heads, because {CROSS}" in " ".join(text.split())
    empty = synthetic_report(1, 1).model_copy(update={"heads": []})
    assert "bert-base-uncased" in views.summary(empty)
    assert views.markdown(empty).startswith("## attnlens inspect")
    assert (views.csv(empty), views.all_heads(empty).strip()) == ("\n", "")


def test_what_one_row_shows_is_not_repeated():
    layer, head, two = (views.summary(synthetic_report(*size), 150) for size in ((1, 3), (1, 1), (2, 3)))
    assert [bool(re.search(r"^ +all ", text, re.MULTILINE)) for text in (layer, head, two)] == [False, False, True]
    assert all(re.search(r"^ +null ", text, re.MULTILINE) for text in (layer, head))
    assert "Rows are medians over heads" in layer
    assert "medians" not in head
    assert "± is the standard error (" in head or "± is the standard error;" in head


def test_colour_carries_no_meaning_of_its_own_and_a_pipe_is_a_hundred_columns_wide(report, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False)
    coloured.print(terminal.document(export.summary(report)))
    text = coloured.file.getvalue()
    assert "\x1b[" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == views.screen(report)
    monkeypatch.delenv("COLUMNS", raising=False)
    for columns, expected in ({}, 100), ({"COLUMNS": "140"}, 140):
        for name, value in columns.items():
            monkeypatch.setenv(name, value)
        for term in ("dumb", "xterm"):
            monkeypatch.setenv("TERM", term)
            for stream in ("stdout", "stderr"):
                with monkeypatch.context() as patch:
                    patch.setattr(f"sys.{stream}", io.StringIO())
                    assert terminal.console(stderr=stream == "stderr").width == expected, (term, columns, stream)


def test_all_heads_shows_every_head_and_measure_within_the_page():
    report = synthetic_report(3, 5, missing=[(1, 1)])
    text = views.all_heads(report, 120)
    assert max(map(len, text.splitlines())) <= 120
    words = re.sub("[↑↓\n]", " ", text).split()
    for head in report.heads:
        labels = [measure.label.split()[0] for measure in head.measures.values() if measure.label is not None]
        symmetry, entropy = head.measures["weights.symmetry"].value, head.measures["tokens.entropy"]
        values = [f"{entropy.value:.3f}±{entropy.se:.3f}", *([] if symmetry is None else [f"{symmetry:.3f}"])]
        assert set(labels + values) <= set(words)
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert [row[:2] for row in rows].count(["1", "1"]) == text.count("layer  head") >= 3
    assert next(row for row in rows if row[:2] == ["1", "1"])[2] == "–"
    assert "1 head, because the weights are not finite" in views.summary(report, 120), "once, above the tables"


def test_markdown_has_the_same_numbers_and_escapes_whatever_a_stranger_wrote(report):
    text = views.markdown(report)
    line = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    assert line.split(" | ")[1] == f"{medians(report, 'weights.symmetry')[1]:.3f}"
    assert not absent(text, "**COMPLETE: 16 of 16 heads**", "### weights", "### tokens")
    strange = synthetic_report(2, 2, model=HOSTILE)
    heads = [head.model_copy(update={"measures": {HOSTILE: head.measures["weights.norm"]}}) for head in strange]
    settings = strange.settings.model_copy(update={"notes": [HOSTILE]})
    text = views.markdown(strange.model_copy(update={"heads": heads, "settings": settings}))
    raw = ("<", "`", "@", "www.", "\x1b", "\u202e", "[", "\n# e")
    assert absent(text, *raw) == [*raw]
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [3] * 10  # two tables of two columns, five lines each
    plain = 'bert.layer.0 effective_rank (95 %), -0.1 ± 2; Previous? "verified": yes'
    assert escape_text(plain) == plain
    assert escape_text(":x: https://a mailto:b") == "&#58;x: https&#58;//a mailto&#58;b"
    assert escape_text("_a_ *b*") == "&#95;a&#95; &#42;b&#42;"
    text = views.summary(strange, 300)
    assert not {"\x1b", "\u202e"} & set(text)
    assert "[red]b[/red]" in text  # rich's own markup is not obeyed either


def test_csv_is_the_dataframe_and_has_no_formula():
    pandas = pytest.importorskip("pandas")
    report = synthetic_report(3, 4, missing=[(1, 1)])
    ours, theirs = pandas.read_csv(io.StringIO(views.csv(report))), report.to_dataframe()
    assert list(ours.columns) == list(theirs.columns)
    for name in theirs.columns:
        if theirs[name].dtype.kind == "f":
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-8)
    assert ours["weights.kind"][0] == theirs["weights.kind"][0]
    report = synthetic_report(2, 2)
    measure = report.heads[0].measures["weights.symmetry"].model_copy(update={"value": -0.5})
    heads = [head.model_copy(update={"site": HOSTILE, "measures": {"+x": measure}}) for head in report]
    rows = list(csv.reader(io.StringIO(views.csv(report.model_copy(update={"heads": heads})))))
    assert len(rows) == 1 + 4
    assert (rows[0][2], rows[1][-1][:3], rows[1][2]) == ("'+x", "'=x", "-0.5")
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@"))]


def test_doctor_gives_its_verdict_in_words():
    names = ("site", "part", "heads", "route", "tokens_error", "weights_error", "reason", "verdict", "passed")
    rows = [
        ("h.0.attn", "decoder", 8, "attention interface", 3.2e-7, 4.1e-7, None, "agrees", True),
        ("h.1.attn", "decoder", 8, "attention interface", 2e-3, None, "softcap is dropped", "differs", False),
        ("h.2.attn", "cross", 8, "none", None, None, "written by hand", "not checked", False),
        ("h.3.attn", "decoder", 8, "none", 3.2e-7, None, "no affine function", "partly checked", False),
    ]
    checks = [SiteCheck(**dict(zip(names, row, strict=True))) for row in rows]
    settings = Settings(notes=["Computed in float32."])
    report = synthetic_report(1, 1).model_copy(update={"kind": "doctor", "doctor": checks, "settings": settings})
    for some, answer, severity, error in (
        (checks[:1], "Yes: 1 of 1 site agrees with", "none", "4.1e-07"),
        (checks[:3], "No: 1 of 3 sites differs from the model (h.1.attn)", "problem", "2.0e-03"),
        (checks[::2], "Not verified: 1 of 2 sites", "problem", "4.1e-07"),
    ):
        (finding,) = find(Shapes(report.model_copy(update={"doctor": some})))
        assert (finding.answer.startswith(answer), finding.severity) == (True, severity), finding
        assert error in finding.evidence
    for width in (80, 120):
        text = views.printed(views.alone(*site_checks(Shapes(report), "terminal")), width)
        assert max(map(len, text.splitlines())) <= width
        facts = ("3.2e-07", "4.1e-07", "agrees", "2.0e-03", "DIFFERS", "not checked", "partly")
        assert not absent(text, "Computed in float32.", *facts)
        assert text.index("agrees") < text.index("DIFFERS") < text.index("not checked")


@pytest.mark.usefixtures("without_layout")
def test_a_section_is_registered_by_its_decorator_alone(monkeypatch):
    monkeypatch.setattr(sections, "_BUILDERS", {key: [*entries] for key, entries in sections._BUILDERS.items()})

    @sections.section(45, "inspection")
    def extra(shapes, view):
        yield sections.Section(f"{view}: {len(shapes.layers)} layers")

    report = synthetic_report(3, 4, measures=["weights.symmetry"])
    texts = {"terminal": views.summary(report), "markdown": views.markdown(report), "page": views.page(report)}
    for view, text in texts.items():
        assert f"{view}: 3 layers" in text.replace("&#58;", ":")
    assert "3 layers" not in views.summary(series_report(3, 4))  # the control: another kind


def test_lists_of_measures_and_analyzers_give_range_and_meaning_and_details_what_a_run_needs():
    infos = (
        MeasureInfo("weights.symmetry", "how symmetric", "tr(CC)/tr(GG)", low=-1, high=1),
        MeasureInfo("weights.singular_values", "singular values", "σ(M)", low=0, curve=True),
        MeasureInfo("weights.decay", "the law", "AIC", labels=("power", "flat")),
    )
    text = views.printed(views.alone(lists.measure_list(infos)), 120)
    facts = ("how symmetric", "tr(CC)/tr(GG)", "curve over index", "power | flat")
    assert not absent(text, "weights.symmetry", "−1 to 1", *facts)
    entry = Analyzer("symmetry", "weights", "Is it symmetric?", infos, lambda _: {})
    listing = views.printed(views.alone(lists.analyzer_list([entry])), 120)
    assert not absent(listing, "Is it symmetric?", "symmetry, singular_values, decay")
    report = synthetic_report(2, 2).model_copy(update={"timings": {"tokens": 1.234}, "peak_memory_bytes": 3 * 2**30})
    text = views.details(report, 120)
    facts = ("attnlens 0.1.0", "torch 2.13.0", "Linux x86_64", "sha256 000", "tokens: 1.23 s", "at most 3,072 MiB")
    assert not absent(text, *facts)


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_of_kernels_shows_their_spelling_and_properties(width):
    listing = views.printed(views.alone(*lists.kernel_list(kernels().values(), TIES.values(), FILTERS.values())), width)
    assert max(map(len, listing.splitlines())) <= width
    assert "…" not in re.sub(r"[:,]\w+=…", "", listing)
    assert all(re.search(rf"^{name} ", listing, re.MULTILINE) for name in (*kernels(), *TIES, *FILTERS))
    assert all(info.formula.split()[0] in listing for info in kernels().values())
    facts = (":degree=2", ",offset=0", ":rank=…", "the power p (even, ≥ 1)", "must be fitted:", "--fit: each head's β")
    words = re.sub(r"\s+", " ", listing)
    assert not absent(words, *facts, "trained by heal: maps W of queries and keys")
    ends = {line.split()[0]: line.split()[-3:] for line in listing.splitlines() if line[:1].isalpha()}
    expected = {"rbf": "yes yes infinite", "linear": "no yes finite", "rank": "yes no infinite", "hard": "yes yes none"}
    assert {name: " ".join(ends[name]) for name in expected} == expected
    info = KernelInfo(HOSTILE, HOSTILE, HOSTILE, HOSTILE, True, True, "none", "score", lambda score: score)
    listing = views.printed(views.alone(*lists.kernel_list([info], (), ())))
    assert not {"\x1b", "\u202e"} & set(listing)
    assert "[red]b[/red]" in " ".join(listing.split())


def test_the_table_of_heads_marks_those_beyond_chance():
    report = attnlens.inspect("demo", source="weights")
    text = views.all_heads(report, 240)
    above = HeadTests(Shapes(report)).heads("weights.symmetry", 1)
    assert above
    table = text.split("Every head")[1]
    assert table.count("↑") >= len(above)
    assert "significantly above or below chance" in " ".join(table.split())


@pytest.mark.parametrize(("position", "mentioned"), [("absolute", False), ("rotary", True), ("unknown", True)])
def test_texts_on_measures_mention_rope_only_for_models_that_may_have_it(position, mentioned):
    report = synthetic_report(3, 4)
    conventions = Conventions(position=position, qk_norm=False, bias="none")
    shapes = Shapes(report.model_copy(update={"model": report.model.model_copy(update={"conventions": conventions})}))
    info = shapes.readings["weights.symmetry"].info
    assert ("RoPE" in info.meaning, "RoPE" in info.formula) == (mentioned, mentioned)
    assert info.meaning.startswith("symmetry of M: 1 if symmetric, −1 if antisymmetric, 0 if both parts are equal")
    assert info.formula.startswith("(‖S‖² − ‖A‖²)/‖M‖² = tr(CC)/tr(G_Q G_K)")
    symbols = "S and A are its parts. Under RoPE M depends on Δ, and the rest on both. Cross-attention has only a norm."
    kept = symbols if mentioned else "S and A are its parts. Cross-attention has only a norm."
    assert drop_rotary(shapes.report, symbols) == kept
