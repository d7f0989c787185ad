"""Project keys: a file with the keys' hashes, which `tidegate keys` changes and a gateway reads."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tidegate.errors import ConfigError
from tidegate.gateway.ids import hash_key, new_key

log = logging.getLogger("tidegate.gateway")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PREFIX = "project-"


@dataclass(frozen=True, slots=True)
class ProjectKey:
    """A key without its secret, of which only the hash is stored."""

    name: str
    """Name of the client; part of its groups' ids and of their entries in the ledger."""
    hash: str
    """SHA-256 of the key, hexadecimal."""
    created: float
    """Unix time."""
    calls_per_minute: int | None = None
    """Limit of its model calls; None: none."""
    train: bool = True
    """Whether its calls may be trained on."""


def check_name(name: str) -> None:
    """Raises ConfigError if a key cannot have this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a key's name has 1 to 64 letters, digits, - or _; not {name!r}")


def read_keys(file: Path) -> dict[str, ProjectKey]:
    """Returns the keys of a file by name. Raises ConfigError."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["keys"]
        return {row["name"]: ProjectKey(**row) for row in rows}
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; tidegate keys create NAME makes one") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} holds no project keys: {error!r}") from None


def create_key(file: Path, name: str, *, calls_per_minute: int | None = None, train: bool = True) -> str:
    """Adds a key to a file, which is created if necessary, and returns the key. Raises ConfigError."""
    check_name(name)
    if calls_per_minute is not None and calls_per_minute < 1:
        raise ConfigError(f"calls_per_minute = {calls_per_minute}: a key may make one call a minute or more")
    keys = read_keys(file) if file.exists() else {}
    if name in keys:
        raise ConfigError(f"{file} has a key {name!r} already; revoke it first, or choose another name")
    key = new_key(_PREFIX)
    _write(file, {**keys, name: ProjectKey(name, hash_key(key).hex(), time.time(), calls_per_minute, train)})
    return key


def revoke_key(file: Path, name: str) -> None:
    """Removes a key from a file. Raises ConfigError if there is none of this name."""
    keys = read_keys(file)
    if name not in keys:
        raise ConfigError(f"{file} has no key {name!r}; it has {', '.join(keys) or 'none'}")
    del keys[name]
    _write(file, keys)


def _write(file: Path, keys: dict[str, ProjectKey]) -> None:
    rows = [asdict(key) for key in keys.values()]
    part = file.with_name(f".{file.name}.partial")
    try:
        part.unlink(missing_ok=True)
        # Created with this mode: nobody else may read it, not even while it is written.
        part.touch(0o600)
        part.write_text(json.dumps({"keys": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None


class KeyFile:
    """The keys that a gateway accepts; `reload` follows changes of the file."""

    def __init__(self, file: Path | None) -> None:
        """`file` None: there are no keys. Raises ConfigError if the file cannot be read."""
        self._file = file
        self._keys: dict[str, ProjectKey] = {}
        """By name."""
        self._names: dict[str, str] = {}
        """By the key's hash."""
        self._state = self._stat()
        if file is not None:
            self._set(read_keys(file))

    def _set(self, keys: dict[str, ProjectKey]) -> None:
        self._keys = keys
        self._names = {key.hash: key.name for key in keys.values()}

    @property
    def required(self) -> bool:
        """Whether the gateway has a file of project keys."""
        return self._file is not None

    def name_of(self, key: str) -> str | None:
        """Returns the name of a key; None if there is no such key."""
        return self._names.get(hash_key(key).hex())

    def named(self, name: str) -> ProjectKey | None:
        """Returns the key of this name; None if it was revoked."""
        return self._keys.get(name)

    def reload(self) -> None:
        """Reads the file again if it has changed. While it cannot be read, no key is accepted."""
        state = self._stat()
        if self._file is None or state == self._state:
            return
        self._state = state
        try:
            self._set(read_keys(self._file))
        except ConfigError as error:
            # A key that the new file revokes must not stay valid.
            self._set({})
            log.error("no project key is accepted: %s", error)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            stat = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        # With the inode, as two writes may come within one tick of the clock: each replaces the file.
        return stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino)
