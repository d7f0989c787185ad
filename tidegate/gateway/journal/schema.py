"""The journal's tables, and the conversion between rows and objects.

Turns are MessagePack: a row for each turn of a running session, one compressed pack for a closed session.
Rows are appended in the order of writing, which costs a third of keeping a session's turns adjacent: most
transactions then change a few pages of the table. If a turn is written again, its later row counts. When a
session is closed, the journal's thread replaces its rows by a pack, in the transaction that closes it.

Other input stays JSON. Times are wall-clock seconds, because a loop's clock is meaningless in the next
process.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import zstandard

from tidegate.errors import GatewayError
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sessions.session import GatewaySession, SessionRequest, SessionResult
from tidegate.gateway.sessions.tree import TurnNode, TurnRequestInfo
from tidegate.service import exact
from tidegate.turn import Turn
from tidegate.types import Message, Outcome, Sampling, Task, Trajectory, array_bytes, element_type, fields_of

VERSION = 10
"""Version of this schema; the database's `user_version`."""
TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, key_hash BLOB NOT NULL, about TEXT NOT NULL,
    opened REAL NOT NULL, deadline REAL NOT NULL, ending TEXT, delivered BLOB, result TEXT, forget_at REAL
);
CREATE TABLE turns (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, node BLOB NOT NULL);
CREATE INDEX turns_of_session ON turns (session);
CREATE TABLE packs (session INTEGER PRIMARY KEY, turns BLOB NOT NULL);
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
    ending["reported"] = ending["reported"] and Outcome(ending["reported"])
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


# -- turns -------------------------------------------------------------------------------------------

INSERT_TURN = "INSERT INTO turns (session, node) VALUES (?, ?)"
DELETE_TURNS = ("DELETE FROM turns WHERE session = ?", "DELETE FROM packs WHERE session = ?")
_LEVEL = 1
"""Level 3 takes 4 % fewer bytes and 40 % more time."""
_HEADER = struct.Struct(">BI")  # MessagePack's array of 2³² elements at most
_ARRAY = 0xDD

# Fields by position, as their names would take a quarter of a row.
_FIELDS = [field.name for field in fields(Turn)]
_DEFAULTS = [field.default for field in fields(Turn)]
_ALWAYS = _FIELDS.index("top_ids")
"""Number of the fields that every row has; others are left out at its end while they have their defaults."""
_turn_values = attrgetter(*_FIELDS)
_node_values = attrgetter("request", "tools_hash", "history_hash", "reply_hash", "new_messages", "reply")

# Arrays are read as bytes, which the arrays of the turn then share.
_TYPES = get_type_hints(Turn, include_extras=True)
_ARRAYS = [
    (at, element_type(array))
    for at, name in enumerate(_FIELDS)
    for array in (_TYPES[name], *get_args(_TYPES[name]))
    if get_origin(array) is np.ndarray
]
_STORED = _TYPES | {_FIELDS[at]: bytes | None for at, _ in _ARRAYS}
_VALUES: Any = msgspec.defstruct(
    "_VALUES",
    [
        (name, _STORED[name], *_DEFAULTS[at : at + 1]) if at >= _ALWAYS else (name, _STORED[name])
        for at, name in enumerate(_FIELDS)
    ],
    array_like=True,
)
_Node = tuple[TurnRequestInfo, bytes, bytes, bytes, list[Message], Message]
_Row: Any = tuple[_VALUES, _Node]
_row_decoder: Any = msgspec.msgpack.Decoder(_Row, ext_hook=exact.read_extension)
_pack_decoder: Any = msgspec.msgpack.Decoder(list[_Row], ext_hook=exact.read_extension)


def turn_row(session: int, node: TurnNode) -> tuple[int, bytes]:
    """Returns the parameters of INSERT_TURN for a turn of session number `session`."""
    values = _turn_values(node.turn)
    # So that a turn does not grow with features that are off.
    end = len(values)
    while end > _ALWAYS and values[end - 1] is _DEFAULTS[end - 1]:
        end -= 1
    return session, exact.pack((values[:end], _node_values(node)), array_bytes)


def lost(index: int) -> TurnNode:
    """Returns the placeholder of a turn that was never written or sent; keeps the indices of the others."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    turn = Turn(index, None, ids, ids, logprobs, (), "lost", 1.0, delivered=False, branch="lost: not written")
    reply = {"role": "assistant", "content": ""}
    return TurnNode(turn, TurnRequestInfo(), b"", b"", b"", [], reply, 0)


def pack_turns(connection: sqlite3.Connection, session: int) -> None:
    """Replaces the rows of a session by its pack, within the caller's transaction."""
    rows = [
        data
        for (data,) in connection.execute("SELECT node FROM turns WHERE session = ? ORDER BY id", (session,))
    ]
    if not rows:
        return
    for (earlier,) in connection.execute("SELECT turns FROM packs WHERE session = ?", (session,)):
        rows = [*msgspec.msgpack.decode(zstandard.decompress(earlier), type=list[msgspec.Raw]), *rows]
    data = zstandard.ZstdCompressor(_LEVEL).compress(_HEADER.pack(_ARRAY, len(rows)) + b"".join(rows))
    connection.execute("REPLACE INTO packs VALUES (?, ?)", (session, data))
    connection.execute(DELETE_TURNS[0], (session,))


def read_turns(connection: sqlite3.Connection) -> dict[int, list[bytes]]:
    """Reads the pack and the rows of each session, for `turn_nodes`."""
    sessions: dict[int, list[bytes]] = defaultdict(list)
    for session, data in connection.execute("SELECT session, turns FROM packs"):
        sessions[session].append(data)
    for session, data in connection.execute("SELECT session, node FROM turns ORDER BY id"):
        sessions[session].append(data)
    return sessions


def turn_nodes(session: str, stored: Sequence[bytes], least: int = 0) -> list[TurnNode]:
    """Returns the turns of a session in order, at least `least`; a missing one is `lost`.

    Raises GatewayError if they are damaged.
    """
    found: list[TurnNode] = []
    try:
        for data in stored:
            for turn, node in _decode(data):
                _add(found, turn, node)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError) as error:
        raise GatewayError(
            f"the turns of session {session} in the journal are damaged ({error}), so its group cannot be "
            "trained on. Restore the journal, or remove its directory and continue with --resume, which "
            "issues the groups again",
            status=500,
        ) from error
    found += map(lost, range(len(found), least))
    return found


def _decode(data: bytes) -> list[Any]:
    """Returns the turns of a pack, or the one of a row, each with its values and those of its node."""
    if data.startswith(zstandard.FRAME_HEADER):  # a row begins with MessagePack's array of two
        return _pack_decoder.decode(zstandard.decompress(data))  # type: ignore[no-any-return]
    return [_row_decoder.decode(data)]


def _add(nodes: list[TurnNode], stored: Any, node: _Node) -> None:
    """Adds a turn to those of its session, or replaces the one that was written before."""
    values = list(msgspec.structs.astuple(stored))
    for at, element in _ARRAYS:
        if (data := values[at]) is not None:
            values[at] = np.frombuffer(data, element)
    turn = Turn(**dict(zip(_FIELDS, values, strict=True)))
    restored = TurnNode(turn, *node, 0)
    index = restored.turn.index
    if index == len(nodes):
        nodes.append(restored)
    else:
        nodes += map(lost, range(len(nodes), index))
        nodes[index : index + 1] = [restored]
