"""Stores the journal in an SQLite database in WAL mode, written by one thread.

A killed process loses nothing that was acknowledged. A power failure may lose the last transactions
(`synchronous=NORMAL`); the database stays consistent.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from tidegate import failpoints
from tidegate.errors import StartError
from tidegate.gateway.engines.engine import EngineRecord
from tidegate.gateway.journal import schema
from tidegate.gateway.journal.base import REMEMBERED, Journal, Recovered, StoredGroup
from tidegate.gateway.journal.recovery import load
from tidegate.gateway.journal.writer import Statement, Writer
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.tree import TurnNode
from tidegate.turn import CLIENT_CLOSED
from tidegate.types import ToolCall, Trajectory, to_wire

FILE = "journal.sqlite"
FLUSH_DELAY_S = 0.05
"""Longest delay in seconds between sending a reply and recording that it was sent."""
_SETTINGS = """
PRAGMA page_size = 1024;
PRAGMA wal_autocheckpoint = 4096;
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA secure_delete = ON;
PRAGMA journal_size_limit = 67108864;
PRAGMA cache_size = -16384;
"""
_ENDED = "INSERT INTO ended (kind, id, why) VALUES (?, ?, ?)"
_SEAL = """
INSERT INTO groups (id, place, task_id, members, oldest, newest, reward) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_UNSENT = "DELETE FROM sent WHERE id = ?"
_FORGET_ENDED: Statement = (
    "DELETE FROM ended WHERE seq <= (SELECT max(seq) FROM ended) - ? AND kind != 'erased'",
    [(2 * REMEMBERED,)],
)


class DiskJournal(Journal):
    """Stores everything in a directory, which one gateway at a time may use."""

    def __init__(self, directory: Path) -> None:
        """Open or create the database. Raises StartError if that fails or another gateway uses it."""
        self._path = directory / FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(0o600)  # contains tasks' answers; SQLite gives its side files the same mode
            self._path.chmod(0o600)
            self._connection = _opened(self._path)
        except (OSError, sqlite3.Error) as error:
            raise StartError(_unusable(self._path, error)) from error
        self._writer = Writer(self._connection, self._path)
        self._sent: list[int] = []
        self._flushing: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str | None:
        return self._writer.problem

    def load(self) -> Recovered:
        collecting = gc.isenabled()
        gc.disable()  # its passes over the growing number of objects would take half of the time
        try:
            return load(self._connection)
        except sqlite3.Error as error:
            raise StartError(_unusable(self._path, error)) from error
        finally:
            if collecting:
                gc.enable()

    async def close(self) -> None:
        self._flush()
        await self._writer.close()

    # -- sessions and turns ----------------------------------------------------------------------

    def opened(self, session: GatewaySession) -> asyncio.Future[None]:
        row = (
            session.number, session.id, session.key_hash, schema.session_row(session),
            _wall(session.opened), _wall(session.deadline), None, None, None, None,
        )  # fmt: skip
        return self._writer.write("opened", (f"INSERT INTO sessions VALUES ({', '.join('?' * 10)})", [row]))

    async def offered(self, sessions: Sequence[GatewaySession]) -> None:
        rows = [
            (
                session.key_hash, schema.session_row(session), _wall(session.opened), _wall(session.deadline),
                session.number,
            )
            for session in sessions
        ]  # fmt: skip
        update = "UPDATE sessions SET key_hash = ?, about = ?, opened = ?, deadline = ? WHERE number = ?"
        await self._writer.write("offered", (update, rows))

    async def set_up(self, session: GatewaySession) -> None:
        row = (schema.session_row(session), session.number)
        await self._writer.write("set_up", ("UPDATE sessions SET about = ? WHERE number = ?", [row]))

    async def tool_called(
        self, session: GatewaySession, number: int, call: ToolCall, key: str | None
    ) -> None:
        row = (session.number, number, key, to_wire(call))
        await self._writer.write("tool_called", ("INSERT INTO tool_calls VALUES (?, ?, ?, ?)", [row]))

    def recorded(self, session: GatewaySession, nodes: Sequence[TurnNode]) -> asyncio.Future[None]:
        rows = [schema.turn_row(session.number, node) for node in nodes]
        return self._writer.write("recorded", (schema.INSERT_TURN, rows), *_closed(session, nodes))

    def sent(self, session: GatewaySession, index: int) -> None:
        self._sent.append(schema.turn_id(session.number, index))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_DELAY_S, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        rows, self._sent, self._flushing = [(turn_id,) for turn_id in self._sent], [], None
        if rows:
            done = self._writer.write("sent", ("INSERT OR IGNORE INTO sent VALUES (?)", rows))
            # A failed write leaves the turns in doubt, which later requests resolve.
            done.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def rewarded(
        self, session: GatewaySession, name: str, value: float, turn: int | None, *, annotated: bool
    ) -> None:
        row = (session.number, schema.WHOLE_SESSION if turn is None else turn, name, value)
        about = [(schema.session_row(session), session.number)] if annotated else []
        await self._writer.write(
            "rewarded",
            ("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?, ?)", [row]),
            ("UPDATE sessions SET about = ? WHERE number = ?", about),
        )

    async def closing(self, session: GatewaySession) -> None:
        assert session.ending is not None, "a session closes with an ending"
        delivered = bytes(node.turn.delivered for node in session.tree.nodes)
        ending = schema.ending_row(session.ending, _wall(session.ending.at))
        update = "UPDATE sessions SET ending = ?, delivered = ? WHERE number = ?"
        late = [schema.turn_row(session.number, node) for node in session.unpersisted.values()]
        await self._writer.write(
            "closing",
            (schema.INSERT_TURN, late),
            functools.partial(schema.pack_turns, session=session.number),
            (update, [(ending, delivered, session.number)]),
        )

    async def finished(self, session: GatewaySession, trajectory: Trajectory, forget_at: float) -> None:
        row = (schema.result_row(trajectory), _wall(forget_at), session.number)
        await self._writer.write(
            "finished", ("UPDATE sessions SET result = ?, forget_at = ? WHERE number = ?", [row])
        )

    async def forgotten(self, sessions: Sequence[GatewaySession]) -> None:
        if sessions:
            await self._writer.write("forgotten", *self._deletion(sessions))

    def _deletion(self, sessions: Sequence[GatewaySession]) -> list[Statement]:
        numbers = {session.number for session in sessions}
        self._sent = [row_id for row_id in self._sent if schema.session_and_index(row_id)[0] not in numbers]
        ranges = [schema.turn_range(number) for number in numbers]
        return [
            ("DELETE FROM sessions WHERE number = ?", [(number,) for number in numbers]),
            *((sql, [(number,) for number in numbers]) for sql in schema.DELETE_TURNS),
            ("DELETE FROM sent WHERE id BETWEEN ? AND ?", ranges),
            ("DELETE FROM rewards WHERE session = ?", [(number,) for number in numbers]),
            ("DELETE FROM tool_calls WHERE session = ?", [(number,) for number in numbers]),
        ]

    # -- groups ----------------------------------------------------------------------------------

    async def sealed(self, entry: StoredGroup, changed: Sequence[Trajectory] = ()) -> None:
        summary = (entry.summary.oldest_version, entry.summary.newest_version, entry.summary.reward)
        row = (entry.id, entry.order, entry.read().task_id, json.dumps(entry.sessions), *summary)
        results = [(schema.result_row(trajectory), trajectory.session_id) for trajectory in changed]
        await self._writer.write(
            "sealed",
            ("UPDATE sessions SET result = ? WHERE id = ?", results),
            (_SEAL, [row]),
        )

    async def entered(self, epoch: int, fenced: Sequence[str]) -> None:
        await self._writer.write(
            "entered",
            ("REPLACE INTO meta VALUES ('epoch', ?)", [(epoch,)]),
            ("UPDATE groups SET lease_id = NULL, lease_key = ''", [()]),
            (_ENDED, [("lease", lease_id, "fenced") for lease_id in fenced]),
        )

    async def leased(self, leases: Sequence[tuple[str, str, str]]) -> None:
        rows = [(lease_id, key, group_id) for group_id, lease_id, key in leases]
        await self._writer.write(
            "leased", ("UPDATE groups SET lease_id = ?, lease_key = ? WHERE id = ?", rows)
        )

    async def returned(self, groups: Sequence[str]) -> None:
        update = "UPDATE groups SET lease_id = NULL, lease_key = '' WHERE id = ?"
        await self._writer.write("returned", (update, [(group_id,) for group_id in groups]))

    async def ended(
        self,
        group_id: str,
        why: str,
        lease_id: str | None,
        sessions: Sequence[GatewaySession],
        *,
        erased: bool = False,
    ) -> None:
        ended = [("group", group_id, why), *([("lease", lease_id, why)] if lease_id is not None else [])]
        ended += [("erased", group_id, why)] if erased else []
        await self._writer.write(
            "ended",
            ("DELETE FROM groups WHERE id = ?", [(group_id,)]),
            (_ENDED, ended),
            _FORGET_ENDED,
            *self._deletion(sessions),
        )

    async def erasures_acknowledged(self, groups: Sequence[str]) -> None:
        delete = "DELETE FROM ended WHERE kind = 'erased' AND id IN (SELECT value FROM json_each(?))"
        await self._writer.write("erasures_acknowledged", (delete, [(json.dumps(groups),)]))

    async def engines(self, engines: Sequence[EngineRecord], trainer_managed: bool) -> None:
        rows = [
            (engine.url, json.dumps(engine.control), engine.joined, engine.admitted, engine.policy)
            for engine in engines
        ]
        await self._writer.write(
            "engines",
            ("DELETE FROM engines", [()]),
            ("INSERT INTO engines VALUES (?, ?, ?, ?, ?)", rows),
            ("REPLACE INTO meta VALUES ('led', ?)", [(trainer_managed,)]),
        )


def _opened(path: Path) -> sqlite3.Connection:
    """Open the database, creating its tables if it is new; the writer's thread uses it later."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    connection.executescript(_SETTINGS)
    [(version,)] = connection.execute("PRAGMA user_version")
    if version == 0:
        failpoints.reach("made.before")
        connection.executescript(f"BEGIN; {schema.TABLES} PRAGMA user_version = {schema.VERSION};")
        failpoints.reach("made.within")
        connection.execute("COMMIT")
        failpoints.reach("made.after")
    elif version != schema.VERSION:
        connection.close()
        raise StartError(
            f"{path} has journal schema version {version}, but this gateway reads {schema.VERSION}: start "
            "it with the Tidegate that wrote the journal, or delete its directory, which loses the "
            "sessions and groups that were not trained on"
        )
    return connection


def _closed(session: GatewaySession, nodes: Sequence[TurnNode]) -> list[Statement]:
    """Statements that record whether the turns of closed streams were delivered."""
    statements: list[Statement] = []
    for node in nodes:
        if node.turn.finish_reason == CLIENT_CLOSED:
            row = (schema.turn_id(session.number, node.turn.index),)
            sql = "INSERT OR IGNORE INTO sent VALUES (?)" if node.turn.delivered else _UNSENT
            statements.append((sql, [row]))
    return statements


def _wall(loop_time: float) -> float:
    return loop_time - asyncio.get_running_loop().time() + time.time()


def _unusable(path: Path, error: Exception) -> str:
    if "locked" in str(error):
        return f"the journal {path} is in use by another gateway; give each gateway its own directory"
    return f"cannot open the journal {path}: {error}"
