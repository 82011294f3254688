"""State facts of a report in sentences and phrases, for sections and pictures; records in, cleaned text out."""
