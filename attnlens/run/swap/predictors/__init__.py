"""Joins the harm of swapped heads with inspect's measures of the same heads on the same windows."""
