"""How the work of a run is done: named units that are computed once, kept, resumed and shared out."""
