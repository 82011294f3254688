"""The errors that attnlens raises: one family, each with what is wrong and what to do.

AttnlensError
├── UsageError        the call's words make no sense (unknown analyzer, heads 7-3)
│   └── UnaskedError  a model is named, and nothing is asked of it
├── ModelError        the model can't be found, read or reached
│   └── TooLargeError it does not fit into memory
├── TextError         the text is missing, empty, binary or too short
├── OutputError       a result can't be written where it was asked for
├── IdentityError     what attnlens recomputes is not what the model computes
└── UnposedError      an Att-SVM problem has no constraint, so no direction is asked for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REFUSALS = (
    *("not enough memory", "allocate memory", "out of memory", "failed to map segment", "new thread"),
    "error return without exception set",
)
"""What allocators, the operating system, its loader of libraries, and Python say where memory does not suffice."""


class AttnlensError(Exception):
    """What is wrong (`problem`) and what to do (`remedy`), one line each; the command line exits with 2."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """How an error goes from one process to another: exceptions are made again of one text otherwise."""
        return _again, (type(self), self.problem, self.remedy), self.__dict__


def _again(kind: type[AttnlensError], problem: str, remedy: str) -> AttnlensError:
    """The error of these lines, whatever else its class is made of."""
    error = kind.__new__(kind)
    AttnlensError.__init__(error, problem, remedy)
    return error


class UsageError(AttnlensError):
    """The words of the call make no sense."""


class UnaskedError(UsageError):
    """A model is named to `converge`, and nothing is asked of it."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} is named, and neither a head nor checkpoints.",
            "Add --head LAYER.HEAD, --checkpoints or --revisions, or name no model for the synthetic experiments.",
        )


class ModelError(AttnlensError):
    """The model can't be found, read or reached."""


class TooLargeError(ModelError):
    """The model does not fit into the memory that is free."""


class TextError(AttnlensError):
    """The text is missing, empty, binary or too short."""


class OutputError(AttnlensError):
    """A result can't be written where it was asked for."""


class IdentityError(AttnlensError):
    """What attnlens recomputes is not what the model computes, so no number may be trusted."""


class UnreadableError(ModelError):
    """A site's W_Q and W_K can't be read."""


class NotBilinearError(UnreadableError):
    """A site's queries and keys are no linear functions of its inputs, so that it has no matrix W_Q W_Kᵀ."""


class UnposedError(AttnlensError):
    """An Att-SVM problem has no constraint, so that no direction is asked for; callers turn it into a missing value."""


class ShardFinished(Exception):  # noqa: N818  # it ends a run as requested
    """A shard has computed its units; the same call without `shard` computes what is missing and makes the report."""

    def __init__(self, finished: int, total: int, remaining: Sequence[str], failed: Mapping[str, str]) -> None:
        super().__init__()
        self.finished, self.total, self.remaining, self.failed = finished, total, remaining, failed

    def __str__(self) -> str:
        """Return what is finished and what remains."""
        if not self.remaining:
            return f"All {self.total} units are finished: run it without --shard for the report."
        one, *others = self.remaining
        rest = f"{one} and {len(others)} more remain" if others else f"{one} remains"
        return f"{self.finished} of {self.total} units are finished; {rest}. The report is written after the last one."


FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""What models raise in a forward pass that they can't do."""


def is_memory(error: BaseException) -> bool:
    """Whether memory did not suffice: Python says so by type, torch's CPU allocator in a plain RuntimeError."""
    said = str(error).lower() if isinstance(error, RuntimeError | OSError | ImportError | SystemError) else ""
    return isinstance(error, MemoryError) or any(words in said for words in REFUSALS)


def reason_of(error: BaseException) -> str:
    """Return an exception on one line: its name and the first line of its message."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    return message if message == type(error).__name__ else f"{type(error).__name__}: {message}"
