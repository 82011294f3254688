"""How do the tests see wrong shapes? The maths rooms are imported with jaxtyping and beartype watching every call."""

import os
import typing

import beartype.door  # noqa: F401  # before the switch below, which is meant for the maths rooms alone
import torch
from jaxtyping import install_import_hook

import attnlens.records  # as above

# The tests say themselves when they are offline; huggingface_hub reads this once, when it is first imported.
os.environ.pop("HF_HUB_OFFLINE", None)

# Two BLAS threads on a small matrix mostly wait for each other; the pools of attnlens.linalg set their own.
torch.set_num_threads(1)

# Annotations are strings whose names the package imports for type checkers only; here they must exist.
typing.TYPE_CHECKING = True
KERNELS = [f"attnlens.kernels.{room}" for room in ("products", "distances", "features", "fitting", "lowrank")]
with install_import_hook(["attnlens.linalg", "attnlens.statistics", *KERNELS], "beartype.beartype"):
    import attnlens.kernels
    import attnlens.linalg
    import attnlens.statistics  # noqa: F401
typing.TYPE_CHECKING = False
