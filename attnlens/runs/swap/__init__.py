"""Run a model with another attention kernel, and compare it with the original (`attnlens swap-kernel`).

`pipeline` prepares the run and builds its report, `kernel_run` runs one kernel; `lab.ranks` and `lab.heal` add steps.
"""
