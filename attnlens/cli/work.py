"""What does every command of a model do alike? It names the model, and shows progress while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnlens.cli.outputs import Outputs
from attnlens.cli.show import console, progress
from attnlens.errors import UsageError


def named_model(name: str | None, *, quiet: bool) -> str:
    """The model asked for, or demo, which is said. Raises UsageError for an empty name."""
    if name is None and not quiet:
        console(stderr=True).print("No model named: using demo, the small model that ships with attnlens.")
    if name is not None and not name.strip():
        raise UsageError("The model's name is empty.", "Name a model, or none for demo.")
    return "demo" if name is None else name


@contextmanager
def working(outputs: Outputs) -> Iterator[Callable[[str, int, int], None]]:
    """Around the one call of a command: progress is shown, and transformers talks only of errors."""
    from attnlens.models.quiet import only_errors

    with only_errors(), progress(shown=outputs.moving) as tell:
        yield tell
