"""Tools of environments: methods that an agent calls, with JSON schemas from their type hints."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time
from enum import Enum
from typing import Any, TypeVar, get_type_hints
from uuid import UUID

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tidegate.errors import ConfigError, TidegateError

Function = TypeVar("Function", bound=Callable[..., Any])
STATE = "state"
"""Parameter that receives the episode's state; it is not part of a tool's schema."""
_MARK = "__tidegate_tool__"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of tools that the APIs of models accept."""


class ToolError(TidegateError):
    """A tool refuses its arguments or cannot carry out the call; the agent receives the message."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an agent can call during an episode.

    Raises:
        ConfigError: The name has other characters than letters, digits, `_` and `-`, or more than 64.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    fn: Callable[[Any, Mapping[str, Any]], Any]
    """`fn(state, arguments)` returns a text or another value that is serialisable as JSON, or a coroutine of
    one. It raises ToolError for what the agent should correct."""

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"a tool cannot be named {self.name!r}: use up to 64 letters, digits, '_' and '-'"
            )

    def schema(self) -> dict[str, Any]:
        """Returns the tool in the format of OpenAI's `tools`."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool(function: Function) -> Function:
    """Decorator that makes a method of an environment a tool.

    The method's name is the tool's, the first paragraph of its docstring the description, and `Args:`
    describes its parameters, which need type hints. A parameter `state` receives the state that `setup`
    returned. The method may be async; if it is not, it runs in a thread.
    """
    setattr(function, _MARK, True)
    return function


def tools_of(owner: object) -> list[Tool]:
    """Returns the tools of an object's class, in the order of their definition.

    Raises:
        ConfigError: A tool has a parameter without a type hint, or of a type without a JSON schema.
    """
    names = {
        name: None
        for cls in reversed(type(owner).__mro__)
        for name, member in vars(cls).items()
        if getattr(member, _MARK, False)
    }
    return [make_tool(getattr(owner, name)) for name in names]


def make_tool(function: Callable[..., Any]) -> Tool:
    """Returns a tool that calls a function with arguments that were checked against its type hints.

    Args:
        function: A function or bound method, as for `tool`.

    Raises:
        ConfigError: A parameter has no type hint, or one of a type without a JSON schema.
    """
    name, docstring = function.__name__, inspect.getdoc(function) or ""
    takes_state, fields = False, {}
    described = _described(docstring)
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"the tool {name!r}: a type hint cannot be resolved: {error}") from error
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == STATE:
            takes_state = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"the tool {name!r}: the parameter {parameter.name!r} must be a named one")
        if parameter.name not in hints:
            raise ConfigError(f"the tool {name!r}: the parameter {parameter.name!r} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name], Field(default, description=described.get(parameter.name))
        )  # fmt: skip
    try:
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        model = create_model(name, __config__=config, **fields)  # type: ignore[call-overload]
        schema = model.model_json_schema()
    except Exception as error:
        raise ConfigError(f"the tool {name!r}: its parameters have no JSON schema: {error}") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})

    def call(state: Any, arguments: Mapping[str, Any]) -> Any:
        values = _checked(name, model, arguments)
        return function(**{STATE: state}, **values) if takes_state else function(**values)

    paragraph = docstring.split("\n\n")[0]
    return Tool(name, " ".join(paragraph.split()), schema, _like(function, call))


def text_of(result: Any) -> str:
    """Returns a tool's result as the text that an agent reads: itself if it is a text, else JSON.

    Raises:
        ToolError: The result cannot be serialised.
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool's result cannot be serialised as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Converts arrays and numbers of NumPy, dataclasses, dates and enums for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date | time | UUID):
        return str(value) if isinstance(value, UUID) else value.isoformat()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _like(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, as a coroutine function if `function` is one, so that it is known where to run it."""
    if not inspect.iscoroutinefunction(function):
        return call

    async def awaited(state: Any, arguments: Mapping[str, Any]) -> Any:
        return await call(state, arguments)

    return awaited


def _checked(name: str, model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = model.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the arguments"
        raise ToolError(f"{name}: {place}: {first['msg']}") from None
    read = checked.model_dump()
    for field, given in arguments.items():
        if _is_another(given, read[field]):
            raise ToolError(
                f"{name}: {field}: {str(given)[:80]!r} would be read as {str(read[field])[:80]!r}"
            )
    return {field: getattr(checked, field) for field in type(checked).model_fields}


def _is_another(given: Any, read: Any) -> bool:
    """Returns whether pydantic read a number or a boolean from a value of another meaning: 1 from true, true
    from 'yes', a float from an integer that it cannot hold, NaN."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        return any(_is_another(given[key], read[key]) for key in given.keys() & read.keys())
    if isinstance(given, list) and isinstance(read, list | tuple):
        return any(map(_is_another, given, read))
    if isinstance(read, bool):
        return not isinstance(given, bool) and str(given).lower() not in ("true", "false")
    if not isinstance(read, int | float):
        return False
    if isinstance(given, str):
        return re.fullmatch(r"\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*", given) is None or not math.isfinite(read)
    if isinstance(given, int) and isinstance(read, float) and math.isfinite(read):
        return isinstance(given, bool) or (int(read) != given and float(given) == read)
    return isinstance(given, bool) or not math.isfinite(read)


def _described(docstring: str) -> dict[str, str]:
    """Returns the descriptions under `Args:` of a docstring by parameter."""
    _, _, section = docstring.partition("\nArgs:\n")
    described: dict[str, str] = {}
    name = None
    for line in section.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        match = re.match(r"    (\w+)(?: \([^)]*\))?: (.*)", line)
        if match is not None:
            name, text = match.groups()
            described[name] = text.strip()
        elif name is not None and line.strip():
            described[name] += " " + line.strip()
    return described
