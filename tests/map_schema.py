"""Compare JSON files of schema version 1 with those of version 2, leaf by leaf, without using attnlens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOVED = (
    (r"plan(?=$|\.)", "swap.plan"),
    (r"more_swaps(?=$|\.)", "swap.others"),
    (r"(selections|attention)(?=$|\.)", r"inspection.\1"),
    (r"((?:swap\.plan\.)?settings)\.windows$", r"\1.placement"),
    (r"((?:swap\.plan\.)?settings)\.sequences$", r"\1.windows"),
    (r"((?:swap\.plan\.)?settings)\.sequences_asked$", r"\1.windows_requested"),
    (r"((?:swap\.plan\.)?settings)\.tokens$", r"\1.length"),
)
"""Paths in version 1 → paths in version 2."""
BODIES = {"selections", "attention", "swap", "more_swaps", "plan", "comparison", "doctor", "experiments", "studies"}
"""Fields that version 2 omits if they are empty."""
RUNS = {"timings", "environment", "peak_memory_bytes", "tokens_per_second", "seconds", "stamp", "beside_sdpa"}
"""Fields that differ between two runs of the same command."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number, text and null with its path; an empty list or object is a leaf too."""
    if isinstance(value, dict | list) and value:
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name not in RUNS:
                yield from leaves(part, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def version2(document: Any) -> dict[str, Any]:
    """Return the leaves of a report, a plan or a baseline of either version, under their paths in version 2."""
    if not isinstance(document, dict) or "settings" not in document or document.get("schema_version") == "2":
        return dict(leaves(document))
    renamed = {}
    for path, leaf in leaves({name: field for name, field in document.items() if field or name not in BODIES}):
        for old, new in MOVED:
            path = re.sub(f"^{old}", new, path)
        renamed[path] = leaf
    return renamed | {"schema_version": "2"}


def differences(old: Any, new: Any) -> list[str]:
    """Return a line for each leaf of the old document that is missing or different in the new one."""
    before, after = version2(old), version2(new)
    return [
        f"{path}: {leaf} → {after.get(path, 'nothing')}"
        for path, leaf in before.items()
        if path not in after or after[path] != leaf or type(after[path]) is not type(leaf)
    ]
