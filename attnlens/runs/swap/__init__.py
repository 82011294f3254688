"""Runs a model with another kernel in its attention and measures what that changes."""
