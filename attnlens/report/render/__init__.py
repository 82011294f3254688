"""Render documents for readers and programs.

Contents: `terminal`, `markdown` (also CSV, and checks for CI systems), `html` (one self-contained page, from the
template in `page/`, and pictures as files).
"""
