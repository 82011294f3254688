"""Build the sections of a report's documents, and its spreadsheet rows.

Contents: `section` (the types that renderers draw, and the decorator `section`), and one module per subject: `facts`
(any report), `layers` (heads), `swaps`, `plans` (also healing and sweeps), `comparisons` (also studies), `experiments`,
`checked` (rules and `doctor`), `explorer` (data for the scripts in `render/page`), `reference` (`list`, `explain`),
`screen` (findings, map, next commands). To add a section, decorate a function in any of these modules or in a new one.
"""
