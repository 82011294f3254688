"""Build the sections of a report: `Report` → `Document` (`documents.summary`, `documents.page`) or `Sheet`.

`section` has the types that renderers draw. `documents` chooses the views by the report's kind. The other modules
build the sections of one subject: `layers` (heads), `swaps`, `comparisons`, `figures` (experiments), `checked`
(rules and `doctor`), `explorer` (the interactive page) and `reference` (`list`, `explain`).
"""
