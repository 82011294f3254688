"""Find the rank of each key head within a loss budget, or take the ranks of a plan."""
