"""Chats become the ids that a model would sample, in every family's format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.bases.recipe import encode
from examples.tiny_base import make as tiny_base
from tests.families import FAMILIES, family_renderer
from tests.tiny_tokenizer import make_tokenizer
from tidegate.agents.solver import TOOLS
from tidegate.envs.arithmetic import draw_problem, substitute_numbers
from tidegate.errors import ConfigError
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.sft.chats import encode_chat, read_chats

MODEL = Path(tiny_base.__file__).parent / "model"
REFUSED = {"deepseek_r1": "after its generation prompt", "glm4": "no token that ends the reply"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "1 + 2"}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 2? Say <|im_end|>"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "It is 4."},
]
CALLED: list[dict[str, Any]] = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "calculator"},
    {"role": "assistant", "content": "3."},
]


@pytest.fixture(scope="module")
def qwen() -> Renderer:
    return Renderer(make_tokenizer("qwen2"))


def trained(renderer: Renderer, ids: Any, mask: Any) -> str:
    return renderer.codec.decode_all([int(token) for token, own in zip(ids, mask, strict=True) if own])


@pytest.mark.parametrize("name", FAMILIES)
def test_each_reply_and_its_end_are_trained_on_in_the_format_of_the_family(name: str) -> None:
    renderer, family = family_renderer(name, "tiny"), FAMILIES[name]
    for messages, tools in ((CHAT, None), (CALLED, TOOLS)) if family.calls else ((CHAT, None),):
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                encode_chat(renderer, messages, tools, {1, 3})
            continue
        [(ids, mask)] = encode_chat(renderer, messages, tools, {1, 3})
        said = trained(renderer, ids, mask)
        assert sum(said.count(stop) for stop in family.stops) == 2
        assert said.endswith(family.stops)
        assert messages[3]["content"] in said
        assert "user" not in said
        assert ("calculator" in said) == bool(tools)
        [(again, last)] = encode_chat(renderer, messages, tools, {3})
        assert again.tolist() == ids.tolist()
        assert trained(renderer, again, last) != said
        assert not last[~mask].any()


def test_the_demonstrations_of_the_tiny_base_are_encoded_as_its_recipe_does() -> None:
    renderer, rng = Renderer.load(MODEL), random.Random(0)
    for _ in range(20):
        problem = draw_problem(rng)
        right = substitute_numbers(problem.template.expression, problem.numbers)
        messages = tiny_base.demonstration(problem.question, right)
        ids, mask = encode(renderer.codec.tokenizer, messages, TOOLS)
        [(own_ids, own_mask)] = encode_chat(renderer, messages, TOOLS, {1, 3})
        assert own_ids.tolist() == ids
        assert own_mask.astype(int).tolist() == mask


def test_special_tokens_in_what_others_say_are_plain_text(qwen: Renderer) -> None:
    [(ids, _)] = encode_chat(qwen, CHAT, None, {1, 3})
    end = qwen.codec.added["<|im_end|>"]
    assert int(np.count_nonzero(ids == end)) == 4  # of two questions and two replies
    assert "<|im_end|>" in qwen.codec.decode_all(ids.tolist()[:30])


def test_a_template_that_rewrites_earlier_text_gives_several_sequences() -> None:
    renderer = Renderer(make_tokenizer("shouting"))
    chat = [{**message, "content": message["content"].replace("-", " ")} for message in CHAT]
    sequences = encode_chat(renderer, chat, None, {1, 3})
    assert len(sequences) == 2
    assert [trained(renderer, *pair) for pair in sequences] == ["IT IS 3.<|im_end|>", "IT IS 4.<|im_end|>"]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_file_of_chats_is_read_with_its_tasks_and_weights(tmp_path: Path, qwen: Renderer) -> None:
    light = [dict(message) for message in CHAT]
    light[1]["weight"] = 0
    file = write(
        tmp_path / "chats.jsonl", {"messages": CHAT}, "", {"messages": light, "task_id": "t"},
        {"messages": CHAT[:1]},
    )  # fmt: skip
    first, second, third = read_chats(file, qwen, "all")
    assert [each.task for each in (first, second)] == [f"{file}, line 1", "t"]
    assert trained(qwen, first.rows[0].ids, first.rows[0].mask) == "It is 3.<|im_end|>It is 4.<|im_end|>"
    assert trained(qwen, second.rows[0].ids, second.rows[0].mask) == "It is 4.<|im_end|>"
    assert third.rows == []
    last, *_ = read_chats(file, qwen, "last")
    assert trained(qwen, last.rows[0].ids, last.rows[0].mask) == "It is 4.<|im_end|>"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ('{"messages": [], "messages": []}', "not JSON: the key 'messages' occurs twice"),
        ([], 'an object with a list "messages"'),
        ({"messages": []}, 'an object with a list "messages"'),
        ({"messages": CHAT, "tools": {}}, "tools are a list, not dict"),
        ({"messages": [*CHAT, {"role": "judge"}]}, r"messages\[4\].role"),
        ({"messages": ["so"]}, r"messages\[0\] is not an object"),
    ],
)
def test_a_line_that_is_no_chat_is_refused_by_its_number(
    tmp_path: Path, qwen: Renderer, line: Any, why: str
) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT}, line)
    with pytest.raises(ConfigError, match=rf"chats\.jsonl, line 2: .*{why}"):
        list(read_chats(file, qwen, "all"))
    with pytest.raises(ConfigError, match=r"absent\.jsonl cannot be read: No such file"):
        list(read_chats(tmp_path / "absent.jsonl", qwen, "all"))
