"""How does a report look as one page, without any other file? Summary, overview picture and every head's numbers."""

from __future__ import annotations

import base64
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens import plots
from attnlens.wording import model_name

if TYPE_CHECKING:
    from attnlens.records import Head, Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } img { max-width: 100%; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { position: sticky; top: 0; background: #fff; }
.scroll { overflow: auto; max-height: 40rem; } .missing { color: #888; }
"""


def page(report: Report) -> str:
    """The report as a self-contained HTML page; whatever a report holds is escaped, it runs no script."""
    title = escape(f"attnlens {report.command}: {model_name(report.model.id)}")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
            f"<p>{escape(_facts(report))}</p><p><strong>{escape(report.coverage.sentence)}</strong></p>",
            _picture(report),
            _standouts(report),
            _heads(report),
            "</body></html>\n",
        ]
    )


def _facts(report: Report) -> str:
    model, settings = report.model, report.settings
    text = f", text {settings.text.name}, {settings.sequences} × {settings.tokens} tokens" if settings.text else ""
    return f"{model.architecture}, {model.parameters:,} parameters, {settings.dtype} on {settings.device}{text}"


def _picture(report: Report) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (path,) = plots.save_all(report, Path(folder) / "overview.png")
        data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="Overview: maps of layers by heads" src="data:image/png;base64,{data}">'


def _standouts(report: Report) -> str:
    rows = [
        f"<li>layer {standout.layer}, head {standout.head}: {escape(standout.text)}</li>"
        for standout in report.summary.standouts
    ]
    return f"<h2>Heads that stand out</h2><ul>{''.join(rows)}</ul>" if rows else ""


def _heads(report: Report) -> str:
    names = report.measure_names()
    head = "".join(f"<th>{escape(name)}</th>" for name in ["site", "part", "layer", "head", *names])
    rows = "".join(_row(record, names) for record in report.heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h2>Every head</h2><div class="scroll">{table}</div>'


def _row(record: Head, names: list[str]) -> str:
    cells = [escape(record.site), record.part, str(record.layer), str(record.head)]
    for name in names:
        measure = record.measures.get(name)
        if measure is None or measure.value is None:
            reason = escape(measure.reason or "" if measure else "not measured", quote=True)
            cells.append(f'<span class="missing" title="{reason}">–</span>')
        else:
            se = f" ± {measure.se:.2g}" if measure.se is not None else ""
            cells.append(escape(measure.label or f"{measure.value:.4g}{se}"))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
