"""Which analyzers a model must be read with, so that rules and a baseline find what they are about."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from attnlens.errors import UsageError
from attnlens.records import Baseline
from attnlens.registry import every_analyzer, measure_infos
from attnlens.rules.rule import Rule
from attnlens.rules.subjects import FIELDS, stem


def needed(rules: Sequence[Rule], baseline: Baseline | None) -> dict[str, Any]:
    """The options `analyzers` and `source` of a run that measures no more than is checked.

    Raises UsageError, before anything is loaded, for a rule about what no analyzer measures and no report has.
    """
    if baseline is not None:
        return {"analyzers": baseline.settings.analyzers, "source": baseline.settings.source}
    _refuse_unknown(rules)
    every = every_analyzer()
    read = [found for found in every if any(info.name in rule.subject for info in found.measures for rule in rules)]
    if not read:
        return {}
    sources = {found.source for found in read}
    return {
        "analyzers": list(dict.fromkeys(found.name for found in read)),
        "source": sources.pop() if len(sources) == 1 else "both",
    }


def _refuse_unknown(rules: Sequence[Rule]) -> None:
    known = measure_infos()
    for rule in rules:
        name = stem(rule.subject)
        if name.partition(".")[0] in FIELDS or any(name == info or name.startswith(f"{info}.") for info in known):
            continue
        near = difflib.get_close_matches(name[:100], known, n=1)
        raise UsageError(
            f"{rule.place}{rule.spelling} matches nothing: no analyzer measures {rule.named}.",
            f"{f'Did you mean {near[0]!r}? ' if near else ''}`attnlens list measures` names them.",
        )
