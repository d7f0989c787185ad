"""A journal in a directory: an SQLite database in WAL mode, written by one thread.

A process that is killed loses nothing that was answered. A machine that loses its power may lose the last
moments before it (`synchronous=NORMAL`), and what is left is consistent.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from tidegate import failpoints
from tidegate.errors import StartError
from tidegate.gateway.engines.engine import EngineRecord
from tidegate.gateway.journal import schema as layout
from tidegate.gateway.journal.base import REMEMBERED, Journal, Recovered, StoredGroup
from tidegate.gateway.journal.recovery import load
from tidegate.gateway.journal.writer import Statement, Writer
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.tree import TurnNode
from tidegate.types import CLIENT_CLOSED, Trajectory

FILE = "journal.sqlite"
LAZY_S = 0.05
"""How long after its sending a reply is written down as sent, at most."""
_SETTINGS = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA secure_delete = ON;
PRAGMA journal_size_limit = 67108864;
PRAGMA cache_size = -16384;
"""
_ENDED = "INSERT INTO ended (kind, id, why) VALUES (?, ?, ?)"
_UNSENT = "DELETE FROM sent WHERE id = ?"
_FORGET_ENDED: Statement = (
    "DELETE FROM ended WHERE seq <= (SELECT max(seq) FROM ended) - ?",
    [(2 * REMEMBERED,)],
)


class DiskJournal(Journal):
    """Keeps everything in a directory, which one gateway at a time may use."""

    def __init__(self, directory: Path) -> None:
        """Open it, or make it. Raises StartError where that cannot be, or another gateway uses it."""
        self._path = directory / FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(0o600)  # it holds the answers; what SQLite puts beside it has the same mode
            self._path.chmod(0o600)
            self._connection = _opened(self._path)
        except (OSError, sqlite3.Error) as error:
            raise StartError(_unusable(self._path, error)) from error
        self._sent: list[int] = []
        self._flushing: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str | None:
        return self._writer.problem

    def start(self) -> Recovered:
        try:
            recovered = load(self._connection)
        except sqlite3.Error as error:
            raise StartError(_unusable(self._path, error)) from error
        self._writer = Writer(self._connection, self._path)
        return recovered

    async def close(self) -> None:
        self._flush()
        await self._writer.close()

    # -- sessions and turns ----------------------------------------------------------------------

    async def opened(self, session: GatewaySession) -> None:
        row = (
            session.number, session.id, session.key_hash, layout.about(session),
            _wall(session.opened), _wall(session.deadline), None, None, None, None,
        )  # fmt: skip
        await self._writer.write("opened", (f"INSERT INTO sessions VALUES ({', '.join('?' * 10)})", [row]))

    def recorded(self, session: GatewaySession, nodes: Sequence[TurnNode]) -> asyncio.Future[None]:
        rows = [layout.turn_row(session.number, node) for node in nodes]
        return self._writer.write("recorded", (layout.INSERT_TURN, rows), *_closed(session, nodes))

    def sent(self, session: GatewaySession, index: int) -> None:
        self._sent.append(layout.turn_id(session.number, index))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(LAZY_S, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        rows, self._sent, self._flushing = [(one,) for one in self._sent], [], None
        if rows:
            done = self._writer.write("sent", ("INSERT OR IGNORE INTO sent VALUES (?)", rows))
            # What could not be written stays in doubt, which later requests resolve.
            done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def rewarded(self, session: GatewaySession, name: str, value: float, turn: int | None) -> None:
        row = (session.number, layout.WHOLE if turn is None else turn, name, value)
        await self._writer.write("rewarded", ("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?, ?)", [row]))

    async def closing(self, session: GatewaySession) -> None:
        assert session.ending is not None, "a session closes with an ending"
        delivered = bytes(node.turn.delivered for node in session.tree.nodes)
        told = layout.ending_row(session.ending, _wall(session.ending.at))
        update = "UPDATE sessions SET ending = ?, delivered = ? WHERE number = ?"
        late = [layout.turn_row(session.number, node) for node in session.unpersisted.values()]
        await self._writer.write(
            "closing", (layout.INSERT_TURN, late), (update, [(told, delivered, session.number)])
        )

    async def finished(self, session: GatewaySession, trajectory: Trajectory, forget_at: float) -> None:
        row = (layout.result_row(trajectory), _wall(forget_at), session.number)
        await self._writer.write(
            "finished", ("UPDATE sessions SET result = ?, forget_at = ? WHERE number = ?", [row])
        )

    async def forgotten(self, sessions: Sequence[GatewaySession]) -> None:
        if sessions:
            await self._writer.write("forgotten", *self._deletion(sessions))

    def _deletion(self, sessions: Sequence[GatewaySession]) -> list[Statement]:
        numbers = {session.number for session in sessions}
        self._sent = [one for one in self._sent if layout.session_and_index(one)[0] not in numbers]
        ranges = [layout.turn_range(number) for number in numbers]
        return [
            ("DELETE FROM sessions WHERE number = ?", [(number,) for number in numbers]),
            ("DELETE FROM turns WHERE id BETWEEN ? AND ?", ranges),
            ("DELETE FROM sent WHERE id BETWEEN ? AND ?", ranges),
            ("DELETE FROM rewards WHERE session = ?", [(number,) for number in numbers]),
        ]

    # -- groups ----------------------------------------------------------------------------------

    async def sealed(self, entry: StoredGroup) -> None:
        members = json.dumps([trajectory.session_id for trajectory in entry.group.trajectories])
        row = (entry.group.id, entry.order, entry.group.task_id, members)
        await self._writer.write(
            "sealed", ("INSERT INTO groups (id, place, task_id, members) VALUES (?, ?, ?, ?)", [row])
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
        await self._writer.write("returned", (update, [(one,) for one in groups]))

    async def ended(
        self, group_id: str, why: str, lease_id: str | None, sessions: Sequence[GatewaySession]
    ) -> None:
        over = [("group", group_id, why), *([("lease", lease_id, why)] if lease_id is not None else [])]
        await self._writer.write(
            "ended",
            ("DELETE FROM groups WHERE id = ?", [(group_id,)]),
            (_ENDED, over),
            _FORGET_ENDED,
            *self._deletion(sessions),
        )

    async def engines(self, engines: Sequence[EngineRecord], led: bool) -> None:
        rows = [(one.url, json.dumps(one.control), one.joined, one.admitted) for one in engines]
        await self._writer.write(
            "engines",
            ("DELETE FROM engines", [()]),
            ("INSERT INTO engines VALUES (?, ?, ?, ?)", rows),
            ("REPLACE INTO meta VALUES ('led', ?)", [(led,)]),
        )


def _opened(path: Path) -> sqlite3.Connection:
    """The database, empty where it is new; made here, used in the writer's thread."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    connection.executescript(_SETTINGS)
    [(version,)] = connection.execute("PRAGMA user_version")
    if version == 0:
        failpoints.reach("made.before")
        connection.executescript(f"BEGIN; {layout.TABLES} PRAGMA user_version = {layout.VERSION};")
        failpoints.reach("made.within")
        connection.execute("COMMIT")
        failpoints.reach("made.after")
    elif version != layout.VERSION:
        connection.close()
        raise StartError(f"{path} is a journal of layout {version}, this gateway reads {layout.VERSION}")
    return connection


def _closed(session: GatewaySession, nodes: Sequence[TurnNode]) -> list[Statement]:
    """Whether the turns of closed streams were delivered, which is known as they are written."""
    statements: list[Statement] = []
    for node in nodes:
        if node.turn.finish_reason == CLIENT_CLOSED:
            row = (layout.turn_id(session.number, node.turn.index),)
            sql = "INSERT OR IGNORE INTO sent VALUES (?)" if node.turn.delivered else _UNSENT
            statements.append((sql, [row]))
    return statements


def _wall(loop_time: float) -> float:
    return loop_time - asyncio.get_running_loop().time() + time.time()


def _unusable(path: Path, error: Exception) -> str:
    if "locked" in str(error):
        return f"the journal {path} is in use by another gateway: give each a directory of its own"
    return f"the journal {path} cannot be used: {error}"
