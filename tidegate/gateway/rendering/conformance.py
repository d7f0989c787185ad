"""Is what follows a reply exactly what the model's template would write? Tried on a battery of histories.

*exact*: the recorded ids with what follows are, as text, the template's own rendering of the history.
*kept*: the recorded ids are kept, where the template would write what came before in another way (it
takes reasoning out of the past, moves the tools, trims). *branch*: the template gives no text for what
follows, so the history is rendered whole. *refused*: the template takes no such history at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.renderer import Renderer, Unrenderable
from tidegate.types import Message

Verdict = Literal["exact", "kept", "branch", "refused"]
_NAMED = 4  # kinds that a log line names; more are counted
_EDGES = " \n two  spaces \t\n"
_UNICODE = "naïve 🍎👩‍👩‍👧 日本語 \u0301\u200b"


class Case(NamedTuple):
    """A history and what is added to it. `sampled` is the reply's text where it is not the content."""

    kind: str
    before: list[Message]
    reply: Message
    new: list[Message]
    tools: list[Any] | None = None
    sampled: str | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What becomes of one kind of continuation, and why it is not exact."""

    kind: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What is known of one template; `shields`: text that looks like a control token stays text."""

    judgements: tuple[CaseResult, ...]
    shields: bool

    def of(self, verdict: Verdict) -> list[CaseResult]:
        return [one for one in self.judgements if one.verdict == verdict]

    def line(self) -> str:
        """All of it on one line, for a log."""
        told = [f"{len(self.of('exact'))} of {len(self.judgements)} kinds of continuations are exact"]
        for verdict in ("kept", "branch", "refused"):
            kinds = [one.kind for one in self.of(verdict)]
            if len(kinds) > _NAMED:
                told.append(f"{verdict}: {len(kinds)} kinds")
            elif kinds:
                told.append(f"{verdict}: {', '.join(kinds)}")
        if not self.shields:
            told.append("control tokens in users' texts become control tokens")
        return "; ".join(told)


def check_conformance(renderer: Renderer) -> ConformanceReport:
    """Try the battery; takes milliseconds, and belongs off the event loop nevertheless."""
    return ConformanceReport(tuple(_judge(renderer, case) for case in _battery()), _shields(renderer))


def _battery() -> Iterator[Case]:
    ask, told, more = [_user("What is 2 + 3?")], _assistant("It is 5."), _user("And 4 + 4?")
    one, two = _calls(1), _calls(2)
    yield Case("a question", ask, told, [more])
    yield Case(
        "a question, with a system prompt and tools", [_system("Be brief."), *ask], told, [more], _TOOLS
    )
    yield Case("two questions at once", ask, told, [more, _user("And 1 + 1?")])
    yield Case("a system message in the middle", ask, told, [_system("Be brief."), more])
    yield Case("a reply that the client wrote", ask, told, [more, _assistant("8"), _user("Sure?")])
    yield Case("nothing: another reply", ask, told, [])
    yield Case("a tool's result", ask, one, _results(one), _TOOLS)
    yield Case("results of parallel calls", ask, two, _results(two), _TOOLS)
    yield Case("a tool's result and a question", ask, one, [*_results(one), more], _TOOLS)
    yield Case("after a cut reply", ask, told, [more], cut=True)
    yield Case("after an empty reply", ask, _assistant(""), [more])
    thought = "<think>\nTwo and three.\n</think>\n\nIt is 5."
    yield Case("after reasoning", ask, _assistant(thought), [more], sampled=thought)
    yield Case("Unicode", ask, _assistant(_UNICODE), [_user(_UNICODE)])
    yield Case("whitespace at the edges", ask, told, [_user(_EDGES)])
    yield Case("whitespace at a reply's edges", ask, _assistant(_EDGES), [more], sampled=_EDGES)


def _judge(renderer: Renderer, case: Case) -> CaseResult:
    """The best that comes of any way in which the model may have sampled the reply."""
    try:
        prompt = renderer.root(case.before, case.tools, {}).tolist()
        replies = list(_sampled(renderer, case, len(renderer.codec.spell(prompt))))
    except ApiError as refusal:
        return CaseResult(case.kind, "refused", str(refusal))
    judgements = [_compare(renderer, case, prompt, output) for output in replies]
    return next((one for one in judgements if one.verdict == "exact"), judgements[0])


def _compare(renderer: Renderer, case: Case, prompt: list[int], output: list[int]) -> CaseResult:
    recorded = prompt + output
    whole = _whole(renderer, case)
    try:
        delta = _follow_up(renderer, case, recorded[-1])
    except Unrenderable as error:
        return CaseResult(case.kind, "refused" if whole is None else "branch", str(error))
    text = renderer.codec.spell(recorded + delta)
    if text == whole:
        return CaseResult(case.kind, "exact")
    if whole is None:
        return CaseResult(case.kind, "kept", "the template refuses such a history as a whole")
    at = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), len(text))
    if at < len(renderer.codec.spell(prompt)):
        return CaseResult(case.kind, "kept", "the template moves or rewrites the first prompt")
    part = "the past reply" if at < len(renderer.codec.spell(recorded)) else "what follows the reply"
    return CaseResult(case.kind, "kept", f"the template writes {part} otherwise: {whole[at : at + 40]!r}")


def _sampled(renderer: Renderer, case: Case, prompt: int) -> Iterator[list[int]]:
    """What a model that keeps to the template may sample for the reply, its end included.

    Reasoning models may think or not, so: as the template writes a last reply, and as it writes a past
    one. `prompt` counts the prompt's characters.
    """
    end = [] if case.cut else renderer.encode(renderer.ending)
    if case.sampled is not None:
        yield [*renderer.encode(case.sampled), *end]
        return
    text = _as_last_reply(renderer, case)
    if text is not None:
        ids = renderer.encode(text)
        stop = next((at for at, one in enumerate(ids) if one in renderer.stop_ids), None)
        yield [*ids, *end] if stop is None else ids[: stop if case.cut else stop + 1]
    whole = _whole(renderer, case)
    with contextlib.suppress(Unrenderable):
        suffix = renderer.codec.spell(_follow_up(renderer, case, None))
        if whole is not None and whole.endswith(suffix):
            yield [*renderer.encode(whole[prompt : len(whole) - len(suffix)]), *end]
    yield [*renderer.encode(case.reply["content"]), *end]


def _as_last_reply(renderer: Renderer, case: Case) -> str | None:
    prompt = renderer.write(case.before, case.tools, {})
    full = renderer.write([*case.before, case.reply], case.tools, {}, prompt=False)
    return full.removeprefix(prompt) if full.startswith(prompt) else None


def _follow_up(renderer: Renderer, case: Case, last_id: int | None) -> list[int]:
    ids: list[int] = renderer.follow_up(
        lambda: case.before, case.reply, case.new, case.tools, {}, last_id
    ).tolist()
    return ids


def _whole(renderer: Renderer, case: Case) -> str | None:
    """The template's own rendering, read back from its ids: some tokens swallow whitespace."""
    try:
        ids = renderer.root([*case.before, case.reply, *case.new], case.tools, {})
    except ApiError:
        return None
    return renderer.codec.spell(ids.tolist())


def _shields(renderer: Renderer) -> bool:
    """Whether control tokens that a user writes stay text."""
    control = [renderer.token_text(one) for one in renderer.stop_ids]
    context, reply = [_user("a")], _assistant("b")
    counts = []
    for text in ("x", " ".join(control)):
        try:
            delta = renderer.follow_up(lambda: context, reply, [_user(text)], None, {}, None)
        except Unrenderable:
            return renderer.codec.shields
        counts.append(sum(delta.tolist().count(one) for one in renderer.stop_ids))
    return bool(counts[0] == counts[1])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(count: int) -> Message:
    calls = [
        {
            "id": f"call_{number}a7b3c9d1e5f",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": f"{number} + 3"}},
        }
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(reply: Message) -> list[Message]:
    return [{"role": "tool", "content": "5", "tool_call_id": call["id"]} for call in reply["tool_calls"]]


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
