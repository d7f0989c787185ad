"""Dialect of OpenAI's Responses: requests, replies, streams and errors, without their items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel, Usage, finish_reason
from tidegate.gateway.dialects.fields import event, get
from tidegate.gateway.dialects.responses_items import (
    content_of,
    in_namespace,
    item_of,
    read_items,
    split_namespace,
    without_repeated,
)
from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.reply import Part, Reasoning, SampledCall, ToolUse
from tidegate.gateway.sampling import RequestedSampling
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.tree import TurnNode
from tidegate.service import exact
from tidegate.types import Message

error = fields.openai_error
_SUPPORTED = (
    {"input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls"}
    | {"stream", "max_output_tokens", "temperature", "top_p", "text", "reasoning", "include"}
    # Accepted without effect on sampling.
    | fields.HARMLESS
    | {"store", "safety_identifier", "stream_options", "client_metadata"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
# Suffix of the ids of responses whose history begins with instructions, which are not carried over.
_INSTRUCTED = "i"
_ID_LENGTH = 32


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A parsed request for one response; `echo` has the parameters that the response repeats."""

    turn_request: TurnRequest
    instructed: bool
    echo: Mapping[str, Any] = field(default_factory=dict)
    namespaces: frozenset[str] = frozenset()
    """Namespaces of the tools, to restore their names in calls."""

    @property
    def turn_requests(self) -> Sequence[TurnRequest]:
        return [self.turn_request]

    @property
    def stream(self) -> bool:
        return self.turn_request.stream

    def body(self, calls: Sequence[ModelCall], model: ServedModel) -> bytes:
        [call] = calls
        events = ResponseEvents(call, self, model)
        for part in call.reader.parts:
            events.part(0, part)
        events.close(_status(call))
        return exact.dumps(self.final_body(call, model, events.items))

    def events(self, calls: Sequence[ModelCall], model: ServedModel) -> ResponseEvents:
        [call] = calls
        return ResponseEvents(call, self, model)

    def initial_body(self, call: ModelCall, model: ServedModel) -> dict[str, Any]:
        """Returns the response body at the start of its call."""
        return {
            "id": f"resp_{call.id}" + _INSTRUCTED * self.instructed,
            "object": "response",
            "created_at": call.created,
            "model": model.name,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "background": False,
            "truncation": "disabled",
            **self.echo,
        }

    def final_body(self, call: ModelCall, model: ServedModel, items: list[dict[str, Any]]) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "status": _status(call),
            "output": items,
            "usage": _usage(Usage.of([call], model)),
            "temperature": call.recorded.turn.temperature,
        }
        if payload["status"] == "incomplete":
            payload["incomplete_details"] = {"reason": "max_output_tokens"}
        return self.initial_body(call, model) | payload


def read(payload: dict[str, Any], session: GatewaySession) -> ResponsesRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    fields.refuse_others(payload, _SUPPORTED, _ONLY)
    for item in get(payload, "include", list) or []:
        if item != "reasoning.encrypted_content":  # plain-text reasoning serves as well
            raise unsupported("include", f"{item!r} is not supported"[:300])
    tools = _tools(payload)
    instructions = get(payload, "instructions", str)
    previous = _previous(payload, session)
    turn_request = TurnRequest(
        messages=_messages(payload, instructions, previous, session),
        sampling=_sampling(payload),
        tools=tools,
        tool_use=_tool_use(payload, tools),
        template_options=_template_options(payload),
        stream=fields.stream(payload),
        parent=None if previous is None else previous[0].turn.index,
    )
    namespaces = frozenset(tool["name"] for tool in payload.get("tools") or [] if _is_namespace(tool))
    return ResponsesRequest(turn_request, bool(instructions), _echo(payload, turn_request), namespaces)


def _messages(
    payload: dict[str, Any],
    instructions: str | None,
    previous: tuple[TurnNode, bool] | None,
    session: GatewaySession,
) -> list[Message]:
    history: list[Message] = []
    if previous is not None:
        node, instructed = previous
        history = session.tree.history(node.turn.index)[instructed:]

    def recorded_reply(key: str) -> Message | None:
        node = _node(session, key.partition("_")[2].partition("_")[0])
        return None if node is None else node.reply

    sent = read_items(payload.get("input") or [], recorded_reply)
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += [*history, *without_repeated(sent, history)]
    if not messages:
        raise ApiError("input: a text or a list of items is required", param="input")
    return fields.complete_history(messages, "input: no tool output found for these function calls", "input")


def _previous(payload: dict[str, Any], session: GatewaySession) -> tuple[TurnNode, bool] | None:
    """Returns the continued turn, and whether its history begins with instructions."""
    key = get(payload, "previous_response_id", str)
    if key is None:
        return None
    name = key.removeprefix("resp_")
    node = _node(session, name[:_ID_LENGTH])
    if node is None or name[_ID_LENGTH:] not in ("", _INSTRUCTED):
        raise ApiError(
            f"there is no response {key!r} in this session"[:300],
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return node, name.endswith(_INSTRUCTED)


def _node(session: GatewaySession, key: str) -> TurnNode | None:
    return next((node for node in reversed(session.tree.nodes) if node.request.id == key), None)


def _sampling(payload: dict[str, Any]) -> RequestedSampling:
    text = get(payload, "text", dict) or {}
    fields.refuse_others(text, {"format"}, {"verbosity": fields.VERBOSITIES}, "text.")
    form = get(text, "format", dict, "text.") or {"type": "text"}
    return fields.sampling(payload, "max_output_tokens", schema=fields.schema(form, form, "text.format"))


def _template_options(payload: dict[str, Any]) -> dict[str, Any]:
    reasoning = get(payload, "reasoning", dict) or {}
    # Reasoning is returned completely, which serves for a summary of any length.
    only = dict.fromkeys(("summary", "generate_summary"), ("auto", "concise", "detailed"))
    fields.refuse_others(reasoning, {"effort"}, only, "reasoning.")
    return fields.effort_options(reasoning.get("effort"), "reasoning.effort")


def _tools(payload: dict[str, Any]) -> list[Any] | None:
    """Converts tools to the form of chat templates; functions of a namespace get a qualified name."""
    functions = []
    for index, tool in enumerate(get(payload, "tools", list) or []):
        where = f"tools[{index}]"
        if not _is_namespace(tool):
            functions.append(_function(tool, where))
            continue
        for inner, item in enumerate(get(tool, "tools", list, f"{where}.") or []):
            function = _function(item, f"{where}.tools[{inner}]")
            functions.append({**function, "name": in_namespace(tool["name"], function["name"])})
    return [{"type": "function", "function": function} for function in functions] or None


def _is_namespace(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("name"), str)


def _function(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if kind != "function" or not isinstance(tool.get("name"), str):
        raise unsupported(where, f"{kind!r} is not supported, only functions with a name"[:300])
    return {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}


def _tool_use(payload: dict[str, Any], tools: list[Any] | None) -> ToolUse:
    choice: Any = payload.get("tool_choice") or "auto"
    named = isinstance(choice, dict) and choice.get("type") == "function"
    parallel = get(payload, "parallel_tool_calls", bool) is not False
    return fields.tool_use(choice, choice.get("name") if named else None, tools, parallel)


def _echo(payload: dict[str, Any], turn_request: TurnRequest) -> dict[str, Any]:
    unchanged = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")
    return {name: payload.get(name) for name in unchanged} | {
        "metadata": payload.get("metadata") or {},
        "parallel_tool_calls": turn_request.tool_use.parallel,
        "reasoning": payload.get("reasoning") or {"effort": None, "summary": None},
        "store": payload.get("store") is not False,
        "text": payload.get("text") or {"format": {"type": "text"}},
        "tool_choice": payload.get("tool_choice") or "auto",
        "tools": payload.get("tools") or [],
    }


# -- replies -----------------------------------------------------------------------------------------


def _status(call: ModelCall) -> str:
    return "incomplete" if finish_reason(call) == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


class ResponseEvents:
    """Turns a call's parts into server-sent events, numbered from 0."""

    ping = fields.PING

    def __init__(self, call: ModelCall, request: ResponsesRequest, model: ServedModel) -> None:
        self._call = call
        self._request = request
        self._model = model
        self._number = 0
        self.items: list[dict[str, Any]] = []
        """Completed items."""
        self._open: str | Reasoning | None = None
        """Content so far of the item in progress."""
        self._item_id = ""
        self._calls = 0

    def start(self) -> bytes:
        response = self._request.initial_body(self._call, self._model)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def part(self, choice: int, part: Part) -> bytes:
        if isinstance(part, SampledCall):
            return self.close() + self._tool_call(part)
        data = b"" if type(self._open) is type(part) else self.close() + self._begin(part)
        text = part.text if isinstance(part, Reasoning) else part
        if isinstance(self._open, Reasoning):
            self._open = Reasoning(self._open.text + text)
            return data + self._in_part("response.reasoning_text.delta", delta=text)
        self._open = (self._open or "") + text
        return data + self._in_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self) -> bytes:
        status = _status(self._call)
        data = self.close(status)
        response = self._request.final_body(self._call, self._model, self.items)
        return data + self._event(f"response.{status}", response=response)

    def error(self, refusal: ApiError) -> bytes:
        payload = {"code": refusal.code, "message": str(refusal), "param": refusal.param}
        # SDKs raise on an event with an `error` field, but pass on the form that the protocol defines.
        return self._event("error", **payload, error={**payload, "type": refusal.type})

    def _tool_call(self, call: SampledCall) -> bytes:
        call_id = self._call.reader.call_ids[self._calls]
        self._calls += 1
        added = self._added(call, call_id)
        place = {"output_index": len(self.items), "item_id": self._item_id}
        kind = "response.function_call_arguments"
        delta = self._event(f"{kind}.delta", **place, delta=call.arguments)
        name = split_namespace(call.name, self._request.namespaces)["name"]
        done = self._event(f"{kind}.done", **place, name=name, arguments=call.arguments)
        return added + delta + done + self._done(call, call_id, "completed")

    def _begin(self, part: str | Reasoning) -> bytes:
        self._open = Reasoning("") if isinstance(part, Reasoning) else ""
        return self._added(part) + self._in_part("response.content_part.added", part=content_of(self._open))

    def close(self, status: str = "completed") -> bytes:
        part, self._open = self._open, None
        if part is None:
            return b""
        if isinstance(part, Reasoning):
            text = self._in_part("response.reasoning_text.done", text=part.text)
        else:
            text = self._in_part("response.output_text.done", text=part, logprobs=[])
        content = self._in_part("response.content_part.done", part=content_of(part))
        return text + content + self._done(part, "", status)

    def _added(self, part: Part, call_id: str = "") -> bytes:
        item = self._item(part, call_id, "in_progress")
        self._item_id = item["id"]
        return self._event("response.output_item.added", output_index=len(self.items), item=item)

    def _done(self, part: Part, call_id: str, status: str) -> bytes:
        item = self._item(part, call_id, status)
        data = self._event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        return data

    def _item(self, part: Part, call_id: str, status: str) -> dict[str, Any]:
        key = f"{self._call.id}_{len(self.items)}"
        return item_of(part, key, call_id, status, self._request.namespaces)

    def _in_part(self, kind: str, **payload: Any) -> bytes:
        place = {"output_index": len(self.items), "item_id": self._item_id, "content_index": 0}
        return self._event(kind, **place, **payload)

    def _event(self, kind: str, **payload: Any) -> bytes:
        number = self._number
        self._number += 1
        return event({"type": kind, "sequence_number": number, **payload}, kind)
