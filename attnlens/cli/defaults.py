"""Default options from attnlens.toml, pyproject.toml and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo

from attnlens.errors import UsageError
from attnlens.files import read_bytes
from attnlens.registry import checked_name
from attnlens.requests.fields import CallOnly

FILES = {"attnlens.toml": (), "pyproject.toml": ("tool", "attnlens")}
"""Where options may stand, the first that has any wins; and under which table."""
RULES = "check"
"""The table in them that holds no options, but what `check` checks."""
NEGATED = {"no_pack": "pack"}
"""The other spelling of a switch that has two; typer gives an environment variable to the first alone."""
LARGEST, REMEDY = 2**20, "Make it a file that can be read, or run in another folder."
WANTED = {
    **{bool: ("true or false", "true"), int: ("a whole number", "16")},
    **{float: ("a number", "0.1"), str: ("a text in quotes", '"…"')},
}
"""What an option of each type must be in a file, and an example."""
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def kinds(commands: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """The type of every option of these commands, annotated as for typer, by parameter name."""
    found: dict[str, Any] = {}
    for command in commands:
        found |= get_type_hints(command, include_extras=True)
    return {name: kind for name, kind in found.items() if name not in ("context", "return")}


def defaults(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Options by parameter name, from ATTNLENS_NO_PACK, `attnlens.toml`, or [tool.attnlens] of `pyproject.toml`.

    Every other ATTNLENS_<OPTION> is typer's. Raises UsageError where a file can't be read, is no TOML, or names an
    option that does not exist, is dangerous, names what is read or written, or has a value of another type.
    """
    return _from_files(folder, known) | _from_environment()


def _from_environment() -> dict[str, Any]:
    found = {}
    for negated, name in NEGATED.items():
        variable = f"ATTNLENS_{negated.upper()}"
        word = os.environ.get(variable, "").lower()
        if word and word not in YES + NO:
            raise UsageError(f"{variable}={word} is neither yes nor no.", f"Write {variable}=1 or {variable}=0.")
        if word:
            found[name] = word in NO
    return found


def _from_files(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    for name, path in FILES.items():
        if not (folder / name).is_file():
            continue
        table = _read(folder / name)
        for depth, key in enumerate(path, 1):
            table = table.get(key, {})
            if not isinstance(table, dict):
                raise UsageError(
                    f"{name}: {'.'.join(path[:depth])} must be a table.", f"Write it as [{'.'.join(path)}]."
                )
        options = {key: value for key, value in table.items() if key != RULES}
        if options:
            return dict(_entry(name, key, value, known) for key, value in options.items())
    return {}


def _read(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_bytes(file, UsageError, REMEDY, most=LARGEST).decode())
    except RecursionError:
        raise UsageError(f"{file} is nested too deep.", "Mend the file, or run in another folder.") from None
    except ValueError as error:  # TOML's own errors, bytes that are no UTF-8, numbers of thousands of digits
        raise UsageError(f"{file} is not valid TOML: {error}.", "Mend the file, or run in another folder.") from None


def _entry(file: str, key: str, value: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """One line of a file as a parameter and its value, checked: a file may lie beside a stranger's model."""
    name = key.replace("-", "_")
    checked_name(f"option in {file}", name, sorted({*known, *NEGATED}))
    kind, declared = get_args(known[NEGATED.get(name, name)])[:2]
    why: CallOnly = "read" if isinstance(declared, ArgumentInfo) else declared.call_only
    if why == "dangerous":
        raise UsageError(f"{file} may not switch on {key}.", "Give it on the command line, if you mean it.")
    if why:
        variable = f"ATTNLENS_{name.upper()}"
        raise UsageError(
            f"{file} may not say by {key} what is {why}: it may come from a stranger.",
            f"Take {key} out of {file}, and name it on the command line or in {variable}.",
        )
    kinds = {kind, *get_args(kind)}  # `int | None`, `list[str] | None`
    several = any(get_origin(one) is list for one in kinds)
    plain = next((one for one in (bool, int, float) if one in kinds), str)
    items = value if several and isinstance(value, list) else [value]
    allowed = (int, float) if plain is float else plain
    if not all(isinstance(item, allowed) and (plain is bool) == isinstance(item, bool) for item in items):
        wanted, example = WANTED[plain]
        wanted += ", or a list of them" * several
        raise UsageError(f"{file}: {key} must be {wanted}.", f"Mend that line, as in {key} = {example}.")
    return (NEGATED[name], not value) if name in NEGATED else (name, items if several else value)
