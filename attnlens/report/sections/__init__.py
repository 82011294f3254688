"""Reports as sections of sentences, tables and pictures; the only room that asks what kind of report it is."""
