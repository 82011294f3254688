"""Reads pairs, labelled texts and series from files from outside, with bounds and errors that name the lines."""

from attnlens.studies.tasks.files.columns import TabbedLines, read_rows
from attnlens.studies.tasks.files.series import Recording, read_series

__all__ = ["Recording", "TabbedLines", "read_rows", "read_series"]
