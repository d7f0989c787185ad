"""Data of one episode: its turns, their tokens, and why each token was trained on or not."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tidegate.sequences import TurnSequence, path_to, training_sequences
from tidegate.types import fields_of
from tidegate.viewer.dashboard.records import EpisodeSummary, NotFound, spans_of
from tidegate.viewer.dashboard.tokens import Texts
from tidegate.viewer.formatting import as_list, as_mapping, known, mappings, printable
from tidegate.viewer.transcripts import episode as transcript_of
from tidegate.viewer.transcripts import tool_lines

Part = Literal["given", "sampled"]
Record = Mapping[str, Any]

LIKELIEST = 5
"""Most ids that are shown as the engine's likeliest ones in place of a token."""
CONTEXT = 8
"""Number of preceding ids that are decoded together with a range of tokens."""


class EpisodeTree:
    """The turns of a record by index. Invalid turns are skipped."""

    def __init__(self, record: Record) -> None:
        turns = mappings(record.get("turns"))
        self.turns = {turn["index"]: turn for turn in turns if isinstance(turn.get("index"), int)}
        self.parents: dict[int, int | None] = {}
        for index, turn in self.turns.items():
            parent = turn.get("parent")
            self.parents[index] = parent if parent in self.turns and parent < index else None

    def turn(self, index: int) -> Record:
        if index not in self.turns:
            raise NotFound(f"the episode has {len(self.turns)} turns; there is no turn {index}")
        return self.turns[index]

    def sequences(self) -> list[TurnSequence]:
        return training_sequences(self.parents, {i for i, turn in self.turns.items() if may_train(turn)})


def may_train(turn: Record) -> bool:
    """Returns whether a turn was delivered, is not exempt, and has a token not forced by a grammar."""
    if not turn.get("delivered", True) or turn.get("exempt"):
        return False
    mask = turn.get("output_mask")
    return any(mask if isinstance(mask, list) else ids(turn, "sampled"))


def ids(turn: Record, part: Part) -> list[int]:
    return as_list(turn.get("output_ids" if part == "sampled" else "delta_ids"))


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
    """Returns the policy versions of the sampled tokens `start..end`; None if the engine reported none."""
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
        columns["logprobs"] = [known(value) for value in as_list(turn.get("logprobs"))[start:end]]
        columns["versions"] = versions(turn, start, end)
        columns["likeliest"] = likeliest(turn, start, end, texts)
    return columns


def likeliest(turn: Record, start: int, end: int, texts: Texts) -> list[list[tuple[str, float]]] | None:
    """Returns text and logprob of the engine's likeliest ids in place of each sampled token `start..end`.

    None if they were not recorded, or zstandard is not installed. Without a tokenizer the text is the id.
    """
    try:
        import zstandard
    except ImportError:
        return None
    sampled = ids(turn, "sampled")
    try:
        packed = [zstandard.decompress(base64.b64decode(turn[name])) for name in ("top_ids", "top_logprobs")]
        top, logprobs = (
            np.frombuffer(data, kind).reshape(len(sampled), -1)[start:end, :LIKELIEST].tolist()
            for data, kind in zip(packed, ("<i4", "<f2"), strict=True)
        )
    except (KeyError, TypeError, ValueError, zstandard.ZstdError):
        return None
    before = [ids(turn, "given")[-1:], *([token] for token in sampled)]

    def text(token: int, place: int) -> str:
        pieces = texts.pieces([token], before[place])
        return str(token) if pieces is None else pieces.texts[0]

    return [
        [(text(token, place), value) for token, value in zip(*pair, strict=True)]
        for place, pair in enumerate(zip(top, logprobs, strict=True), start)
    ]


def _before(tree: EpisodeTree, turn: Record, part: Part, start: int) -> list[int]:
    """Returns up to CONTEXT ids before index `start` of a part of a turn."""
    parent = tree.parents[turn["index"]]
    before = [] if parent is None else ids(tree.turns[parent], "sampled")[-CONTEXT:]
    if part == "sampled":
        before = [*before, *ids(turn, "given")[-CONTEXT:]]
    return [*before, *ids(turn, part)[max(0, start - CONTEXT) : start]][-CONTEXT:]


def turn_to_wire(tree: EpisodeTree, index: int, state: str, sequences: Iterable[int]) -> dict[str, Any]:
    """Returns a turn without its tokens; `sequences` are the numbers of its sequences."""
    turn = tree.turns[index]
    before = [tree.turns[earlier] for earlier in path_to(index, tree.parents)[:-1]]
    return {
        "index": index,
        "parent": turn.get("parent"),
        "branch": printable(turn["branch"]) if turn.get("branch") else None,
        "finish": printable(turn.get("finish_reason") or "?"),
        "delivered": bool(turn.get("delivered", True)),
        "parse": printable(turn["parse"]) if turn.get("parse") else None,
        "exempt": printable(turn["exempt"]) if turn.get("exempt") else None,
        "policy": printable(turn.get("policy") or ""),
        "structured": printable(turn["structured"]) if turn.get("structured") else None,
        "temperature": known(turn.get("temperature")),
        "kv_version": turn.get("kv_version") if isinstance(turn.get("kv_version"), int) else None,
        "cached": known(turn.get("cached_tokens")) or 0,
        "seconds": known(turn.get("seconds")),
        "before": sum(len(ids(earlier, part)) for earlier in before for part in PARTS),
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
        "policy_rewards": _numbers(record.get("policy_rewards")),
        "metrics": _numbers(record.get("metrics")),
        "messages": [line.to_wire() for line in transcript.lines],
        "turns": list(turns.values()),
        "tools": [fields_of(line) for line in tool_lines(record)],
        "sequences": [{"turns": path, "own": sorted(own)} for path, own in sequences],
        "no_tokenizer": texts.problem,
    }


def _numbers(values: object) -> dict[str, float | None]:
    return {printable(name): known(value) for name, value in as_mapping(values).items()}
