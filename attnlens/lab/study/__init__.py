"""Training of small transformers with any kernel, to rerun the papers' tables.

`tables`: the papers' tables and the sizes of the models; `examples`, `tasks`: data and scores; `units`: training
runs as units of work, and their speed; `cells`: search, seeds and comparison of a table's cells. Inputs: cells and
tasks. Outputs: `records.studies.StudyTable`, and saved models. Imported only by `lab/reproduce.py`.
"""
