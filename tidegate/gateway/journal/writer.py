"""The journal's writer: one thread that owns the database, and commits what has gathered as one transaction.

What the event loop writes in one pass goes to the thread together; while a transaction is being written
others wait in the queue, and the next one takes them all. So the cost of a commit is shared by those who
come at the same time, and nobody waits for company.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate import failpoints
from tidegate.errors import GatewayError

log = logging.getLogger("tidegate.gateway")
MOST_AT_ONCE = 512
TEND_S = 1.0
"""How long deleted rows may stay readable in the write-ahead log, and space unused in the file."""
_SPARE_PAGES = 1024
"""Free pages that are kept for what comes next."""

Statement = tuple[str, Sequence[Sequence[Any]]]
"""SQL and the rows that it is executed with."""


@dataclass(eq=False, slots=True)
class Write:
    """Statements that are written together or not at all; `name` is that of its failpoints."""

    name: str
    statements: Sequence[Statement]
    done: asyncio.Future[None]
    error: Exception | None = None


class Writer:
    """Made on a running event loop, for a connection that nobody else uses any more."""

    def __init__(self, connection: sqlite3.Connection, place: Path) -> None:
        self._connection = connection
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Sequence[Write] | None] = queue.SimpleQueue()
        self._fresh: list[Write] = []
        self._deleted = False
        self._tended = time.monotonic()
        self.problem: str | None = None
        """Why the last write failed; None where it did not."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, name: str, *statements: Statement) -> asyncio.Future[None]:
        """Done when it is committed; fails with GatewayError (503) where it is not."""
        done = self._loop.create_future()
        if not self._fresh:
            self._loop.call_soon(self._hand_over)
        self._fresh.append(Write(name, statements, done))
        return done

    def _hand_over(self) -> None:
        if self._fresh:
            self._queue.put(self._fresh)
            self._fresh = []

    async def close(self) -> None:
        """Write what is queued and close the database."""
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        going = True
        while going:
            batch, going = self._gather()
            if batch:
                self._commit(batch)
                self._tell(batch)
            elif self.problem is not None and going:
                self._try()
            if self._deleted and time.monotonic() - self._tended >= TEND_S:
                self._tend()
        self._connection.close()

    def _gather(self) -> tuple[list[Write], bool]:
        """What is queued, and whether more may come; no writes where it is time for other work."""
        batch: list[Write] = []
        wait_s = TEND_S if self._deleted or self.problem is not None else None
        with contextlib.suppress(queue.Empty):
            writes = self._queue.get(timeout=wait_s)
            while writes is not None:
                batch += writes
                if len(batch) >= MOST_AT_ONCE:
                    break
                writes = self._queue.get_nowait()
            return batch, writes is not None
        return batch, True

    def _commit(self, batch: list[Write]) -> None:
        try:
            self._transaction(batch)
        except Exception as error:  # noqa: BLE001 - it is told to whoever waits for the write
            if len(batch) > 1:  # one that cannot be written must not take the others with it
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
                for sql, rows in write.statements:
                    if len(rows) == 1:
                        execute(sql, rows[0])
                    else:
                        self._connection.executemany(sql, rows)
                    self._deleted |= sql.startswith("DELETE")
                failpoints.reach(f"{write.name}.within")
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        if self.problem is not None:
            log.warning("the journal %s is written again", self._place)
            self.problem = None
        for write in batch:
            failpoints.reach(f"{write.name}.after")

    def _failed(self, error: Exception) -> None:
        if isinstance(error, sqlite3.Error):
            if self.problem is None:
                log.error("the journal %s cannot be written: %s", self._place, error)
            self.problem = f"the journal {self._place} cannot be written: {error}"

    def _try(self) -> None:
        """Whether it can be written again, as nobody else tries."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("REPLACE INTO meta VALUES ('tried', ?)", (time.time(),))
            self.problem = None

    def _tend(self) -> None:
        """Drop what was deleted from the write-ahead log too, and give unused space back."""
        self._tended, self._deleted = time.monotonic(), False
        failpoints.reach("tended.before")
        try:
            [(spare,)] = self._connection.execute("PRAGMA freelist_count")
            if spare > _SPARE_PAGES:
                self._connection.execute(f"PRAGMA incremental_vacuum({spare - _SPARE_PAGES})").fetchall()
            failpoints.reach("tended.within")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            failpoints.reach("tended.after")
        except sqlite3.Error as error:
            self._deleted = True
            self._failed(error)

    def _tell(self, batch: list[Write]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, batch)

    def _settle(self, batch: list[Write]) -> None:
        for write in batch:
            if write.done.done():
                continue
            if write.error is None:
                write.done.set_result(None)
            else:
                why = (
                    f"the journal {self._place} cannot be written ({write.error}); {write.name} was not done"
                )
                write.done.set_exception(GatewayError(why, status=503))
