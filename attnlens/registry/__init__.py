"""Registers analyzers and kernels by decorators, and suggests the nearest name for an unknown one."""

from attnlens.registry.analysis import (
    Analyzer,
    Answer,
    Gatherer,
    Gathering,
    GatheringPlace,
    Readings,
    analyzer,
    analyzers,
    beside_sweeps,
    comparing,
    every_analyzer,
    gathering,
    info_of,
    measure_infos,
    measure_sources,
)
from attnlens.registry.kernels import KERNELS, MODIFIERS, Fit, KernelInfo, KernelParameter, OutputFit, kernel
from attnlens.registry.measure_info import NOT_IDENTIFIED, MeasureInfo
from attnlens.registry.names import checked_name

__all__ = [
    "KERNELS",
    "MODIFIERS",
    "NOT_IDENTIFIED",
    "Analyzer",
    "Answer",
    "Fit",
    "Gatherer",
    "Gathering",
    "GatheringPlace",
    "KernelInfo",
    "KernelParameter",
    "MeasureInfo",
    "OutputFit",
    "Readings",
    "analyzer",
    "analyzers",
    "beside_sweeps",
    "checked_name",
    "comparing",
    "every_analyzer",
    "gathering",
    "info_of",
    "kernel",
    "measure_infos",
    "measure_sources",
]
