"""Run a command: a model and its options in, a `Report` out.

Contents: `inspect/`, `compare/` and `swap/` (one package per command), `series.py` (checkpoints), `doctor.py` (a second
computation of what a report contains; `backends.py` compares attention backends, `masks.py` builds inputs that test
masks), `capture.py` (the attention of a model in memory), and shared modules:
`checks.py` (check that the model runs and is analysed correctly), `feeding.py` (options → settings and texts),
`outputs.py` and `differences.py` (compare predictions of a changed model with the original's), `progress.py`,
`provenance.py`, `work.py` (compute or resume named units, in which process) and `store.py` (keep units in files; the
folder's name is a hash of the facts that determine the numbers).

Input: a model's name or a loaded model, and checked options (attnlens.requests). Output: attnlens.report.report.Report.
Allowed importers: attnlens.lab, attnlens.cli, and attnlens itself for its public functions.
"""
