"""Keeps transformers quiet while it loads and runs a model, and away from code on the hub while it loads one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from logging import CRITICAL, getLogger
from typing import Any


@contextmanager
def unlogged() -> Iterator[None]:
    """Inside, transformers and accelerate log nothing that is not critical; what was set is set again at the end.

    Its errors repeat what a config says, control characters and all; what matters of them is raised.
    Some models log when they are run and not when they are loaded: Mamba tells at its first forward pass which of its
    kernels are not installed.
    """
    from transformers.utils import logging

    with ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(CRITICAL)
        spreading = getLogger("accelerate")
        undo.callback(spreading.setLevel, spreading.level)
        spreading.setLevel(CRITICAL)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no bars and logs nothing, and nothing warns; for the time that a model is loaded."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def no_kernels() -> Iterator[None]:
    """Inside, transformers downloads no compiled code, as it does for some models where the package `kernels` is.

    It is told that there is none, and so computes the same without.
    """
    hub: Any = import_module("transformers.integrations.hub_kernels")
    own = getattr(hub, "get_kernel_hub", None)
    if own is None:  # the package is not installed
        yield
        return

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("attnlens runs no code from the hub")

    package: Any = import_module("kernels")
    hub.get_kernel_hub = package.get_kernel = refuse
    try:
        yield
    finally:
        hub.get_kernel_hub = package.get_kernel = own


@contextmanager
def no_peft() -> Iterator[None]:
    """Inside, transformers applies no adapter that lies beside weights, as it does where the package `peft` is."""
    module: Any = import_module("transformers.integrations.peft")
    own = module.is_peft_available
    module.is_peft_available = lambda *_: False
    try:
        yield
    finally:
        module.is_peft_available = own
