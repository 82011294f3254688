"""Draws."""
def drawn(m): return {}
