"""Built-in tasks of which theory says what a model without positions, or with few features, can reach."""

from attnlens.study.tasks.planted.angles import angles, least_leak
from attnlens.study.tasks.planted.orders import before, majority
from attnlens.study.tasks.planted.reversal import Reversal, bag_bound

__all__ = ["Reversal", "angles", "bag_bound", "before", "least_leak", "majority"]
