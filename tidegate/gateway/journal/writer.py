"""Writes the journal in one thread with group commit: all queued writes form one transaction.

Writes from one pass of the event loop are queued together; writes that arrive during a transaction go into
the next one. Concurrent writes thus share the cost of a commit, and no write is delayed to wait for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate import failpoints
from tidegate.errors import GatewayError

log = logging.getLogger("tidegate.gateway")
MAX_BATCH = 512
MAINTAIN_S = 1.0
"""Seconds until deleted rows are removed from the write-ahead log and unused space is freed."""
_SPARE_PAGES = 2048
"""Free pages kept for later writes."""

_VACUUM_PAGES = 4096
"""Pages freed at a time, as writes wait meanwhile."""

Statement = tuple[str, Sequence[Sequence[Any]]] | Callable[[sqlite3.Connection], None]
"""SQL and its parameter rows, or a function that changes rows."""


@dataclass(eq=False, slots=True)
class Write:
    """Statements of one atomic write; `name` is the prefix of its failpoints."""

    name: str
    statements: Sequence[Statement]
    done: asyncio.Future[None]
    error: Exception | None = None


class Writer:
    """Owns a connection."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._queue: queue.SimpleQueue[Sequence[Write] | None] = queue.SimpleQueue()
        self._pending: list[Write] = []
        self._deleted = False
        self._maintained_at = time.monotonic()
        self.problem: str | None = None
        """Why the last write failed; None if it succeeded."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, name: str, *statements: Statement) -> asyncio.Future[None]:
        """Queue a write; the future resolves at the commit, or fails with GatewayError (503)."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        # One call for all writes of this pass of the loop: they form one batch.
        if not self._pending:
            loop.call_soon(self._submit)
        self._pending.append(Write(name, statements, done))
        return done

    def _submit(self) -> None:
        if self._pending:
            self._queue.put(self._pending)
            self._pending = []

    async def close(self) -> None:
        """Write what is queued and close the database."""
        self._submit()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        running = True
        while running:
            batch, running = self._next_batch()
            if batch:
                self._commit(batch)
                self._resolve(batch)
            elif self.problem is not None and running:
                self._probe()
            if self._deleted and time.monotonic() - self._maintained_at >= MAINTAIN_S:
                self._maintain()
        self._connection.close()

    def _next_batch(self) -> tuple[list[Write], bool]:
        """The queued writes, empty after MAINTAIN_S with pending work; False once closed."""
        batch: list[Write] = []
        wait_s = MAINTAIN_S if self._deleted or self.problem is not None else None
        with contextlib.suppress(queue.Empty):
            writes = self._queue.get(timeout=wait_s)
            while writes is not None:
                batch += writes
                if len(batch) >= MAX_BATCH:
                    break
                writes = self._queue.get_nowait()
            return batch, writes is not None
        return batch, True

    def _commit(self, batch: list[Write]) -> None:
        try:
            self._transaction(batch)
        except Exception as error:  # noqa: BLE001 - set on the future of the write
            if len(batch) > 1:  # commit them separately, so that only the faulty write fails
                for write in batch:
                    self._commit([write])
            else:
                batch[0].error = error
                self._failed(error)

    def _transaction(self, batch: list[Write]) -> None:
        for write in batch:
            failpoints.reach(f"{write.name}.before")
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            for write in batch:
                for statement in write.statements:
                    self._deleted |= _execute(self._connection, statement)
                failpoints.reach(f"{write.name}.within")
            execute("COMMIT")
        except BaseException:
            # SQLite rolls back by itself after some errors, such as a full disk; a second ROLLBACK would
            # hide the cause.
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        if self.problem is not None:
            log.warning("the journal %s can be written again", self._path)
            self.problem = None
        for write in batch:
            failpoints.reach(f"{write.name}.after")

    def _failed(self, error: Exception) -> None:
        if isinstance(error, sqlite3.Error):
            if self.problem is None:
                log.error("the journal %s cannot be written: %s", self._path, error)
            self.problem = f"the journal {self._path} cannot be written: {error}"

    def _probe(self) -> None:
        """Test whether the journal can be written again."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("REPLACE INTO meta VALUES ('tried', ?)", (time.time(),))
            self.problem = None

    def _maintain(self) -> None:
        """Remove deleted rows from the write-ahead log and free unused space."""
        self._maintained_at, self._deleted = time.monotonic(), False
        failpoints.reach("tended.before")
        try:
            [(spare,)] = self._connection.execute("PRAGMA freelist_count")
            if spare > _SPARE_PAGES:
                pages = min(spare - _SPARE_PAGES, _VACUUM_PAGES)
                # `execute` would end at the statement's first step, which frees one page.
                self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")
                self._deleted = spare - pages > _SPARE_PAGES  # free the others later, so that writes go on
            failpoints.reach("tended.within")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            failpoints.reach("tended.after")
        except sqlite3.Error as error:
            self._deleted = True
            self._failed(error)

    def _resolve(self, batch: list[Write]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            batch[0].done.get_loop().call_soon_threadsafe(self._resolve_on_loop, batch)

    def _resolve_on_loop(self, batch: list[Write]) -> None:
        for write in batch:
            # The caller was cancelled, and setting a result of a cancelled future raises.
            if write.done.done():
                continue
            if write.error is None:
                write.done.set_result(None)
            else:
                why = f"the journal {self._path} cannot be written ({write.error}); {write.name!r} failed"
                write.done.set_exception(GatewayError(why, status=503))


def _execute(connection: sqlite3.Connection, statement: Statement) -> bool:
    """Executes a statement; returns whether it deletes rows."""
    if callable(statement):
        statement(connection)
        return True
    sql, rows = statement
    if len(rows) == 1:
        connection.execute(sql, rows[0])
    else:
        connection.executemany(sql, rows)
    return sql.startswith("DELETE")
