"""The journal's tables, and the conversion between rows and objects.

Arrays are stored as little-endian bytes: ids int32, logprobs float32. JSON input stays JSON. Times are
wall-clock seconds, because a loop's clock is meaningless in the next process.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import orjson

from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sessions.session import GatewaySession, SessionResult
from tidegate.gateway.sessions.tree import TurnNode, TurnRequestInfo
from tidegate.types import Outcome, Sampling, Task, Trajectory, Turn, VersionSpan

VERSION = 4
"""Version of this schema; the database's `user_version`."""
TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, key_hash BLOB NOT NULL, about TEXT NOT NULL,
    opened REAL NOT NULL, deadline REAL NOT NULL, ending TEXT, delivered BLOB, result TEXT, forget_at REAL
);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, parent INTEGER, request TEXT, digest BLOB, idempotency_key TEXT, ordinal INTEGER,
    root BLOB, asked BLOB, key BLOB, said BLOB, reply BLOB, delta BLOB, output BLOB, logprobs BLOB,
    spans BLOB, finish_reason TEXT, temperature REAL, kv_version INTEGER, cached_tokens INTEGER, mask BLOB,
    branch TEXT, started REAL, seconds REAL, parse TEXT, exempt TEXT, structured TEXT
);
CREATE TABLE sent (id INTEGER PRIMARY KEY);
CREATE TABLE rewards (
    session INTEGER, turn INTEGER, name TEXT, value REAL, PRIMARY KEY (session, turn, name)
) WITHOUT ROWID;
CREATE TABLE groups (
    id TEXT PRIMARY KEY, place INTEGER NOT NULL, task_id TEXT NOT NULL, members TEXT NOT NULL,
    lease_id TEXT, lease_key TEXT NOT NULL DEFAULT ''
);
CREATE TABLE ended (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, id TEXT NOT NULL, why TEXT NOT NULL);
CREATE TABLE engines (
    url TEXT PRIMARY KEY, control TEXT NOT NULL, joined INTEGER NOT NULL, admitted INTEGER NOT NULL
);
CREATE TABLE meta (name TEXT PRIMARY KEY, value NUMERIC);
"""
INSERT_TURN = f"INSERT OR REPLACE INTO turns VALUES ({', '.join('?' * 26)})"
TURN_BITS = 24
WHOLE_SESSION = -1
"""Value of the column `turn` of `rewards` for a reward of the whole session."""


def turn_id(number: int, index: int) -> int:
    """Row id of a turn; a session's turns are adjacent, so no index is needed."""
    return number << TURN_BITS | index


def turn_range(number: int) -> tuple[int, int]:
    """First and last possible row id of a session's turns."""
    return turn_id(number, 0), turn_id(number + 1, 0) - 1


def session_and_index(row_id: int) -> tuple[int, int]:
    return row_id >> TURN_BITS, row_id & (1 << TURN_BITS) - 1


def turn_row(number: int, node: TurnNode) -> tuple[Any, ...]:
    turn, request = node.turn, node.request
    return (
        turn_id(number, turn.index), turn.parent,
        request.id, request.digest, request.idempotency_key, request.ordinal,
        node.tools_hash, node.history_hash, node.reply_hash,
        orjson.dumps(node.new_messages), orjson.dumps(node.reply),
        _bytes(turn.delta_ids, "<i4"), _bytes(turn.output_ids, "<i4"), _bytes(turn.logprobs, "<f4"),
        msgpack.packb(turn.version_spans), turn.finish_reason, turn.temperature, turn.kv_version,
        turn.cached_tokens, None if turn.output_mask is None else turn.output_mask.tobytes(),
        turn.branch, turn.started, turn.seconds, turn.parse, turn.exempt, turn.structured,
    )  # fmt: skip


def read_turn(row: tuple[Any, ...]) -> TurnNode:
    """The turn of a row, marked undelivered; the tree sets its `length`."""
    (
        row_id, parent, request, digest, idempotency_key, ordinal, root, asked, key, said, reply, delta,
        output, logprobs, spans, finish_reason, temperature, kv_version, cached_tokens, mask, branch,
        started, seconds, parse, exempt, structured,
    ) = row  # fmt: skip
    turn = Turn(
        index=session_and_index(row_id)[1],
        parent=parent,
        delta_ids=np.frombuffer(delta, dtype="<i4"),
        output_ids=np.frombuffer(output, dtype="<i4"),
        logprobs=np.frombuffer(logprobs, dtype="<f4"),
        version_spans=tuple(VersionSpan(*span) for span in msgpack.unpackb(spans)),
        finish_reason=finish_reason,
        temperature=temperature,
        delivered=False,
        kv_version=kv_version,
        cached_tokens=cached_tokens,
        output_mask=None if mask is None else np.frombuffer(mask, dtype=np.uint8),
        branch=branch,
        started=started,
        seconds=seconds,
        parse=parse,
        exempt=exempt,
        structured=structured,
    )
    info = TurnRequestInfo(request, digest, idempotency_key, ordinal)
    return TurnNode(turn, info, root, asked, key, orjson.loads(said), orjson.loads(reply), 0)


def lost_turn(index: int) -> TurnNode:
    """Placeholder of a turn that was never written or sent; keeps the indices of the others."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    turn = Turn(index, None, ids, ids, logprobs, (), "lost", 1.0, delivered=False, branch="lost: not written")
    reply = {"role": "assistant", "content": ""}
    return TurnNode(turn, TurnRequestInfo(), b"", b"", b"", [], reply, 0)


def _bytes(array: Any, kind: str) -> bytes:
    return np.ascontiguousarray(array, dtype=kind).tobytes()


def session_row(session: GatewaySession) -> str:
    """The arguments a session was opened with, by Python's json: it writes all JSON that bodies contain."""
    return json.dumps(
        {
            "task": None if session.task is None else session.task.to_wire(),
            "env": session.env,
            "split": session.split,
            "sampling": session.sampling.to_wire(),
            "group_id": session.group_id,
            "slot": session.slot,
            "seed": session.seed,
            "metadata": session.metadata,
            "limits": session.limits.to_wire(),
            "untrained_models": session.untrained_models,
            "epoch": session.epoch,
        }
    )


def read_session(
    number: int, session_id: str, key_hash: bytes, row: str, opened: float, end: float
) -> GatewaySession:
    fields = json.loads(row)
    task = fields["task"]
    fields["task"] = None if task is None else Task.from_wire(task)
    fields["untrained_models"] = tuple(fields["untrained_models"])
    fields["sampling"], fields["limits"] = Sampling(**fields["sampling"]), SessionLimits(**fields["limits"])
    return GatewaySession(
        id=session_id, key_hash=key_hash, opened=opened, deadline=end, number=number, **fields
    )


def ending_row(ending: SessionResult, at: float) -> str:
    return json.dumps(
        {
            "outcome": ending.outcome.value,
            "error": ending.error,
            "at": at,
            "output": ending.output,
            "claimed": ending.agent_reward,
            "metrics": ending.metrics,
        }
    )


def read_ending(row: str, loop_offset: float) -> SessionResult:
    fields = json.loads(row)
    fields["outcome"] = Outcome(fields["outcome"])
    fields["at"] += loop_offset
    return SessionResult(agent_reward=fields.pop("claimed"), **fields)


_RESULT = ("reward", "reward_parts", "agent_reward", "metrics", "output", "error", "seconds")


def result_row(trajectory: Trajectory) -> str:
    """The fields of a trajectory that its session and turns do not contain."""
    turns = {turn.index: turn.reward for turn in trajectory.turns if turn.reward}
    fields = {name: getattr(trajectory, name) for name in _RESULT}
    return json.dumps({"outcome": trajectory.outcome.value, "turn_rewards": turns, **fields})


def restore_result(row: str, trajectory: Trajectory) -> None:
    """Set the fields of a trajectory that `result_row` wrote."""
    fields: dict[str, Any] = json.loads(row)
    trajectory.outcome = Outcome(fields.pop("outcome"))
    for index, reward in fields.pop("turn_rewards").items():
        trajectory.turns[int(index)].reward = reward
    for name, value in fields.items():
        setattr(trajectory, name, value)
