"""Reads pairs, labelled texts and series from files from outside, with bounds and errors that name the lines."""

from attnlens.study.tasks.files.columns import TabbedLines, read_rows
from attnlens.study.tasks.files.series import Recording, read_series

__all__ = ["Recording", "TabbedLines", "read_rows", "read_series"]
