"""Run a model with another attention kernel, and compare it with the original (`attnlens swap-kernel`).

`pipeline` loads the model, cuts the texts, runs each kernel as a unit of work and builds the report. `kernel_run` runs
one kernel: `fit` its parameters, check it for leaks (`sites`), measure it and its controls, `sweep` heads or layers,
and save the model (`saved`). `session` has the state that the kernels share, and the steps through which `lab.ranks`
and `lab.heal` take part in a run. Imported by `runs.compare`, `lab` and `cli`.
"""
