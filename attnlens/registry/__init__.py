"""Registers analyzers and kernels by decorators, and suggests the nearest name for an unknown one."""

from attnlens.registry.analysis import (
    NOT_IDENTIFIED,
    Analyzer,
    Answer,
    Gatherer,
    Gathering,
    GatheringPlace,
    MeasureInfo,
    Readings,
    analyzer,
    analyzers,
    beside_sweeps,
    checked_name,
    comparing,
    every_analyzer,
    gathering,
    info_of,
    measure_infos,
    measure_sources,
)
from attnlens.registry.kernels import KERNELS, MODIFIERS, Fit, KernelInfo, KernelParameter, OutputFit, kernel
