"""Presentation of a report.

`shapes` arranges the measures of a `Report` as arrays, and `atlas` compares them with trained models. `sentences`
states facts in words; `sections` puts sentences, tables and pictures together as a `Document`, or rows as a `Sheet`;
`render` writes a document to a terminal, as markdown or HTML, a sheet as CSV; `pictures` draws with matplotlib;
`export` writes files. Only the command line, the pytest plugin of `checks` and `Report` (late) import it.
"""
