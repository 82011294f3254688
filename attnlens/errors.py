"""Errors that attnlens raises; each states a problem and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REFUSALS = (  # Phrases by which error messages report that memory ran out
    *("not enough memory", "allocate memory", "out of memory", "failed to map segment", "new thread"),
    "error return without exception set",
)


class AttnlensError(Exception):
    """Error with a problem and a remedy, one line each; commands that raise it exit with code 2."""

    code = "usage"
    """Stable name of the kind of error, used in the JSON that `--json -` writes on failure."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Make errors picklable, although the constructor's parameters differ from `args`."""
        return AttnlensError.__new__, (type(self), *self.args), self.__dict__


class UsageError(AttnlensError):
    """Invalid arguments of a call or command."""


class ModelError(AttnlensError):
    """A model that can't be found, loaded or analysed."""

    code = "model"


class TooLargeError(ModelError):
    """A model that does not fit into free memory."""

    code = "memory"


class TextError(AttnlensError):
    """A text that can't be used, e.g. because it is missing, empty, binary or too short."""

    code = "text"


class OutputError(AttnlensError):
    """A result that can't be written to its path."""

    code = "output"


class IdentityError(AttnlensError):
    """A failed verification: recomputed attention differs from the model's, or a kernel or backend is faulty."""

    code = "identity"


class UnreadableError(ModelError):
    """A site whose W_Q and W_K can't be read."""

    code = "unreadable"


class NotBilinearError(UnreadableError):
    """A site whose queries and keys are not linear in its inputs, so it has no matrix W_Q W_Kᵀ."""


class UnposedError(AttnlensError):
    """An Att-SVM problem without constraints, whose solution is zero."""

    code = "unposed"


class ShardFinished(Exception):  # noqa: N818  # not an error: the run ends as requested
    """Signal that a shard is finished; the same call without `shard` computes the other units and writes the report."""

    def __init__(self, finished: int, total: int, remaining: Sequence[str], failed: Mapping[str, str]) -> None:
        super().__init__()
        self.finished, self.total, self.remaining, self.failed = finished, total, remaining, failed

    def __str__(self) -> str:
        if not self.remaining:
            return f"All {self.total} units are finished: run the command without --shard to write the report."
        first, *others = self.remaining
        left = f"{first} and {len(others)} more remain" if others else f"{first} remains"
        return f"{self.finished} of {self.total} units are finished; {left}. The report is written after the last unit."


FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""Exceptions that a model can raise in a forward pass that it does not support."""


def is_memory(error: BaseException) -> bool:
    """Return True if the error means that memory ran out."""
    # torch's CPU allocator raises a plain RuntimeError
    message = str(error).lower() if isinstance(error, RuntimeError | OSError | ImportError | SystemError) else ""
    return isinstance(error, MemoryError) or any(words in message for words in REFUSALS)


def reason_of(error: BaseException) -> str:
    """Format an exception on one line: the name of its class and, if it has a message, the message's first line."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    return message if message == type(error).__name__ else f"{type(error).__name__}: {message}"


def empty_text(name: str) -> TextError:
    """Return the error for an empty text."""
    return TextError(f"The text is empty: {name}.", "Give a text of at least a few hundred words.")
