"""Built-in tasks of which theory says what a model without positions, or with few features, can reach."""

from attnlens.studies.tasks.planted.angles import angles, least_leak
from attnlens.studies.tasks.planted.orders import before, majority
from attnlens.studies.tasks.planted.reversal import Reversal, bag_bound

__all__ = ["Reversal", "angles", "bag_bound", "before", "least_leak", "majority"]
