"""Chat templates render as with the tokenizer's own `apply_chat_template`."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest

from tests.families import FAMILIES, family_tokenizer
from tests.unit.gateway.test_families import TOOLS, reply, text
from tidegate.gateway.rendering.chat_template import ChatTemplate
from tidegate.types import Message

SPECIAL_FEATURES = """
{%- set found = namespace(user=0) -%}
{%- for message in messages -%}
{%- if message.role == 'system' %}{% continue %}{% endif -%}
{%- set found.user = found.user + 1 -%}
{%- generation %}{% set inner = '<' ~ message.content ~ '>' %}{{ inner }}{% endgeneration -%}
{%- if loop.index > 2 %}{% break %}{% endif -%}
{%- endfor -%}
{{ found.user }} {{ inner }} {{ strftime_now('%Y') }} {{ bos_token }}
{{ dict(a='<é>') | tojson }} {{ dict.fromkeys(['b', 'a'], 1) | tojson(indent=2, sort_keys=true) }}
{{ tools | tojson(ensure_ascii=true, separators=(',', ':')) }}
"""


def histories(rng: random.Random, calls: int) -> list[list[Message]]:
    """Prefixes of a conversation, with and without a system message, and with reasoning."""
    history: list[Message] = []
    for _ in range(3):
        history.append({"role": "user", "content": text(rng)})
        said = reply(rng, calls)
        if rng.random() < 0.3:
            said["reasoning_content"] = text(rng)
        history.append(said)
        for call in said.get("tool_calls", ()):
            result = {"role": "tool", "content": text(rng), "tool_call_id": call["id"]}
            history.append({**result, "name": call["function"]["name"]})
    system: Message = {"role": "system", "content": text(rng)}
    return [[*first, *history[:end]] for first in ([], [system]) for end in range(1, len(history) + 1)]


def rendered(render: Any) -> str:
    """The text, or the error: templates refuse some histories."""
    try:
        return str(render())
    except Exception as error:  # noqa: BLE001 - templates raise arbitrary exceptions
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", [*FAMILIES, "special features"])
def test_every_template_renders_as_with_the_tokenizer(name: str) -> None:
    tokenizer = copy.copy(family_tokenizer(name if name in FAMILIES else "qwen3", "tiny"))
    if name not in FAMILIES:
        tokenizer.chat_template = SPECIAL_FEATURES
    template, rng = ChatTemplate(tokenizer), random.Random(name)
    texts = []
    calls = FAMILIES[name].calls if name in FAMILIES else 2
    for history in [one for _ in range(6) for one in histories(rng, calls)]:
        tools, prompt = rng.choice([None, TOOLS]), rng.random() < 0.5
        own = partial(tokenizer.apply_chat_template, history, tools=tools, tokenize=False)
        texts.append(rendered(partial(template.render, history, tools, {}, prompt)))
        assert texts[-1] == rendered(partial(own, add_generation_prompt=prompt))
    assert len(set(texts)) > 20, "most histories are not refused"


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_out(source: str) -> None:
    tokenizer = copy.copy(family_tokenizer("qwen3", "tiny"))
    tokenizer.chat_template = source
    text = rendered(partial(ChatTemplate(tokenizer).render, [{"role": "user", "content": "."}], None, {}))
    assert text == "" or "Error: " in text
