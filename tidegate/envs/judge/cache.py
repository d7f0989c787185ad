"""A judge's replies on disk, so that a resumed run does not pay for them again."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tidegate.errors import StorageError

MOST = 100_000
"""Replies that are kept; the oldest are removed."""

_SCHEMA = """
PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS replies (key TEXT UNIQUE, text TEXT);
CREATE TABLE IF NOT EXISTS origins (key TEXT, group_id TEXT, PRIMARY KEY (key, group_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS origins_by_group ON origins (group_id);
CREATE TABLE IF NOT EXISTS erased (group_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON replies
    BEGIN DELETE FROM origins WHERE key = OLD.key; END;
"""
_NOT_ERASED = "NOT EXISTS (SELECT 1 FROM erased WHERE group_id = ?)"


class ReplyCache:
    """Replies by key, with the groups whose episodes they judge. Calls block and may come from any thread.

    Args:
        path: The database; None: in memory.
        most: Limit of the replies.

    Raises:
        StorageError: The database cannot be opened.
    """

    def __init__(self, path: Path | None, most: int = MOST) -> None:
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False)
            self._database.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"cannot open the judge's cache {path}: {error}") from error

    def get(self, key: str, group: str | None = None) -> str | None:
        """Returns the reply with this key, which judges `group`, too, from now on; None if there is none.

        Raises StorageError.
        """
        with self._transaction() as database:
            row = database.execute("SELECT text FROM replies WHERE key = ?", (key,)).fetchone()
            if row is not None:
                self._add_origin(key, group)
        return None if row is None else row[0]

    def put(self, key: str, text: str, group: str | None = None) -> None:
        """Stores a reply, unless `group` is erased, and removes the oldest ones beyond the limit.

        Args:
            key: Key of the reply.
            text: The reply.
            group: Group whose episodes it judges; None: an episode without one, which is never erased.

        Raises:
            StorageError: The database cannot be written.
        """
        with self._transaction() as database:
            insert = f"INSERT OR IGNORE INTO replies SELECT ?, ? WHERE {_NOT_ERASED}"
            database.execute(insert, (key, text, group or ""))
            self._add_origin(key, group)
            limit = "DELETE FROM replies WHERE rowid <= (SELECT max(rowid) FROM replies) - ?"
            database.execute(limit, (self._most,))

    def erase(self, groups: Collection[str]) -> None:
        """Deletes the replies that judge none but these groups, and stores none for them from now on.

        Replies of a database that an earlier version of Tidegate wrote have no groups, and are deleted.
        Idempotent. Raises StorageError.
        """
        names = [(group,) for group in groups]
        with self._transaction() as database:
            database.executemany("INSERT OR IGNORE INTO erased VALUES (?)", names)
            database.executemany("DELETE FROM origins WHERE group_id = ?", names)
            database.execute("DELETE FROM replies WHERE key NOT IN (SELECT key FROM origins)")
        with self._lock, self._naming():
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _add_origin(self, key: str, group: str | None) -> None:
        insert = f"INSERT OR IGNORE INTO origins SELECT ?, ? WHERE {_NOT_ERASED}"
        self._database.execute(insert, (key, group or "", group or ""))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._naming(), self._database as database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"the judge's cache {self._path}: {error}") from error


def erase_replies(path: Path, groups: Collection[str]) -> None:
    """Erases groups from the cache at `path`, if there is one. Raises StorageError."""
    if path.exists():
        with closing(ReplyCache(path)) as cache:
            cache.erase(groups)
