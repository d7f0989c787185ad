"""Items of OpenAI's Responses: how a history is written in them, and a reply."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.parts import Part, Reasoning, ToolCall
from tidegate.gateway.parsing.reply import call_wire
from tidegate.types import Message

_TEXT_PARTS = ("input_text", "output_text", "text")
Referred = Callable[[str], Message | None]
"""The recorded reply that an item's id belongs to."""


def read_items(items: Any, referred: Referred) -> list[Message]:
    """The messages that input items stand for. Raises Refusal that names the item.

    What one reply consists of comes in several items: those of the assistant that follow each other are
    one message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ApiError("input: a text or a list of items is required", param="input")
    reader = _Items(referred)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ApiError(f"input[{index}] is not an object", param="input")
        reader.add(item, f"input[{index}]")
    return reader.messages


class _Items:
    def __init__(self, referred: Referred) -> None:
        self.messages: list[Message] = []
        self._referred = referred
        self._reply: Message | None = None
        """The assistant's message that further items of it belong to."""
        self._recorded: Message | None = None
        """The recorded reply that items of that message refer to."""
        self._taken: set[str] = set()
        """Pieces of the recorded reply that the message has already."""

    def add(self, item: dict[str, Any], where: str) -> None:
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                self._assistant()["content"] += _text(item.get("content"), f"{where}.content")
            case "message":
                self._other(item.get("role"), _text(item.get("content"), f"{where}.content"))
            case "reasoning":
                thought = _reasoning(item)
                if thought:
                    reply = self._assistant()
                    reply["reasoning_content"] = reply.get("reasoning_content", "") + thought
            case "function_call" if isinstance(item.get("name"), str):
                name = item["name"]
                if isinstance(item.get("namespace"), str):
                    name = in_namespace(item["namespace"], name)
                call = call_wire(str(item.get("call_id")), name, item.get("arguments") or "")
                self._assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                self._other("tool", output, tool_call_id=str(item.get("call_id")))
            case "item_reference":
                self._reference(item.get("id"), where)
            case kind:
                raise unsupported(where, f"{kind!r} items are not supported"[:300])

    def _assistant(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": ""}
            self.messages.append(self._reply)
        return self._reply

    def _other(self, role: Any, content: str, **more: str) -> None:
        self._reply = self._recorded = None
        self.messages.append({"role": role, "content": content, **more})

    def _reference(self, key: Any, where: str) -> None:
        """Adds one item of a recorded reply; a client may write out the others."""
        recorded = self._referred(key) if isinstance(key, str) else None
        piece = None if recorded is None else _piece(recorded, key)
        if recorded is None or piece is None:
            raise ApiError(f"{where}: there is no item {key!r} in this session"[:300], param="input")
        if self._recorded is not recorded:
            if self._recorded is not None:
                self._reply = None
            self._recorded, self._taken = recorded, set()
        name, value = piece
        part = key if name == "tool_calls" else name
        if part not in self._taken:
            self._taken.add(part)
            reply = self._assistant()
            reply[name] = reply[name] + value if name in reply else value


def _piece(recorded: Message, key: str) -> tuple[str, Any] | None:
    """The field of a recorded reply that an item's id stands for, and what the item has of it."""
    match key.partition("_")[0]:
        case "msg":
            return "content", recorded.get("content") or ""
        case "rs":
            return "reasoning_content", recorded.get("reasoning_content") or ""
        case "fc":
            calls = [one for one in recorded.get("tool_calls") or [] if key.endswith(_call_suffix(one["id"]))]
            return ("tool_calls", calls) if calls else None
    return None


def _call_suffix(call_id: str) -> str:
    """The part of a call item's id that tells the calls of one reply apart."""
    return "_" + call_id.removeprefix("call_")


def in_namespace(namespace: str, name: str) -> str:
    """The name under which the model knows a namespace's function; no function's own name has a dot."""
    return f"{namespace}.{name}"


def named(name: str, namespaces: Collection[str]) -> dict[str, str]:
    """The other way: a called function's name, and its namespace where it has one."""
    namespace, _, inner = name.partition(".")
    return {"name": inner, "namespace": namespace} if namespace in namespaces and inner else {"name": name}


def _reasoning(item: dict[str, Any]) -> str:
    """Its text where it is there; what is encrypted or summarised is the same history without it."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where} is neither text nor a list of parts", param="input")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise unsupported(where, f"{kind!r} parts are not supported, only text"[:300])
    text: str = part["text"]
    return text


# -- replies -----------------------------------------------------------------------------------------


def item_of(
    part: Part, key: str, call_id: str, status: str, namespaces: Collection[str] = ()
) -> dict[str, Any]:
    """An output item; one that is in progress has nothing in it yet."""
    begun = status == "in_progress"
    if isinstance(part, ToolCall):
        arguments = "" if begun else part.arguments
        told = {"call_id": call_id, **named(part.name, namespaces), "arguments": arguments}
        return {"id": f"fc_{key}{_call_suffix(call_id)}", "type": "function_call", "status": status, **told}
    content = [] if begun else [content_of(part)]
    if isinstance(part, Reasoning):
        return {"id": f"rs_{key}", "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": f"msg_{key}", "type": "message", "status": status, "role": "assistant", "content": content}


def content_of(part: str | Reasoning) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part, "annotations": [], "logprobs": []}
