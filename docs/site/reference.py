"""Writes the reference pages from the code: settings, commands, the gateway's HTTP API, the Python API."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx

from docs.site.sources import REPO
from docs.site.tables import code, table
from tidegate.cli import _parser
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.settings.sections import known_keys

PYTHON_API = {
    "Agents": ["tidegate.agents.base"],
    "Environments": ["tidegate.envs.base", "tidegate.envs.rewards", "tidegate.envs.tools"],
    "Groups from your own programs": ["tidegate.client.groups"],
    "Sandboxes": ["tidegate.sandbox.sandbox", "tidegate.sandbox.limits", "tidegate.sandbox.verify"],
    "Retrieval": ["tidegate.rag.client"],
    "Gateway": ["tidegate.gateway.client"],
    "Tasks and trajectories": ["tidegate.types", "tidegate.turn"],
    "Errors": ["tidegate.errors"],
}
"""Modules that users import, by heading of the page."""
MODELS = {
    "tidegate train": "tidegate.config:Settings",
    "tidegate gateway": "tidegate.settings.servers:GatewayCommand",
    "tidegate simulate": "tidegate.simulation.scenario:Scenario",
}
"""Class of the settings of each command; those of the others are among those of `tidegate train`."""
_KEYS = {
    "session key": "Calls of an agent",
    "worker key": "Calls of a worker",
    "project key": "Calls of a client",
    "admin key": "Calls of the trainer",
    "": "Health",
}


def reference_pages() -> dict[str, str]:
    """Returns the text of each generated page, by its path in the site."""
    return {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/http.md": http_page(openapi()),
        "reference/python.md": python_page(),
    }


def settings_page() -> str:
    """Returns tables of all settings, with a heading for each section."""
    text = [
        "# Settings",
        "All settings of `config.toml`, with their defaults. On the command line a setting is given as "
        "`--section.key value`; `tidegate train --settings` prints this list. A name that is not in the list "
        "is an error.",
    ]
    seen: set[str] = set()
    for command, model in MODELS.items():
        module, _, name = model.partition(":")
        sections: dict[str, list[tuple[str, str, str]]] = {}
        for key, default, meaning in known_keys(getattr(importlib.import_module(module), name)):
            if key not in seen:
                section = key.rpartition(".")[0].partition(".")[0]
                sections.setdefault(section, []).append((code(key), code(default), meaning))
                seen.add(key)
        for section, rows in sections.items():
            name = section or "Top level"
            text.append(f"## {name}" if command == "tidegate train" else f"## {name} of `{command}`")
            text.append(table(("setting", "default", "meaning"), rows))
    return _joined(text)


def commands_page() -> str:
    """Returns the help of every command."""
    text = ["# Commands", "The help of each command of the program `tidegate`."]
    for name, parser in _commands(_parser()):
        text += [f"## {name}", f"```text\n{parser.format_help().strip()}\n```"]
    return _joined(text)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the commands and their actions with their names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                child.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
                yield child.prog, child
                yield from _commands(child)


def openapi() -> dict[str, Any]:
    """Returns the OpenAPI document of a gateway that is not started."""
    app = create_app(Gateway(GatewayOptions(model=REPO / "examples/tiny_base/model")))

    async def served() -> dict[str, Any]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return dict((await client.get("/openapi.json")).raise_for_status().json())

    return asyncio.run(served())


def http_page(document: dict[str, Any]) -> str:
    """Returns the calls of the gateway, by the key that opens them."""
    text = [
        "# HTTP API",
        "Calls of the gateway. A key is sent as `Authorization: Bearer KEY`. A running gateway serves this "
        "description as OpenAPI at `/openapi.json`, and as a page at `/docs`. The calls of an agent are also "
        "served at `/s/{session_id}/v1/…`. An error has the format of OpenAI's API, or of Anthropic's for "
        "`/v1/messages`.",
    ]
    calls: dict[str, list[str]] = {key: [] for key in _KEYS}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            key = next((name for security in operation["security"] for name in security), "")
            calls[key] += _call(f"{method.upper()} {path}", operation, document)
    for key, parts in calls.items():
        text += [
            f"## {_KEYS[key]}",
            f"These calls need the {key}." if key else "These calls need no key.",
            *parts,
        ]
    return _joined(text)


def _call(title: str, operation: dict[str, Any], document: dict[str, Any]) -> list[str]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = _fields(_resolved(schema, document))
    heading = [f"### `{title}`", operation["summary"]]
    return [*heading, table(("field", "type", "meaning"), fields)] if fields else heading


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema that a reference, or a nullable reference, stands for."""
    schema = next(iter(schema.get("anyOf", [])), schema)
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(document["components"]["schemas"][name]) if name else schema


def _fields(schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    required = schema.get("required", ())
    return [
        (
            code(name) + (" (required)" if name in required else ""),
            _type(field)
            + (f", default {code(json.dumps(field['default']))}" if field.get("default") else ""),
            field.get("description", ""),
        )
        for name, field in schema.get("properties", {}).items()
    ]


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(kind) for kind in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "const" in field or "enum" in field:
        return " or ".join(code(json.dumps(value)) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"array of {_type(field['items'])}" if field.get("items") else "array"
    return str(field.get("type", "any"))


def python_page() -> str:
    """Returns a page with the directives that mkdocstrings replaces by the modules' docstrings."""
    text = ["# Python API", "Classes and functions that programs outside Tidegate use."]
    for heading, modules in PYTHON_API.items():
        text.append(f"## {heading}")
        text += [f"::: {module}" for module in modules]
    return _joined(text)


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def write(folder: Path, pages: dict[str, str]) -> None:
    """Writes pages into a folder."""
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
