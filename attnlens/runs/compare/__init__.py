"""Compare two models, or two saved reports, head by head.

Contents: `pipeline.compare` reads or inspects both sides; `sides` matches their sites and heads, and runs both models
over the same windows; `significance` tests each change and simulates the rounding of weights; `changes` builds the
rows of the comparison; `diagnosis` names the causes of the differences in all layers, `causes` those in one layer;
`moves` finds layers with tensors from different layers; `stored` compares weights left in files. Imported by `cli`
and `lab.lens`.
"""
