"""Run a command: a model and its options in, a `Report` out.

docs/architecture.md describes the modules. Imported by `lab`, `cli`, and `attnlens` itself for its public functions.
"""
