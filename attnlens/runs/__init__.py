"""Compute a `Report` from a model and the options of a command.

docs/architecture.md describes the modules. Imported by `lab`, `cli`, and `attnlens` itself for its public functions.
"""
