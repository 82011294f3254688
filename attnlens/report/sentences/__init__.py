"""Facts of a report as sentences and phrases, for tables and pictures."""
