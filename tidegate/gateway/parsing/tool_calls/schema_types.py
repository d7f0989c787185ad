"""Finds the JSON types that a tool's JSON schema permits for an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from tidegate.service import exact

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_ANY: frozenset[str] = frozenset()
_SPELLINGS = {
    "int": "integer", "int32": "integer", "int64": "integer", "long": "integer", "float": "number",
    "double": "number", "decimal": "number", "bool": "boolean", "list": "array", "tuple": "array",
    "dict": "object", "none": "null",
}  # fmt: skip
"""Names of types in Python and elsewhere."""
_OF_TEXTS = {"pattern", "minLength", "maxLength", "contentEncoding"}
_FORMATS_OF_NUMBERS = ("int32", "int64", "float", "double", "decimal")


def type_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    return _TYPES.get(type(value), "null")


def types_of_property(schema: Any, name: str) -> frozenset[str]:
    """Returns the JSON types of a property of an object with this schema, and texts of enums as JSON; empty
    if none is named. References are to places in the schema."""
    known: dict[int, frozenset[str]] = {}
    return _ANY.union(*(_types(each, schema, known) for each in _properties(schema, name, schema, {})))


def _properties(schema: Any, name: str, root: Any, seen: dict[int, None], levels: int = 0) -> Iterator[Any]:
    """Yields the schemas that an object's schema, or its parts, have for a property."""
    if not isinstance(schema, Mapping) or id(schema) in seen or levels > exact.MAX_LEVELS:
        return
    seen[id(schema)] = None
    named = schema.get("properties")
    if isinstance(named, Mapping) and name in named:
        yield named[name]
    else:
        patterns = schema.get("patternProperties")  # not matched: a client's pattern may take for ever
        yield from patterns.values() if isinstance(patterns, Mapping) else ()
        yield schema.get("additionalProperties")
    for part in (*_required(schema, root), *_options(schema)):
        yield from _properties(part, name, root, seen, levels + 1)


def _types(schema: Any, root: Any, known: dict[int, frozenset[str]], levels: int = 0) -> frozenset[str]:
    """Returns the types that a schema permits; empty if it names none. `known` has those of schemas that were
    read, and none for those that refer to themselves."""
    if not isinstance(schema, Mapping) or levels > exact.MAX_LEVELS:
        return _ANY
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = _ANY
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else filter(_is_text, _list(schema, "type"))
    found = [frozenset(_named(name) for name in names if name.lower() != "any")]
    values = [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    found.append(frozenset(map(_type_of_value, values)))
    found.append(_ANY.union(*(_types(each, root, known, levels + 1) for each in _options(schema))))
    found += [_types(each, root, known, levels + 1) for each in _required(schema, root)]
    types = _ANY
    for each in filter(None, found):
        types = (_common(types, each) or _narrower(types, each)) if types else each
    if not types and (_OF_TEXTS & schema.keys() or schema.get("format", "int32") not in _FORMATS_OF_NUMBERS):
        types = frozenset(["string"])
    if types and schema.get("nullable") is True:
        types |= {"null"}
    known[id(schema)] = types
    return types


def is_text_of(kind: str) -> bool:
    """Returns whether a type is one text, as JSON, and not a name."""
    return kind.startswith('"')


def _named(name: str) -> str:
    """Returns the type of a name in any spelling; an unknown one counts as a string."""
    name = _SPELLINGS.get(name.lower(), name.lower())
    return name if name in _TYPES.values() or name == "null" else "string"


def _type_of_value(value: Any) -> str:
    """Returns the type of an enum's value: of a text, the text, so that `["auto", 1]` permits no other."""
    return exact.dumps(value).decode() if isinstance(value, str) else type_of(value)


def _common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Returns the types of two sets that both permit."""
    texts = {each for each in one ^ other if is_text_of(each)}
    return one & other | (texts if "string" in one | other and "string" not in one & other else _ANY)


def _narrower(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Returns the types of two sets without a common one: an integer is a number; others contradict."""
    return frozenset(["integer"]) if {"integer", "number"} <= one | other else one | other


def _required(schema: Mapping[str, Any], root: Any) -> Iterator[Any]:
    """Yields the schemas that must hold beside this one."""
    yield from _list(schema, "allOf")
    if isinstance(schema.get("$ref"), str):
        yield _place(schema["$ref"], root)


def _options(schema: Mapping[str, Any]) -> list[Any]:
    return [*_list(schema, "anyOf"), *_list(schema, "oneOf"), schema.get("then"), schema.get("else")]


def _place(reference: str, root: Any) -> Any:
    """Returns the place in a schema to which a JSON pointer refers; None if there is none."""
    value = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
