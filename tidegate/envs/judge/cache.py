"""A judge's replies on disk, so that a resumed run does not pay for them again."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from tidegate.errors import StorageError

MOST = 100_000
"""Replies that are kept; the oldest are removed."""


class ReplyCache:
    """Replies by key. Calls block and may come from any thread.

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
            self._database = sqlite3.connect(
                path or ":memory:", isolation_level=None, check_same_thread=False
            )
            self._database.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
                "CREATE TABLE IF NOT EXISTS replies (key TEXT UNIQUE, text TEXT)"
            )
            [(self._number,)] = self._database.execute("SELECT count(*) FROM replies")
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"cannot open the judge's cache {path}: {error}") from error

    def get(self, key: str) -> str | None:
        """Returns the reply with this key; None if there is none. Raises StorageError."""
        with self._lock:
            row = self._execute("SELECT text FROM replies WHERE key = ?", key).fetchone()
        return None if row is None else row[0]

    def put(self, key: str, text: str) -> None:
        """Stores a reply, and removes the oldest one beyond the limit. Raises StorageError."""
        with self._lock:
            self._number += self._execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", key, text).rowcount
            if self._number > self._most:
                oldest = "DELETE FROM replies WHERE rowid = (SELECT min(rowid) FROM replies)"
                self._number -= self._execute(oldest).rowcount

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _execute(self, sql: str, *values: str) -> sqlite3.Cursor:
        try:
            return self._database.execute(sql, values)
        except sqlite3.Error as error:
            raise StorageError(f"the judge's cache {self._path}: {error}") from error
