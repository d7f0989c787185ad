"""Transcripts of the same problems before and after training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate.viewer.formatting import as_list, as_mapping, known, mappings, number, printable
from tidegate.viewer.run_files import objects

Record = Mapping[str, Any]
"""One trajectory as a line of `trajectories/*.jsonl` holds it."""

LONGEST_MESSAGE = 4_000
LONGEST_OUTPUT = 20_000
"""Characters of an agent's output that a page shows; the trajectory file has the rest."""
MOST_MESSAGES = 40


@dataclass(frozen=True, slots=True)
class TranscriptLine:
    """One message of an episode, ready to be shown.

    `calls` are the tool calls as `name(arguments)`; `sampled` describes how the reply was sampled and is
    empty for messages that the policy did not write.
    """

    role: str
    text: str
    calls: tuple[str, ...] = ()
    sampled: str = ""

    def to_wire(self) -> dict[str, Any]:
        return {"role": self.role, "text": self.text, "calls": self.calls, "origin": self.sampled}


@dataclass(frozen=True, slots=True)
class ToolLine:
    """One call of the environment's tools, ready to be shown."""

    turn: int | None
    """Index of the newest turn when the call began; None if there was none."""
    call: str
    """`name(arguments)`."""
    result: str
    error: bool
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Transcript:
    """One episode, ready to be shown; `parts` are those of its reward."""

    task_id: str
    outcome: str
    reward: float | None
    parts: str
    lines: tuple[TranscriptLine, ...]
    error: str = ""
    output: str | None = None
    """What the agent returned; None: nothing."""
    answer: str = ""
    """The task's gold answer; empty where the record has none."""

    @property
    def returned_last_reply(self) -> bool:
        """Whether the output is the text of the last reply, which is shown already."""
        last = self.lines[-1] if self.lines else None
        return last is not None and last.role == "assistant" and last.text == (self.output or "").strip()

    @property
    def verdict(self) -> str:
        """One line: the reward, or why there is none."""
        if self.reward is None:
            return f"no reward: {self.outcome}" + (f" ({self.error})" if self.error else "")
        cut = ", truncated" if self.outcome == "truncated" else ""
        return f"reward {number(self.reward)}{cut}"

    def to_wire(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "verdict": self.verdict,
            "parts": self.parts,
            "messages": [line.to_wire() for line in self.lines],
            "output": self.output,
            "returned_last_reply": self.returned_last_reply,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """One problem, before training and after it; `after` is None where there is one evaluation only.

    `problem` are the messages with which both begin; the episodes hold what follows.
    """

    task_id: str
    problem: tuple[TranscriptLine, ...]
    before: Transcript
    after: Transcript | None
    titles: tuple[str, str] = ("before", "after")
    """What the two episodes are called: an evaluation that is not of step 0 is named by its step."""

    @property
    def answer(self) -> str:
        """The gold answer, as far as a record has one."""
        return self.before.answer or (self.after.answer if self.after else "")

    def to_wire(self) -> dict[str, Any]:
        episodes = zip(self.titles, (self.before, self.after), strict=True)
        return {
            "task": self.task_id,
            "answer": self.answer,
            "problem": [line.to_wire() for line in self.problem],
            "episodes": [{"title": title, **one.to_wire()} for title, one in episodes if one is not None],
        }


@dataclass(frozen=True, slots=True)
class Chosen:
    """Pairs, and in one sentence how they were chosen."""

    pairs: tuple[Pair, ...]
    how: str

    def to_wire(self) -> dict[str, Any]:
        return {"how": self.how, "pairs": [pair.to_wire() for pair in self.pairs]}


def choose(evaluations: Sequence[Path], count: int = 3) -> Chosen:
    """The problems that gained most between the first and the last evaluation, ties by task id.

    Both evaluations must hold the problem in the same held-out set and sampling mode; the sampled mode
    of the first set is preferred, because it is what `eval/reward` measures.
    """
    if not evaluations:
        return Chosen((), "No evaluation has been written yet.")
    first = _by_problem(evaluations[0])
    if len(evaluations) < 2:
        shown = sorted(_preferred(first), key=_order)[:count]
        pairs = tuple(pair(episode(first[key]), None, _titles(evaluations[0])) for key in shown)
        return Chosen(pairs, "There is one evaluation only; these are its first problems by id.")
    last = _by_problem(evaluations[-1])
    gains = {}
    for key in sorted(_preferred(key for key in first if key in last), key=_order):
        before, after = known(first[key].get("reward")), known(last[key].get("reward"))
        if before is not None and after is not None:
            gains[key] = after - before
    best = sorted(gains, key=lambda key: -gains[key])[:count]
    titles = _titles(evaluations[0], evaluations[-1])
    pairs = tuple(pair(episode(first[key]), episode(last[key]), titles) for key in best)
    return Chosen(pairs, _how(list(gains.values()), len(pairs)))


def _titles(first: Path, last: Path | None = None) -> tuple[str, str]:
    one, other = (path.stem.removeprefix("eval_").lstrip("0") for path in (first, last or first))
    return (f"step {one}", f"step {other}") if one.isdigit() else ("before", "after")


def pair(before: Transcript, after: Transcript | None, titles: tuple[str, str] = ("before", "after")) -> Pair:
    """Put the messages with which both episodes begin apart, up to the first sampled reply."""
    shared = 0
    for index, line in enumerate(before.lines):
        same = after is None or (index < len(after.lines) and after.lines[index] == line)
        if line.role == "assistant" or not same:
            break
        shared = index + 1
    rest = [None if one is None else replace(one, lines=one.lines[shared:]) for one in (before, after)]
    assert rest[0] is not None
    return Pair(before.task_id, before.lines[:shared], rest[0], rest[1], titles)


def _how(gains: list[float], shown: int) -> str:
    if not gains:
        return "No problem was scored in both the first and the last evaluation."
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    same = len(gains) - better - worse
    problems = "1 problem was" if len(gains) == 1 else f"{len(gains)} problems were"
    which = "These are the" if shown > 1 else "This is the"
    return (
        f"{problems} scored before and after: {better} scored higher after, {same} the same, {worse} lower. "
        f"{which} {shown} with the largest gain (ties by task id): examples of what was learned, "
        "not a fair sample."
    )


Key = tuple[str, str, str]


def _by_problem(path: Path) -> dict[Key, Record]:
    """The first episode of each (held-out set, mode, task)."""
    found: dict[Key, Record] = {}
    for one in objects(path):
        key = (str(one.get("eval_set", "")), str(one.get("mode", "")), str(one.get("task_id", "")))
        found.setdefault(key, one)
    return found


def _preferred(keys: Iterable[Key]) -> list[Key]:
    """The keys of one set and mode: sampled before greedy, then the first set that the file names."""
    listed = list(keys)
    kinds = list(dict.fromkeys((name, mode) for name, mode, _ in listed))
    kinds.sort(key=lambda kind: (kind[1] == "greedy", "unseen" in kind[0]))
    return [key for key in listed if key[:2] == kinds[0]] if kinds else []


def _order(key: Key) -> tuple[Any, ...]:
    """Task ids in the order that a person expects: `p-9` before `p-10`."""
    pieces = re.split(r"(\d+)", key[2])
    return tuple((piece.isdigit(), int(piece) if piece.isdigit() else 0, piece) for piece in pieces)


def episode(record: Record) -> Transcript:
    """A trajectory's record as what is shown of it; missing fields are left out, never an error."""
    messages = mappings(record.get("messages"))
    sampled = _sampled(record, messages)
    parts = as_mapping(record.get("reward_parts"))
    named = parts.items() if len(parts) > 1 else ()
    return Transcript(
        task_id=printable(record.get("task_id", "")),
        outcome=printable(record.get("outcome", "")),
        reward=known(record.get("reward")),
        parts=", ".join(f"{printable(name)} {number(value)}" for name, value in named),
        lines=tuple(_line(one, sampled.get(index, "")) for index, one in enumerate(messages)),
        error=printable(record.get("error") or ""),
        output=None if (output := record.get("output")) is None else _shown_output(printable(output)),
        answer=_answer(record.get("answer")),
    )


def tool_lines(record: Record) -> list[ToolLine]:
    """A record's calls of the environment's tools in the order in which they ended."""
    return [
        ToolLine(
            turn=one["turn"] if isinstance(one.get("turn"), int) else None,
            call=printable(_call(one)),
            result=_shown_output(printable(one.get("result") or "")),
            error=bool(one.get("error")),
            seconds=known(one.get("seconds")),
        )
        for one in mappings(record.get("tool_calls"))
    ]


def _shown_output(text: str) -> str:
    more = len(text) - LONGEST_OUTPUT
    return f"{text[:LONGEST_OUTPUT]} … ({more:,} more characters)" if more > 0 else text


def _answer(value: object) -> str:
    """A gold answer as text; what is no text as JSON."""
    if value is None:
        return ""
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _line(message: Mapping[str, Any], sampled: str) -> TranscriptLine:
    return TranscriptLine(
        role=printable(message.get("role", "")),
        text=printable(_content(message.get("content"))).strip(),
        calls=tuple(printable(_call(one.get("function"))) for one in mappings(message.get("tool_calls"))),
        sampled=sampled,
    )


def _content(content: object) -> str:
    """A message's text; of a list of parts, the text of each, and the type of what is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [one if isinstance(one, Mapping) else {"text": one} for one in content]
        return "\n".join(str(one.get("text", f"[{one.get('type', 'part')}]")) for one in parts)
    return json.dumps(content, ensure_ascii=False)


def _call(function: object) -> str:
    if not isinstance(function, Mapping):
        return "[call without a function]"
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name', '?')}({text})"


def _sampled(record: Record, messages: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """How each reply of the policy came about, by the message's place.

    The messages are the newest branch: its turns are found from the newest one, an exempt one only if all
    are, through the parents, and match the last so many assistant messages (earlier ones were given by the
    agent).
    """
    turns = {turn["index"]: turn for turn in mappings(record.get("turns")) if "index" in turn}
    branch: list[Mapping[str, Any]] = []
    delivered = [index for index in turns if turns[index].get("delivered", True)]
    at = max((index for index in delivered if not turns[index].get("exempt")), default=None)
    at = max(delivered, default=None) if at is None else at
    while at in turns and len(branch) <= len(turns):
        branch.append(turns[at])
        at = turns[at].get("parent")
    replies = [index for index, one in enumerate(messages) if one.get("role") == "assistant"]
    return {index: _origin(turn) for index, turn in zip(reversed(replies), branch, strict=False)}


def _origin(turn: Mapping[str, Any]) -> str:
    spans = [one for one in as_list(turn.get("version_spans")) if isinstance(one, list | tuple) and one]
    versions = list(dict.fromkeys(str(one[0]) for one in spans))
    words = [str(turn["policy"])] if turn.get("policy") else []
    if len(versions) == 1:
        words.append(f"version {versions[0]}")
    elif versions:
        words.append(f"versions {' → '.join(versions)}, straddles a publish")
    tokens = len(as_list(turn.get("output_ids")))
    if tokens:
        words.append(f"{tokens} tokens")
    if turn.get("finish_reason") == "length":
        words.append("cut at the token limit")
    return printable(", ".join(words))


ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold", "tool": "magenta"}


def as_text(pair: Pair) -> Group:
    """The pair for a terminal: the problem, then both episodes. Very long ones are shortened, saying so."""
    parts: list[RenderableType] = [Text(f"Problem {pair.task_id}", "bold underline"), _grid(pair.problem)]
    if pair.answer:
        parts.append(_grid([TranscriptLine("gold", pair.answer)]))
    for title, one in zip(pair.titles, (pair.before, pair.after), strict=True):
        if one is None:
            continue
        good = one.reward is not None and one.reward > 0
        head = Text.assemble((f"{title}  ", "bold"), (one.verdict, "green" if good else "yellow"))
        head.append(f"  ({one.parts})" if one.parts else "", "dim")
        parts += [head, _grid(one.lines)]
        if one.output is not None and not one.returned_last_reply:
            parts.append(_grid([TranscriptLine("returned", one.output)]))
    return Group(*parts)


def _grid(lines: Sequence[TranscriptLine]) -> Table:
    """Messages in two columns, role and text, so that long text wraps beside its role."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=9)
    grid.add_column(overflow="fold")
    half = MOST_MESSAGES // 2
    for index, line in enumerate(lines):
        if half <= index < len(lines) - half:
            if index == half:
                skipped = len(lines) - 2 * half
                grid.add_row("", "", Text(f"… {skipped} more messages; the report has them …", "dim"))
            continue
        style = ROLE_STYLES.get(line.role, "")
        grid.add_row("", Text(line.role, style), _body(line, "dim" if line.role == "system" else ""))
    return grid


def _body(line: TranscriptLine, style: str) -> Text:
    shown = line.text[:LONGEST_MESSAGE]
    out = Text(shown, style)
    if len(line.text) > len(shown):
        out.append(f" … {len(line.text) - len(shown)} more characters; the report has them", "dim")
    for call in line.calls:
        out.append("\n" if out.plain else "")
        out.append(f"→ {call[:LONGEST_MESSAGE]}", "bold")
    if line.sampled:
        out.append(f"  [{line.sampled}]" if out.plain else f"[empty reply; {line.sampled}]", "dim")
    return out
