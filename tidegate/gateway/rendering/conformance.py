"""Tests whether recorded ids plus suffix equal the template's own rendering, on a set of histories.

*exact*: recorded ids and suffix decode to the template's rendering of the complete history.
*prefix_kept*: the recorded ids are kept although the template would render the past differently (it removes
past reasoning, moves the tools, trims). *branch*: the template has no suffix, so the complete history is
rendered. *refused*: the template rejects such a history.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reply import call_wire, function_tool
from tidegate.gateway.rendering.renderer import Renderer, Unrenderable
from tidegate.types import Message

Verdict = Literal["exact", "prefix_kept", "branch", "refused"]
_NAMED = 4  # kinds named in a log line; more are only counted
_EDGES = " \n two  spaces \t\n"
_UNICODE = "naïve 🍎👩‍👩‍👧 日本語 \u0301\u200b"


class Case(NamedTuple):
    """A history and its new messages. `sampled` is the reply's text if it differs from the content."""

    kind: str
    before: list[Message]
    reply: Message
    new: list[Message]
    tools: list[Any] | None = None
    sampled: str | None = None
    truncated: bool = False


class CaseResult(NamedTuple):
    """The verdict on one kind of continuation, and the reason if it is not exact."""

    kind: str
    verdict: Verdict
    reason: str = ""


class ConformanceReport(NamedTuple):
    """Results for a template; `escapes_special_tokens`: special-token text in messages stays text."""

    results: tuple[CaseResult, ...]
    escapes_special_tokens: bool

    def with_verdict(self, verdict: Verdict) -> list[CaseResult]:
        return [result for result in self.results if result.verdict == verdict]

    def summary(self) -> str:
        parts = [f"{len(self.with_verdict('exact'))} of {len(self.results)} kinds of continuations are exact"]
        for verdict in ("prefix_kept", "branch", "refused"):
            kinds = [result.kind for result in self.with_verdict(verdict)]
            if len(kinds) > _NAMED:
                parts.append(f"{verdict}: {len(kinds)} kinds")
            elif kinds:
                parts.append(f"{verdict}: {', '.join(kinds)}")
        if not self.escapes_special_tokens:
            parts.append("special-token text in messages becomes special tokens")
        return "; ".join(parts)


def check_conformance(renderer: Renderer) -> ConformanceReport:
    """Tests a renderer. Takes milliseconds; run it off the event loop nevertheless."""
    results = tuple(_check_case(renderer, case) for case in _battery())
    return ConformanceReport(results, _escapes_special_tokens(renderer))


def _battery() -> Iterator[Case]:
    question, reply, more = (
        [_message("user", "What is 2 + 3?")],
        _message("assistant", "It is 5."),
        _message("user", "And 4 + 4?"),
    )
    one, two = _calls(1), _calls(2)
    yield Case("a question", question, reply, [more])
    yield Case(
        "a question, with a system prompt and tools",
        [_message("system", "Be brief."), *question],
        reply,
        [more],
        TOOLS,
    )
    yield Case("two questions at once", question, reply, [more, _message("user", "And 1 + 1?")])
    yield Case("a system message in the middle", question, reply, [_message("system", "Be brief."), more])
    yield Case(
        "a reply that the client wrote",
        question,
        reply,
        [more, _message("assistant", "8"), _message("user", "Sure?")],
    )
    yield Case("nothing: another reply", question, reply, [])
    yield Case("a tool's result", question, one, _results(one), TOOLS)
    yield Case("results of parallel calls", question, two, _results(two), TOOLS)
    yield Case("a tool's result and a question", question, one, [*_results(one), more], TOOLS)
    yield Case("after a truncated reply", question, reply, [more], truncated=True)
    yield Case("after an empty reply", question, _message("assistant", ""), [more])
    thought = "<think>\nTwo and three.\n</think>\n\nIt is 5."
    yield Case("after reasoning", question, _message("assistant", thought), [more], sampled=thought)
    yield Case("Unicode", question, _message("assistant", _UNICODE), [_message("user", _UNICODE)])
    yield Case("whitespace at the edges", question, reply, [_message("user", _EDGES)])
    yield Case(
        "whitespace at a reply's edges", question, _message("assistant", _EDGES), [more], sampled=_EDGES
    )


def _check_case(renderer: Renderer, case: Case) -> CaseResult:
    """The best result over the possible samplings of the reply."""
    try:
        prompt = renderer.encode_prompt(case.before, case.tools, {}).tolist()
        replies = list(_sampled(renderer, case, len(renderer.codec.decode_all(prompt))))
    except ApiError as refusal:
        return CaseResult(case.kind, "refused", str(refusal))
    results = [_compare(renderer, case, prompt, output) for output in replies]
    return next((result for result in results if result.verdict == "exact"), results[0])


def _compare(renderer: Renderer, case: Case, prompt: list[int], output: list[int]) -> CaseResult:
    recorded = prompt + output
    rendered = _render_all(renderer, case)
    try:
        delta = _encode_suffix(renderer, case, recorded[-1])
    except Unrenderable as error:
        return CaseResult(case.kind, "refused" if rendered is None else "branch", str(error))
    text = renderer.codec.decode_all(recorded + delta)
    if text == rendered:
        return CaseResult(case.kind, "exact")
    if rendered is None:
        return CaseResult(case.kind, "prefix_kept", "the template refuses the complete history")
    at = next((i for i, (a, b) in enumerate(zip(text, rendered, strict=False)) if a != b), len(text))
    if at < len(renderer.codec.decode_all(prompt)):
        return CaseResult(case.kind, "prefix_kept", "the template moves or rewrites the first prompt")
    part = "the past reply" if at < len(renderer.codec.decode_all(recorded)) else "what follows the reply"
    return CaseResult(
        case.kind, "prefix_kept", f"the template renders {part} differently: {rendered[at : at + 40]!r}"
    )


def _sampled(renderer: Renderer, case: Case, prompt: int) -> Iterator[list[int]]:
    """The ids that a model following the template may sample for the reply, including its end: a reasoning
    model may reason or not, so as the template renders a last reply, and a past one. `prompt` is the length
    of the prompt in characters."""
    end = [] if case.truncated else renderer.encode(renderer.turn_end)
    if case.sampled is not None:
        yield [*renderer.encode(case.sampled), *end]
        return
    before = renderer.render_text(case.before, case.tools, {})
    full = renderer.render_text([*case.before, case.reply], case.tools, {}, prompt=False)
    if full.startswith(before):
        ids = renderer.encode(full.removeprefix(before))
        stop = next((at for at, token in enumerate(ids) if token in renderer.stop_ids), None)
        yield [*ids, *end] if stop is None else ids[: stop if case.truncated else stop + 1]
    rendered = _render_all(renderer, case)
    with contextlib.suppress(Unrenderable):
        suffix = renderer.codec.decode_all(_encode_suffix(renderer, case, None))
        if rendered is not None and rendered.endswith(suffix):
            yield [*renderer.encode(rendered[prompt : len(rendered) - len(suffix)]), *end]
    yield [*renderer.encode(case.reply["content"]), *end]


def _encode_suffix(renderer: Renderer, case: Case, last_id: int | None) -> list[int]:
    suffix = renderer.encode_suffix(lambda: case.before, case.reply, case.new, case.tools, {}, last_id)
    return list(suffix.tolist())


def _render_all(renderer: Renderer, case: Case) -> str | None:
    """The complete history as rendered, decoded from its ids: some tokens strip whitespace."""
    try:
        ids = renderer.encode_prompt([*case.before, case.reply, *case.new], case.tools, {})
    except ApiError:
        return None
    return renderer.codec.decode_all(ids.tolist())


def _escapes_special_tokens(renderer: Renderer) -> bool:
    control = [renderer.token_text(token) for token in renderer.stop_ids]
    context, reply = [_message("user", "a")], _message("assistant", "b")
    counts = []
    for text in ("x", " ".join(control)):
        try:
            delta = renderer.encode_suffix(lambda: context, reply, [_message("user", text)], None, {}, None)
        except Unrenderable:
            return renderer.codec.escapes_special_tokens
        counts.append(sum(delta.tolist().count(token) for token in renderer.stop_ids))
    return bool(counts[0] == counts[1])


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calls(count: int) -> Message:
    calls = [
        call_wire(f"call_{number}a7b3c9d1e5f", "calculator", {"expression": f"{number} + 3"})
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(reply: Message) -> list[Message]:
    return [{"role": "tool", "content": "5", "tool_call_id": call["id"]} for call in reply["tool_calls"]]


TOOLS = [function_tool("calculator", "Work out an expression.", expression="string")]
