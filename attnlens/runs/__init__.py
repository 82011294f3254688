"""Compute a `Report` from a model and the options of a command.

docs/architecture.md describes the modules. Imported by `lab` and `cli`; `attnlens` exports its public functions.
"""
