"""Units of work that engines run in other processes: they work, fail, or kill their worker, as their numbers say."""

import os
import signal
import sys
import time
from pathlib import Path

from attnlens.errors import TextError


def square(number):
    return number * number


def process(_):
    time.sleep(0.3)
    return os.getpid()


def threads(_):
    return os.environ["OMP_NUM_THREADS"]


def inherited(_):
    """The threads that this process was given and has, and whether all was imported before its first unit."""
    there = "attnlens.run" in sys.modules
    import torch

    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), there


def times(folder, unit):
    """How often the unit was begun, this time too."""
    path = Path(folder) / f"{unit}.begun"
    with path.open("a") as file:
        file.write("x")
    return path.stat().st_size


def kill(number):
    os.kill(os.getpid(), signal.SIGKILL)


def fail_once(folder, unit):
    if unit == 2 and times(folder, unit) == 1:
        raise ValueError("at first")
    return unit


def fail_always(unit):
    if unit == 2:
        raise TextError("There is no text.", "Name another.")
    if unit == 3:
        raise ZeroDivisionError("first line\nsecond line")
    if unit == 4:
        raise UnpicklableError("a", "b")
    return unit


class UnpicklableError(Exception):
    """Not made again of its arguments, which breaks what reads it."""

    def __init__(self, first, second):
        super().__init__(first + second)


def killed_once(folder, unit):
    if times(folder, unit) == 1 and unit == 2:
        kill(unit)
    return unit


def killed_always(folder, unit):
    times(folder, unit)
    if unit == 2:
        kill(unit)
    return unit


def preempted_once(folder, unit):
    if times(folder, unit) == 1 and unit == 2:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(30)
    return unit


def interrupted(_):
    os.kill(os.getpid(), signal.SIGINT)
    return "lived on"


def folder(_):
    return str(Path.cwd())


def sleep(folder, unit):
    (Path(folder) / f"{unit}.pid").write_text(str(os.getpid()))
    time.sleep(60)


def tasks():
    """Of a study."""
    from attnlens.studies.tasks import Reversal

    return [Reversal()]


def training_units():
    """Two short runs of a small model."""
    from dataclasses import replace

    from attnlens.kernel_transformers import AttentionForm
    from attnlens.studies.scales import SCALES
    from attnlens.studies.training import Run
    from attnlens.studies.units import TrainingUnit

    small = replace(SCALES["tiny"], layers=1, d_model=16, d_forward=16, heads=2, batch=8, looks=1)
    form = AttentionForm(positions="sum", in_value=True)
    return [TrainingUnit(tasks()[0].name, form, small, Run(1e-2, 2, seed), tested=True) for seed in (0, 1)]
