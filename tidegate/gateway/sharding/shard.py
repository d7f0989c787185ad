"""The shards behind a front: processes that it owns, and which of them knows what.

A session's id and key, and a lease's id, begin with the index of the shard that made them, as in `3.9f…`;
a group is where its id's hash says. So nothing has to be looked up, and nothing is shared.
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

MAX_DEATHS = 5
"""So many in a row, with no minute of life between two, and the front gives up."""
HEALTHY_S = 60.0


def id_prefix(index: int) -> str:
    return f"{index}."


def shard_of_id(token: str, shards: int) -> int | None:
    """The shard that made an id or a key; None where it is not one of ours."""
    index, dot, _ = token.removeprefix("tg-").partition(".")
    known = dot and index.isascii() and index.isdecimal() and int(index) < shards
    return int(index) if known else None


def shard_of_group(group_id: str, shards: int) -> int:
    """The shard of a group."""
    digest = blake2b(group_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


class Shard:
    """One gateway process, kept alive on one address by its `keep` task."""

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

    async def keep(self, on_return: Callable[[Shard], Awaitable[None]]) -> None:
        """Start it again whenever it dies, and let `on_return` prepare it before it is up; raises
        StartError where that helps no more."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            since = loop.time()
            how = await self._service.wait_for_exit()
            self.up.clear()
            deaths = 1 if loop.time() - since > HEALTHY_S else deaths + 1
            if deaths > MAX_DEATHS:
                raise StartError(f"{how}, {deaths} times in a row")
            log.error("%s; it is started again at %s", how, self.url)
            self.restarts += 1
            await self._service.restart()
            await on_return(self)
            self.up.set()


def journal_of(journal: Path, index: int, shards: int) -> Path:
    """A shard's part of a journal, all of it where there is one; raises StartError where it was kept by
    another number of shards."""
    others = [one.name for one in journal.glob("shard-*-of-*") if not one.name.endswith(f"-of-{shards}")]
    if shards > 1 and (journal / FILE).exists():
        others.append(FILE)
    if others:
        raise StartError(
            f"{journal} holds {', '.join(sorted(others))}: start with that many shards ({FILE} is of one), "
            "for sessions stay where they are, or give another directory"
        )
    return journal / f"shard-{index}-of-{shards}" if shards > 1 else journal
