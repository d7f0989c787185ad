"""Writes the tables of fields in docs/formats.md from the types that the files are written from."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

from docs.site.tables import code, table

_DOCSTRING = re.compile(r"^<!-- docstring: ([\w.]+):(\w+) -->$", re.MULTILINE)
_MARK = re.compile(r"^<!-- fields: ([\w.]+):(\w+) -->$", re.MULTILINE)


def with_fields(text: str) -> str:
    """Replaces lines `<!-- fields: MODULE:CLASS -->` of a page by a table of the class's fields, and lines
    `<!-- docstring: MODULE:CLASS -->` by its docstring."""
    text = _DOCSTRING.sub(
        lambda mark: inspect.getdoc(getattr(importlib.import_module(mark[1]), mark[2])) or "", text
    )
    return _MARK.sub(lambda mark: table(("field", "type", "meaning"), field_rows(mark[1], mark[2])), text)


def field_rows(module: str, name: str) -> list[tuple[str, str, str]]:
    """Returns name, type and meaning of each field of a class: the string below the field.

    Raises:
        LookupError: A field has no meaning.
    """
    kind = getattr(importlib.import_module(module), name)
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(inspect.getmodule(kind))).body  # type: ignore[arg-type]
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    rows = []
    for at, node in enumerate(body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id != "_":  # the mark of fields that are given by name
            below = body[at + 1] if at + 1 < len(body) else None
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise LookupError(f"{module}.{name}.{node.target.id} has no string below it with its meaning")
            rows.append((code(node.target.id), code(_type(node.annotation)), str(below.value.value)))
    return rows


def _type(annotation: ast.expr) -> str:
    """The type as JSON has it: arrays of numbers are lists."""
    text = ast.unparse(annotation)
    for numpy, plain in (
        ("npt.NDArray[np.uint8]", "list[int]"),
        ("PackedIds", "str"),
        ("PackedLogprobs", "str"),
        ("PackedExperts", "str"),
        ("Ids", "list[int]"),
        ("Logprobs", "list[float]"),
    ):
        text = text.replace(numpy, plain)
    return text
