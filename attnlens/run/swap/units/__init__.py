"""A kernel as a unit of work: what is kept of it, and of parts that take long."""
