"""Presentation of a report.

Contents: `report` (`Report`, the `records.Report` with methods that write and draw it), `shapes` (the measures of a
report as arrays), `atlas` (comparison with trained models), `findings/` (answers with their evidence), `sections/`
(rows, and a `Document` of sentences, tables and pictures), `render/` (documents for a terminal, as markdown or HTML;
rows as CSV), `pictures/` (matplotlib), `export` (documents and files).
"""
