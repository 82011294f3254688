"""The analyses: a model and its options give a Report. Their work is a list of named units, kept and resumed."""
