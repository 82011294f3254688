"""Presentation of a report: sections with sentences, tables and pictures, rendered for several media."""
