"""Solvers of the Att-SVM problems; each answer carries its certificate."""
