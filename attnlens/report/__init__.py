"""Presentation of a report.

Contents: `report` (`records.Report` with methods for saving and drawing), `shapes` (measures as arrays), `atlas`
(comparison with trained models), `findings/` (answers with evidence), `sections/` (documents of sentences, tables and
pictures, and spreadsheet rows), `render/` (documents for a terminal, as markdown or HTML; rows as CSV), `pictures/`
(matplotlib), `export` (documents and files).
"""
