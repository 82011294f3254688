"""Compare two models, or two saved reports, head by head.

Contents: `pipeline.compare` reads or inspects both sides; `sides.py` matches their sites and heads; `draws.py` runs
both models over the same windows and simulates the rounding of weights; `significance.py` tests each change;
`changes.py` builds the rows of the comparison.

Input: two models or reports of inspect, and the options of CompareRequest. Output: a Report of kind compare.
Allowed importers: attnlens.cli, and attnlens itself for `compare`.
"""
