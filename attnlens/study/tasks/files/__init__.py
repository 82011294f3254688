"""Reads pairs, labelled texts and series from files from outside, with bounds and errors that name the lines."""

from attnlens.study.tasks.files.columns import Rows, read_rows
from attnlens.study.tasks.files.series import Recording, read_series

__all__ = ["Recording", "Rows", "read_rows", "read_series"]
