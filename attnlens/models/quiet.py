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
    """Inside, transformers downloads no compiled code from the hub; models compute the same without it.

    A patch, because security needs it and no switch covers it: with the package `kernels`, RWKV, YOSO and MRA
    call transformers' get_kernel while they are built, and neither use_kernels=False nor USE_HUB_KERNELS (which is read
    only when transformers is first imported) stops them; HF_HUB_OFFLINE would still run what an earlier program cached.
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
