"""The shard processes behind a router, and the mapping of ids to shards.

Session ids, session keys and lease ids begin with the index of their shard, as in `3.9f…`; the shard of a
group is a hash of its id. Routing therefore needs no lookup and no shared state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tidegate.errors import StartError
from tidegate.gateway.journal.sqlite import FILE
from tidegate.service.service import Service

log = logging.getLogger("tidegate.gateway.sharding.shard")

MAX_EXITS = 5
"""Consecutive exits, each within HEALTHY_S of the start, after which the router gives up."""
HEALTHY_S = 60.0


def id_prefix(index: int) -> str:
    return f"{index}."


def shard_of_id(token: str, shards: int) -> int | None:
    """The shard index in an id or key; None if it is invalid."""
    index, dot, _ = token.removeprefix("tg-").partition(".")
    # `int` alone also reads `01`, ` 1` and digits of other scripts.
    return int(index) if dot and index in map(str, range(shards)) else None


def shard_of_group(group_id: str, shards: int) -> int:
    """The shard index of a group, a hash of its id."""
    # JSON may hold a lone surrogate, which UTF-8 cannot.
    digest = blake2b(group_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


class Shard:
    """A gateway process at a fixed address, which its `supervise` task restarts."""

    def __init__(
        self,
        index: int,
        arguments: Sequence[str],
        directory: Path,
        secrets: Mapping[str, Any],
        host: str = "127.0.0.1",
    ) -> None:
        self.index = index
        self.restarts = 0
        self.up = asyncio.Event()
        self._service = Service(
            "gateway",
            lambda: arguments,
            directory,
            secrets=secrets,
            name=f"shard-{index}",
            shares_log=True,
            host=host,
        )

    @property
    def url(self) -> str:
        return self._service.url

    async def start(self) -> None:
        """Raises StartError."""
        await self._service.start()
        self.up.set()

    async def stop(self) -> None:
        await self._service.stop()

    async def supervise(self, on_restart: Callable[[Shard], Awaitable[None]]) -> None:
        """Restart the process whenever it exits, and await `on_restart` before it is up.

        Raises StartError after MAX_EXITS consecutive exits.
        """
        loop = asyncio.get_running_loop()
        exits = 0
        while True:
            since = loop.time()
            how = await self._service.wait_for_exit()
            self.up.clear()
            exits = 1 if loop.time() - since > HEALTHY_S else exits + 1
            if exits > MAX_EXITS:
                raise StartError(f"{how}, {exits} times in a row")
            log.error("%s; restarting it at %s", how, self.url)
            self.restarts += 1
            await self._service.restart()
            await on_restart(self)
            self.up.set()


def journal_of(journal: Path, index: int, shards: int) -> Path:
    """The journal directory of a shard: the directory itself if there is one shard, else a subdirectory.

    Raises StartError if the journal was written by another number of shards.
    """
    others = [path.name for path in journal.glob("shard-*-of-*") if not path.name.endswith(f"-of-{shards}")]
    if shards > 1 and (journal / FILE).exists():
        others.append(FILE)
    if others:
        raise StartError(
            f"{journal} contains {', '.join(sorted(others))}, written by another number of shards ({FILE} is "
            "from one); sessions do not move between shards: start with that number, or use another directory"
        )
    return journal / f"shard-{index}-of-{shards}" if shards > 1 else journal
