"""Measure a model's attention heads; docs/architecture.md follows an inspection from `pipeline` to the report."""
