"""Run a model with a different attention kernel, and compare it with the original model (`attnlens swap-kernel`).

`pipeline` prepares a run and builds its report; `kernel_run` runs one kernel; `lab.ranks` and `lab.heal` add steps.
"""
