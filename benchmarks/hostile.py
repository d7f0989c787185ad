"""A hostile client of a running service: two honest keys notice nothing of its attacks.

    python benchmarks/hostile.py [--json] [--conversations 10000] [--deletes 66400] [--connections 2000]
                                 [--only NAME ...] [--keep DIR]

`tidegate serve` trains the tiny model while users of two honest keys talk and give feedback. A third key, and
connections without a key, attack gateway, engine and a gateway of workers. At the end the honest users must
have met no error and lost no feedback, no process may have exited or grown, no attack may have had an effect,
and no file of the run may contain a text that was redacted or erased.

Growth is counted from a service that has had as many ordinary conversations as the attack begins: then its
bounded stores (caches, ids of ended groups, ended conversations) are full, and its heap has the size for the
open conversations that it permits. `growth_since_start_mb` counts from the third step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import zstandard
from common import Check, parser_of, place, report
from hostile_attacks import ATTACKS, Attacker, slow_headers
from hostile_world import (
    ENVIRONMENT,
    LIMIT_S,
    PROCESSES,
    ROOT,
    Honest,
    Server,
    client,
    many,
    serving,
    until,
)

from tidegate.errors import TidegateError
from tidegate.gateway.project_keys import create_key

GROWTH_MB = 50
"""Most by which gateway and engine may have grown once freed memory has been returned."""


def texts(place: Path) -> Iterator[tuple[Path, bytes]]:
    """Yields the content of every file, and the unpacked values of databases."""
    for path in place.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()
        if path.suffix == ".sqlite":
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
                for (table,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                ).fetchall():
                    for value in (
                        value for row in database.execute(f'SELECT * FROM "{table}"') for value in row
                    ):
                        if isinstance(value, bytes) and value.startswith(zstandard.FRAME_HEADER):
                            yield path, zstandard.ZstdDecompressor().decompressobj().decompress(value)


def leaks(place: Path, hidden: list[str]) -> list[str]:
    found = re.compile(b"|".join(text.encode() for text in hidden))
    return sorted(
        {f"{path.name}: {one.decode()}" for path, content in texts(place) for one in found.findall(content)}
    )


def reading(verb: str, run_dir: Path) -> bool:
    """Returns whether a command fails for the run."""
    command = [sys.executable, "-m", "tidegate", verb, str(run_dir)]
    return bool(subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True).returncode)


def growth(server: Server, before: dict[str, float]) -> float:
    """Returns by how much gateway or engine have grown, whichever more, in MB."""
    return max(server.rss(name)[0] - before[name] for name in ("gateway", "engine"))


async def measure(place: Path, scale: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Check]]:
    keys = place / "keys.json"
    named = {name: create_key(keys, name) for name in ("first", "second", "hostile")}
    rows: list[dict[str, Any]] = []
    attackers: list[Attacker] = []
    async with serving(place, keys) as server:
        honest = [Honest(server.url, named[name]) for name in ("first", "second")]
        talking = [asyncio.create_task(one.run()) for one in honest]
        async with client(named["hostile"]) as http:
            await until(lambda: server.steps() >= 3, "step 3", LIMIT_S, server.process)
            fresh = {name: server.rss(name)[0] for name in PROCESSES}
            warm = Attacker(server, "", honest[0], scale, http)
            await many(scale.conversations, 48, lambda number: warm.chat(f"warm {number}"))
            await asyncio.sleep(scale.settle)
            before = {name: server.rss(name)[0] for name in PROCESSES}
            steps, pids = server.steps(), {name: server.address(name)["pid"] for name in PROCESSES}

            async def run(attack: Callable[[Attacker], Awaitable[None]]) -> None:
                a = Attacker(server, named["hostile"], honest[0], scale, http)
                attackers.append(a)
                for one in honest:
                    one.longest_s = 0.0
                began, thumbs = time.monotonic(), sum(len(one.thumbs) for one in honest)
                try:
                    await attack(a)
                except (OSError, TimeoutError, aiohttp.ClientError, KeyError, ValueError) as error:
                    a.effects.append(f"{attack.__name__} failed: {error!r}"[:300])
                rows.append({
                    "attack": attack.__name__, "seconds": time.monotonic() - began,
                    "answers": dict(a.answers), "effects": a.effects[:5],
                    "honest_feedback": sum(len(one.thumbs) for one in honest) - thumbs,
                    "longest_s": max(one.longest_s for one in honest),
                    "mb": {name: round(server.rss(name)[0]) for name in PROCESSES},
                    "peak_mb": {name: round(server.rss(name)[1]) for name in PROCESSES},
                })  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

            slow = asyncio.create_task(run(slow_headers)) if not scale.only else None
            for attack in ATTACKS:
                if not scale.only or attack.__name__ in scale.only:
                    await run(attack)
            if slow is not None:
                await slow
        # Hostile conversations end after the feedback window, and the trainer reads erasures.
        await asyncio.sleep(scale.settle)
        with contextlib.suppress(TidegateError):  # a growth that stays fails the check below
            await until(lambda: growth(server, before) <= GROWTH_MB, "freed memory", LIMIT_S, server.process)
        after = {name: server.rss(name)[0] for name in PROCESSES}
        for one in honest:
            one.stop.set()
        await asyncio.gather(*talking)
        lost = [group for one in honest for group in await one.lost()]
        exits = server.output.read_text().count("starting it again")
        same = pids == {name: server.address(name)["pid"] for name in PROCESSES}
        took = server.steps() - steps
    errors = [error for one in honest for error in one.errors]
    found = leaks(server.run_dir, [*named.values(), *(text for a in attackers for text in a.secrets)])
    grew = {name: after[name] - before[name] for name in PROCESSES}
    unreadable = sum([await asyncio.to_thread(reading, verb, server.run_dir) for verb in ("audit", "report")])
    logs = sum(path.stat().st_size for path in (server.run_dir / "logs").iterdir()) / 2**20
    rows.append({
        "honest_feedback": sum(len(one.thumbs) for one in honest), "steps": took, "growth_mb": grew,
        "growth_since_start_mb": {name: after[name] - fresh[name] for name in PROCESSES},
        "logs_mb": logs, "errors": errors[:5],
        "lost": lost[:5], "leaks": found[:20],
    })  # fmt: skip
    return rows, [
        Check("honest_errors", len(errors), "==", 0),
        Check("honest_lost", len(lost), "==", 0),
        Check("trainer_exits", exits + (not same), "==", 0),
        Check("rss_growth_mb", max(grew["gateway"], grew["engine"]), "<=", GROWTH_MB),
        Check("leaks", len(found), "==", 0),
        Check("effects", sum(len(a.effects) for a in attackers), "==", 0),
        Check("steps", took, ">=", 1),
        Check("unreadable", unreadable, "==", 0),
        Check("logs_mb", logs, "<=", 20),
    ]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--deletes", type=int, default=66_400)
    parser.add_argument("--connections", type=int, default=2000, help="at a time, without a key")
    parser.add_argument("--settle", type=float, default=40.0, help="seconds after the last attack")
    parser.add_argument("--only", action="append", choices=[attack.__name__ for attack in ATTACKS])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run in DIR")
    arguments = parser.parse_args()
    with place(arguments.keep, "hostile") as directory:
        rows, checks = asyncio.run(measure(directory.absolute(), arguments))
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
