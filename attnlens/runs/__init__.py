"""Run a command: a model and its options in, a `Report` out.

Contents: `inspect/`, `compare/` and `swap/` (one package per command), `series.py` (checkpoints), `doctor.py` (a second
computation of what a report contains), and what they share: `checks.py` (the model runs and is read rightly),
`feeding.py` (options → settings and texts), `outputs.py` and `differences.py` (predictions of a changed
model against the original's), `progress.py`, `provenance.py`, `work.py` (which named units to compute, and where) and
`store.py` (keeps them in files; the facts that determine the numbers, which each run lists, are hashed into the
folder's name). `lens.py`: a model loaded once
for several of them.

Input: a model's name or a loaded model, and checked options (attnlens.requests). Output: attnlens.report.report.Report.
Allowed importers: attnlens.lab, attnlens.cli, and attnlens itself for its public functions.
"""
