"""Standard errors, intervals, nulls and false discoveries: how sure a number is."""

from attnlens.statistics.design import Design
from attnlens.statistics.discoveries import false_discovery, p_values
from attnlens.statistics.intervals import Interval, paired_difference, student_interval
from attnlens.statistics.means import median_error, standard_error
from attnlens.statistics.nulls import gaussian_null, null_of_median, robust_z, z_scores
from attnlens.statistics.ranks import rank_correlation
from attnlens.statistics.streams import Stream

__all__ = [
    "Design",
    "Interval",
    "Stream",
    "false_discovery",
    "gaussian_null",
    "median_error",
    "null_of_median",
    "p_values",
    "paired_difference",
    "rank_correlation",
    "robust_z",
    "standard_error",
    "student_interval",
    "z_scores",
]
