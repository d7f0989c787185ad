"""The journal's tables, and the conversion between rows and objects.

`turns` converts turns; other input stays JSON. Times are wall-clock seconds, because a
loop's clock is meaningless in the next process.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from tidegate.gateway.journal import turns
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sessions.session import GatewaySession, SessionRequest, SessionResult
from tidegate.types import Outcome, Sampling, Task, Trajectory, fields_of

VERSION = 10
"""Version of this schema; the database's `user_version`."""
EXTENDED = range(7, VERSION)
"""Versions that `extension` makes the current one: later ones add fields at the end of turns."""
TABLES = f"""
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, key_hash BLOB NOT NULL, about TEXT NOT NULL,
    opened REAL NOT NULL, deadline REAL NOT NULL, ending TEXT, delivered BLOB, result TEXT, forget_at REAL
);
{turns.TABLES}
CREATE TABLE sent (id INTEGER PRIMARY KEY);
CREATE TABLE rewards (
    session INTEGER, turn INTEGER, name TEXT, value REAL, PRIMARY KEY (session, turn, name)
) WITHOUT ROWID;
CREATE TABLE tool_calls (
    session INTEGER, number INTEGER, key TEXT, call BLOB NOT NULL, PRIMARY KEY (session, number)
) WITHOUT ROWID;
CREATE TABLE groups (
    id TEXT PRIMARY KEY, place INTEGER NOT NULL, task_id TEXT NOT NULL, members TEXT NOT NULL,
    oldest INTEGER, newest INTEGER, reward REAL, lease_id TEXT, lease_key TEXT NOT NULL DEFAULT ''
);
CREATE TABLE ended (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, id TEXT NOT NULL, why TEXT NOT NULL);
CREATE TABLE engines (
    url TEXT PRIMARY KEY, control TEXT NOT NULL, joined INTEGER NOT NULL, admitted INTEGER NOT NULL,
    policy TEXT NOT NULL DEFAULT ''
);
CREATE TABLE meta (name TEXT PRIMARY KEY, value NUMERIC);
"""
TURN_BITS = 24
WHOLE_SESSION = -1
"""Value of the column `turn` of `rewards` for a reward of the whole session."""
_REQUEST = [field.name for field in fields(SessionRequest)]


def extension(version: int) -> str:
    """Statements that make a database of this version one of the current version."""
    added = "ALTER TABLE engines ADD COLUMN policy TEXT NOT NULL DEFAULT '';" if version < 10 else ""
    return f"{added} PRAGMA user_version = {VERSION};"


def turn_id(number: int, index: int) -> int:
    """Row id in `sent` of a turn; those of a session are adjacent."""
    return number << TURN_BITS | index


def turn_range(number: int) -> tuple[int, int]:
    """First and last possible row id of a session's turns."""
    return turn_id(number, 0), turn_id(number + 1, 0) - 1


def session_and_index(row_id: int) -> tuple[int, int]:
    return row_id >> TURN_BITS, row_id & (1 << TURN_BITS) - 1


def session_row(session: GatewaySession) -> str:
    """The arguments a session was opened with, by Python's json: it writes all JSON that bodies contain."""
    return json.dumps(
        {name: getattr(session, name) for name in (*_REQUEST, "worker", "client", "conversation", "set_up")},
        default=fields_of,
    )


def read_session(about: str, **fields: Any) -> GatewaySession:
    request = json.loads(about)
    request["task"] = request["task"] and Task(**request["task"])
    request["sampling"] = Sampling(**request["sampling"])
    request["limits"] = SessionLimits(**request["limits"])
    request["untrained_models"] = tuple(request["untrained_models"])
    return GatewaySession(**request, **fields)


def ending_row(ending: SessionResult, at: float) -> str:
    return json.dumps(fields_of(ending) | {"at": at})


def read_ending(row: str, loop_offset: float) -> SessionResult:
    ending = json.loads(row)
    ending["outcome"] = Outcome(ending["outcome"])
    reported = ending.get("reported")
    ending["reported"] = None if reported is None else Outcome(reported)
    ending["at"] += loop_offset
    return SessionResult(**ending)


_RESULT = (
    "reward", "reward_parts", "agent_reward", "metrics", "output", "error", "seconds", "reward_started",
    "reward_seconds", "policy_rewards",
)  # fmt: skip


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
