"""Comparison with the library `renderers`: the same follow-up prompts and the same calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import renderers

from tests.families import FAMILIES, family_renderer, family_tokenizer
from tests.unit.gateway.test_families import TOOLS, after, reply, text
from tests.unit.gateway.test_tool_call_formats import write
from tidegate.gateway.parsing.reply import SampledCall
from tidegate.gateway.parsing.tool_calls.registry import FORMATS

KNOWN = {
    "qwen3": (renderers.Qwen3Renderer, renderers.Qwen3RendererConfig),
    "qwen25": (renderers.Qwen3Renderer, renderers.Qwen3RendererConfig),
    "llama3": (renderers.Llama3Renderer, renderers.Llama3RendererConfig),
    "deepseek_v3": (renderers.DeepSeekV3Renderer, renderers.DeepSeekV3RendererConfig),
    "kimi_k2": (renderers.KimiK2Renderer, renderers.KimiK2RendererConfig),
    "glm4": (renderers.GLM45Renderer, renderers.GLM45RendererConfig),
}
WRITES = {
    "qwen3": "hermes",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "glm4": "glm45",
    "llama3": "llama3_json",
}


def theirs(name: str) -> Any:
    renderer, config = KNOWN[name]
    return renderer(family_tokenizer(name, "tiny"), config(thinking_retention="all"))


@pytest.mark.parametrize("name", ["qwen3", "qwen25", "llama3"])
def test_what_follows_a_reply_is_what_they_write(name: str) -> None:
    rng, family, own, other = random.Random(3), FAMILIES[name], family_renderer(name, "tiny"), theirs(name)
    compared = 0
    for _ in range(60):
        before = [{"role": "user", "content": text(rng)}]
        said = reply(rng, family.calls)
        new = after(rng, family, said)
        prompt = own.encode_prompt(before, TOOLS, {}).tolist()
        output = [*own.encode(said["content"]), own.stop_ids[0]]
        bridged = other.bridge_to_next_turn(prompt, output, new, tools=TOOLS)
        if bridged is None:
            continue
        delta = own.encode_suffix(lambda b=before: b, said, new, TOOLS, {}, output[-1]).tolist()
        assert bridged.token_ids == [*prompt, *output, *delta]
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(("name", "form"), WRITES.items())
def test_calls_are_what_they_read(name: str, form: str) -> None:
    rng, own, other = random.Random(5), family_renderer(name, "tiny"), theirs(name)
    for _ in range(40):
        count = 1 if name == "llama3" else rng.randint(1, 3)
        calls = [("calculator", {"expression": text(rng), "n": rng.randint(-3, 9)}) for _ in range(count)]
        written = write(form, calls)
        parsed = other.parse_response(own.encode(written), tools=TOOLS).tool_calls
        parser = FORMATS[form].parser(TOOLS)
        parts = [*parser.feed(written), *parser.finish()]
        mine = [(one.name, json.loads(one.arguments)) for one in parts if isinstance(one, SampledCall)]
        assert mine == [(one.name, one.arguments) for one in parsed] == calls
