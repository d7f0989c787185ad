"""Compiles the model's chat template; renders complete histories and the suffix after a reply."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from datetime import datetime
from functools import cache, cached_property
from hashlib import blake2b
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tidegate.gateway.rendering.tokenizer import unescape_json
from tidegate.types import Message

PLACEHOLDER = "zQstandQz"
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


class Unrenderable(Exception):
    """The template has no suffix after this reply; the complete history must be rendered."""


class _Generation(Extension):
    """Tag `generation`, which encloses the assistant's text and does not change it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _PublicNamespace(Namespace):
    """Global `namespace`, which stores no private attributes: templates are untrusted code."""

    def __init__(*args: Any, **attributes: Any) -> None:  # without `self`, which may be an attribute
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **attributes).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace of a chat template has no attribute {name!r}")
        super().__setitem__(name, value)


class _Dict:
    """Global `dict`, without the attributes of a type."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson`; that of jinja2 escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@cache
def _environment() -> jinja2.Environment:
    """Returns the environment for which chat templates are written, that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _PublicNamespace,
    }
    return environment


class ChatTemplate:
    """A tokenizer's chat template, compiled once. Templates may raise any exception."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = dict(tokenizer.special_tokens_map)
        self._compiled: dict[bool, jinja2.Template] = {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        source = self._tokenizer.get_chat_template
        parsed = map(_environment().parse, {source(None, None), source(None, [{}])})
        return frozenset().union(*map(find_undeclared_variables, parsed))

    def render(
        self, messages: list[Message], tools: Any, options: dict[str, Any], prompt: bool = True
    ) -> str:
        """Renders a history; with `prompt` the text ends with the generation prompt."""
        template = self._compiled.get(bool(tools))
        if template is None:
            source = self._tokenizer.get_chat_template(None, tools or None)
            template = self._compiled[bool(tools)] = _environment().from_string(source)
        text = template.render(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=prompt,
            **{**self._special, **options},
        )
        return unescape_json(text)

    @cached_property
    def needs_short_ids(self) -> bool:
        """Whether it accepts only call ids of nine letters and digits."""
        return not self._accepts("call_0123456789abcdef") and self._accepts("abcdefghi")

    def _accepts(self, call_id: str) -> bool:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        history: list[Message] = [
            _user("."),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": call_id, "name": "f"},
        ]
        with contextlib.suppress(Exception):  # templates raise arbitrary exceptions
            self.render(history, None, {})
            return True
        return False


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Returns messages whose call ids have nine letters and digits; the same id always gets the same one."""
    forms = []
    for message in messages:
        form = dict(message)
        if "tool_calls" in form:
            form["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in form["tool_calls"]]
        if "tool_call_id" in form:
            form["tool_call_id"] = _short_id(form["tool_call_id"])
        forms.append(form)
    return forms


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


class Suffixes:
    """Renders the suffix after a reply, from the end of the reply's turn on.

    The reply is rendered as PLACEHOLDER: its sampled ids are recorded and never encoded again. `added` are
    the tokenizer's added tokens, `stops` the texts of the stop tokens.
    """

    def __init__(self, template: ChatTemplate, added: Collection[str], stops: Collection[str]) -> None:
        self._template = template
        self.past_turn_end = self._find_past_turn_end(added)
        """The token that ends a past reply; empty if only the next role's marker ends it."""
        last = self._last_reply_tail()
        self.turn_end = _first_token(added, last) if last else self.past_turn_end
        """The token that ends the last reply and stops the model; in some formats not `past_turn_end`."""
        self._turn_ends = tuple({*stops, self.past_turn_end} - {""})

    def after(
        self, before: list[Message], reply: Message, new: list[Message], tools: Any, options: dict[str, Any]
    ) -> str:
        """Returns the text after `reply`. Raises Unrenderable if the template has none."""
        calls = reply.get("tool_calls")
        if calls:
            # A template that renders no calls may still render the suffix as after any text.
            with contextlib.suppress(Unrenderable):
                return self._cut_after_calls(self._tail(before, _with_calls(calls), new, tools, options))
        tail = self._tail(before, _assistant(PLACEHOLDER), new, tools, options)
        stripped = tail.lstrip()
        return stripped if stripped.startswith(self._turn_ends) else tail

    def _cut_after_calls(self, tail: str) -> str:
        """`tail` without the end of the call that contained the placeholder."""
        ends = [at for at in map(tail.find, self._turn_ends) if at >= 0]
        if not ends:
            raise Unrenderable("the template writes no end-of-turn token after calls")
        return tail[min(ends) :]

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
        except Exception as error:  # noqa: BLE001 - templates raise arbitrary exceptions
            raise Unrenderable(str(error)) from None
        if text.count(PLACEHOLDER) != 1:
            raise Unrenderable("the template does not render a reply's content unchanged")
        return text.rpartition(PLACEHOLDER)[2]

    def _find_past_turn_end(self, added: Collection[str]) -> str:
        """The token that follows a reply whatever message comes next; "" if it depends on that message."""
        firsts: set[str] = set()
        for new in ([_user(".")], [], [{"role": "tool", "content": ".", "tool_call_id": "c", "name": "f"}]):
            with contextlib.suppress(Unrenderable):
                firsts.add(
                    _first_token(added, self._tail([_user(".")], _assistant(PLACEHOLDER), new, None, {}))
                )
        return firsts.pop() if len(firsts) == 1 else ""

    def _last_reply_tail(self) -> str:
        with contextlib.suppress(Unrenderable):
            return self._tail([_user(".")], _assistant(PLACEHOLDER), [], None, {}, prompt=False)
        return ""


def _first_token(added: Collection[str], text: str) -> str:
    """The longest added token that `text` begins with."""
    text = text.lstrip()
    return max((token for token in added if text.startswith(token)), key=len, default="")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _with_calls(calls: list[dict[str, Any]]) -> Message:
    """A reply whose last call has the placeholder as its argument."""
    marked = [
        {**call, "function": {"name": call["function"]["name"], "arguments": {"x": text}}}
        for call, text in zip(calls, ["."] * (len(calls) - 1) + [PLACEHOLDER], strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": marked}
