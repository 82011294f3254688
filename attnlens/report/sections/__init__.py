"""Build the sections of a report's documents (`export.summary`, `export.page`), and spreadsheet rows.

Contents: `section` (the types that renderers draw, and the decorator `section`), and the sections of one subject with
their sentences: `facts` (any report), `layers` (heads), `swaps`, `plans` (also healing and sweeps), `comparisons` (also
studies), `experiments`, `checked` (rules and `doctor`), `explorer` (data of the page's interactive table and maps,
which the scripts in `render/page` draw), `reference` (`list`, `explain`). A new section is one decorated function in
any of these modules, or in a new module.
"""
