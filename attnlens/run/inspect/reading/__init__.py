"""Reads what a model's weights and its forward passes show, and hands it to a sink."""
