"""Run a model with another kernel in its attention and measure what changes."""
