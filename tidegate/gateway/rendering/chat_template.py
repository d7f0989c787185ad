"""The model's own chat template: whole histories, and what it writes after a reply."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import cached_property
from typing import Any

import jinja2
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from tidegate.gateway.rendering.tokenizer import unescaped
from tidegate.types import Message

STAND_IN = "zQstandQz"


class Unrenderable(Exception):
    """The template gives no text that would follow a reply; the history must be rendered whole."""


class ChatTemplate:
    """One tokenizer's template, compiled once. What it raises is its own choice."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = dict(tokenizer.special_tokens_map)
        self._compiled: dict[bool, jinja2.Template] = {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        source = self._tokenizer.get_chat_template
        sources = {source(None, None), source(None, [{}])}
        parsed = [_compile_jinja_template(one).environment.parse(one) for one in sources]
        return frozenset().union(*map(find_undeclared_variables, parsed))

    def render(
        self, messages: list[Message], tools: Any, options: dict[str, Any], prompt: bool = True
    ) -> str:
        """The text of a history; with `prompt` it ends where the model is to speak."""
        template = self._compiled.get(bool(tools))
        if template is None:
            source = self._tokenizer.get_chat_template(None, tools or None)
            template = self._compiled[bool(tools)] = _compile_jinja_template(source)
        text = template.render(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=prompt,
            **{**self._special, **options},
        )
        return unescaped(text)


class Suffixes:
    """What a template writes after a reply, from the end of the reply's turn on.

    The reply is rendered as a stand-in: what the model really sampled is recorded as ids, and is never
    written again. `added` are the tokenizer's added tokens, `stops` the texts of those that stop it.
    """

    def __init__(self, template: ChatTemplate, added: Collection[str], stops: Collection[str]) -> None:
        self._template = template
        self.closing = self._find_closing(added)
        """The token that the template ends a past reply with; empty where the next role's marker does."""
        last = self._last_tail()
        self.ending = _first(added, last) if last else self.closing
        """The token that ends a last reply, and so stops the model: for some formats another one."""
        self._enders = tuple({*stops, self.closing} - {""})

    def after(
        self, before: list[Message], reply: Message, new: list[Message], tools: Any, options: dict[str, Any]
    ) -> str:
        """The text after `reply`. Raises Unrenderable where the template has none of its own."""
        calls = reply.get("tool_calls")
        if calls:
            # A template that writes no calls may still go on after the reply as after any text.
            with contextlib.suppress(Unrenderable):
                return self._cut_after_calls(self._tail(before, _called(calls), new, tools, options))
        tail = self._tail(before, _said(STAND_IN), new, tools, options)
        ended = tail.lstrip()
        return ended if ended.startswith(self._enders) else tail

    def _cut_after_calls(self, tail: str) -> str:
        """`tail` without the rest of the call in which the stand-in stood."""
        found = [at for at in map(tail.find, self._enders) if at >= 0]
        if not found:
            raise Unrenderable("the template does not show where calls end")
        return tail[min(found) :]

    def _tail(
        self,
        before: list[Message],
        reply: Message,
        new: list[Message],
        tools: Any,
        options: dict[str, Any],
        prompt: bool = True,
    ) -> str:
        try:
            text = self._template.render([*before, reply, *new], tools, options, prompt)
        except Exception as error:  # noqa: BLE001 - the template is the model's code; it refuses as it likes
            raise Unrenderable(str(error)) from None
        if text.count(STAND_IN) != 1:
            raise Unrenderable("the template does not write a reply's content as it is")
        return text.rpartition(STAND_IN)[2]

    def _find_closing(self, added: Collection[str]) -> str:
        """A token that follows a reply whatever comes next ends it; one that announces what comes doesn't."""
        firsts: set[str] = set()
        for new in ([_asked(".")], [], [{"role": "tool", "content": ".", "tool_call_id": "c", "name": "f"}]):
            with contextlib.suppress(Unrenderable):
                firsts.add(_first(added, self._tail([_asked(".")], _said(STAND_IN), new, None, {})))
        return firsts.pop() if len(firsts) == 1 else ""

    def _last_tail(self) -> str:
        with contextlib.suppress(Unrenderable):
            return self._tail([_asked(".")], _said(STAND_IN), [], None, {}, prompt=False)
        return ""


def _first(added: Collection[str], text: str) -> str:
    """The token that `text` begins with."""
    text = text.lstrip()
    return max((token for token in added if text.startswith(token)), key=len, default="")


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _called(calls: list[dict[str, Any]]) -> Message:
    """A reply with the stand-in as the last thing that is said in its last call."""
    marked = [
        {**call, "function": {"name": call["function"]["name"], "arguments": {"x": text}}}
        for call, text in zip(calls, ["."] * (len(calls) - 1) + [STAND_IN], strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": marked}
