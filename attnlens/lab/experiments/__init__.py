"""The papers' synthetic experiments on token selection, and their experiments on one head and on small models.

`synthetic/`: experiments on random instances, listed in EXPERIMENTS; `one_head`, `trained`, `binary_kernel`: those on a
model's head, on the demo model, and on a planted kernel. Inputs: `ExperimentSettings`, or a loaded head. Outputs:
`records.studies.Experiment`, judged against published values. Imported by `lab/reproduce.py` only.
"""
