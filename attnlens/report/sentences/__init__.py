"""Facts of a report as sentences and words, for tables and pictures."""
