"""CPU time per event of a gateway process, of the router of its shards, and of the trainer's calls to it."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from gateway import EPISODES, SESSIONS, TURNS, Bench, control_plane
from remote import POLLS_PER_S, idle_polls
from turns.material import TURN_TOKENS, passage
from turns.systems import Loader, Processes, System

from tidegate.gateway.client import GatewayClient
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Sampling, Task

LONG_TOKENS = 1024
"""Tokens of a long reply; its cost beyond that of a reply of TURN_TOKENS is the cost per token."""
ADDED_WORDS = 400
"""Words of a long message to the model."""
GROUPS, GROUP_SIZE = 16, 8
ENGINES = 256
POLLS_S, PROBES_S = 10.0, 10.0
EPOCH = 1
Costs = dict[str, float]


@dataclass(frozen=True)
class Router(System):
    """A sharded gateway of which the router's process alone is measured."""

    def cpu_seconds(self) -> float:
        return self.own_cpu_seconds()


@dataclass(frozen=True)
class GroupCosts:
    """CPU seconds of sealing, leasing and acknowledging a group, in the server's process and in this one."""

    server: float
    trainer: float


def turn_costs(
    loader: Loader, bench: Bench, short: System, long: System, renderer: Renderer, rounds: int
) -> Costs:
    """Costs of a turn and of its tokens; all kinds of turns in each round, medians of the rounds."""
    words = len(renderer.encode(passage("measured", 10_000))) / 10_000
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, system, stream, added in (
            ("short", short, False, 0),
            ("long", long, False, 0),
            ("prompt", short, False, ADDED_WORDS),
            ("short_streamed", short, True, 0),
            ("long_streamed", long, True, 0),
        ):
            cost = _turns(loader, bench, system, stream, added)
            if number:  # the first round warms up
                taken.setdefault(name, []).append(cost)
    cost = {name: statistics.median(costs) for name, costs in taken.items()}
    more = LONG_TOKENS - TURN_TOKENS
    token, streamed = ((cost[f"long{kind}"] - cost[f"short{kind}"]) / more for kind in ("", "_streamed"))
    # The message before the first turn is not long.
    added = ADDED_WORDS * words * (TURNS - 1) / TURNS
    return {
        "gateway_turn_s": cost["short"] - TURN_TOKENS * token,
        "gateway_streamed_turn_s": cost["short_streamed"] - TURN_TOKENS * streamed,
        "gateway_token_s": token,
        "gateway_streamed_token_s": streamed,
        "gateway_prompt_token_s": (cost["prompt"] - cost["short"]) / added,
    }


def _turns(loader: Loader, bench: Bench, system: System, stream: bool, added: int) -> float:
    """CPU seconds per turn of SESSIONS new sessions."""
    sessions = bench.open(system, SESSIONS)
    job = {"kind": "turns", "url": system.url, "sessions": sessions, "turns": TURNS, "added": added}
    before = system.cpu_seconds()
    done = loader.ask({**job, "concurrency": SESSIONS, "stream": stream})
    cpu = system.cpu_seconds() - before
    if done["errors"]:
        raise RuntimeError(f"{done['errors']} calls failed, first: {done['error']}")
    return cpu / float(done["turns"])


def session_costs(bench: Bench, system: System, rounds: int) -> tuple[float, float]:
    """CPU seconds of opening and finishing a session: in the server's process, and in this one."""
    control_plane(bench, system, 1)
    before = time.process_time()
    found = control_plane(bench, system, rounds)
    own = (time.process_time() - before) / (rounds * EPISODES)
    return (found["open_cpu_ms"] + found["finish_cpu_ms"]) / 1e3, own


def group_costs(loader: Loader, systems: list[System], rounds: int) -> list[GroupCosts]:
    """Costs of a group in each system; the systems by turns, medians of the rounds."""
    names = itertools.count()
    taken: list[list[GroupCosts]] = [[] for _ in systems]
    for number in range(rounds + 1):
        for system, costs in zip(systems, taken, strict=True):
            cost = asyncio.run(_groups(loader, system, f"{system.name}{next(names)}"))
            if number:
                costs.append(cost)
    return [
        GroupCosts(
            *(statistics.median(getattr(one, name) for one in costs) for name in ("server", "trainer"))
        )
        for costs in taken
    ]


async def _groups(loader: Loader, system: System, name: str) -> GroupCosts:
    """Runs GROUPS groups of one turn per episode; measures the calls after their episodes."""
    groups: dict[str, list[str]] = {}
    turns = []
    async with GatewayClient(system.url) as client:
        await client.begin_epoch(EPOCH)
        for group in (f"{name}-{number}" for number in range(GROUPS)):
            for slot in range(GROUP_SIZE):
                access = await client.open_session(
                    group_id=group, slot=slot, epoch=EPOCH, sampling=Sampling(), deadline_s=3600, task=TASK
                )
                groups.setdefault(group, []).append(access.session_id)
                path = "/" + access.base_url.split("/", 3)[3] + "/chat/completions"
                turns.append((access.session_id, path, access.api_key))
        await asyncio.to_thread(loader.turns, system, turns, 1)
        for session in itertools.chain.from_iterable(groups.values()):
            await client.finish(session, reward=1.0, epoch=EPOCH)
        server, own = system.cpu_seconds(), time.process_time()
        for group, sessions in groups.items():
            await client.seal_group(group, TASK.id, sessions, EPOCH)
        left = GROUPS
        while left:
            leased = await client.lease(EPOCH, GROUPS, 5.0)
            left -= len(leased)
            for one in leased:
                await client.ack(EPOCH, one.lease_id or "", "stepped")
        server, own = system.cpu_seconds() - server, time.process_time() - own
    return GroupCosts(server / GROUPS, own / GROUPS)


TASK = Task("t", "e", [], info={})


def poll_cost(directory: Path, shards: int = 1) -> float:
    """CPU seconds of a poll without an attempt in a gateway, or in the router of so many shards."""
    return float(idle_polls(directory, POLLS_S, shards)["cores"]) / POLLS_PER_S


def probe_cost(system: System, engine: System) -> float:
    """CPU seconds of the gateway for one probe of an engine's health."""
    before = _over(system, PROBES_S)
    asyncio.run(_add_engines(system.url, [f"{engine.url}/{number}" for number in range(ENGINES)]))
    _over(system, PoolOptions().probe_every_s)  # the first probes connect
    return (_over(system, PROBES_S) - before) / (ENGINES * PROBES_S / PoolOptions().probe_every_s)


async def _add_engines(url: str, engines: list[str]) -> None:
    async with GatewayClient(url) as client:
        for engine in engines:
            await client.add_engine(engine)


def _over(system: System, seconds: float) -> float:
    """CPU seconds in a time without calls."""
    before = system.cpu_seconds()
    time.sleep(seconds)
    return system.cpu_seconds() - before


def journal_bytes(processes: Processes, bench: Bench, engine: System, model: Path, directory: Path) -> float:
    """Bytes in the journal per turn, after its gateway has stopped."""
    known = set(directory.glob("journal-*"))
    system = processes.tidegate(engine, model)
    bench.turns(system, bench.open(system, SESSIONS), TURNS)
    system.process.terminate()
    system.process.wait(60)
    [journal] = set(directory.glob("journal-*")) - known
    size = sum(file.stat().st_size for file in journal.rglob("*") if file.is_file())
    return size / (SESSIONS * TURNS)
