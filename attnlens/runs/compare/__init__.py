"""Compare two models, or two saved reports, head by head.

Contents: `pipeline.compare` reads or inspects both sides; `sides` matches their sites and heads; `draws` runs both
models over the same windows and simulates the rounding of weights; `significance` tests each change; `changes` builds
the rows of the comparison. Imported by `cli` and `runs.lens`.
"""
