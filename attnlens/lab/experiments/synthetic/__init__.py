"""Synthetic experiments on random instances, one `Study` each.

`tokens`: instances, and experiments in which every input selects one token; `weights`: those in which several tokens
can keep their weight. Inputs: `ExperimentSettings`. Outputs: `Experiment`. Imported by `lab/experiments` only.
"""
