"""Compare two models head by head."""
