"""Reports as sections of sentences, tables and pictures. The only package that branches on the kind of a report."""
