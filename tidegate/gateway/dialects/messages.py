"""Dialect of Anthropic's Messages: requests, replies, streams and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel, Usage, blocks, finish_reason
from tidegate.gateway.dialects.fields import event, get
from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.reply import Part, Reasoning, SampledCall, ToolUse, call_wire
from tidegate.gateway.rendering.messages import text_of, text_of_part
from tidegate.gateway.sampling import RequestedSampling
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.service import exact
from tidegate.types import Message

_SUPPORTED = frozenset(
    {"messages", "system", "tools", "tool_choice", "stream", "max_tokens", "temperature", "top_p", "top_k"}
    | {"stop_sequences", "thinking", "output_config", "context_management", "thread"}
    # Accepted without effect on sampling.
    | {"model", "metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id"}
    | {"workspace_id", "diagnostics"}
)
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {"speed": ("standard",)}
_KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
"""The only supported edit of a history, which changes nothing."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    424: "api_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request for one message."""

    turn_requests: Sequence[TurnRequest]
    stream: bool

    def body(self, calls: Sequence[ModelCall], model: ServedModel) -> bytes:
        [call] = calls
        content = [_block(part, key, call.id) for part, key in blocks(call)]
        usage = _usage(Usage.of(calls, model))
        return orjson.dumps({**_head(call, model), "content": content, **_end(call), "usage": usage})

    def events(self, calls: Sequence[ModelCall], model: ServedModel) -> MessageEvents:
        [call] = calls
        return MessageEvents(call, model)


def read(payload: dict[str, Any], session: GatewaySession) -> MessagesRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    if fields.at_least_1(payload, "max_tokens") is None:
        raise ApiError("max_tokens: a number is required", param="max_tokens")
    turn_request = read_prompt(payload)
    return MessagesRequest([turn_request], turn_request.stream)


def read_prompt(payload: dict[str, Any]) -> TurnRequest:
    """Parses a body of `messages` or `count_tokens`. Raises ApiError as `read`."""
    fields.refuse_others(payload, _SUPPORTED, _ONLY)
    _check_history(payload)
    history: list[Any] = get(payload, "messages", list) or []
    if not history:
        raise ApiError("messages: a list with at least one message is required", param="messages")
    system = payload.get("system")
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": text_of(system, "system", joint="\n")})
    for index, message in enumerate(history):
        messages += _messages(message, f"messages[{index}]")
    if messages[-1]["role"] == "assistant":
        raise unsupported(
            "messages", "the last message is the assistant's; prefilled replies are not supported"
        )
    tools = _tools(payload)
    return TurnRequest(
        messages=fields.complete_history(
            messages,
            "messages: `tool_use` ids were found without `tool_result` blocks after them",
            "messages",
        ),
        sampling=_sampling(payload),
        tools=tools,
        tool_use=_tool_use(payload, tools),
        template_options=_template_options(payload),
        stream=fields.stream(payload),
    )


def _sampling(payload: dict[str, Any]) -> RequestedSampling:
    config = get(payload, "output_config", dict) or {}
    fields.refuse_others(config, {"format", "effort"}, {}, "output_config.")
    form = get(config, "format", dict, "output_config.") or {"type": "text"}
    schema = fields.schema(form, form, "output_config.format")
    return fields.sampling(payload, "max_tokens", max_temperature=1, stop="stop_sequences", schema=schema)


def _template_options(payload: dict[str, Any]) -> dict[str, Any]:
    """Returns the template options for thinking and effort; a thinking budget has no effect."""
    thinking = get(payload, "thinking", dict) or {}
    kind = thinking.get("type", "enabled")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise unsupported("thinking", f"{kind!r} is not supported"[:300])
    config = get(payload, "output_config", dict) or {}
    options = fields.effort_options(config.get("effort"), "output_config.effort")
    return options | ({"enable_thinking": False} if kind == "disabled" else {})


def _tools(payload: dict[str, Any]) -> list[Any] | None:
    tools = []
    for index, tool in enumerate(get(payload, "tools", list) or []):
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        if kind not in (None, "custom") or not isinstance(tool.get("name"), str):
            raise unsupported(
                f"tools[{index}]", f"{kind!r} is not supported, only tools of your own with a name"[:300]
            )
        function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
        tools.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema")}})
    return tools or None


def _tool_use(payload: dict[str, Any], tools: list[Any] | None) -> ToolUse:
    choice = get(payload, "tool_choice", dict) or {"type": "auto"}
    parallel = get(choice, "disable_parallel_tool_use", bool, "tool_choice.") is not True
    if choice.get("type") == "tool":
        return fields.tool_use(choice, choice.get("name"), tools, parallel)
    return fields.tool_use(choice.get("type"), None, tools, parallel)


# -- histories ---------------------------------------------------------------------------------------


def _check_history(payload: dict[str, Any]) -> None:
    """Raises ApiError for parameters that refer to stored history or edit it."""
    if payload.get("thread") is not None:
        # SDKs react to this code by sending complete histories.
        raise ApiError(
            "thread: histories are not stored under message ids; send all messages",
            code="thread_unsupported_request",
            param="thread",
        )
    management = get(payload, "context_management", dict) or {}
    fields.refuse_others(management, {"edits"}, {}, "context_management.")
    for index, edit in enumerate(get(management, "edits", list, "context_management.") or []):
        if edit != _KEEP_THOUGHTS:
            raise unsupported(
                f"context_management.edits[{index}]",
                "the gateway never edits a history; only keep = all is supported",
            )


def _messages(message: Any, where: str) -> list[Message]:
    """Converts a message to internal messages: each tool result becomes a message."""
    if not isinstance(message, dict):
        raise ApiError(f"{where} is not an object", param="messages")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise unsupported(f"{where}.role", f"{role!r} is not one of user, assistant, system"[:300])
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(f"{where}.content is neither text nor a list of blocks", param="messages")
    if role == "assistant":
        return [_assistant_message(content, f"{where}.content")]
    return _user_messages(role, content, f"{where}.content")


def _user_messages(role: str, content: list[Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if role == "user" and isinstance(block, dict) and block.get("type") == "tool_result":
            result = text_of(block.get("content") or "", f"{at}.content", joint="\n")
            messages.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}
            )
            continue
        text = text_of_part(block, at)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + text
        else:
            messages.append({"role": role, "content": text})
    return messages or [{"role": role, "content": ""}]


def _assistant_message(content: list[Any], where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for index, block in enumerate(content):
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                if text:
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
            case {"type": "redacted_thinking"}:
                pass  # unreadable, and histories match without their reasoning
            case {"type": "tool_use", "name": str(name)}:
                arguments = exact.dumps(block.get("input") or {}).decode()
                call = call_wire(str(block.get("id")), name, arguments)
                message.setdefault("tool_calls", []).append(call)
            case _:
                message["content"] += text_of_part(block, f"{where}[{index}]")
    return message


# -- replies -----------------------------------------------------------------------------------------


def _head(call: ModelCall, model: ServedModel) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model.name}


def _block(part: Part, key: str = "", signature: str = "") -> dict[str, Any]:
    if isinstance(part, SampledCall):
        return {"type": "tool_use", "id": key, "name": part.name, "input": orjson.Fragment(part.arguments)}
    if isinstance(part, Reasoning):
        # The signature is never checked, but clients turn unsigned thinking into text.
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    return {"type": "text", "text": part}


def _end(call: ModelCall) -> dict[str, Any]:
    stop = call.reader.stopped
    reason = _STOP_REASONS[finish_reason(call)] if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, int]:
    """Formats usage; Anthropic counts cached tokens separately."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output,
    }


class MessageEvents:
    """Formats the parts of a call as server-sent events."""

    ping = event({"type": "ping"}, "ping")

    def __init__(self, call: ModelCall, model: ServedModel) -> None:
        self._call = call
        self._model = model
        self._index = -1
        self._open: type | None = None
        """Type of the parts in the open block; None if no block is open."""
        self._keys = 0

    def start(self) -> bytes:
        usage = _usage(Usage(self._call.prompt_tokens, 0, 0, 0))
        message = {
            **_head(self._call, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return _event("message_start", message={**message, "usage": usage})

    def part(self, choice: int, part: Part) -> bytes:
        if isinstance(part, SampledCall):
            key = self._call.reader.call_ids[self._keys]
            self._keys += 1
            data = self._close() + self._begin(part, key)
            return data + self._delta("input_json_delta", "partial_json", part.arguments) + self._close()
        data = b"" if self._open is type(part) else self._close() + self._begin(part)
        if isinstance(part, Reasoning):
            return data + self._delta("thinking_delta", "thinking", part.text)
        return data + self._delta("text_delta", "text", part)

    def end(self) -> bytes:
        usage = _usage(Usage.of([self._call], self._model))
        delta = _event("message_delta", delta=_end(self._call), usage=usage)
        return self._close() + delta + _event("message_stop")

    def error(self, refusal: ApiError) -> bytes:
        return fields.framed(error(refusal), "error")

    def _begin(self, part: Part, key: str = "") -> bytes:
        self._index += 1
        self._open = type(part)
        empty = part._replace(arguments="{}") if isinstance(part, SampledCall) else type(part)("")
        return _event("content_block_start", index=self._index, content_block=_block(empty, key))

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is Reasoning:
            signed = self._delta("signature_delta", "signature", self._call.id)
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **payload: Any) -> bytes:
    return event({"type": kind, **payload}, kind)


def error(refusal: ApiError) -> bytes:
    message = str(refusal)
    if refusal.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # clients match this text
    kind = _ERRORS.get(refusal.status, "invalid_request_error")
    payload: dict[str, Any] = {"type": kind, "message": message}
    if refusal.code is not None:
        payload["details"] = {"error_code": refusal.code}
    return orjson.dumps({"type": "error", "error": payload})


def models(names: Sequence[str], single: bool) -> bytes:
    """Returns the response body of `GET /models`, or of `GET /models/{name}` if `single`."""
    fixed = {"created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    found = [{"type": "model", "id": name, "display_name": name, **fixed} for name in names]
    listed = {"data": found, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return orjson.dumps(found[0] if single else listed)
