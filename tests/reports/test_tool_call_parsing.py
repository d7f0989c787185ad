"""Calls are read as the model wrote them: markers in arguments, names of fields, types of the schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.unit.gateway.test_tool_call_formats import CALLS, WRITTEN, of, plain, read, write
from tidegate.envs.tools import ToolError, make_tool
from tidegate.gateway.parsing.reply import SampledCall
from tidegate.gateway.parsing.tool_calls.registry import FORMATS

JSON_FORMATS = [form for form in WRITTEN if of(form) not in ("qwen3_coder", "glm45")]
TAGGED = ["qwen3_coder", "glm45"]


def both(form: str, text: str) -> tuple[str, list[Any], str | None]:
    """Reads a reply as a whole and character by character."""
    whole, streamed = read(form, text), read(form, *text)
    assert streamed == whole
    return whole[0].strip(), plain(whole[1]), whole[2]


@pytest.mark.parametrize("form", WRITTEN)
def test_a_marker_within_an_argument_is_text(form: str) -> None:
    """vllm-project/vllm#45167, minpeter/ai-sdk-tool-call-middleware#297, jundot/omlx#2544"""
    for marker in FORMATS[of(form)].markers:
        if marker in ("<arg_value>", "</arg_value>"):
            continue
        for text in (marker, f"a {marker} b", f'q " {marker}', f"{marker}\\", f"\\{marker}{marker}\n"):
            calls = [("find", {"text": text, "n": 3}), ("find", {"text": "b"})]
            assert both(form, write(form, calls)) == ("", calls, "ok")


@pytest.mark.parametrize(
    "closer", ["</tool_call>", "</parameter>", "</function>", "</parameter> </tool_call> "]
)
def test_closers_within_a_tagged_argument(closer: str) -> None:
    """raullenchai/Rapid-MLX#1515 and #1730"""
    calls = [("find", {"text": f"A block ends with {closer} on its own.", "n": 3})]
    assert both("qwen3_coder", write("qwen3_coder", calls)) == ("", calls, "ok")


def test_a_quoted_call_within_an_argument() -> None:
    """raullenchai/Rapid-MLX#1515: an agent writes a document about tool calls"""
    for form in ("hermes", "qwen3_coder", "glm45", "kimi_k2", "deepseek_v3"):
        calls = [("find", {"text": write(form, CALLS[2:])}), ("find", {"n": 1})]
        assert both(form, write(form, calls)) == ("", calls, "ok")


@pytest.mark.parametrize("value", ["use </arg_value> in docs", ".<", "a <", "</arg_key>"])
def test_closers_within_a_value_of_glm(value: str) -> None:
    """smg-project/smg#1942, sgl-project/sglang#24147"""
    calls = [("find", {"text": value, "n": 3})]
    assert both("glm45", write("glm45", calls)) == ("", calls, "ok")


def test_a_malformed_call_does_not_take_the_next_one() -> None:
    """jundot/omlx#2544: a string that is never closed has no marker within it"""
    good = '<tool_call>\n{"name": "find", "arguments": {"n": 1}}\n</tool_call>'
    for bad in (
        '<tool_call>{"name": "find, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a"</tool_call>',
    ):
        for text in (bad + good, bad + "\n" + good + good):
            content, calls, status = both("hermes", text)
            assert (content, calls[0], status) == (bad, ("find", {"n": 1}), "malformed")


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "granite"])
def test_arguments_under_another_name(form: str, key: str) -> None:
    """ahwurm/localharness#104"""
    used = "parameters" if form == "llama3_json" else "arguments"
    text = write(form, [("find", {"text": "a", "n": 3})]).replace(f'"{used}"', f'"{key}"')
    assert both(form, text) == ("", [("find", {"text": "a", "n": 3})], "ok")


@pytest.mark.parametrize(
    "value",
    ['{"name": "find", "input": {"n": 1}}', '{"name": "find", "n": 1}',
     '{"name": "find", "arguments": {}, "parameters": {"n": 1}}'],
)  # fmt: skip
def test_arguments_are_never_dropped(value: str) -> None:
    """ahwurm/localharness#104: a call without its arguments is worse than none"""
    text = f"<tool_call>{value}</tool_call>"
    assert both("hermes", text) == (text, [], "malformed")


def test_a_call_without_arguments() -> None:
    """NousResearch/hermes-agent#83937, vllm-project/vllm#28806"""
    for value in (
        '{"name": "find"}',
        '{"name": "find", "arguments": {}}',
        '{"name": "find", "arguments": ""}',
    ):
        assert both("hermes", f"<tool_call>{value}</tool_call>") == ("", [("find", {})], "ok")


@pytest.mark.parametrize(
    "value",
    ['{"name": "find", "arguments": {"n": 1, "n": 2}}', '{"name": "find", "name": "g", "arguments": {}}',
     '{"name": "find", "arguments": {"a": {"b": 1, "b": 1}}}'],
)  # fmt: skip
def test_a_key_that_occurs_twice_is_malformed(value: str) -> None:
    """Readers of JSON keep the last value without a word."""
    for form, start, end in (
        ("hermes", "<tool_call>", "</tool_call>"),
        ("llama3_json", "<|python_tag|>", ""),
        ("granite", "<|tool_call|>[", "]"),
    ):
        assert both(form, start + value + end) == (start + value + end, [], "malformed")


@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("qwen3_coder", "<parameter=n>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>"),
        ("qwen3_coder", "<parameter=text>\na\n<parameter=n>\n2\n</parameter>"),
        (
            "qwen3_coder",
            "<parameter=n>\n1\n</parameter>\n</function>\n<function=find>\n<parameter=n>\n2\n</parameter>",
        ),
        (
            "glm45",
            "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n",
        ),
        ("glm45", "<arg_key>text</arg_key>\n<arg_value>a\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n"),
    ],
)
def test_an_argument_does_not_take_the_next_one(form: str, arguments: str) -> None:
    """A tag that is not closed, a second function in a block, an argument twice"""
    start, end = ("<function=find>\n", "\n</function>\n") if form == "qwen3_coder" else ("find\n", "")
    text = f"<tool_call>{start}{arguments}{end}</tool_call>"
    assert both(form, text) == (text, [], "malformed")


# -- types -------------------------------------------------------------------------------------------


def parsed(form: str, parameters: Any, **values: str) -> dict[str, Any]:
    """Returns the arguments that a tagged format reads for a tool with these parameters."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = FORMATS[form].parser(tools)
    parts = [*parser.feed(write(form, [("f", values)])), *parser.finish()]
    [made] = [part for part in parts if isinstance(part, SampledCall)]
    arguments: dict[str, Any] = json.loads(made.arguments)
    return arguments


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas, "$defs": DEFS, "definitions": DEFS}


DEFS: dict[str, Any] = {
    "Code": {"enum": ["123", "true"], "type": "string"},
    "Alias": {"$ref": "#/$defs/Code"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b~c d": {"type": "string"},
}
TEXTS = [
    {"$ref": "#/$defs/Code"},
    {"$ref": "#/definitions/Alias"},
    {"$ref": "#/$defs/a~1b~0c%20d"},
    {"$ref": "#/properties/y"},
    {"allOf": [{"$ref": "#/$defs/Code"}], "default": "123"},
    {"allOf": [{"title": "x"}, {"allOf": [{"type": "string"}]}]},
    {"anyOf": [{"$ref": "#/$defs/Alias"}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"oneOf": [{"type": "string"}]}]},
    {"const": "123"},
    {"enum": ["123", "true"]},
    {"pattern": "^[0-9a-z]+$"},
    {"minLength": 1},
    {"format": "date"},
    {"type": "STRING"},
    {"type": "str"},
    {"type": "varchar"},
    {"if": {"const": "1"}, "then": {"type": "string"}, "else": {"type": "string"}},
    {"anyOf": [{"const": "123"}, {"const": "true"}]},
    {"type": ["string", "integer"]},
    {"type": "string", "nullable": True},
    {"$ref": "#/$defs/Loop", "type": "string"},
]


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"enum": ["auto", 1, 2]}, "1", 1),
        ({"enum": ["auto", 1, 2]}, "auto", "auto"),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"enum": ["auto", "7"]}, {"type": "number"}]}, "0.5", 0.5),
        ({"anyOf": [{"enum": ["auto", "7"]}, {"type": "number"}]}, "7", "7"),
        ({"anyOf": [{"enum": ["none", "all"]}, {"type": "null"}]}, "none", "none"),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"], "enum": ["1", 2]}, "1", "1"),
        ({"type": ["string", "integer"], "enum": ["1", 2]}, "2", 2),
        ({"type": "INTEGER"}, "5.0", 5),
        ({"type": "int"}, "5.0", 5),
        ({"type": "bool"}, "True", True),
        ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        ({"type": "any"}, "5", 5),
        ({"format": "int64"}, "5", 5),
    ],
)
def test_texts_beside_other_values(form: str, schema: Any, text: str, value: Any) -> None:
    """A text that an enum lists permits no other text; types are spelled as in Python and Gemini's API."""
    read_value = parsed(form, properties(x=schema), x=text)["x"]
    assert (read_value, type(read_value)) == (value, type(value))


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize("schema", TEXTS)
def test_a_text_stays_text(form: str, schema: Any) -> None:
    """antirez/ds4#1016, ggml-org/llama.cpp#22240, kaeawc/auto-mobile#4241"""
    for text in ("123", "true", "001", "1e5", "[1]"):
        assert parsed(form, properties(x=schema, y={"type": "string"}), x=text) == {"x": text}


@pytest.mark.parametrize("form", TAGGED)
def test_text_of_parameters_that_are_not_listed(form: str) -> None:
    """kaeawc/auto-mobile#4241, for objects whose schema is elsewhere"""
    text, item = {"type": "string"}, {"x": "123"}
    for parameters in (
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": text}}}},
        {"allOf": [{"properties": {"x": text}}]},
        {"anyOf": [{"properties": {"x": text}}, {"properties": {"y": text}}]},
        {"type": "object", "additionalProperties": text},
        {"type": "object", "patternProperties": {"^x": text}},
    ):
        assert parsed(form, parameters, **item) == item
    assert parsed(form, {}, **item) == {"x": 123}


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize(
    "schema",
    [{"type": "integer"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"const": 5}, {"enum": [5, 0]},
     {"allOf": [{"type": "number"}, {"type": "integer"}]}],
)  # fmt: skip
def test_a_whole_number_is_an_integer(form: str, schema: Any) -> None:
    """ml-explore/mlx-lm#1417, #1627 and #1635"""
    for text, value in (
        ("230.0", 230),
        ("0.0", 0),
        ("-3.00", -3),
        ("12345678901234567891.0", 12345678901234567891),
    ):
        number = parsed(form, properties(x=schema), x=text)["x"]
        assert (number, type(number)) == (value, int)
    assert parsed(form, properties(x=schema), x="140.5") == {"x": 140.5}
    assert parsed(form, properties(x={"type": "number"}), x="140.5") == {"x": 140.5}


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize("text", ["2026-01-15", "true", "nan", "inf", "0x10", "1_000", "007"])
def test_what_is_no_number_stays_text(form: str, text: str) -> None:
    """ml-explore/mlx-lm#1330 and #1617"""
    for kind in ("integer", "number"):
        assert parsed(form, properties(x={"type": kind}), x=text) == {"x": text}


class Colour(StrEnum):
    ONE = "1"
    TRUE = "true"


class Place(BaseModel):
    name: str


def paint(
    colour: Colour,
    again: Colour | None = None,
    word: Literal["1", "2"] = "1",
    text: Annotated[str, Field(min_length=1)] | None = None,
    place: Place | None = None,
    count: int = 1,
) -> str:
    """Paints."""
    return f"{colour!r} {again!r} {word!r} {text!r} {place!r} {count!r}"


@pytest.mark.parametrize("form", TAGGED)
def test_tools_with_enumerations(form: str) -> None:
    """antirez/ds4#1016, for the schemas that `@tool` makes"""
    made = make_tool(paint)
    values = {
        "colour": "1",
        "again": "true",
        "word": "2",
        "text": "12",
        "place": '{"name": "1"}',
        "count": "5.0",
    }
    arguments = parsed(form, made.parameters, **values)
    assert arguments == {**values, "place": {"name": "1"}, "count": 5}
    assert made.fn(None, arguments) == ("<Colour.ONE: '1'> <Colour.TRUE: 'true'> '2' '12' Place(name='1') 5")


def test_references_without_end() -> None:
    """A schema that refers to itself in many ways is read in time, as a client may send it."""
    loops = {
        f"{at}": {"anyOf": [{"$ref": f"#/$defs/{(at + step) % 40}"} for step in (1, 2, 3)]}
        for at in range(40)
    }
    parameters = {"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": loops, "allOf": [{"$ref": "#"}]}
    assert parsed("glm45", parameters, x="1") == {"x": 1}


def take(
    n: int = 0,
    x: float = 0.0,
    b: bool = False,
    u: int | str = "",
    xs: Sequence[int] = (),
    m: dict[str, float] | None = None,
) -> str:
    return json.dumps([n, x, b, u, [*xs], m])


@pytest.mark.parametrize(
    "arguments",
    [{"n": True}, {"n": "1_000"}, {"x": True}, {"x": "nan"}, {"x": "inf"}, {"x": 2**70 + 1}, {"b": "yes"},
     {"b": 1}, {"b": "off"}, {"u": True}, {"xs": [1, False]}, {"m": {"a": 12345678901234567890123}}],
)  # fmt: skip
def test_an_argument_that_would_be_read_as_another_is_refused(arguments: dict[str, Any]) -> None:
    """pydantic reads 1 from true, true from 'yes' and a rounded float from an integer"""
    with pytest.raises(ToolError, match=f"take: {next(iter(arguments))}: .* would be read as"):
        make_tool(take).fn(None, arguments)


def test_an_argument_in_another_notation_is_read() -> None:
    arguments = {"n": "5", "x": 3, "b": "True", "u": 7, "xs": [2.0, "3"], "m": {"a": 2**60, "b": "1e3"}}
    assert make_tool(take).fn(None, arguments) == json.dumps(
        [5, 3.0, True, 7, [2, 3], {"a": 2.0**60, "b": 1e3}]
    )
