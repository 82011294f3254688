"""Write `attnlens/__init__.pyi`, from which editors and type checkers know every keyword of the public functions.

python tests/support/stub.py
"""

import inspect
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

import attnlens
from attnlens.requests import Request, alternatives, details

STUB = Path(attnlens.__file__).with_name("__init__.pyi")
SPELLED = {
    r"\bloading\.Loaded\b": "Loaded",
    r"\brequests\.Words\b": "str | Sequence[str]",
    r"\bModel\b": "str | PathLike[str] | Loaded",
    r"\bSide\b": "str | PathLike[str] | Report | Loaded | PreTrainedModel",
}
HEAD = '''"""Types of the public names of attnlens, written by tests/support/stub.py."""

# ruff: noqa
# fmt: off

from collections.abc import Sequence
from os import PathLike
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnlens.models.loading import Loaded
from attnlens.records import Plan
from attnlens.runs.progress import Progress
'''


def text() -> str:
    """Return the stub: names that are imported from their modules, and a signature for each function with options."""
    imported = [f"from attnlens import {name} as {name}" for name in attnlens._PACKAGES]
    functions = []
    for name, home in sorted(attnlens._HOMES.items()):
        public = getattr(attnlens, name)
        if kind := getattr(public, "options", None):
            functions.append(_function(name, public, kind))
        else:
            imported.append(f"from attnlens.{home} import {name} as {name}")
    return "\n".join([HEAD + "\n".join(imported), "", "__version__: str", "", *functions, ""])


def _function(name: str, public: object, kind: type[Request]) -> str:
    parameters, starred = [], False
    for parameter in inspect.signature(public).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        field = kind.model_fields.get(parameter.name)
        written = _accepted(field) if field is not None else str(parameter.annotation)
        for pattern, word in SPELLED.items() if field is None else ():
            written = re.sub(pattern, word, written)
        plain = isinstance(parameter.default, str | int | float | tuple | None.__class__)
        default = f" = {parameter.default!r}" if plain else " = ..."
        default = "" if parameter.default is parameter.empty else default
        parameters.append(f"{parameter.name}: {written}{default}".replace("'", '"'))
    return f"def {name}(\n    " + ",\n    ".join(parameters) + ",\n) -> Report: ..."


def _accepted(field: FieldInfo) -> str:
    """Return the type of the values that callers may give for an option."""
    if field.annotation is object:
        return "Plan | str | PathLike[str] | None"
    path = {"FILE", "DIR", "DIR|ID"} & {details(field).get("metavar")}
    names = []
    for part in alternatives(field.annotation):
        if part == tuple[str, ...]:
            names.append("str | PathLike[str] | Sequence[str | PathLike[str]]" if path else "str | Sequence[str]")
        elif part == tuple[str, str]:
            names.append("tuple[str, str]")
        elif part == list[int]:
            names.append("Sequence[int] | str")
        elif part == list[int | str]:
            names.append("Sequence[int | str] | str")
        elif get_origin(part) is Literal:
            names.append(f"Literal[{', '.join(map(repr, get_args(part)))}]")
        elif part is str:
            names.append("str | PathLike[str]" if path else "str")
        else:
            names.append("None" if part is type(None) else part.__name__ if part in (bool, int, float) else "int | str")
    return " | ".join(names)


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
