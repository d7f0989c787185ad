"""Describes the gateway in OpenAPI: FastAPI's document, extended by the routes that bypass FastAPI."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from tidegate.gateway.http import schemas
from tidegate.prometheus import CONTENT_TYPE

Schema = dict[str, Any]
ADMIN, SESSION = "admin key", "session key"
FINISHING: dict[int | str, dict[str, Any]] = {
    202: {"description": "The reward is not ready: send the request again"}
}


class Msgpack(Response):
    media_type = "application/msgpack"


class Exposition(Response):
    """A response in Prometheus text format."""

    media_type = CONTENT_TYPE


def describe(app: FastAPI) -> Schema:
    """Returns the complete OpenAPI document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for unused in ("HTTPValidationError", "ValidationError"):
        del document["components"]["schemas"][unused]
    document["components"]["securitySchemes"] = {
        ADMIN: {"type": "http", "scheme": "bearer"},
        SESSION: {"type": "http", "scheme": "bearer"},
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _set_errors(operation["responses"])
            operation["security"] = [{ADMIN: []}]
            if path in ("/health", "/ready"):
                operation["security"] = []
                operation["responses"]["503"] = operation["responses"]["200"]
    document["paths"]["/groups/lease"] = {"post": _lease()}
    for path, (method, operation) in _data_plane().items():
        document["paths"][f"/v1{path}"] = {method: {**operation, "security": [{SESSION: []}]}}
    return document


def _set_errors(responses: Schema) -> None:
    """Replaces FastAPI's description of error responses by the gateway's."""
    responses.pop("422", None)
    responses.update(_refusals(_CONTROL))


def _lease() -> Schema:
    return {
        "summary": "Lease ready groups",
        "security": [{ADMIN: []}],
        "requestBody": _json_body(schemas.Lease.model_json_schema()),
        "responses": {
            "200": {"description": "The groups", "content": {Msgpack.media_type: {}}},
            **_refusals(_CONTROL),
        },
    }


def _data_plane() -> dict[str, tuple[str, Schema]]:
    anthropic = {"max_tokens": _integer(1), "system": _TEXT, "stop_sequences": _STOPS}
    tools = {"tools": {"type": "array", "items": _tool({"function": _function("parameters")}, "function")}}
    chat = {"messages": _messages("system", "user", "assistant", "tool"), **_SAMPLED, **_CHOICES, **tools}
    messages = {"messages": _messages("user"), "tools": {"type": "array", "items": _function("input_schema")}}
    responses = {
        "input": {"anyOf": [{**_TEXT, "minLength": 1}, _messages("system", "user", "assistant")]},
        "instructions": _TEXT,
        "max_output_tokens": _integer(1),
        "tools": {"type": "array", "items": _tool(_function("parameters"), "function")},
        "temperature": _SAMPLED["temperature"],
        "stream": _SAMPLED["stream"],
    }
    counted = _object({"input_tokens": _integer(0)})
    return {
        "/chat/completions": _turn("Chat Completions", _object(chat, "messages"), _reply("choices"), _OPENAI),
        "/completions": _turn(
            "Completions",
            _object({"prompt": _PROMPT, **_SAMPLED, **_CHOICES}, "prompt"),
            _reply("choices"),
            _OPENAI,
        ),
        "/responses": _turn("Responses", _object(responses, "input"), _reply("output"), _OPENAI),
        "/messages": _turn(
            "Messages",
            _object({**messages, **anthropic, "stream": _BOOL}, "messages", "max_tokens"),
            _reply("content"),
            _ANTHROPIC,
        ),
        "/messages/count_tokens": (
            "post",
            {
                "summary": "Messages: count the tokens of a prompt",
                "requestBody": _json_body(_object({**messages, "system": _TEXT}, "messages")),
                "responses": {"200": _response(counted), **_refusals(_ANTHROPIC)},
            },
        ),
        "/models": (
            "get",
            {
                "summary": "The only served model",
                "responses": {"200": _response(_object({"data": {"type": "array"}})), **_refusals(_OPENAI)},
            },
        ),
        "/models/{name}": (
            "get",
            {
                "summary": "The model of that name",
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": _TEXT}],
                "responses": {"200": _response(_object({"id": _TEXT})), **_refusals(_OPENAI)},
            },
        ),
    }


def _turn(summary: str, body: Schema, reply: Schema, error: Schema) -> tuple[str, Schema]:
    """Describes an operation that returns a turn, as JSON or as server-sent events."""
    content = {"application/json": {"schema": reply}, "text/event-stream": {}}
    return "post", {
        "summary": summary,
        "requestBody": _json_body(body),
        "responses": {"200": {"description": "The reply", "content": content}, **_refusals(error)},
    }


def _json_body(schema: Schema) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _response(schema: Schema) -> Schema:
    return {"description": "The response", "content": {"application/json": {"schema": schema}}}


def _refusals(schema: Schema) -> Schema:
    return {code: _response(schema) for code in ("4XX", "5XX")}


def _object(properties: Schema, *required: str) -> Schema:
    """Returns an object schema; all properties are required unless some are named."""
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _integer(least: int, most: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _messages(*roles: str) -> Schema:
    message = _object({"role": {"enum": list(roles)}, "content": _TEXT})
    return {"type": "array", "minItems": 1, "items": message}


def _function(parameters: str) -> Schema:
    name = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
    return _object({"name": name, "description": _TEXT, parameters: {"type": "object"}}, "name", parameters)


def _tool(schema: Schema, kind: str) -> Schema:
    inner = schema if "properties" in schema else _object(schema)
    return {
        **inner,
        "properties": {**inner["properties"], "type": {"const": kind}},
        "required": [*inner["required"], "type"],
    }


def _reply(parts: str) -> Schema:
    return _object({"id": _TEXT, "model": _TEXT, parts: {"type": "array"}, "usage": {"type": "object"}})


_TEXT: Schema = {"type": "string"}
_BOOL: Schema = {"type": "boolean"}
_STOPS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_IDS: Schema = {"type": "array", "minItems": 1, "items": _integer(0, 255)}
_PROMPT: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}
_SAMPLED: Schema = {
    "model": _TEXT,
    "stream": _BOOL,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "seed": _integer(0),
    "stop": _STOPS,
}
_CHOICES: Schema = {"n": _integer(1, 8), "max_tokens": _integer(1)}
_NULLABLE: Schema = {"type": ["string", "null"]}
_CONTROL: Schema = _object({"error": _object({"message": _TEXT, "type": _TEXT, "code": {"type": "integer"}})})
_OPENAI: Schema = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE})}
)
_ANTHROPIC: Schema = _object(
    {"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT})}
)
