"""Compute the named units of a run, keep each in one file, resume after an interruption, and share units out.

A unit is computed by a function `name → value`; a value is a nested list or dictionary of tensors and of what JSON
holds. It is kept as one safetensors file `<work>/<key>/<name>.safetensors`, written under another name and renamed. The
key hashes the facts that determine the run's numbers, so that the same command finds the file again and no other does.
torch is imported late, because the command line imports this module before it needs torch.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib import import_module, metadata
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Event, Thread, local
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from attnlens.errors import FAILURES, AttnlensError, ModelError, OutputError, TextError, UsageError
from attnlens.files import with_home, write_atomically
from attnlens.wording import clean, counted

if TYPE_CHECKING:
    from torch import Tensor

LOG = logging.getLogger("attnlens")
Compute = Callable[[str], Any]
"""Computes the unit of a name."""
Opener = Callable[..., tuple[Mapping[str, Any], Compute]]
"""Prepares a run in another process: arguments that can be pickled → the run's facts, and what computes its units."""
Keep = Callable[[str, Callable[[], Any]], Any]
"""Returns what is kept of a part of that name, or else what the function computes, which is then kept."""
RUN = "run.json"
"""The file in a run's folder with the facts that its key hashes."""
SUFFIX = ".safetensors"
OWN_NAME = re.compile(r".*-[0-9a-f]{8}(\.safetensors)?")
"""The names of units' files, and of the folders with their parts."""
RETRIED = (*FAILURES, OSError, ImportError, MemoryError, EOFError)
"""What a unit may raise that can be different at a second try."""
OTHER_WORK = "Name another folder with --work."
LOST = (
    "its process ended twice before it did: killed, perhaps for lack of memory, or started by a script that calls "
    "attnlens outside of `if __name__ == '__main__':`"
)
UNSEEN = "its file is not in this process's --work folder, which all workers must share"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What libraries read when they are first imported."""
RAY_HERE = "local"
"""The address that starts a Ray cluster of this machine alone."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2, which Ray's protocol uses, sends first, and empty settings (RFC 9113, section 3.4)."""
ACCELERATORS = ("nvidiactl", "kfd", "dxg")
"""Devices of NVIDIA, AMD and Windows below Linux: a process that has them open must not be forked."""


class Stopped(KeyboardInterrupt):
    """The user interrupted the unit `name`; `value` is what it had found, in the form of a finished unit."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name, self.value = name, value


class ShardFinished(Exception):  # noqa: N818  # it ends a run as asked
    """A shard has computed its units; the same call without `shard` computes what is missing and makes the report."""

    def __init__(self, finished: int, total: int, remaining: Sequence[str], failed: Mapping[str, str]) -> None:
        super().__init__()
        self.finished, self.total, self.remaining, self.failed = finished, total, remaining, failed

    def __str__(self) -> str:
        """Return what is finished and what remains."""
        if not self.remaining:
            return f"All {self.total} units are finished: run it without --shard for the report."
        more = f" and {len(self.remaining) - 1} more" if len(self.remaining) > 1 else ""
        return f"{self.finished} of {self.total} units are finished; {self.remaining[0]}{more} remain."


@dataclass(frozen=True)
class Failure:
    """Why a unit has no value."""

    reason: str
    error: BaseException | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run's units found."""

    values: dict[str, Any]
    """By unit, in the order of the run."""
    missing: dict[str, str]
    """Why units have no value, in the order of the run; those that an interruption prevented are left out."""
    stopped: bool
    """Whether the user interrupted the run."""


@dataclass(frozen=True)
class WorkPlan:
    """Where units are kept, and who computes them: the options of `WorkRequest`."""

    work: str | os.PathLike[str] | None = None
    resume: bool = True
    shard: tuple[int, int] | None = None
    jobs: int = 1
    engine: str = "local"
    address: str | None = None
    device: str = "auto"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> WorkPlan:
        """Return the plan in a run's checked options; options that a kind of run lacks keep their defaults."""
        named = {name: options[name] for name in cls.__dataclass_fields__ if name in options and name != "shard"}
        index, _, count = (options.get("shard") or "").partition("/")
        return cls(**named, shard=(int(index), int(count)) if count else None)

    @property
    def elsewhere(self) -> bool:
        """Whether other processes compute the units."""
        return self.engine != "local" or self.jobs > 1

    @property
    def gpus(self) -> int:
        """The GPUs that each task of a cluster needs."""
        import torch

        return int(self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available()))

    @property
    def root(self) -> Any:
        """The folder in which runs are kept, or the place behind an address (a `UPath`).

        Raises UsageError if an address needs a package that is not installed.
        """
        if self.work is None:
            return user_cache_path("attnlens", appauthor=False) / "work"
        if "://" not in os.fspath(self.work):
            return with_home(os.fspath(self.work))
        try:
            from upath import UPath

            return UPath(os.fspath(self.work))
        except (ImportError, ValueError) as error:
            raise UsageError(f"--work {self.work}: {error}.", 'Run: pip install "attnlens[ray]"') from None

    def check(self, texts: Collection[object] = ()) -> None:
        """Raise UsageError or OutputError before the work if the plan contradicts itself or nothing can be kept.

        `texts` are those that the run reads: other processes cannot read stdin.
        """
        if self.address is not None and self.engine != "ray":
            raise UsageError("--address names a Ray cluster.", "Leave it out, or add --engine ray.")
        if self.engine == "ray":
            check_cluster(self.address)
        if self.elsewhere and "-" in map(str, texts):
            raise UsageError("Several processes cannot read a text from stdin.", "Write it to a file.")
        if self.elsewhere and str(self.work).startswith("memory:"):
            raise UsageError("Other processes do not see the memory of this one.", OTHER_WORK)
        if (self.work is not None or self.shard is not None or self.elsewhere) and (problem := self._unwritable()):
            raise OutputError(f"Finished units cannot be kept in {self.root}: {problem}.", OTHER_WORK)

    def _unwritable(self) -> str:
        root = self.root
        try:
            with _output_errors(root, "made"):
                root.mkdir(parents=True, exist_ok=True)
        except (OSError, OutputError) as error:
            return getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
        return "" if not isinstance(root, Path) or os.access(root, os.W_OK) else "Permission denied"

    def store(self, facts: Mapping[str, Any]) -> Store | None:
        """Return the store of a run; None if the user's cache, where nothing was asked for, cannot be written."""
        if self.work is None and self._unwritable():
            return None
        return Store(self.root / key_of(facts), facts, resume=self.resume)


PACKAGE = Path(__file__).parents[1]


def versions() -> dict[str, str | None]:
    """Return the versions of what computes the units; of attnlens its code too, which changes between releases."""
    libraries = ("attnlens", "torch", "transformers", "peft", "gguf")
    return {"code": own_code()} | {name: _version(name) for name in libraries}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def own_code() -> str:
    """Return a hash of the modules of attnlens, by their paths and contents."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


NOTHING_KEPT = WorkPlan()
"""The plan of a run in this process."""


def keep_nothing(_name: str, make: Callable[[], Any]) -> Any:
    """Compute a part that is not kept."""
    return make()


def key_of(facts: Any) -> str:
    """Return a name for what these facts determine: 32 hex digits of their SHA-256."""
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Store:
    """The files of one run, which any number of processes and machines may share."""

    folder: Any
    """A path, or a `UPath`."""
    facts: Mapping[str, Any]
    """What determines the numbers of the run, as JSON."""
    resume: bool = True
    """Whether files of an earlier run are used."""

    def path(self, name: str) -> Any:
        """Return the path of a unit's file."""
        return self.folder / (slug(name) + SUFFIX)

    def inside(self, name: str) -> Store:
        """Return a store for the parts of a unit that takes long, in a folder beside its file."""
        return Store(self.folder / slug(name), {"run": key_of(self.facts), "unit": name}, self.resume)

    def load(self, name: str) -> Any:
        """Return what a unit found, or None if it is not finished.

        A file that is damaged, cut off or of another unit is reported, set aside under another name, and not used.
        Raises OutputError if a file cannot be read.
        """
        path = self.path(name)
        try:
            if isinstance(path, Path) and path.exists() and not path.is_file():
                raise ValueError(name)  # noqa: TRY301  # a folder, or a pipe, of which reading may never end
            with _output_errors(path, "read"):
                return _parsed(path.read_bytes(), self._stamp(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            self._set_aside(name)
            return None

    def _set_aside(self, name: str) -> None:
        """Rename what is under a unit's name and not its file, and log that."""
        path = self.path(name)
        aside = path.with_name(path.name + ".damaged")
        try:
            path.rename(aside)
        except FileNotFoundError:  # another process has set it aside
            return
        except OSError as error:
            what = f"it cannot be set aside: {error.strerror or error}"
        else:
            what = f"it is kept as {aside.name}"
        LOG.warning("%s is damaged or not the unit %s: %s.", path, clean(name), what)

    def save(self, name: str, value: Any) -> None:
        """Write what a unit found, whole or not at all. Raises OutputError if it cannot be written."""
        self._write(self.path(name), _serialised(value, self._stamp(name)))
        self.begin()

    def begin(self) -> None:
        """Write what the run is, unless it is written. Raises OutputError if nothing can be written here."""
        with _output_errors(self.folder / RUN, "read"):
            known = (self.folder / RUN).exists()
        if not known:
            self._write(self.folder / RUN, json.dumps(self.facts, indent=1).encode())

    @staticmethod
    def _write(path: Any, content: bytes) -> None:
        for attempt in range(8):  # another run that has written its report may remove the folder in between
            try:
                with _output_errors(path, "written"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if isinstance(path, Path):
                        write_atomically(path, content)
                    else:  # an object store puts an object whole
                        path.write_bytes(content)
            except (OutputError, FileNotFoundError) as error:
                if attempt < 7 and isinstance(path, Path) and not path.parent.exists():
                    continue
                if isinstance(error, OutputError):
                    raise
                raise OutputError(f"{path} cannot be written: {error.strerror}.", OTHER_WORK) from None
            else:
                return

    def compute(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a unit found before, or what `make` finds now, which is then kept."""
        value = self.load(name) if self.resume else None
        if value is None:
            value = make()
            self.keep(name, value)
        return value

    def keep(self, name: str, value: Any) -> None:
        """Write what a unit found; if that is not possible, log a warning, because the run can go on."""
        try:
            self.save(name, value)
        except OutputError as error:
            LOG.warning("%s is not kept. %s", clean(name), error.problem)

    def clear(self) -> None:
        """Remove the run's files, because its report is written; files of anybody else stay."""
        with suppress(OSError):  # another process may clear it at the same time
            for path in list(self.folder.iterdir()):
                if path.name != RUN and not OWN_NAME.fullmatch(path.name):
                    continue
                if path.is_dir() and not path.is_symlink():
                    Store(path, {}).clear()
                else:
                    path.unlink(missing_ok=True)
            if isinstance(self.folder, Path):  # `UPath.rmdir` removes what is inside
                self.folder.rmdir()

    def report_others(self) -> None:
        """Log which other runs of the same kind have units in the same folder, and the first fact that differs."""
        places: list[Any] = []
        with suppress(OSError):
            places = sorted(self.folder.parent.iterdir())
        for path in places:
            with suppress(OSError, ValueError, AttributeError, RecursionError):  # it is anybody's file
                facts = json.loads((path / RUN).read_text())
                reason = difference(self.facts, facts)
                if facts.get("command") == self.facts.get("command") and reason:
                    count = counted(sum(file.name.endswith(SUFFIX) for file in path.iterdir()), "finished unit")
                    LOG.warning("%s holds %s of a run that differs: %s.", path, count, clean(reason))

    def _stamp(self, name: str) -> str:
        return f"{key_of(self.facts)} {name}"


@contextmanager
def _output_errors(path: Any, what: str) -> Iterator[None]:
    """Turn what the system refuses into an OutputError; of a remote store also what its library raises."""
    try:
        yield
    except (AttnlensError, FileNotFoundError, NotADirectoryError, ValueError):
        raise
    except Exception as error:
        if isinstance(path, Path) and not isinstance(error, OSError):
            raise
        message = getattr(error, "strerror", None) or reason_of(error)
        raise OutputError(f"{path} cannot be {what}: {message}.", OTHER_WORK) from None


def slug(name: str) -> str:
    """Return a readable file name that no other unit has."""
    readable = re.sub(r"[^A-Za-z0-9.=]+", "-", name)[:80].strip("-.")
    return f"{readable}-{sha256(name.encode()).hexdigest()[:8]}"


def difference(first: Any, second: Any, where: str = "") -> str | None:
    """Return the first place at which two contents differ, with both values; None if they are equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        inner = (difference(first.get(name), second.get(name), f"{where}.{name}") for name in {**first, **second})
        return next((found for found in inner if found is not None), None)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        return difference(dict(enumerate(first)), dict(enumerate(second)), where)
    if first == second:
        return None
    return f"{where.removeprefix('.')} is {str(first)[:60]} here and {str(second)[:60]} there"


def _serialised(value: Any, stamp: str) -> bytes:
    """Return a value as a safetensors file: its tensors, and the rest as JSON in the metadata, with a hash of both."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps({"stamp": stamp, "value": _plain(value, tensors)})
    return save(tensors, {"attnlens": f"{_digest(text, tensors)} {text}"})  # one entry: safetensors orders none


def _parsed(content: bytes, stamp: str) -> Any:
    """Return the value in a file. Raises ValueError if it is cut off, damaged or another unit's."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        digest, _, text = metadata["attnlens"].partition(" ")
        whole = json.loads(text)
        if digest != _digest(text, tensors) or whole["stamp"] != stamp:
            raise ValueError(stamp)
        return _restored(whole["value"], tensors)
    except (SafetensorError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(stamp) from error


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    import torch

    digest = sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON and move its tensors into `tensors`; dictionaries become pairs, for keys of any type."""
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key, tensors), _plain(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple | range):
        return [_plain(part, tensors) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
    return {"tensor": str(len(tensors) - 1)}


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {_hashable(_restored(key, tensors)): _restored(part, tensors) for key, part in value["pairs"]}


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def run_units(
    names: Sequence[str],
    compute: Compute,
    plan: WorkPlan,
    store: Store | None,
    *,
    elsewhere: tuple[Opener, tuple[Any, ...]] | None = None,
    tell: Callable[[str], None] = lambda _name: None,
    usable: Callable[[Any], bool] = lambda _value: True,
) -> Outcome:
    """Compute every unit of a run that is not finished, and return what all of them found.

    A unit that fails is tried once more; then its reason stands in its place, and a warning is logged. `elsewhere`
    prepares the same run in another process. `tell` hears of each unit as it is finished or has failed. `usable` says
    whether a kept value is complete. Raises ShardFinished at the end of a shard; the error of a unit, if it is one of
    attnlens's own, because those concern all units; and the first unit's error if no unit could be computed.
    """
    mine = names if plan.shard is None else names[plan.shard[0] - 1 :: plan.shard[1]]
    if store is not None and plan.work is not None:
        store.begin()
        store.report_others()
    values: dict[str, Any] = {}
    failures: dict[str, Failure] = {}
    stopped = False
    try:
        for name, value in _computed(mine, compute, plan, store, elsewhere, usable):
            if not isinstance(value, Failure):
                values[name] = value
            elif isinstance(value.error, AttnlensError):
                raise value.error
            else:
                failures[name] = value
                LOG.warning("%s failed: %s", clean(name), clean(value.reason))
            tell(name)
    except Stopped as stop:
        stopped = True
        values[stop.name] = stop.value
    except KeyboardInterrupt:
        stopped = True
    missing = {name: failures[name].reason for name in names if name in failures}
    if plan.shard is not None and store is not None and not stopped:
        remaining = [name for name in names if name not in values and store.load(name) is None]
        raise ShardFinished(len(names) - len(remaining), len(names), remaining, missing)
    if failures and not values and not stopped:
        name, first = next(iter(failures.items()))
        raise first.error or ModelError(f"No unit could be computed; {name}: {first.reason}.", "Use fewer --jobs.")
    return Outcome({name: values[name] for name in names if name in values}, missing, stopped)


def _computed(
    names: Sequence[str],
    compute: Compute,
    plan: WorkPlan,
    store: Store | None,
    elsewhere: tuple[Opener, tuple[Any, ...]] | None,
    usable: Callable[[Any], bool],
) -> Iterator[tuple[str, Any]]:
    """Yield each unit's value, or its Failure, as it comes."""

    def kept(name: str) -> Any:
        value = store.load(name) if store is not None and store.resume else None
        return value if value is not None and usable(value) else None

    def anew(name: str) -> Any:
        value = compute(name)
        if store is not None:
            (store.keep if plan.shard is None else store.save)(name, value)  # of a shard nothing else would remain
            clear_parts(name, value)
        return value

    def clear_parts(name: str, value: Any) -> None:
        if store is not None and usable(value):
            store.inside(name).clear()

    if not plan.elsewhere or elsewhere is None or store is None:
        for name in names:  # another run that shares the folder may have finished a unit by the time it is its turn
            value = kept(name)
            yield name, tried(anew, name) if value is None else value
        return
    waiting = []
    for name in names:
        value = kept(name)
        if value is None:
            waiting.append(name)
        else:
            yield name, value
    if not waiting:
        return
    function = partial(_compute_in_worker, *elsewhere, store)
    engine = _in_processes if plan.engine == "local" else _on_ray
    for name, failure in engine(waiting, function, plan):
        if failure is not None:
            yield name, failure
        elif (value := store.load(name)) is not None:
            clear_parts(name, value)
            yield name, value
        elif plan.engine == "local":  # another run has written its report, and cleared the folder
            yield name, tried(compute, name)
        else:
            yield name, Failure(UNSEEN)


def tried(compute: Compute, name: str) -> Any:
    """Return what a unit found, or a Failure after a second try. What the user must change is not tried again."""
    for _ in range(2):
        try:
            return compute(name)
        except AttnlensError as error:
            failure = Failure(error.problem, error)
            if isinstance(error, UsageError | TextError | OutputError):
                break
        except RETRIED as error:
            clear_frames(error.__traceback__)  # which would hold the memory that the unit took
            failure = Failure(reason_of(error), error)
    return failure


def reason_of(error: BaseException) -> str:
    """Return an exception on one line: its name and the first line of its message."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    return message if message == type(error).__name__ else f"{type(error).__name__}: {message}"


_prepared: dict[str, tuple[Mapping[str, Any], Compute]] = {}
"""In a worker: the run whose units it computes, by a hash of how it was prepared."""


def _compute_in_worker(opener: Opener, arguments: tuple[Any, ...], store: Store, name: str) -> Failure | None:
    """Compute a unit in another process and write its file. Returns why that failed, in a form that can be pickled."""

    def compute(name: str) -> None:
        call = sha256(pickle.dumps((opener, arguments))).hexdigest()
        if call not in _prepared:
            _prepared.clear()
            _prepared[call] = opener(*arguments)
        facts, make = _prepared[call]
        if key_of(facts) != key_of(store.facts):
            raise ModelError(
                f"A worker has other inputs than the run that it works for: {difference(facts, store.facts)}.",
                "Give all workers the same files, texts and versions.",
            )
        store.save(name, make(name))

    failure: Failure | None = tried(compute, name)
    if failure is None or isinstance(failure.error, AttnlensError):
        return failure
    return Failure(failure.reason)


_server_started = False


def start_server(jobs: int) -> None:
    """Start the process that the workers of `--jobs` are forked from, which imports the library in the meantime.

    The program calls it before it imports torch. Elsewhere than on Linux, and where an accelerator could be open in the
    process that is forked, each worker imports the library itself.
    """
    global _server_started
    if jobs < 2 or sys.platform != "linux" or any(Path("/dev", name).exists() for name in ACCELERATORS):
        return
    from multiprocessing import forkserver  # Windows lacks it

    forkserver.set_forkserver_preload(["attnlens.run"])
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(THREADS, "1"))
    with _interruptions_blocked():
        forkserver.ensure_running()
    for name in THREADS:
        del os.environ[name]
    os.environ.update(before)
    _server_started = True


def _in_processes(names: Sequence[str], function: Callable[[str], Any], plan: WorkPlan) -> Iterator[tuple[str, Any]]:
    """Call a function on every name in `plan.jobs` processes of one thread each; yields names with what it returned.

    Each process has a pool of its own, so that one that is killed takes only its own unit with it, which is then tried
    once more.
    """
    own, pools, ended = local(), [], Event()
    context = get_context("forkserver" if _server_started else "spawn")

    def call(name: str) -> Any:
        for _ in range(2):
            if ended.is_set():
                break
            if getattr(own, "pool", None) is None:
                own.pool = ProcessPoolExecutor(1, context, _begin_worker)
                pools.append(own.pool)
            try:
                # a new process inherits that: this one decides what an interruption ends
                with _interruptions_blocked():
                    future = own.pool.submit(function, name)
                if ended.is_set():  # it may have begun after the others were ended
                    end(own.pool)
                return future.result()
            except BrokenExecutor:
                own.pool.shutdown()
                own.pool = None
        return Failure(LOST)

    def end(pool: ProcessPoolExecutor) -> None:
        for process in list((pool._processes or {}).values()):
            process.terminate()  # what it had finished is in its files

    try:
        with ThreadPoolExecutor(plan.jobs) as threads:
            futures = {threads.submit(call, name): name for name in names}
            lost = 0
            try:
                for future in as_completed(futures):
                    result = future.result()
                    lost = lost + 1 if result == Failure(LOST) else -len(names)
                    if lost > plan.jobs:
                        raise AttnlensError(  # noqa: TRY301  # it ends the workers, as any other error here
                            f"All workers were lost: {LOST}.", "Run it again with fewer --jobs."
                        )
                    yield futures[future], result
            except BaseException:
                ended.set()
                threads.shutdown(wait=False, cancel_futures=True)
                for pool in pools:
                    end(pool)
                raise
    finally:  # also what has failed: the program may end without clearing up, and semaphores would be left
        for pool in pools:
            pool.shutdown()


@contextmanager
def _interruptions_blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    """Prepare a process for units: one thread, no interruptions, and an end with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    if (torch := sys.modules.get("torch")) is not None:  # the main script has imported it already
        torch.set_num_threads(1)

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()


def check_cluster(address: str | None) -> None:
    """Raise UsageError if Ray is not installed, or no Ray cluster answers at HOST:PORT.

    Ray itself would try for two minutes, and then end the process.
    """
    if find_spec("ray") is None:
        raise UsageError("Ray is not installed.", 'Run: pip install "attnlens[ray]"')
    place = address or os.environ.get("RAY_ADDRESS") or RAY_HERE
    host, _, port = place.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        with socket.create_connection((host, int(port)), 5) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(GREETING)
                if connection.recv(9)[3:4] != b"\x04":  # the type of a frame with settings
                    raise OSError("what answers there is not Ray")  # noqa: TRY301
    except OSError as error:
        raise _no_cluster(place, error) from error


def _on_ray(names: Sequence[str], function: Callable[[str], Any], plan: WorkPlan) -> Iterator[tuple[str, Any]]:
    """Call a function on every name as tasks of a Ray cluster, which runs a lost task again.

    Without an address and RAY_ADDRESS a cluster with `plan.jobs` workers is started on this machine.
    """
    ray: Any = import_module("ray")
    started = not ray.is_initialized()
    if started:
        address = plan.address or os.environ.get("RAY_ADDRESS") or RAY_HERE
        own = {"num_cpus": plan.jobs, "include_dashboard": False} if address == RAY_HERE else {}
        if own:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **own)
        except Exception as error:  # Ray raises Exception itself if its programs do not start
            raise _no_cluster(address, error) from error
        worker = ray._private.worker  # prints lost workers on stdout, where a report may go; there is no setting for it
        if printed := getattr(worker, "print_to_stdstream", None):
            worker.print_to_stdstream = lambda data, **named: printed(data | {"is_err": True}, **named)
    options = {"num_cpus": 1, "num_gpus": plan.gpus, "max_retries": 1, "retry_exceptions": False}
    task = ray.remote(**options)(_call_in)
    pending = {task.remote(str(Path.cwd()), function, name): name for name in names}
    try:
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            name = pending.pop(done)
            try:
                yield name, ray.get(done)
            except ray.exceptions.RayError as error:
                yield name, Failure(f"Ray returned no result: {reason_of(error)}")
    finally:
        for one in pending:
            ray.cancel(one, force=True)
        if started:
            ray.shutdown()


def _call_in(folder: str, function: Callable[[str], Any], name: str) -> Any:
    """Call a function in a Ray worker, in the folder that relative paths start from."""
    with suppress(OSError):  # a node without that folder names what it lacks itself
        os.chdir(folder)
    return function(name)


def _no_cluster(address: str, error: Exception) -> UsageError:
    where = "can be started on this machine" if address == RAY_HERE else f"answers at {address}"
    return UsageError(
        f"No Ray cluster {where}: {reason_of(error).rstrip('.')}.",
        "Start one with `ray start --head` and give its HOST:PORT, or leave --address out to run Ray on this machine.",
    )
