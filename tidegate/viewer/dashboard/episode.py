"""Data of one episode: its turns, their tokens, and why each token was trained on or not.

Sequences follow the trainer's rule: each path from a root to a trainable leaf is one sequence, and a token
that several sequences share is trained in the first of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tidegate.viewer.dashboard.errors import NotFound
from tidegate.viewer.dashboard.records import EpisodeSummary, spans_of
from tidegate.viewer.dashboard.tokens import Texts
from tidegate.viewer.formatting import known, printable
from tidegate.viewer.transcripts import episode as transcript_of

Part = Literal["given", "sampled"]
Record = Mapping[str, Any]

CONTEXT = 8
"""Number of preceding ids that are decoded together with a range of tokens."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One training sequence: its turns from the root on, and those whose tokens it trains (`own`)."""

    turns: tuple[int, ...]
    own: frozenset[int]


class EpisodeTree:
    """The turns of a record by index. Invalid turns are skipped."""

    def __init__(self, record: Record) -> None:
        turns = record.get("turns")
        listed = [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []
        self.turns: dict[int, Record] = {
            turn["index"]: turn for turn in listed if isinstance(turn.get("index"), int)
        }

    def turn(self, index: int) -> Record:
        if index not in self.turns:
            raise NotFound(f"the episode has {len(self.turns)} turns; there is no turn {index}")
        return self.turns[index]

    def path(self, index: int) -> list[int]:
        """Returns the indices from the root to a turn."""
        path = [index]
        while (parent := self.turns[path[-1]].get("parent")) in self.turns and parent not in path:
            path.append(parent)
        return path[::-1]

    def sequences(self) -> list[Exported]:
        """Returns the training sequences in order."""
        usable = [index for index, turn in self.turns.items() if may_train(turn)]
        inner = {parent for index in usable for parent in self.path(index)[:-1]}
        sequences = []
        done: set[int] = set()
        for leaf in (index for index in usable if index not in inner):
            path = self.path(leaf)
            own = frozenset(turn for turn in path if may_train(self.turns[turn])) - done
            done |= own
            sequences.append(Exported(tuple(path), own))
        return sequences


def may_train(turn: Record) -> bool:
    """Returns whether a turn was delivered, is not exempt, and has a token not forced by a grammar."""
    if not turn.get("delivered", True) or turn.get("exempt"):
        return False
    mask = turn.get("output_mask")
    return any(mask if isinstance(mask, list) else ids(turn, "sampled"))


def ids(turn: Record, part: Part) -> list[int]:
    part_ids = turn.get("output_ids" if part == "sampled" else "delta_ids")
    return part_ids if isinstance(part_ids, list) else []


def reasons(turn: Record, state: str) -> list[tuple[str, int]]:
    """Returns whether the sampled tokens were trained, or why not, as run-length pairs (reason, count).

    Reasons are `trained`, `grammar` (restricted by a grammar), `undelivered`, `exempt`, the group's state
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
    words = (word if allowed else "grammar" for allowed in free)
    return [(reason, sum(1 for _ in run)) for reason, run in itertools.groupby(words)]


def versions(turn: Record, start: int, end: int) -> list[int | None]:
    """Returns the policy versions of the sampled tokens `start..end`; None if not attested."""
    column: list[int | None] = [None] * (end - start)
    for version, first, last in spans_of(turn):
        for place in range(max(first, start), min(last, end)):
            column[place - start] = version
    return column


def tokens(tree: EpisodeTree, index: int, part: Part, texts: Texts, start: int, most: int) -> dict[str, Any]:
    """Returns at most `most` tokens of a turn from index `start` on, as parallel columns."""
    turn = tree.turn(index)
    part_ids = ids(turn, part)
    end = min(len(part_ids), start + most)
    pieces = texts.pieces(part_ids[start:end], _before(tree, turn, part, start))
    columns: dict[str, Any] = {
        "start": start,
        "total": len(part_ids),
        "ids": part_ids[start:end],
        "texts": None if pieces is None else pieces.texts,
        "parts": [] if pieces is None else pieces.parts,
        "special": [] if pieces is None else pieces.special,
    }
    if part == "sampled":
        logprobs = turn.get("logprobs")
        values = logprobs if isinstance(logprobs, list) else []
        columns["logprobs"] = [known(value) for value in values[start:end]]
        columns["versions"] = versions(turn, start, end)
    return columns


def _before(tree: EpisodeTree, turn: Record, part: Part, start: int) -> list[int]:
    """Returns up to CONTEXT ids before index `start` of a part of a turn."""
    parent = tree.turns.get(turn["parent"]) if turn.get("parent") is not None else None
    before = ids(parent, "sampled")[-CONTEXT:] if parent is not None else []
    if part == "sampled":
        before = [*before, *ids(turn, "given")[-CONTEXT:]]
    return [*before, *ids(turn, part)[max(0, start - CONTEXT) : start]][-CONTEXT:]


def turn_to_wire(tree: EpisodeTree, index: int, state: str, sequences: Iterable[int]) -> dict[str, Any]:
    """Returns a turn without its tokens; `sequences` are the numbers of its sequences."""
    turn = tree.turns[index]
    prompt = sum(len(ids(tree.turns[turn], part)) for turn in tree.path(index)[:-1] for part in PARTS)
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
        "sequences": list(sequences),
    }


PARTS: Sequence[Part] = ("given", "sampled")


def episode_to_wire(
    summary: EpisodeSummary, record: Record, state: str, texts: Texts, budget: int
) -> dict[str, Any]:
    """Returns an episode with its messages, turns and at most `budget` tokens.

    Sampled tokens take precedence over given ones; the page requests missing tokens by turn.
    """
    tree = EpisodeTree(record)
    sequences = tree.sequences()
    turns = {}
    for index in tree.turns:
        members = [number for number, sequence in enumerate(sequences) if index in sequence.turns]
        turns[index] = turn_to_wire(tree, index, state, members)
    for part in reversed(PARTS):
        for index, turn in turns.items():
            columns = tokens(tree, index, part, texts, 0, budget)
            budget -= len(columns["ids"])
            turn[f"{part}_tokens"] = columns
    transcript = transcript_of(record)
    return {
        **summary.to_wire(),
        "state": state,
        "session": printable(record.get("session_id") or ""),
        "output": transcript.output,
        "returned_last_reply": transcript.returned_last_reply,
        "answer": transcript.answer,
        "error": printable(record.get("error") or ""),
        "reward_parts": _numbers(record.get("reward_parts")),
        "agent_reward": known(record.get("agent_reward")),
        "metrics": _numbers(record.get("metrics")),
        "messages": [
            {"role": line.role, "text": line.text, "calls": line.calls, "origin": line.sampled}
            for line in transcript.lines
        ],
        "turns": list(turns.values()),
        "sequences": [{"turns": list(sequence.turns), "own": sorted(sequence.own)} for sequence in sequences],
        "no_tokenizer": texts.problem,
    }


def _numbers(values: object) -> dict[str, float | None]:
    items = values.items() if isinstance(values, Mapping) else ()
    return {printable(name): known(value) for name, value in items}
