"""Describes the gateway in OpenAPI: FastAPI's document, extended by the routes that bypass FastAPI."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from tidegate.gateway.http import schemas
from tidegate.prometheus import CONTENT_TYPE

Schema = dict[str, Any]
ADMIN, SESSION, WORKER, PROJECT = "admin key", "session key", "worker key", "project key"
FINISHING: dict[int | str, dict[str, Any]] = {
    202: {"description": "The reward is not ready: send the request again"}
}

SUMMARIES = {
    "POST /v1/chat/completions": "Samples a reply in OpenAI's Chat Completions format.",
    "POST /v1/completions": "Samples a continuation in OpenAI's Completions format.",
    "POST /v1/responses": "Samples a reply in OpenAI's Responses format.",
    "POST /v1/messages": "Samples a reply in Anthropic's Messages format.",
    "POST /v1/messages/count_tokens": "Counts the tokens of a prompt in Anthropic's Messages format.",
    "GET /v1/models": "Lists the policy as the only model, or several policies by their names.",
    "GET /v1/models/{name}": "Describes a policy.",
    "POST /s/{session_id}/finish": "Ends the session with the agent's output; returns outcome and reward.",
    "GET /s/{session_id}/tools": "Lists the tools of the episode's environment.",
    "POST /s/{session_id}/tools/{name}": "Calls a tool of the episode's environment.",
    "POST /s/{session_id}/respond": "Gives a reply to the environment's counterpart, and returns its answer.",
    "POST /attempts/next": "Takes attempts; waits up to `wait_s` seconds for the first one.",
    "POST /attempts/{attempt}/heartbeat": "Keeps an attempt; without heartbeats it is attempted again.",
    "POST /attempts/leave": "Gives up all attempts of a worker that exits.",
    "POST /v1/feedback": "Rewards a reply or a conversation.",
    "DELETE /v1/conversations/{name}": "Erases a conversation from the journal and from the run's files.",
    "POST /v1/groups/{group}/episodes": "Opens an episode of a group, which begins with its first episode.",
    "POST /v1/groups/{group}/seal": "Completes a group: these sessions are its episodes.",
    "GET /v1/groups/{group}": "Returns the state of a group; waits up to `wait_s` seconds for its end.",
    "DELETE /v1/groups/{group}": "Ends a group and its episodes without training on it.",
    "POST /sessions": "Opens a session, and returns the base URL and the key for its agent.",
    "GET /sessions/{session_id}": "Describes a session, without its key and its task's answer.",
    "DELETE /sessions/{session_id}": "Aborts and deletes a session.",
    "POST /sessions/{session_id}/reward": "Adds a part to the reward of a session, or of one of its turns.",
    "POST /sessions/{session_id}/finish": "Ends a session; returns its outcome and reward.",
    "GET /sessions/{session_id}/result": "Returns the outcome and the reward of a finished session.",
    "GET /sessions/{session_id}/trajectory": "Returns a finished session's trajectory as MessagePack.",
    "GET /attempts": "Describes the queue of attempts and the workers.",
    "GET /groups": "Lists the groups.",
    "POST /groups/end": "Tells clients that the run has ended.",
    "GET /sessions": "Lists the newest sessions.",
    "GET /groups/erased": "Lists the groups that clients erased, whose files the trainer erases.",
    "POST /groups/erased": "Acknowledges erasures that the trainer has carried out.",
    "POST /groups/lease": "Leases ready groups as MessagePack; waits up to `wait_s` for the first one.",
    "POST /groups/ack": "Ends a lease, and with it the group.",
    "POST /groups/wait": "Waits up to `wait_s` seconds for a ready group, and returns their number.",
    "POST /groups/return": "Returns leases, so that their groups are ready again.",
    "POST /groups/{group_id}/seal": "Makes a group of finished sessions ready to be leased.",
    "DELETE /groups/{group_id}": "Ends a group and its sessions; returns their trajectories as MessagePack.",
    "GET /engines": "Lists the engines with their version, load and health.",
    "POST /engines": "Adds an engine.",
    "PATCH /engines": "Sets whether an engine receives calls.",
    "PUT /engines/candidate": "Sets the engines with a version that is not promoted yet.",
    "DELETE /engines": "Removes an engine.",
    "GET /health": "Health of the gateway: 503 if it cannot go on, with the reason.",
    "GET /ready": "Readiness: 503 without an engine that serves calls.",
    "GET /metrics": "Metrics in Prometheus text format.",
}  # fmt: skip
"""Method and path of a call → one line about it."""


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
        name: {"type": "http", "scheme": "bearer"} for name in (ADMIN, SESSION, WORKER, PROJECT)
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # the gateway answers 400 instead
            operation["responses"].update(_refusals(_CONTROL))
            operation["security"] = [{ADMIN: []}]
            if path in ("/health", "/ready"):
                operation["security"] = []
                operation["responses"]["503"] = operation["responses"]["200"]
    document["paths"] |= _json_routes(document["components"]["schemas"])
    for path, reply, error, body in _data_plane():
        method = "get" if body is None else "post"
        document["paths"][f"/v1{path}"] = {method: _operation(path, reply, error, body)}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["summary"] = SUMMARIES[f"{method.upper()} {path}"]
            operation.pop("description", None)
    return document


def _operation(path: str, reply: Schema, error: Schema, body: Schema | None) -> Schema:
    """Describes a call of the data plane."""
    responses = {"200": _response(reply), **_refusals(error)}
    operation: Schema = {"responses": responses, "security": [{SESSION: []}]}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        if "stream" in body["properties"]:
            responses["200"]["content"]["text/event-stream"] = {}
    return operation


def _json_routes(shared: dict[str, Schema]) -> dict[str, dict[str, Schema]]:
    """Describes the calls of workers (docs/remote.md), of clients with a project key (docs/agents.md), and
    those for tools (docs/gateway.md); adds the types that their bodies refer to."""
    group = "/v1/groups/{group}"
    calls: list[tuple[str, str, str, type[schemas.Body] | None]] = [
        ("post", "/attempts/next", WORKER, schemas.NextAttempts),
        ("post", "/attempts/{attempt}/heartbeat", WORKER, schemas.WorkerName),
        ("post", "/attempts/leave", WORKER, schemas.WorkerName),
        ("post", "/s/{session_id}/finish", SESSION, schemas.WorkerFinish),
        ("get", "/s/{session_id}/tools", SESSION, None),
        ("post", "/s/{session_id}/tools/{name}", SESSION, schemas.ToolArguments),
        ("post", "/s/{session_id}/respond", SESSION, schemas.AgentReply),
        ("post", "/v1/feedback", PROJECT, schemas.Feedback),
        ("delete", "/v1/conversations/{name}", PROJECT, None),
        ("post", f"{group}/episodes", PROJECT, schemas.ClientEpisodeRequest),
        ("post", f"{group}/seal", PROJECT, schemas.SealClientGroup),
        ("get", group, PROJECT, None),
        ("delete", group, PROJECT, None),
    ]
    paths: dict[str, dict[str, Schema]] = {}
    for method, path, key, body in calls:
        names = re.findall(r"{(\w+)}", path)
        operation: Schema = {
            "security": [{key: []}],
            "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names],
            "responses": {"2XX": _response(_object({})), **_refusals(_CONTROL)},
        }
        if path == group and method == "get":
            wait = {"type": "number", "minimum": 0, "maximum": 60}
            operation["parameters"].append({"name": "wait_s", "in": "query", "schema": wait})
        if body is not None:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            shared |= schema.pop("$defs", {})
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method] = operation
    return paths


def _data_plane() -> list[tuple[str, Schema, Schema, Schema | None]]:
    """Returns the path, response, error and request body of each call."""
    function = _object({"type": {"const": "function"}, "function": _function("parameters")})
    chat = {"messages": _messages("system", "user", "assistant", "tool"), "tools": _array(function)}
    prompt = {"messages": _messages("user"), "tools": _array(_function("input_schema")), "system": _TEXT}
    messages = {**prompt, "max_tokens": _integer(1), "stop_sequences": _STOPS, "stream": _BOOL}
    tool = _function("parameters", type={"const": "function"})
    responses = {
        "input": {"anyOf": [{**_TEXT, "minLength": 1}, _messages("system", "user", "assistant")]},
        "instructions": _TEXT,
        "max_output_tokens": _integer(1),
        "tools": _array(tool),
        "temperature": _SAMPLED["temperature"],
        "stream": _BOOL,
    }
    completions = {"prompt": _PROMPT, **_SAMPLED}
    counted = _object({"input_tokens": _integer(0)})
    return [
        ("/chat/completions", _reply("choices"), _OPENAI, _object({**chat, **_SAMPLED}, "messages")),
        ("/completions", _reply("choices"), _OPENAI, _object(completions, "prompt")),
        ("/responses", _reply("output"), _OPENAI, _object(responses, "input")),
        ("/messages", _reply("content"), _ANTHROPIC, _object(messages, "messages", "max_tokens")),
        ("/messages/count_tokens", counted, _ANTHROPIC, _object(prompt, "messages")),
        ("/models", _object({"data": {"type": "array"}}), _OPENAI, None),
        ("/models/{name}", _object({"id": _TEXT}), _OPENAI, None),
    ]


def _response(schema: Schema) -> Schema:
    return {"description": "The response", "content": {"application/json": {"schema": schema}}}


def _refusals(schema: Schema) -> Schema:
    return {code: _response(schema) for code in ("4XX", "5XX")}


def _object(properties: Schema, *required: str) -> Schema:
    """Returns an object schema; all properties are required unless some are named."""
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _integer(least: int, most: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _array(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "minItems": least, "items": items}


def _messages(*roles: str) -> Schema:
    return _array(_object({"role": {"enum": list(roles)}, "content": _TEXT}), 1)


def _function(parameters: str, **more: Schema) -> Schema:
    name = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
    properties = {"name": name, "description": _TEXT, parameters: {"type": "object"}, **more}
    return _object(properties, "name", parameters, *more)


def _reply(parts: str) -> Schema:
    return _object({"id": _TEXT, "model": _TEXT, parts: {"type": "array"}, "usage": {"type": "object"}})


_TEXT: Schema = {"type": "string"}
_BOOL: Schema = {"type": "boolean"}
_STOPS: Schema = _array({"type": "string", "minLength": 1})
_PROMPT: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _array(_integer(0, 255), 1)]}
_SAMPLED: Schema = {
    "model": _TEXT,
    "stream": _BOOL,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "seed": _integer(0),
    "stop": _STOPS,
    "n": _integer(1, 8),
    "max_tokens": _integer(1),
}
_NULLABLE: Schema = {"type": ["string", "null"]}
_CONTROL: Schema = _object({"error": _object({"message": _TEXT, "type": _TEXT, "code": {"type": "integer"}})})
_OPENAI: Schema = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE})}
)
_ANTHROPIC: Schema = _object(
    {"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT})}
)
