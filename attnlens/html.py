"""A report as one self-contained HTML page: overview, most extreme heads, every head's numbers."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from attnlens import plots
from attnlens.shapes import Reading, Shapes, group_of
from attnlens.tables import facts
from attnlens.tables.experiments import experiment_sections
from attnlens.tables.population import no_errors, population
from attnlens.tables.sections import Rows, Section
from attnlens.tables.series import told_of
from attnlens.tables.swaps import sections, site_sections
from attnlens.wording import (
    NO_VALUE,
    clean,
    decimals_for,
    decimals_with_error,
    short,
    title_of,
    written,
)

if TYPE_CHECKING:
    from attnlens.records import Head, Measure, Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1.5rem;
  color: #1a1a1a; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin-bottom: .3rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } p { margin: .3rem 0; }
img { width: 100%; margin-top: 1rem; }
table { border-collapse: separate; border-spacing: 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e2e2e2; white-space: nowrap; }
th { background: #f5f5f5; font-weight: 600; }
thead th { vertical-align: bottom; }
.heads thead { position: sticky; top: 0; }
.heads tr > :first-child { position: sticky; left: 0; background: #f5f5f5; }
.source { text-align: left; border-left: 1px solid #bbb; }
.first { border-left: 1px solid #bbb; }
.chance td, .chance th { color: #666; background: #fafafa; }
.scroll { overflow: auto; max-height: 44rem; border: 1px solid #ddd; }
.words th, .words td { text-align: left; white-space: normal; vertical-align: top; }
.quiet { color: #666; }
"""


def page(report: Report) -> str:
    """The report as a self-contained HTML page; whatever a report holds is cleaned and escaped, it runs no script.

    Raises UsageError where the report has nothing to draw.
    """
    shapes = Shapes(report)
    title = _text(f"{facts.title(report)} – attnlens {report.command}")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{STYLE}</style></head><body>",
            *_head(report),
            _picture(report),
            *map(_section, _sections(report)),
            _list(
                "Most extreme heads (ranks, not tests)", [": ".join(facts.extreme(e)) for e in report.summary.extremes]
            ),
            _heads(shapes) if report.heads else "",
            _list("No value", facts.without_value(shapes)),
            _list("Left out", facts.skipped(report.coverage.skipped)),
            _measures(shapes),
            _made(report),
            "</body></html>\n",
        ]
    )


def _text(text: str) -> str:
    """A stranger's string as text and nothing else: no control characters, no markup."""
    return escape(clean(text))


def _head(report: Report) -> Iterator[str]:
    yield f"<h1>{_text(facts.title(report))}</h1>"
    yield f"<p>{_text(facts.header(report))}</p>"
    for line in (facts.ran_on(report), facts.conventions(report), *facts.notes(report), facts.identity(report)):
        if line:
            yield f'<p class="quiet">{_text(line)}</p>'
    yield f"<p><strong>{_text(facts.standing(report)[0])}</strong></p>"


def _picture(report: Report) -> str:
    data = base64.b64encode(plots.overview(report)).decode()
    shown = "what the kernel does" if report.swap else "maps of layers by heads, shares and curves"
    shown = "curves of the experiments" if report.experiments else shown
    return f'<img alt="Overview: {shown}" src="data:image/png;base64,{data}">'


def _sections(report: Report) -> list[Section]:
    """What is told of a swap or of experiments; nothing of other reports."""
    return [*sections(report), *site_sections(report), *experiment_sections(report, whole=True)]


def _section(section: Section) -> str:
    title = f"<h2>{_text(section.title)}</h2>" if section.title else ""
    if section.items:
        return _list(_text(section.title), section.lines)
    lines = "".join(f"<p>{_text(line)}</p>" for line in section.lines)
    below = "".join(f'<p class="quiet">{_text(line)}</p>' for line in section.below)
    return f"{title}{lines}{'' if section.rows is None else _table(section.rows)}{below}"


def _table(rows: Rows) -> str:
    columns = [*rows.names, *rows.columns]
    groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
    over = "".join(f'<th class="source" colspan="{count}">{_text(group)}</th>' for group, count in groups)
    head = f"<tr>{over}</tr>" if any(group for group, _ in groups) else ""
    head += f"<tr>{''.join(f'<th>{_text(column.title)}</th>' for column in columns)}</tr>"
    tags = ["th"] * len(rows.names) + ["td"] * len(rows.columns)
    body = "".join(
        f"<tr>{''.join(_cell(tag, _text(cell), False) for tag, cell in zip(tags, cells, strict=True))}</tr>"
        for cells in zip(*(column.cells for column in columns), strict=True)
    )
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def _heads(shapes: Shapes) -> str:
    groups: dict[str, list[Reading]] = {}
    for reading in shapes.readings.values():
        groups.setdefault(group_of(reading.info), []).append(reading)
    columns = [reading for group in groups.values() for reading in group]
    parts = len(set(shapes.parts)) > 1
    starts = {group[0].name for group in groups.values()}
    first = "<th></th>" + "".join(
        f'<th class="source" colspan="{len(group)}">{_text(source)}</th>' for source, group in groups.items()
    )
    second = f"<th>{'part layer' if parts else 'layer'} · head</th>" + "".join(
        _cell("th", _text(title_of(reading.name)), reading.name in starts) for reading in columns
    )
    rows = "".join(_row(head, columns, starts, parts) for head in shapes.report.heads)
    head = f"<thead><tr>{first}</tr><tr>{second}</tr></thead>"
    body = f"<tbody>{_null_row(columns, starts)}{rows}</tbody>"
    about = population(shapes.report)
    said = no_errors(shapes.report) or (about and f"±: standard error; {about}")
    below = f'<p class="quiet">{_text(said)}.</p>' if said else ""
    return f'<h2>Every head</h2><div class="scroll"><table class="heads">{head}{body}</table></div>{below}'


def _cell(tag: str, content: str, first: bool) -> str:
    return f'<{tag} class="first">{content}</{tag}>' if first else f"<{tag}>{content}</{tag}>"


def _null_row(columns: list[Reading], starts: set[str]) -> str:
    if not any(reading.null for reading in columns):
        return ""
    cells = (_cell("td", _null(reading), reading.name in starts) for reading in columns)
    return f'<tr class="chance"><th>null, mean ± sd</th>{"".join(cells)}</tr>'


def _null(reading: Reading) -> str:
    if reading.null is None:
        return ""
    mean, sd = reading.null
    decimals = decimals_for([sd or mean], figures=2)
    return f"{written(mean, decimals)} ± {written(sd, decimals)}"


def _row(head: Head, columns: list[Reading], starts: set[str], parts: bool) -> str:
    place = f"{head.part} {head.layer} · {head.head}" if parts else f"{head.layer} · {head.head}"
    cells = (
        _cell("td", _number(head.measures.get(reading.name), reading), reading.name in starts) for reading in columns
    )
    return f'<tr><th title="{_text(head.site)}">{place}</th>{"".join(cells)}</tr>'


def _number(measure: Measure | None, reading: Reading) -> str:
    if measure is None or measure.value is None:
        reason = measure.reason or "" if measure else "not measured"
        return f'<span class="quiet" title="{_text(reason)}">{NO_VALUE}</span>'
    if measure.label is not None:
        return _text(measure.label)
    decimals = decimals_with_error(reading.present.tolist(), reading.error)
    error = f" ± {short(measure.se)}" if measure.se is not None else ""
    return f"{written(measure.value, decimals)}{error}"


def _measures(shapes: Shapes) -> str:
    followed = [name for e in shapes.report.experiments if e.trajectories for name in told_of(e)]
    known = [shapes.info(name) for name in (*shapes.readings, *shapes.curves, *followed)]
    rows = "".join(
        f"<tr><th>{_text(info.name)}</th><td>{_text(info.meaning)}</td><td>{_text(info.formula)}</td></tr>"
        for info in known
        if info.meaning
    )
    return f'<h2>What is measured</h2><table class="words">{rows}</table>' if rows else ""


def _made(report: Report) -> str:
    made, settings = report.environment, report.settings
    text = [f"text: {settings.text.name}, sha256 {settings.text.sha256}"] if settings.text else []
    lines = [
        f"{report.tool.name} {report.tool.version}, Python {made.python}, torch {made.torch}, "
        f"transformers {made.transformers}, {made.platform}; seed {settings.seed}",
        *text,
        *(f"{file.name}: sha256 {file.sha256}" for file in report.model.files),
    ]
    return _list("How it was made", lines)
