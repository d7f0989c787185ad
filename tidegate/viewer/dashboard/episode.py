"""One episode for the page: its turns, their tokens, and why each token was trained on or not.

What is trained follows the trainer's rule: every path from a root to a last turn that can be trained is one
sequence, and a token that several sequences share is trained in the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tidegate.viewer.dashboard.errors import NotFound
from tidegate.viewer.dashboard.records import EpisodeSummary, spans_of
from tidegate.viewer.dashboard.tokens import Texts
from tidegate.viewer.formatting import known, printable
from tidegate.viewer.transcripts import episode as spoken

Part = Literal["given", "sampled"]
Record = Mapping[str, Any]

CONTEXT = 8
"""Ids before a run of tokens that are decoded with it."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One sequence that is exported for training: its turns from the root on, and those trained in it."""

    turns: tuple[int, ...]
    own: frozenset[int]


class EpisodeTree:
    """The turns of a record, by index, each knowing its parent. Damaged turns are left out."""

    def __init__(self, record: Record) -> None:
        turns = record.get("turns")
        listed = [one for one in turns if isinstance(one, Mapping)] if isinstance(turns, list) else []
        self.turns: dict[int, Record] = {
            one["index"]: one for one in listed if isinstance(one.get("index"), int)
        }

    def turn(self, index: int) -> Record:
        if index not in self.turns:
            raise NotFound(f"the episode has {len(self.turns)} turns; there is no turn {index}")
        return self.turns[index]

    def path(self, index: int) -> list[int]:
        """Indices from the root to a turn."""
        path = [index]
        while (parent := self.turns[path[-1]].get("parent")) in self.turns and parent not in path:
            path.append(parent)
        return path[::-1]

    def sequences(self) -> list[Exported]:
        """The sequences that are exported for training, in order."""
        usable = [index for index, turn in self.turns.items() if may_train(turn)]
        inner = {parent for index in usable for parent in self.path(index)[:-1]}
        found = []
        done: set[int] = set()
        for leaf in (index for index in usable if index not in inner):
            path = self.path(leaf)
            own = frozenset(one for one in path if may_train(self.turns[one])) - done
            done |= own
            found.append(Exported(tuple(path), own))
        return found


def may_train(turn: Record) -> bool:
    """Whether a turn was delivered, is not exempt, and holds a token that was sampled freely."""
    if not turn.get("delivered", True) or turn.get("exempt"):
        return False
    mask = turn.get("output_mask")
    return any(mask if isinstance(mask, list) else ids(turn, "sampled"))


def ids(turn: Record, part: Part) -> list[int]:
    found = turn.get("output_ids" if part == "sampled" else "delta_ids")
    return found if isinstance(found, list) else []


def reasons(turn: Record, state: str) -> list[tuple[str, int]]:
    """For every sampled token whether it was trained, or why not, as (word, count) run by run.

    The words: `trained`, `grammar` (changed by one), `undelivered`, `exempt`, what became of the group
    (`filtered`, `stale`, `failed`, `cancelled`, `abandoned`, `live`), or `eval`.
    """
    count = len(ids(turn, "sampled"))
    if not turn.get("delivered", True):
        return [("undelivered", count)] if count else []
    if turn.get("exempt"):
        return [("exempt", count)] if count else []
    word = "trained" if state in ("trained", "stepped") else state
    mask = turn.get("output_mask")
    free = mask if isinstance(mask, list) and len(mask) == count else [1] * count
    found: list[tuple[str, int]] = []
    for one in (word if allowed else "grammar" for allowed in free):
        if found and found[-1][0] == one:
            found[-1] = (one, found[-1][1] + 1)
        else:
            found.append((one, 1))
    return found


def versions(turn: Record, start: int, end: int) -> list[int | None]:
    """The policy version of the sampled tokens `start..end`; None where the engine attested none."""
    found: list[int | None] = [None] * (end - start)
    for version, first, last in spans_of(turn):
        for place in range(max(first, start), min(last, end)):
            found[place - start] = version
    return found


def tokens(tree: EpisodeTree, index: int, part: Part, texts: Texts, start: int, most: int) -> dict[str, Any]:
    """At most `most` tokens of a turn from place `start` on, as columns side by side."""
    turn = tree.turn(index)
    every = ids(turn, part)
    end = min(len(every), start + most)
    pieces = texts.pieces(every[start:end], _before(tree, turn, part, start))
    found: dict[str, Any] = {
        "start": start,
        "total": len(every),
        "ids": every[start:end],
        "texts": None if pieces is None else pieces.texts,
        "parts": [] if pieces is None else pieces.parts,
        "special": [] if pieces is None else pieces.special,
    }
    if part == "sampled":
        logprobs = turn.get("logprobs")
        held = logprobs if isinstance(logprobs, list) else []
        found["logprobs"] = [known(one) for one in held[start:end]]
        found["versions"] = versions(turn, start, end)
    return found


def _before(tree: EpisodeTree, turn: Record, part: Part, start: int) -> list[int]:
    """A few ids that stand before place `start` of a part of a turn."""
    parent = tree.turns.get(turn["parent"]) if turn.get("parent") is not None else None
    before = ids(parent, "sampled")[-CONTEXT:] if parent is not None else []
    if part == "sampled":
        before = [*before, *ids(turn, "given")[-CONTEXT:]]
    return [*before, *ids(turn, part)[max(0, start - CONTEXT) : start]][-CONTEXT:]


def turn_words(tree: EpisodeTree, index: int, state: str, belongs: Iterable[int]) -> dict[str, Any]:
    """What is told of a turn besides its tokens; `belongs` are the numbers of its sequences."""
    turn = tree.turns[index]
    prompt = sum(len(ids(tree.turns[one], part)) for one in tree.path(index)[:-1] for part in PARTS)
    return {
        "index": index,
        "parent": turn.get("parent"),
        "branch": printable(turn["branch"]) if turn.get("branch") else None,
        "finish": printable(turn.get("finish_reason") or "?"),
        "delivered": bool(turn.get("delivered", True)),
        "parse": printable(turn["parse"]) if turn.get("parse") else None,
        "exempt": printable(turn["exempt"]) if turn.get("exempt") else None,
        "structured": printable(turn["structured"]) if turn.get("structured") else None,
        "temperature": known(turn.get("temperature")),
        "kv_version": turn.get("kv_version") if isinstance(turn.get("kv_version"), int) else None,
        "cached": known(turn.get("cached_tokens")) or 0,
        "seconds": known(turn.get("seconds")),
        "before": prompt,
        "given": len(ids(turn, "given")),
        "sampled": len(ids(turn, "sampled")),
        "spans": spans_of(turn),
        "reasons": reasons(turn, state),
        "sequences": list(belongs),
    }


PARTS: Sequence[Part] = ("given", "sampled")


def shown(one: EpisodeSummary, record: Record, state: str, texts: Texts, budget: int) -> dict[str, Any]:
    """An episode: what is known of it, its messages, its turns, and tokens as far as `budget` reaches.

    Sampled tokens come before given ones where there is no room for all; the rest is asked for by turn.
    """
    tree = EpisodeTree(record)
    sequences = tree.sequences()
    turns = {}
    for index in tree.turns:
        belongs = [number for number, one in enumerate(sequences) if index in one.turns]
        turns[index] = turn_words(tree, index, state, belongs)
    for part in reversed(PARTS):
        for index, words in turns.items():
            laid = tokens(tree, index, part, texts, 0, budget)
            budget -= len(laid["ids"])
            words[f"{part}_tokens"] = laid
    parts = record.get("reward_parts")
    metrics = record.get("metrics")
    said = spoken(record)
    return {
        **one.to_wire(),
        "state": state,
        "session": printable(record.get("session_id") or ""),
        "output": said.output,
        "returned_last_reply": said.returned_last_reply,
        "answer": said.answer,
        "error": printable(record.get("error") or ""),
        "reward_parts": _numbers(parts),
        "agent_reward": known(record.get("agent_reward")),
        "metrics": _numbers(metrics),
        "messages": [
            {"role": line.role, "text": line.text, "calls": line.calls, "origin": line.sampled}
            for line in said.lines
        ],
        "turns": list(turns.values()),
        "sequences": [{"turns": list(one.turns), "own": sorted(one.own)} for one in sequences],
        "no_tokenizer": texts.problem,
    }


def _numbers(found: object) -> dict[str, float | None]:
    held = found if isinstance(found, Mapping) else {}
    return {printable(name): known(value) for name, value in held.items()}
