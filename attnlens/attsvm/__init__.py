"""Does attention select tokens as a support vector machine would? The problems of Att-SVM, solved and certified."""

from attnlens.attsvm.problem import Problem
from attnlens.attsvm.solution import Solution, Status

__all__ = ["Problem", "Solution", "Status"]
