"""Compares two models head by head."""
