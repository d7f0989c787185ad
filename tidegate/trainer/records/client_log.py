"""`clients.jsonl`: the groups and conversations of clients, with their rewards and feedback.

The ledger has the groups that admission accepted, and their ends. This file adds what the viewer shows of
them, and what never enters the ledger: refused groups, and conversations that ended without a reward. Lines
have names and numbers and no texts of a conversation; an erasure leaves them, as it leaves the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tidegate import failpoints
from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient, GroupRow
from tidegate.trainer.ledger.jsonl import drop_torn_line, naming, read_jsonl
from tidegate.trainer.records.writer import FileWriter
from tidegate.types import Group, Trajectory

FILE = "clients.jsonl"
POLL_S = 10.0
TAKEN, REFUSED = "taken", "refused"
LONGEST_NAME = 200


class ClientLog:
    """Appends a line for each group of a client that is offered, and each conversation without a reward.

    After a crash a group may be there twice; its last line counts. The gateway lists conversations without a
    reward for `GatewayOptions.retention_s`: those that end and expire while no trainer runs are missing.

    Args:
        run_dir: Directory of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        drop_torn_line(self._path)
        self._ended: set[str] | None = None
        """Conversations without a reward that have a line; None: the file has not been read yet."""

    def offered(self, group: Group, refusal: str | None) -> None:
        """Record a group that admission took in or refused."""
        self._append(
            group=group.id,
            client=group.client,
            state=TAKEN if refusal is None else REFUSED,
            why=refusal,
            episodes=[_episode(trajectory) for trajectory in group.trajectories],
        )

    async def watch(self, gateway: GatewayClient, writer: FileWriter) -> None:
        """Record the conversations that end without a reward, until cancelled."""
        while True:
            with contextlib.suppress(GatewayError):  # a restarting gateway; repeated later
                await writer.run(self.ended, await gateway.list_groups())
            await asyncio.sleep(POLL_S)

    def ended(self, rows: list[GroupRow]) -> None:
        """Record those of these groups that are conversations which ended without a reward, once each.

        Raises TidegateError if the file is damaged.
        """
        if self._ended is None:
            lines = read_jsonl(self._path)
            self._ended = {line["group"] for line in lines if line["state"] not in (TAKEN, REFUSED)}
        for row in rows:
            if row.outcome is not None and row.id not in self._ended:
                self._ended.add(row.id)
                self._append(group=row.id, client=row.client, state=row.outcome, why=None, episodes=[])

    def _append(self, **fields: Any) -> None:
        line = orjson.dumps({"time": round(time.time(), 3), **fields}) + b"\n"
        with failpoints.around("clients"), naming(self._path), self._path.open("ab") as file:
            file.write(line)


def _episode(trajectory: Trajectory) -> dict[str, Any]:
    notes = trajectory.metadata.get("feedback")
    values = notes.values() if isinstance(notes, dict) else ()
    kinds = [kind for note in values if isinstance(note, dict) for kind in note]
    group = Group("", "", [trajectory])
    return {
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "feedback": [*_feedback(trajectory.metadata.get("received"))],
        "comments": kinds.count("comment"),
        "corrections": kinds.count("correction"),
        "oldest": group.oldest_version(),
        "newest": group.newest_version(),
    }


def _feedback(received: Any) -> Iterator[dict[str, Any]]:
    """Yield the values of feedback. A client that forms groups may have sent metadata of any form."""
    for one in received if isinstance(received, list) else ():
        if isinstance(one, dict) and isinstance(name := one.get("name"), str):
            yield {"name": name[:LONGEST_NAME]} | {key: _number(one.get(key)) for key in ("value", "after_s")}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
