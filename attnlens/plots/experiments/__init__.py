"""Pictures of experiments: curves with quartiles, ours against the published, trajectories of heads."""

from attnlens.plots.experiments.curves import experiment_panels
from attnlens.plots.experiments.pages import experiment_overview

__all__ = ["experiment_overview", "experiment_panels"]
