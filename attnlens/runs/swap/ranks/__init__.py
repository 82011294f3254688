"""Finds the rank of each key head within a budget of loss, or takes the ranks of a plan."""
