"""Build the sections of a report: `Report` → `Document` (`documents.summary`, `documents.page`) or rows.

Contents: `section` (the types that renderers draw), `documents` (the views of each kind of report), and the sections of
one subject: `layers` (heads), `swaps`, `comparisons`, `figures` (experiments), `checked` (rules and
`doctor`), `explorer` (the interactive page), `reference` (`list`, `explain`).
Inputs: a `Report`, or its `Shapes`. Outputs: `Document` and rows. Importers: `report.render`, `report.export`, `cli`
and the pytest plugin of `checks`.
"""
