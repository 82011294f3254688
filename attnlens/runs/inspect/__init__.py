"""Measure a model's attention heads.

Data flow: `pipeline.inspect` checks the options and loads the model (`PreparedRun`) → `pipeline.survey` finds the sites
and cuts the texts (`Inspection`, frozen) → `Inspection.read_unit` computes each unit, a dictionary of tensors and JSON
values (the weights of a site, a batch of tokens, or the gatherers of a few sites), in any process and order → `Results`
derives the heads' records, the tables and the `Report` from the units. `sequences.py` splits batches, averages rows,
and selects the details that `--show` adds.

Input: a model and the options of InspectRequest. Output: a Report of kind inspect.
Allowed importers: attnlens.runs (compare, swap, series, doctor, lens), attnlens.lab, attnlens.cli.
"""
