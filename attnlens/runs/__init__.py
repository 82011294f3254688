"""Analyses that turn a model and its options into a Report; their work consists of named units that can be resumed."""
