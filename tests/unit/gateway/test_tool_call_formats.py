"""Tool-call formats: whole, malformed and streamed replies, and detection of a template's format."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.families import FAMILIES, family_renderer
from tidegate.config import GatewaySettings
from tidegate.errors import ConfigError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reply import Part, ReplyReader, SampledCall, ToolUse
from tidegate.gateway.parsing.tool_calls.base import forced_start, single_call_stop
from tidegate.gateway.parsing.tool_calls.registry import FORMATS, NONE, choose
from tidegate.gateway.parsing.tool_calls.schema_types import types_of_property
from tidegate.gateway.parsing.tool_calls.tagged_formats import parse_value

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "n": {"type": "integer"},
                    "deep": {"type": "object"},
                },
            },
        },
    }
    for name in ("find", "get.it-2")
]
TRICKY = 'a "b" {c} <d> é\n1'


def _xml(name: str, arguments: dict[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"

    inner = "".join(parameter(*pair) for pair in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    def pair(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>"

    return f"<tool_call>{name}{''.join(itertools.starmap(pair, arguments.items()))}\n</tool_call>"


def _json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _joined(calls: list[Any], write: Any, between: str, before: str = "", after: str = "") -> str:
    return before + between.join(itertools.starmap(write, calls)) + after


def write(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of that family writes them."""
    match form:
        case "hermes":
            return _joined(calls, lambda *call: f"<tool_call>\n{_json(*call)}\n</tool_call>", "\n")
        case "qwen3_coder":
            return _joined(calls, _xml, "\n")
        case "glm45":
            return _joined(calls, _glm, "\n")
        case "deepseek_v3":
            one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
            written = [one.format(name, json.dumps(arguments)) for name, arguments in calls]
            return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"
        case "deepseek_v3.1":
            one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            written = [one.format(name, json.dumps(arguments)) for name, arguments in calls]
            return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"
        case "kimi_k2":
            one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
            written = [one.format(call[0], at, json.dumps(call[1])) for at, call in enumerate(calls)]
            return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"
        case "llama3_json":
            return _joined(calls, lambda *call: _json(*call, "parameters"), "; ")
        case "llama3_json.tag":
            return "<|python_tag|>" + write("llama3_json", calls)
        case "mistral":
            return _joined(calls, _json, ", ", "[TOOL_CALLS][", "]")
        case "mistral.v11":
            return _joined(calls, lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}", "")
        case "granite":
            return _joined(calls, _json, ", ", "<|tool_call|>[", "]")
    raise AssertionError(form)


WRITTEN = [*FORMATS, "deepseek_v3.1", "mistral.v11", "llama3_json.tag"]
ONLY_CALLS = {"llama3_json"}  # a reply that begins with a call has nothing else in it


def of(form: str) -> str:
    return form if form in FORMATS else form.rpartition(".")[0]


def read(form: str, *pieces: str) -> tuple[str, list[SampledCall], str | None]:
    parser = FORMATS[of(form)].parser(TOOLS)
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if isinstance(part, SampledCall)], parser.status


def plain(calls: list[SampledCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


CALLS = [("find", {"text": TRICKY, "n": 3}), ("get.it-2", {}), ("find", {"deep": {"a": [1, None, True]}})]


def test_arguments_may_be_json_text_and_text_between_calls_is_content() -> None:
    text = json.dumps({"name": "find", "arguments": '{"n": 1}'})
    content, calls, _ = read(
        "hermes", f"{write('hermes', CALLS[1:2])} and <tool_call>{text}</tool_call> done"
    )
    assert content.split() == ["and", "done"]
    assert [call.arguments for call in calls] == ["{}", '{"n":1}']


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("count", [1, 3])
def test_calls_are_read_back(form: str, count: int) -> None:
    content, calls, status = read(form, write(form, CALLS[:count]))
    assert (content.strip(), plain(calls), status) == ("", CALLS[:count], "ok")


@pytest.mark.parametrize("form", [one for one in WRITTEN if one not in ONLY_CALLS])
def test_text_before_calls_is_content(form: str) -> None:
    content, calls, status = read(form, "Let me see.\n" + write(form, CALLS))
    assert (content.strip(), plain(calls), status) == ("Let me see.", CALLS, "ok")


@pytest.mark.parametrize("form", [one for one in WRITTEN if one not in ONLY_CALLS])
def test_text_is_given_as_it_comes_and_each_call_when_it_is_whole(form: str) -> None:
    parser = FORMATS[of(form)].parser(TOOLS)
    assert parser.feed("Let me see.") == ["Let me see."]
    text = write(form, CALLS)
    given: list[Part] = []
    after = 0  # characters after which the first call is there
    for at, sign in enumerate(text):
        given += parser.feed(sign)
        after = after or (at if given else 0)
    if FORMATS[of(form)].call_end is not None:
        assert 0 < after < len(text) * 0.6
    given += parser.finish()
    assert plain([part for part in given if isinstance(part, SampledCall)]) == CALLS
    assert "".join(part for part in given if isinstance(part, str)).strip() == ""


MALFORMED = {
    "hermes": [
        "<tool_call>{oops}</tool_call>", '<tool_call>{"name": "find", "arguments": {}}',
        *(f"a <tool_call>{inner}</tool_call> b" for inner in (
            "", "[]", '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}', '{"arguments": {}}',
            '{"name": "f", "arguments": {"x": 1}', '{"name": "f", "arguments": [1]}',
            '{"name": "f", "arguments": "not json"}',
        )),
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=find>\nstray\n</function>\n</tool_call>",
        "<tool_call>\n<function=find>\n",
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>',
    ],
    "glm45": [
        "<tool_call>find\n<arg_key>n</arg_key>\n</tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>find me\n</tool_call>",
        "<tool_call>find",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{oops\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>find<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
    ],
    "llama3_json": [
        '{"name": "find", "parameters": {"n": 1}',
        '{"name": "find", "parameters": [1]}',
        '<|python_tag|>find.call(n=1)',
    ],
    "mistral": ["[TOOL_CALLS][{]", "[TOOL_CALLS]find[ARGS]{", "[TOOL_CALLS]", '[TOOL_CALLS]{"name": "find"}'],
    "granite": ["<|tool_call|>[", '<|tool_call|>[{"name": "find", "arguments": 3}]'],
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts]
)
def test_a_malformed_call_comes_back_as_content(form: str, text: str) -> None:
    content, calls, status = read(form, text)
    assert (calls, status) == ([], "malformed")
    expected = text
    for end in ("<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>"):
        expected = expected.removesuffix(end)
        content = content.removesuffix(end)
    assert content == expected


@pytest.mark.parametrize("form", FORMATS)
def test_plain_text_is_left_as_it_is(form: str) -> None:
    for text in ("", " a \n", "a < b [1] {2}", "<tool", "[TOOL_C", "<｜tool", "an answer: {}"):
        assert read(form, text) == (text, [], None)


def test_an_answer_in_json_is_no_failed_call() -> None:
    for text in ('{"answer": 4}', '{"name": "Ann"}', "{4, 5}"):
        assert read("llama3_json", text) == (text, [], None)


MARKS = {form: FORMATS[form].markers for form in FORMATS}


@pytest.mark.parametrize("form", WRITTEN)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_pieces_do_not_matter_and_nothing_is_lost(form: str, data: st.DataObject) -> None:
    parts = st.one_of(
        st.text('ab{}"[]:<>|/n \n', max_size=5),
        st.sampled_from(MARKS[of(form)]),
        st.just(write(form, CALLS[:1])),
    )
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    content, calls, status = read(form, text)
    assert read(form, *(text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]))) == (
        content,
        calls,
        status,
    )
    assert status in ("ok", "malformed") if calls else status in (None, "malformed")
    kept = "".join(content.split())
    if not calls:
        whole = "".join(text.split())
        for marker in FORMATS[of(form)].markers[:2]:
            whole, kept = whole.replace(marker, ""), kept.replace(marker, "")
        assert kept == whole


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        (" a ", {"type": "string"}, " a "),
        ("12", {"type": "integer"}, 12),
        ("12", None, 12),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("true", {"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "true"),
        ("red", {"enum": ["red", "1"]}, "red"),
        ("1", {"enum": ["red", "1"]}, "1"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("twelve", {"type": "integer"}, "twelve"),
    ],
)
def test_bare_values_have_the_types_of_the_tools_schema(text: str, schema: Any, value: Any) -> None:
    parsed = parse_value(text, types_of_property({"properties": {"x": schema}}, "x"))
    assert (parsed, type(parsed)) == (value, type(value))


# -- which form a model writes

EXPECTED = {
    "qwen25": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "mistral_v3": "mistral",
    "mistral_v7": "mistral", "deepseek_v3": "deepseek_v3", "deepseek_r1": "deepseek_v3", "glm4": "glm45",
    "granite": "granite", "kimi_k2": "kimi_k2", "qwen3_coder": "qwen3_coder",
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    form, why = choose("auto", family_renderer(name, "tiny").render_text)
    assert form.name == EXPECTED.get(name, "hermes")
    assert why.startswith("it parses the calls" if name in EXPECTED else "by default")


@pytest.mark.parametrize(("name", "form"), EXPECTED.items())
def test_a_sampled_call_is_read_through_the_models_own_tokens(name: str, form: str) -> None:
    """The markers are control tokens, which clients do not see; here they must be seen."""
    renderer = family_renderer(name, "tiny")
    reader = ReplyReader(renderer.decode, (), FORMATS[form].parser(TOOLS))
    for one in [*renderer.encode(write(form, CALLS[:1])), renderer.stop_ids[0]]:
        reader.push([one])
    reader.finish()
    assert plain([part for part in reader.parts if isinstance(part, SampledCall)]) == CALLS[:1]
    assert reader.message()["content"] is None


def test_a_form_may_be_set_and_must_be_known() -> None:
    renderer = family_renderer("qwen3", "tiny")
    assert choose("mistral", renderer.render_text).format is FORMATS["mistral"]
    assert choose("none", renderer.render_text).format is NONE
    with pytest.raises(ConfigError, match=r"'hermess' is unknown; use one of auto, hermes, .*, none"):
        choose("hermess", renderer.render_text)


@pytest.mark.parametrize("name", ["auto", "none", *FORMATS])
def test_the_settings_know_every_form(name: str) -> None:
    assert GatewaySettings(tool_parser=name).tool_parser == name


def test_the_settings_refuse_an_unknown_form() -> None:
    with pytest.raises(ValidationError, match=r"'hermess' is not one of auto, hermes, .*, none"):
        GatewaySettings(tool_parser="hermess")


@pytest.mark.parametrize("form", FORMATS)
def test_the_prefix_of_a_forced_reply_continues_to_a_call(form: str) -> None:
    known = FORMATS[form]
    use = ToolUse("required", "find")
    if known.forced is None:
        with pytest.raises(ApiError, match="tool_choice"):
            forced_start(known, use)
        return
    whole = write(form, [("find", {"n": 1})])
    bare = "".join(whole.split())
    for start in (known.forced("find"), known.forced(None)):
        assert bare.startswith("".join(start.split()))
    assert forced_start(known, ToolUse("auto")) == ""


def test_one_call_at_most_is_refused_where_the_form_has_no_end() -> None:
    assert single_call_stop(FORMATS["glm45"], ToolUse("auto", None, False)) == "</tool_call>"
    with pytest.raises(ApiError, match="parallel_tool_calls"):
        single_call_stop(FORMATS["mistral"], ToolUse("auto", None, False))
