"""Measures the gateway's journal: bytes of a turn, CPU of a restart, and disk space after consumption.

Writes sessions of TURNS turns, 64 at a time, through the journal's own interface: a turn's prompt adds a
message of about 36 tokens, its reply has 64 tokens. Tokens and texts are of the gateway benchmark's
tokenizer; logprobs are random float32. Each group of 8 sessions is finished and sealed; the sessions of the
last eighth keep running. Then another process starts a gateway from the journal, and all groups and sessions
are consumed.

    python benchmarks/journal.py [--json] [--turns 100000]

- *Raw bytes* of a turn: the arrays that it newly records. Token ids as int32 of the message and the reply,
  logprobs as float32 and policy versions as int32 of the reply; each token counted once, in the turn that
  added it.
- *Bytes* of a turn: all files of the journal ÷ turns, with sessions, groups, indexes and free pages. They are
  measured twice, for closed sessions and for running ones.
- *Text*: the messages that a turn adds and its reply, as MessagePack before compression. It is no part of the
  raw bytes, but of the bytes; the figure `without_text` subtracts it where it is stored uncompressed.
- *Restart*: CPU of `Gateway.start` from the journal, less that of a start from an empty one.
- *First use*: CPU of packing all restored groups for the trainer. *Memory*: growth of the resident set at the
  restart, per session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from common import Check, report
from gateway import make_model
from turns.material import passage

from tidegate.gateway.gateway import Gateway
from tidegate.gateway.ids import new_id, unique_name
from tidegate.gateway.journal.base import StoredGroup
from tidegate.gateway.journal.sqlite import DiskJournal
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.sessions.session import FinishReport, GatewaySession, decide_outcome, trajectory_of
from tidegate.gateway.sessions.tree import Attachment, TurnNode, TurnRequestInfo
from tidegate.types import Group, Ids, Task, Turn, VersionSpan, to_wire

TURNS, AT_ONCE, GROUP = 8, 64, 8
PROMPT_TOKENS, REPLY_TOKENS = 36, 64
RUNNING_SHARE = 1 / 8
TEXTS = 4096
CONSUMED_S = 120.0
Text = tuple[str, Ids]


class Material:
    """Texts with their token ids, and the turns made of them."""

    def __init__(self, renderer: Renderer) -> None:
        self._random = Random(0)
        self._numbers = np.random.default_rng(0)
        self._prompts = [_text(renderer, f"prompt {n}", PROMPT_TOKENS) for n in range(TEXTS)]
        self._replies = [_text(renderer, f"reply {n}", REPLY_TOKENS) for n in range(TEXTS)]
        self.raw = self.text = self.turns = 0

    def session(self, number: int, group: str) -> GatewaySession:
        now = asyncio.get_running_loop().time()
        task = Task(
            f"t{group}", "sums", [{"role": "user", "content": self._random.choice(self._prompts)[0]}], "42"
        )
        return GatewaySession(
            id=new_id(), key_hash=os.urandom(32), opened=now, deadline=now + 3600, number=number, task=task,
            env="sums", group_id=group, slot=number % GROUP,
        )  # fmt: skip

    def turn(self, session: GatewaySession) -> TurnNode:
        """Adds a turn to the session's tree, as the gateway does."""
        tree = session.tree
        parent = len(tree.nodes) - 1 if tree.nodes else None
        (asked, delta), (said, ids) = self._random.choice(self._prompts), self._random.choice(self._replies)
        logprobs = -self._numbers.exponential(0.5, len(ids)).astype(np.float32)
        turn = Turn(
            -1, parent, delta, ids, logprobs, (VersionSpan(7, 0, len(ids)),), "stop", 1.0, delivered=False,
            started=time.time(), seconds=self._numbers.random(), cached_tokens=100 * len(tree.nodes),
        )  # fmt: skip
        message = {"role": "user", "content": asked}
        reply = {"role": "assistant", "content": said}
        attachment = Attachment(parent, 2 * len(tree.nodes), os.urandom(16), None, b"t" * 16)
        request = TurnRequestInfo(unique_name(), os.urandom(16), None, len(tree.nodes))
        node = tree.append(turn, tree.prompt(parent, delta), attachment, [message], reply, request)
        self.raw += 4 * len(delta) + 12 * len(ids)
        self.text += len(msgspec.msgpack.encode([message, reply]))
        self.turns += 1
        return node


def _text(renderer: Renderer, name: str, tokens: int) -> Text:
    ids = renderer.encode(passage(name, tokens))[:tokens]
    return renderer.decode(ids), np.array(ids, np.int32)


class Book:
    """A journal that sessions are written to."""

    def __init__(self, directory: Path, material: Material) -> None:
        self._directory = directory
        self._journal = DiskJournal(directory)
        self._journal.load()
        self._material = material
        self._opened = 0
        self.sealed = 0
        self.running: list[GatewaySession] = []
        self.members: dict[str, list[GatewaySession]] = {}
        self.record_cpu_s = 0.0

    async def wave(self, *, finish: bool) -> None:
        """Runs AT_ONCE sessions at the same time."""
        groups = [f"g{self._opened // GROUP + n}" for n in range(AT_ONCE // GROUP)]
        sessions = []
        for _ in range(AT_ONCE):
            self._opened += 1
            sessions.append(self._material.session(self._opened, groups[len(sessions) // GROUP]))
        await asyncio.gather(*map(self._journal.opened, sessions))
        for _ in range(TURNS):
            nodes = [(session, self._material.turn(session)) for session in sessions]
            before = time.process_time()
            for at in range(0, len(nodes), 16):  # turns that end in one pass of the gateway's loop
                some = nodes[at : at + 16]
                await asyncio.gather(*(self._journal.recorded(session, [node]) for session, node in some))
                for session, node in some:
                    session.tree.mark_delivered(node.turn.index)
                    self._journal.sent(session, node.turn.index)
            self.record_cpu_s += time.process_time() - before
        if finish:
            await asyncio.gather(*(self._finish(session) for session in sessions))
            for number, group in enumerate(groups):
                await self._seal(group, sessions[number * GROUP : (number + 1) * GROUP])
        else:
            self.running += sessions

    async def _finish(self, session: GatewaySession) -> None:
        now = asyncio.get_running_loop().time()
        session.ending = decide_outcome(session, FinishReport(), now)
        await self._journal.closing(session)
        session.trajectory = trajectory_of(session, session.ending)
        session.trajectory.reward = 1.0
        await self._journal.finished(session, session.trajectory, now + 3600)

    async def _seal(self, group: str, sessions: list[GatewaySession]) -> None:
        trajectories = [one.trajectory for one in sessions if one.trajectory is not None]
        entry = StoredGroup.of(Group(group, f"t{group}", trajectories), self.sealed + 1)
        await self._journal.sealed(entry)
        for session in sessions:  # the benchmark's own memory
            session.trajectory, session.tree = None, type(session.tree)()
        self.members[group] = sessions
        self.sealed += 1

    async def consume(self) -> None:
        """Ends all groups and deletes the running sessions."""
        for group, sessions in self.members.items():
            await self._journal.ended(group, "trained", None, sessions)
        await self._journal.forgotten(self.running)

    def size(self) -> int:
        return size_of(self._directory)

    async def close(self) -> None:
        await self._journal.close()


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


async def waves(directory: Path, material: Material, turns: int, running: float) -> tuple[Book, int]:
    """Writes sessions; returns the open journal and the largest size of its files."""
    book, peak = Book(directory, material), 0
    number = max(1, round(turns / (AT_ONCE * TURNS)))
    for wave in range(number):
        await book.wave(finish=wave < round((1 - running) * number))
        peak = max(peak, book.size())
    return book, peak


async def bytes_a_turn(directory: Path, renderer: Renderer, *, running: bool) -> dict[str, Any]:
    material = Material(renderer)
    book, _ = await waves(directory, material, 10 * AT_ONCE * TURNS, 1.0 if running else 0.0)
    await book.close()
    raw, text, size = (value / material.turns for value in (material.raw, material.text, size_of(directory)))
    row = {"raw": raw, "text": text, "bytes": size, "vs_raw": size / raw}
    if running:
        row["without_text_vs_raw"] = (size - text) / raw
    return {"what": f"bytes of a turn, {'running' if running else 'closed'} sessions", **row}


async def whole(directory: Path, model: Path, renderer: Renderer, turns: int) -> list[dict[str, Any]]:
    """Writes all turns, restarts in another process and consumes; returns rows."""
    material = Material(renderer)
    book, peak = await waves(directory, material, turns, RUNNING_SHARE)
    await book.close()
    written = {
        "what": "written", "turns": material.turns, "sessions": material.turns // TURNS,
        "record_cpu_us_a_turn": 1e6 * book.record_cpu_s / material.turns, "peak_mb": peak / 1e6,
        "closed_mb": size_of(directory) / 1e6, "raw_mb": material.raw / 1e6,
    }  # fmt: skip
    command = [sys.executable, __file__, "--restart", str(directory), "--model", str(model)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    restarted = json.loads((await process.communicate())[0])
    if process.returncode != 0:
        raise RuntimeError(f"the restarted gateway exited with {process.returncode}; see its error above")
    book._journal = DiskJournal(directory)
    began = time.monotonic()
    before = time.process_time()
    await book.consume()
    cpu = time.process_time() - before
    goal, left = 0.1 * peak, book.size()
    while left > goal and time.monotonic() - began < CONSUMED_S:
        await asyncio.sleep(0.1)
        left = book.size()
    await asyncio.sleep(2.0)
    consumed = {
        "what": "consumed", "left_mb": book.size() / 1e6, "vs_peak": book.size() / peak,
        "seconds": time.monotonic() - began - 2.0, "consume_cpu_us_a_turn": 1e6 * cpu / material.turns,
    }  # fmt: skip
    await book.close()
    return [written, {"what": "restart", **restarted}, consumed]


async def restart(directory: Path, model: Path) -> dict[str, Any]:
    """Starts a gateway from an empty journal and from `directory`; measures the difference."""
    renderer = Renderer.load(model)
    costs = []
    with tempfile.TemporaryDirectory() as empty:
        for journal in (Path(empty), directory):
            gateway = Gateway(GatewayOptions(model=model, journal=journal), renderer)
            resident, before = _resident(), time.process_time()
            await gateway.start()
            costs.append((time.process_time() - before, _resident() - resident))
            sessions, groups = gateway.sessions.all(), gateway.groups.entries()
            before = time.process_time()
            packed = sum(len(to_wire(entry.read())) for entry in groups)
            first_use = time.process_time() - before
            turns = sum(len(session.tree.nodes) for session in sessions)
            used = _resident()
            await gateway.close()
    return {
        "cpu_s": costs[1][0] - costs[0][0], "first_use_cpu_s": first_use, "turns": turns,
        "sessions": len(sessions), "groups": len(groups), "leased_mb": packed / 1e6,
        "kb_a_session": (costs[1][1] - costs[0][1]) / len(sessions) / 1e3, "resident_mb": used / 1e6,
    }  # fmt: skip


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--turns", type=int, default=100_000, help="number of turns")
    parser.add_argument("--restart", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.restart is not None:
        print(json.dumps(asyncio.run(restart(arguments.restart, arguments.model))))
        return 0
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        directory = Path(name)
        model = make_model(directory / "model")
        renderer = Renderer.load(model)
        rows = [
            asyncio.run(bytes_a_turn(directory / f"{running}", renderer, running=running))
            for running in (False, True)
        ]
        closed, running = rows
        rows += asyncio.run(whole(directory / "journal", model, renderer, arguments.turns))
    checks = [
        Check("restart_cpu_s", rows[3]["cpu_s"], "<=", 3.0),
        Check("restored_turns", rows[3]["turns"], "==", rows[2]["turns"]),
        Check("closed_bytes_vs_raw", closed["vs_raw"], "<=", 1.5),
        Check("running_bytes_without_text_vs_raw", running["without_text_vs_raw"], "<=", 1.5),
        Check("consumed_vs_peak", rows[4]["vs_peak"], "<=", 0.1),
    ]
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
