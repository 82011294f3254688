"""Compare two models, or two saved reports, head by head.

Contents: `pipeline.compare` reads or inspects both sides; `sides` matches their sites and heads, and runs both models
over the same windows; `significance` tests each change and simulates the rounding of weights; `changes` builds the
rows of the comparison. Imported by `cli` and `lab.lens`.
"""
