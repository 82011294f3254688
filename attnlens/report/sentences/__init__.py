"""State facts of a report in sentences and phrases, for sections and pictures.

Contents: `reports` (any report), `swaps`, `plans` (ranks, healing), `comparisons` (two models, studies).
Inputs: records. Outputs: text without terminal control characters. Importers: `report.sections`, `report.pictures` and
`cli`.
"""
