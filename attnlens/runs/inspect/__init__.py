"""Measure a model's attention heads.

Data flow: `pipeline.inspect` checks the options and loads the model → `inspection.survey` finds the sites and cuts the
texts (`Inspection`, frozen) → `units.UnitReader` computes each unit, a dictionary of tensors and JSON values (the
weights of a site, a batch of tokens, or the gatherers of a few sites), in any process and order →
`results.combine_units` joins the units into the heads' records and tables (`Results`) → `assembly.compute` returns the
`Report`.

`sequences.py` splits batches and averages rows, `attention_rows.py` selects what `--show` adds, `summary.py` computes
medians and extreme heads.

Input: a model and the options of InspectRequest. Output: a Report of kind inspect.
Allowed importers: attnlens.runs (compare, swap, series, doctor), attnlens.lab, attnlens.cli.
"""
