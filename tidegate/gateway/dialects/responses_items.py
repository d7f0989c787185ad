"""Converts between messages and the items of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.reply import Part, Reasoning, SampledCall, call_wire
from tidegate.gateway.rendering.messages import meaning, template_form, text_of
from tidegate.types import Message

FindReply = Callable[[str], Message | None]
"""Returns the recorded reply of an item id, if there is one."""


def read_items(items: Any, find_reply: FindReply) -> list[Message]:
    """Converts input items to messages. Raises ApiError that names the item. One reply may consist of several
    items: consecutive items of the assistant become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ApiError("input: a text or a list of items is required", param="input")
    reader = _Items(find_reply)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ApiError(f"input[{index}] is not an object", param="input")
        reader.add(item, f"input[{index}]")
    return reader.messages


def without_repeated(sent: list[Message], history: Sequence[Message]) -> list[Message]:
    """Returns the messages that a request adds to the history of its previous response.

    Some clients send items of that history again, all of them or the last reply alone. `sent` may therefore
    begin with messages of `history`, in its order; they are left out up to the last reply or tool result. The
    messages of a user after it are new, also if they equal earlier ones.
    """
    pending = [call["id"] for call in history[-1].get("tool_calls") or ()] if history else []
    new = list(sent)
    kept: list[Message] = []
    at = 0
    for index, message in enumerate(sent):
        found = None
        # The result of a pending call is new, even if it equals an earlier one.
        if message.get("tool_call_id") not in pending:
            found = next((i for i in range(at, len(history)) if _repeats(message, history[i], index)), None)
        if found is not None:
            at = found + 1
        elif message["role"] in ("system", "developer"):
            kept.append(message)
        else:
            break
        if found is not None and message["role"] in ("assistant", "tool"):
            new = [*kept, *sent[index + 1 :]]
    return new


def _repeats(sent: Message, recorded: Message, index: int) -> bool:
    """Returns whether a message is one of the history, or for a reply some items of it."""
    if sent["role"] != recorded["role"]:
        return False
    one, other = template_form(sent, index), template_form(recorded, index)
    if one["role"] != "assistant":
        return meaning(one) == meaning(other) and one.get("tool_call_id") == other.get("tool_call_id")
    calls = set(map(_meaning_of, one.get("tool_calls", ())))
    without_text = not one["content"].strip() and bool(calls or one.get("reasoning_content"))
    text, recorded_text = (
        meaning({"role": "assistant", "content": form["content"]}) for form in (one, other)
    )
    return calls <= set(map(_meaning_of, other.get("tool_calls", ()))) and (
        without_text or text == recorded_text
    )


def _meaning_of(call: Any) -> bytes:
    return meaning({"role": "assistant", "content": "", "tool_calls": [call]})


class _Items:
    def __init__(self, find_reply: FindReply) -> None:
        self.messages: list[Message] = []
        self._find_reply = find_reply
        self._reply: Message | None = None
        """Assistant message to which further assistant items are added."""
        self._recorded: Message | None = None
        """Recorded reply to which items of that message refer."""
        self._used: set[str] = set()
        """Parts of the recorded reply that the message already has."""

    def add(self, item: dict[str, Any], where: str) -> None:
        match {"type": "message", **item}:
            case {"type": "message", "role": "assistant"}:
                self._assistant()["content"] += _text(item.get("content"), f"{where}.content")
            case {"type": "message"}:
                self._add(item.get("role"), _text(item.get("content"), f"{where}.content"))
            case {"type": "reasoning"}:
                reasoning = _reasoning(item)
                if reasoning:
                    reply = self._assistant()
                    reply["reasoning_content"] = reply.get("reasoning_content", "") + reasoning
            case {"type": "function_call", "name": str(name)}:
                if isinstance(item.get("namespace"), str):
                    name = in_namespace(item["namespace"], name)
                call = call_wire(str(item.get("call_id")), name, item.get("arguments") or "")
                self._assistant().setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output"}:
                output = _text(item.get("output"), f"{where}.output")
                self._add("tool", output, tool_call_id=str(item.get("call_id")))
            case {"type": "item_reference"}:
                self._reference(item.get("id"), where)
            case {"type": kind}:
                raise unsupported(where, f"{kind!r} items are not supported"[:300])

    def _assistant(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": ""}
            self.messages.append(self._reply)
        return self._reply

    def _add(self, role: Any, content: str, **more: str) -> None:
        self._reply = self._recorded = None
        self.messages.append({"role": role, "content": content, **more})

    def _reference(self, key: Any, where: str) -> None:
        """Adds one item of a recorded reply; the client may send the others in full."""
        recorded = self._find_reply(key) if isinstance(key, str) else None
        piece = None if recorded is None else _piece(recorded, key)
        if recorded is None or piece is None:
            raise ApiError(f"{where}: there is no item {key!r} in this session"[:300], param="input")
        if self._recorded is not recorded:
            if self._recorded is not None:
                self._reply = None
            self._recorded, self._used = recorded, set()
        name, value = piece
        part = key if name == "tool_calls" else name
        if part not in self._used:
            self._used.add(part)
            reply = self._assistant()
            reply[name] = reply[name] + value if name in reply else value


def _piece(recorded: Message, key: str) -> tuple[str, Any] | None:
    """Returns the field of a recorded reply that an item id denotes, and the item's value of it."""
    match key.partition("_")[0]:
        case "msg":
            return "content", recorded.get("content") or ""
        case "rs":
            return "reasoning_content", recorded.get("reasoning_content") or ""
        case "fc":
            calls = recorded.get("tool_calls") or []
            calls = [call for call in calls if key.endswith(_call_suffix(call["id"]))]
            return ("tool_calls", calls) if calls else None
    return None


def _call_suffix(call_id: str) -> str:
    """Returns the suffix of a call item's id that distinguishes the calls of one reply."""
    return "_" + call_id.removeprefix("call_")


def in_namespace(namespace: str, name: str) -> str:
    """Returns the name of a namespace's function in the prompt; function names contain no dot."""
    return f"{namespace}.{name}"


def split_namespace(name: str, namespaces: Collection[str]) -> dict[str, str]:
    """Splits the name of a called function into its name and its namespace, if it has one."""
    namespace, _, inner = name.partition(".")
    return {"name": inner, "namespace": namespace} if namespace in namespaces and inner else {"name": name}


def _reasoning(item: dict[str, Any]) -> str:
    """Returns an item's reasoning text. Other forms are ignored, as histories match without reasoning."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _text(content: Any, where: str) -> str:
    return text_of(content, where, ("input_text", "output_text", "text"))


# -- replies -----------------------------------------------------------------------------------------


def item_of(
    part: Part, key: str, call_id: str, status: str, namespaces: Collection[str] = ()
) -> dict[str, Any]:
    """Returns an output item, which is empty while in progress."""
    in_progress = status == "in_progress"
    if isinstance(part, SampledCall):
        arguments = "" if in_progress else part.arguments
        fields = {"call_id": call_id, **split_namespace(part.name, namespaces), "arguments": arguments}
        return {"id": f"fc_{key}{_call_suffix(call_id)}", "type": "function_call", "status": status, **fields}
    content = [] if in_progress else [content_of(part)]
    if isinstance(part, Reasoning):
        return {"id": f"rs_{key}", "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": f"msg_{key}", "type": "message", "status": status, "role": "assistant", "content": content}


def content_of(part: str | Reasoning) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part, "annotations": [], "logprobs": []}
