"""Measure a model's attention heads; docs/architecture.md describes the steps of an inspection."""
