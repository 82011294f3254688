"""The `Report` that commands return: `records.Report` with methods for saving and drawing.

The methods import the modules that they need, so that commands that only read reports start quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attnlens import arguments, records
from attnlens.errors import OutputError
from attnlens.files import caption_file, local_path, write_atomically
from attnlens.records.measures import read_record
from attnlens.records.provenance import convert_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report(records.Report):
    """The report of a command, which can be saved in every format, drawn, and shown in a notebook."""

    def save(self, path: str | Path, *, bare: bool = False) -> None:
        """Write the report in the format of the path's suffix: .json, .csv, .md, .html, .png, .svg or .pdf.

        A picture named after a measure or panel (`symmetry.pdf`) shows only this measure or panel; any other picture
        shows the overview. The caption is written to a second file (`symmetry.pdf.txt`). `bare` omits title and notes,
        for a paper. Raise OutputError if the suffix is not supported or the file can't be written, UsageError if the
        picture can't be drawn or its name is ambiguous.
        """
        from attnlens.report import export
        from attnlens.report.pictures.style import FORMATS

        target = local_path(arguments.path("path", path))
        suffix = target.suffix.lower()
        if suffix in FORMATS:
            ((_, draw),) = export.drawings(self, target, bare=bare).items()
            content, caption = draw()
            write_atomically(target, content)
            write_atomically(caption_file(target), caption.encode())
        elif suffix in export.ENDINGS:
            write_atomically(target, export.WRITERS[export.ENDINGS[suffix]](self).encode())
        else:
            raise OutputError(
                f"Cannot write a report with the suffix {suffix!r} ({target}).",
                f"Use one of: {', '.join((*export.ENDINGS, *FORMATS))}.",
            )

    def plot(self, *, bare: bool = False) -> Figure:
        """Draw the overview as a matplotlib Figure; the figure's label is the caption. `bare` omits title and notes.

        Raise UsageError if the report has nothing to draw.
        """
        from attnlens.report.export import overview
        from attnlens.report.pictures.style import house_style

        with house_style(bare=bare):
            return overview(self).draw(bare=bare)

    def __str__(self) -> str:
        """Return the text that a command prints: heading, findings, any map or table, and next commands."""
        import io

        from attnlens.report.export import summary
        from attnlens.report.render import terminal

        page = terminal.console()
        page.file = io.StringIO()
        page.print(terminal.document(summary(self)))
        return page.file.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: heading, findings, next commands and, if it can be drawn, the overview."""
        from attnlens.report.export import build_card

        return build_card(self)


def read_report(path: str | Path) -> Report:
    """Read a report, validating every field. Raise UsageError if the file is missing or is not a report in JSON."""
    return read_record(Report, path, "not a report", "Pass a file written with --json.", convert_report)
