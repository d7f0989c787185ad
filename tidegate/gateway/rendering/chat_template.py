"""Compiles the model's chat template; renders complete histories."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import datetime
from functools import cache, cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tidegate.gateway.parsing.reply import call_wire
from tidegate.gateway.rendering.tokenizer import unescape_json
from tidegate.types import Message

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


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
        "dict": _Dict(),
        "namespace": _PublicNamespace,
    }
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Returns a compiled template, which has no state; with tools and without, most models have the same."""
    return _environment().from_string(source)


class ChatTemplate:
    """A tokenizer's chat template, compiled once. Templates may raise any exception."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = dict(tokenizer.special_tokens_map)
        self._compiled: dict[bool, jinja2.Template] = {}
        self._date_formats: dict[str, None] = {}
        """Formats in which renderings so far wrote the time; ordered."""

    def dates(self) -> list[str]:
        """Returns the present time as the template writes it: a text that it rendered is valid as long as
        this does not change. Empty for templates that write no time."""
        now = datetime.now()
        return [now.strftime(form) for form in tuple(self._date_formats)]

    def _strftime_now(self, form: str) -> str:
        self._date_formats[form] = None
        return datetime.now().strftime(form)

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
            template = self._compiled[bool(tools)] = _compiled(source)
        text = template.render(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=prompt,
            **{**self._special, "strftime_now": self._strftime_now, **options},
        )
        return unescape_json(text)

    @cached_property
    def needs_short_ids(self) -> bool:
        """Whether it accepts only call ids of nine letters and digits."""
        return not self._accepts("call_0123456789abcdef") and self._accepts("abcdefghi")

    def _accepts(self, call_id: str) -> bool:
        call = call_wire(call_id, "f", {"x": 1})
        history: list[Message] = [
            {"role": "user", "content": "."},
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
