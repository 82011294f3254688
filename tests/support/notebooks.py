"""Execute the code cells of notebooks in order, as Jupyter does, and store their outputs.

python tests/support/notebooks.py examples/*.ipynb
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DPI = 90  # of stored figures, which keeps a notebook small


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def execute(path: Path) -> list[list[dict[str, Any]]]:
    """Return the outputs of each code cell; files are written to a temporary folder."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return [
            _run("".join(cell["source"]), f"<{path.stem}, cell {number}>", number, namespace)
            for number, cell in enumerate(read_cells(path), 1)
        ]


def _run(source: str, name: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the printed text of a cell, and its last value unless it is None."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)  # noqa: S102  # our own notebooks
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace) if last else None  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append(shown | {"data": _show(value)})
    return outputs


def _show(value: object) -> dict[str, Any]:
    if isinstance(value, Figure):
        image = io.BytesIO()
        value.savefig(image, format="png", dpi=DPI)
        return {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["a figure"]}
    page = value._repr_html_() if hasattr(value, "_repr_html_") else None  # a table of pandas
    html = {} if page is None else {"text/html": page.splitlines(keepends=True)}
    return html | {"text/plain": repr(value).splitlines(keepends=True)}


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the text of each output."""
    return ["".join(output["text"] if "text" in output else output["data"]["text/plain"]) for output in outputs]


def store(path: Path) -> None:
    """Execute a notebook and write its outputs into it."""
    outputs = iter(execute(path))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = next(outputs)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        store(file.resolve())
