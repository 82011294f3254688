"""Render documents for readers and programs.

Contents: `terminal`, `markdown` (also CSV, and checks for CI systems), `html` (one self-contained page, from the
template in `page/`, and pictures as files).
Inputs: a `Document`, rows or a `Picture` of `report.sections`. Outputs: text, or bytes of an image. Importers: `cli`
and `report.export`.
"""
