"""Run a model with another attention kernel, and compare it with the original (`attnlens swap-kernel`).

`pipeline` loads the model, cuts the texts, runs each kernel as a unit of work and builds the report. `kernel_run` runs
one kernel: `fit` its parameters, check it for leaks (`sites`), measure it and its controls, and `sweep` heads or
layers; `lab.ranks` and `lab.heal` add steps of their own. `saved` writes and reads changed models. Imported by
`runs.compare`, `lab` and `cli`.
"""
