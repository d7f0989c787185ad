"""Measures rewards: many at a time, rewards that compute, and one that holds the interpreter's lock.

Real gateway processes with `--env.use`, a stand-in engine, one load generator. 128 sessions finish together,
each with a reward of 0.5 s, under a timeout of 2 s. 32 rewards that compute are timed with one and with two
worker processes. Then SESSIONS sessions run turns for a while, first alone, then while another session's
reward holds the interpreter's lock for 30 s; medians of the rounds.

    python benchmarks/rewards.py [--json] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from acting import TASK
from common import Check, report
from gateway import Access, make_model
from turns.material import write_replies
from turns.systems import Loader, Processes, System

from tidegate.gateway.client import GatewayClient, SessionAccess, SessionSummary
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Outcome, Sampling

MANY, SLEEP_S, TIMEOUT_S = 128, 0.5, 2.0
COMPUTING, SQUARES = 32, 5_000_000
SESSIONS, ALONE_S, PACE_S = 64, 12.0, 0.5
LOCK_S, LOCKED_S = 30, 24.0
SETTLE_S = 2.0
"""Time in which a reward has begun to hold the lock."""


class Bench:
    """Sessions of one gateway."""

    def __init__(self, system: System, loader: Loader) -> None:
        self.system = system
        self._loader = loader

    def open(self, count: int) -> list[SessionAccess]:
        """Opens sessions of the environment, and runs a turn in each."""
        opened = asyncio.run(self._open(count))
        done = self._loader.turns(self.system, [access_of(one) for one in opened], 1, concurrency=SESSIONS)
        if done["errors"]:
            raise RuntimeError(f"{done['errors']} turns failed, first: {done['error']}")
        return opened

    async def _open(self, count: int) -> list[SessionAccess]:
        async with GatewayClient(self.system.url) as client:
            sampling = Sampling(max_tokens=256)
            opening = (
                client.open_session(task=TASK, sampling=sampling, deadline_s=3600) for _ in range(count)
            )
            return list(await asyncio.gather(*opening))

    def finish(self, sessions: list[SessionAccess], output: str) -> tuple[list[SessionSummary], float]:
        """Finishes sessions together; returns their summaries, and the seconds until all were rewarded."""

        async def run() -> list[SessionSummary]:
            async with GatewayClient(self.system.url) as client:
                calls = (client.finish(one.session_id, output=output, timeout_s=300.0) for one in sessions)
                return list(await asyncio.gather(*calls))

        began = time.perf_counter()
        return asyncio.run(run()), time.perf_counter() - began

    def paced_turns(self, sessions: list[SessionAccess], seconds: float) -> dict[str, Any]:
        """Runs a turn in each session every PACE_S seconds."""
        job = {
            "kind": "turns", "url": self.system.url, "sessions": [access_of(one) for one in sessions],
            "for_s": seconds, "every_s": PACE_S, "stream": False, "concurrency": len(sessions),
        }  # fmt: skip
        done = self._loader.ask(job)
        if done["errors"]:
            raise RuntimeError(f"{done['errors']} turns failed, first: {done['error']}")
        return done


def access_of(session: SessionAccess) -> Access:
    path = "/" + session.base_url.split("/", 3)[3] + "/chat/completions"
    return session.session_id, path, session.api_key


def failed(summaries: list[SessionSummary]) -> int:
    return sum(one.outcome is not Outcome.COMPLETED or one.reward != 1.0 for one in summaries)


def queued(bench: Bench) -> dict[str, Any]:
    """More rewards at a time than a worker computes: those that wait are not late."""
    summaries, seconds = bench.finish(bench.open(MANY), f"sleep {SLEEP_S}")
    return {"what": f"{MANY} rewards of {SLEEP_S} s", "failed": failed(summaries), "seconds": seconds}


def computed(benches: dict[int, Bench], rounds: int) -> dict[str, Any]:
    """The same computations with each number of workers, interleaved."""
    took: dict[int, list[float]] = {workers: [] for workers in benches}
    failures = 0
    for _ in range(rounds):
        for workers, bench in benches.items():
            summaries, seconds = bench.finish(bench.open(COMPUTING), f"compute {SQUARES}")
            failures += failed(summaries)
            took[workers].append(seconds)
    pairs = zip(took[1], took[2], strict=True)
    return {
        "what": f"{COMPUTING} rewards that compute",
        **{f"seconds_{workers}_workers": statistics.median(seconds) for workers, seconds in took.items()},
        "speedup": statistics.median(one / two for one, two in pairs),
        "failed": failures,
    }


def locked(bench: Bench, rounds: int) -> dict[str, Any]:
    """How much longer turns take while a reward of another session holds the interpreter's lock."""
    alone, beside, failures = [], [], 0
    sessions = bench.open(SESSIONS)
    for _ in range(rounds):
        alone.append(bench.paced_turns(sessions, ALONE_S)["p99_ms"])
        holder = bench.open(1)
        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(bench.finish, holder, f"lock {LOCK_S}")
            time.sleep(SETTLE_S)
            beside.append(bench.paced_turns(sessions, LOCKED_S)["p99_ms"])
            if holding.done():
                raise RuntimeError("the reward ended before the turns did")
            summaries, seconds = holding.result()
            failures += failed(summaries)
        if seconds < LOCK_S:
            raise RuntimeError(f"the lock was held for {seconds:.1f} s, not {LOCK_S} s")
    return {
        "what": f"a reward that holds the lock for {LOCK_S} s",
        "p99_ms_alone": statistics.median(alone),
        "p99_ms_beside_it": statistics.median(beside),
        "lock_delay_ms_p99": statistics.median(b - a for a, b in zip(alone, beside, strict=True)),
        "failed": failures,
    }


def measure(directory: Path, processes: Processes, rounds: int) -> list[dict[str, Any]]:
    model = make_model(directory / "model")
    write_replies(directory / "replies.json", Renderer.load(model))
    engine, loader = processes.engine(directory / "replies.json"), processes.load()

    def bench(workers: int, *arguments: str) -> Bench:
        settings = ["--env.use=acting.py:Acting", f"--env.workers={workers}", *arguments]
        return Bench(processes.tidegate(engine, model, *settings), loader)

    rows = [queued(bench(1, f"--env.reward_timeout_s={TIMEOUT_S}"))]
    benches = {workers: bench(workers) for workers in (1, 2)}
    return [*rows, computed(benches, rounds), locked(benches[1], rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name, Processes(Path(name)) as processes:
        rows = measure(Path(name), processes, arguments.rounds)
    checks = [
        Check("failed", rows[0]["failed"], "==", 0),
        Check("failed_computing", rows[1]["failed"], "==", 0),
        Check("lock_delay_ms_p99", rows[2]["lock_delay_ms_p99"], "<=", 50),
        Check("failed_holding_the_lock", rows[2]["failed"], "==", 0),
    ]
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
