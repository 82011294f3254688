"""Sections on a terminal, in markdown, as a page of HTML, in a spreadsheet, as pictures; each draws nothing else."""
