"""Finds the lines on which a TOML file says what it says, which tomllib forgets."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence

TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|'
    r"'''.*?'''|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'[^'\n]*'|"
    r"#[^\n]*|"
    r"[ \t\r]+|"
    r"\n|[\[\]{}=,]|"
    r"[^\s\"'#\[\]{}=,]+",
    re.DOTALL,
)
"""Strings, comments, blanks, ends of lines, brackets and signs, and bare words, of a text that is valid TOML."""
QUOTES = ('"', "'")


def lines_of(text: str, table: Sequence[str]) -> dict[str, list[int]]:
    """Of each key in that table, by its dotted name: its line, and then the line of every string behind it.

    A table below it continues the name. The text is valid TOML; lines are counted from 1 on.
    """
    found: dict[str, list[int]] = {}
    header: list[str] = []
    for line, tokens in _statements(text):
        words = [word for word, _ in tokens]
        if words[0] == "[":
            header = _names([word for word in words if word not in "[]"])
            continue
        sign = words.index("=")
        path = [*header, *_names(words[:sign])]
        if path[: len(table)] == [*table]:
            strings = [at for word, at in tokens[sign + 1 :] if word[:1] in QUOTES]
            found[".".join(path[len(table) :])] = [line, *strings]
    return found


def _statements(text: str) -> list[tuple[int, list[tuple[str, int]]]]:
    """Every header and every `key = value`: its first line, and its tokens with their lines."""
    found: list[tuple[int, list[tuple[str, int]]]] = []
    line, depth = 1, 0
    current: list[tuple[str, int]] = []
    for match in TOKEN.finditer(text):
        word = match[0]
        if word == "\n" and depth == 0 and current:
            found.append((current[0][1], current))
            current = []
        elif word.strip() and word[0] != "#":
            depth += (word in "[{") - (word in "]}")
            current.append((word, line))
        line += word.count("\n")
    return [*found, (current[0][1], current)] if current else found


def _names(words: Sequence[str]) -> list[str]:
    """The parts of a key: `a."b.c"` is a and b.c."""
    path: list[str] = []
    table = tomllib.loads("".join(words) + " = 0")
    while isinstance(table, dict):
        ((name, table),) = table.items()
        path.append(name)
    return path
