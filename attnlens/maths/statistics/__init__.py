"""Standard errors, intervals, null distributions and false discovery rates of measures.

- `design`: the sampling of windows from texts, the variance of a mean under this design, bootstrap samples; running
  means and linear CKA over batches.
- `intervals`: standard errors, intervals, p-values, false discovery rates, null distributions.
- `associations`: rank correlations, permutation tests, comparisons of treatments in blocks.

Inputs are tensors with one row per window or head, and a `Design`, which describes how windows were sampled; outputs
are tensors, numbers or an `Interval`.

The studies under `benchmarks/` compare two measures of the same heads by Spearman's ρ with an interval over heads, or
over whole `groups` of heads such as layers:

>>> import torch
>>> from attnlens.maths import statistics
>>> depth = torch.arange(32.0)
>>> noisy = depth + 4 * torch.randn(32, generator=torch.Generator().manual_seed(0))
>>> interval = statistics.rank_correlation(depth, noisy)
>>> 0.8 < interval.low < interval.value < interval.high < 1
True
"""

from attnlens.maths.statistics.associations import rank_correlation
from attnlens.maths.statistics.design import Design, Stream, count_and_mean
from attnlens.maths.statistics.intervals import (
    Interval,
    adjust_p_values,
    false_discovery,
    gaussian_null,
    median_error,
    null_of_median,
    p_values,
    paired_difference,
    prediction_bound,
    robust_z,
    standard_error,
    student_interval,
)
