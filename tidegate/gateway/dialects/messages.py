"""Dialect of Anthropic's Messages: requests, replies, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel, Usage, merged
from tidegate.gateway.dialects.fields import event, get
from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.parts import Part, Reasoning, ToolCall, ToolUse
from tidegate.gateway.parsing.reply import call_wire
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sampling import RequestedSampling, Schema
from tidegate.gateway.sessions.pending_turns import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.types import Message

# Accepted without effect on sampling.
_HARMLESS = frozenset(
    {"model", "metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id"}
    | {"workspace_id", "diagnostics"}
)
_READ = frozenset(
    {"messages", "system", "tools", "tool_choice", "stream", "max_tokens", "temperature", "top_p", "top_k"}
    | {"stop_sequences", "thinking", "output_config", "context_management", "thread"}
)
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {"speed": ("standard",)}
_KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
"""The only supported edit of a history, which changes nothing."""
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

    def body(self, calls: Sequence[PendingTurn], model: ServedModel) -> bytes:
        [call] = calls
        keys = iter(call.reader.call_ids)
        content = [_block(part, keys, _signature(call)) for part in merged(call.reader.parts)]
        usage = _usage(Usage.of(calls, model))
        return orjson.dumps({**_head(call, model), "content": content, **_end(call), "usage": usage})

    def events(self, calls: Sequence[PendingTurn], model: ServedModel) -> MessageEvents:
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
    fields.refuse_others(payload, _READ | _HARMLESS, _ONLY)
    _check_history(payload)
    history: list[Any] = get(payload, "messages", list) or []
    if not history:
        raise ApiError("messages: a list with at least one message is required", param="messages")
    messages = _system(payload)
    for index, message in enumerate(history):
        messages += _messages(message, f"messages[{index}]")
    if messages[-1]["role"] == "assistant":
        raise unsupported(
            "messages", "the last message is the assistant's; prefilled replies are not supported"
        )
    tools = _tools(payload)
    return TurnRequest(
        messages=messages,
        sampling=_sampling(payload),
        tools=tools,
        tool_use=_tool_use(payload, tools or []),
        template_options=_template_options(payload),
        stream=get(payload, "stream", bool) or False,
    )


def _sampling(payload: dict[str, Any]) -> RequestedSampling:
    return RequestedSampling(
        temperature=fields.within(payload, "temperature", 0, 1),
        top_p=fields.top_p(payload),
        top_k=get(payload, "top_k", int),
        max_tokens=fields.at_least_1(payload, "max_tokens"),
        stop=fields.stops(payload, "stop_sequences"),
        stop_param="stop_sequences",
        schema=_schema(payload),
    )


def _schema(payload: dict[str, Any]) -> Schema | None:
    config = get(payload, "output_config", dict) or {}
    fields.refuse_others(config, {"format", "effort"}, {}, "output_config.")
    form = get(config, "format", dict, "output_config.") or {"type": "text"}
    return fields.schema(form, form, "output_config.format")


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


def _tool_use(payload: dict[str, Any], tools: list[Any]) -> ToolUse:
    choice = get(payload, "tool_choice", dict) or {"type": "auto"}
    parallel = get(choice, "disable_parallel_tool_use", bool, "tool_choice.") is not True
    match choice.get("type"):
        case "auto":
            return ToolUse("auto", parallel=parallel)
        case "none":
            return ToolUse("none", parallel=parallel)
        case kind:
            name = choice.get("name") if kind == "tool" else None
            names = [tool["function"]["name"] for tool in tools]
            return fields.required_tool(choice if kind == "tool" else kind, name, names, parallel)


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


def _system(payload: dict[str, Any]) -> list[Message]:
    content = payload.get("system")
    if not content:
        return []
    return [{"role": "system", "content": _text(content, "system")}]


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


def _user_messages(role: str, blocks: list[Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if _kind(block, at) == "tool_result" and role == "user":
            result = _text(block.get("content") or "", f"{at}.content")
            messages.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}
            )
            continue
        text = _block_text(block, at)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + text
        else:
            messages.append({"role": role, "content": text})
    return messages or [{"role": role, "content": ""}]


def _assistant_message(blocks: list[Any], where: str) -> Message:
    """Joins an assistant's content blocks to one message."""
    content, reasoning, calls = "", "", []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match _kind(block, at):
            case "thinking" if isinstance(block.get("thinking"), str):
                reasoning += block["thinking"]
            case "redacted_thinking":
                pass  # unreadable, and histories match without their reasoning
            case "tool_use" if isinstance(block.get("name"), str):
                arguments = orjson.dumps(block.get("input") or {}).decode()
                calls.append(call_wire(str(block.get("id")), block["name"], arguments))
            case _:
                content += _block_text(block, at)
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where} is neither text nor a list of blocks", param=where)
    return "\n".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    kind = _kind(block, where)
    if kind != "text" or not isinstance(block.get("text"), str):
        raise unsupported(where, f"{kind!r} blocks are not supported here, only text"[:300])
    text: str = block["text"]
    return text


def _kind(block: Any, where: str) -> Any:
    if not isinstance(block, dict):
        raise ApiError(f"{where} is not a content block", param=where)
    return block.get("type")


# -- replies -----------------------------------------------------------------------------------------


def _head(call: PendingTurn, model: ServedModel) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model.name}


def _block(part: Part, keys: Iterator[str], signature: str) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return {**_empty_block(part, next(keys)), "input": orjson.loads(part.arguments)}
    if isinstance(part, Reasoning):
        return {**_empty_block(part), "thinking": part.text, "signature": signature}
    return {**_empty_block(part), "text": part}


def _signature(call: PendingTurn) -> str:
    """Returns a signature of thinking. It is never checked, but clients turn unsigned thinking into text."""
    return call.id


def _empty_block(part: Part, key: str = "") -> dict[str, Any]:
    """Returns a content block without its content."""
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": key, "name": part.name, "input": {}}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _end(call: PendingTurn) -> dict[str, Any]:
    assert call.node is not None, "the call is done"
    stop = call.reader.stopped
    if stop is not None:
        reason = "stop_sequence"
    elif call.node.turn.finish_reason == "length":
        reason = "max_tokens"
    else:
        reason = "tool_use" if call.node.reply.get("tool_calls") else "end_turn"
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

    def __init__(self, call: PendingTurn, model: ServedModel) -> None:
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
            "usage": usage,
        }
        return _event("message_start", message=message)

    def part(self, choice: int, part: Part) -> bytes:
        if isinstance(part, ToolCall):
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
        return b"event: error\ndata: " + error(refusal) + b"\n\n"

    def _begin(self, part: Part, key: str = "") -> bytes:
        self._index += 1
        self._open = type(part)
        return _event("content_block_start", index=self._index, content_block=_empty_block(part, key))

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is Reasoning:
            signed = self._delta("signature_delta", "signature", _signature(self._call))
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **payload: Any) -> bytes:
    return event({"type": kind, **payload}, kind)


def error(refusal: ApiError) -> bytes:
    message = str(refusal)
    if refusal.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # clients match this text
    payload: dict[str, Any] = {
        "type": _ERRORS.get(refusal.status, "invalid_request_error"),
        "message": message,
    }
    if refusal.code is not None:
        payload["details"] = {"error_code": refusal.code}
    return orjson.dumps({"type": "error", "error": payload})


def models(name: str) -> bytes:
    """Returns the response body of `GET /models`."""
    return orjson.dumps({"data": [_model(name)], "has_more": False, "first_id": name, "last_id": name})


def model(name: str) -> bytes:
    """Returns the response body of `GET /models/{name}`."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Any]:
    epoch = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": name, "display_name": name, "created_at": epoch, "lifecycle": "active"}
