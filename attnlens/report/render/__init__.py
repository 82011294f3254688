"""Render a `Document` for a terminal, as markdown or as an HTML page, a `Sheet` as CSV, and a `Picture` as a file."""
