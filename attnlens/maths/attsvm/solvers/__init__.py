"""Solvers of the Att-SVM problems; each solution includes its certificate."""
