"""Which modules an adapter's settings mean, and with which rank and α, by the rules of peft."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import regex  # Python's own re can't be stopped, and the expressions come from a stranger's file

from attnlens.errors import ModelError
from attnlens.files import written
from attnlens.models.adapters.settings import SAY_AGAIN, AdapterSettings

LONGEST = 4096
"""Characters of the longest expression; those of well-known trainers have a tenth of it."""
SECONDS = 10.0
"""Within which all of them must be answered."""


@dataclass
class Targets:
    """Answers what the settings mean for a module by its path."""

    settings: AdapterSettings
    ends: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def __contains__(self, path: str) -> bool:
        """Whether the settings name the module, as peft's check_target_module_exists decides it."""
        settings = self.settings
        if self._named(settings.excluded, path) or any(
            self._first((name,), path, r"(?:^|.*\.){}(?:$|\..*)") for name in settings.saved
        ):
            return False
        if settings.targets is None:
            return True
        if not self._named(settings.targets, path):
            return False
        if isinstance(settings.targets, str) or settings.layers is None:
            return True
        return self._layer(path) in settings.layers

    def rank(self, path: str) -> int:
        """r of that module."""
        key = self._first(self.settings.rank_pattern, path, r"(?:.*\.)?(?:{})")
        return self.settings.rank if key is None else self.settings.rank_pattern[key]

    def alpha(self, path: str) -> float:
        """α of that module."""
        key = self._first(self.settings.alpha_pattern, path, r"(?:.*\.)?(?:{})")
        return self.settings.alpha if key is None else self.settings.alpha_pattern[key]

    def _named(self, names: str | tuple[str, ...], path: str) -> bool:
        """By an expression for the whole path, or by a list of paths and ends of paths."""
        if isinstance(names, str):
            return self._match(names, path) is not None
        return any(path == name or path.endswith(f".{name}") for name in names)

    def _layer(self, path: str) -> int | None:
        """The first number in the path, or the first behind one of the names of lists of layers."""
        lists = self.settings.layers_pattern or (r"[^.]*",)
        start = r"(?:^|.*?\.)" if self.settings.layers_pattern else r".*?\."
        for name in lists:
            if found := self._match(rf"{start}{name}\.(?P<idx>\d+)\..*", path):
                return int(found["idx"])
        return None

    def _first(self, patterns: Iterable[str], path: str, around: str) -> str | None:
        """The first of the patterns that matches, put into `around`."""
        return next((one for one in patterns if self._match(around.replace("{}", one), path)), None)

    def _match(self, pattern: str, path: str) -> regex.Match[str] | None:
        file = self.settings.file
        left = self.ends - time.monotonic()
        try:
            if len(pattern) > LONGEST:
                raise ValueError("it is too long")  # noqa: TRY301  # refused as what can't be compiled is
            if left <= 0:
                raise TimeoutError  # noqa: TRY301  # as if the last of them had used all the time
            return regex.fullmatch(pattern, path, timeout=left)
        except TimeoutError:
            raise ModelError(
                f"The names of modules in {file} can't be compared within {SECONDS:.0f} s: {written(pattern)}.",
                "Name the modules one by one.",
            ) from None
        except (regex.error, RecursionError, ValueError):
            raise ModelError(f"{file} holds no expression for modules: {written(pattern)}.", SAY_AGAIN) from None
