"""Stores turns: a row for each turn of a running session, one compressed pack for a closed session.

Rows are appended in the order of writing, which costs a third of keeping a session's turns adjacent: most
transactions then change a few pages of the table. If a turn is written again, its later row counts. When a
session is closed, the journal's thread replaces its rows by a pack, in the transaction that closes it.
"""

from __future__ import annotations

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
from tidegate.gateway.sessions.tree import TurnNode, TurnRequestInfo
from tidegate.service import exact
from tidegate.turn import Turn
from tidegate.types import Message, array_bytes, element_type

TABLES = """
CREATE TABLE turns (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, node BLOB NOT NULL);
CREATE INDEX turns_of_session ON turns (session);
CREATE TABLE packs (session INTEGER PRIMARY KEY, turns BLOB NOT NULL);
"""
INSERT = "INSERT INTO turns (session, node) VALUES (?, ?)"
DELETE = ("DELETE FROM turns WHERE session = ?", "DELETE FROM packs WHERE session = ?")
_LEVEL = 1
"""Level 3 takes 4 % fewer bytes and 40 % more time."""
_HEADER = struct.Struct(">BI")  # MessagePack's array of 2³² elements at most
_ARRAY = 0xDD

# Fields by position, as their names would take a quarter of a row.
_FIELDS = [field.name for field in fields(Turn)]
_DEFAULTS = [field.default for field in fields(Turn)]
_ALWAYS = _FIELDS.index("top_ids")
"""Number of the fields that every row has. Rows of earlier schemas lack some of the others, at the end."""
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


def row(session: int, node: TurnNode) -> tuple[int, bytes]:
    """Returns the parameters of INSERT for a turn of session number `session`."""
    values = _turn_values(node.turn)
    # Defaults at the end are left out, as from turns of earlier schemas, so that a turn does not grow with
    # features that are off.
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


def pack(connection: sqlite3.Connection, session: int) -> None:
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
    connection.execute(DELETE[0], (session,))


def read(connection: sqlite3.Connection) -> dict[int, list[bytes]]:
    """Reads the pack and the rows of each session, for `nodes`."""
    sessions: dict[int, list[bytes]] = defaultdict(list)
    for session, data in connection.execute("SELECT session, turns FROM packs"):
        sessions[session].append(data)
    for session, data in connection.execute("SELECT session, node FROM turns ORDER BY id"):
        sessions[session].append(data)
    return sessions


def nodes(session: str, stored: Sequence[bytes], least: int = 0) -> list[TurnNode]:
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
