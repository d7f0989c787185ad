"""Measures rewards that are slow, that compute, and that hold the interpreter's lock.

- REWARDS rewards of 0.5 s with a deadline of 2 s: time in the queue must not count.
- Rewards that compute, in one worker process and in two.
- A reward that holds the interpreter's lock until its deadline of 30 s, while 32 other sessions make turns
  through `tidegate gateway`: p99 of the turns meanwhile minus p99 of the turns before, in one run.

    python benchmarks/rewards.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Check, report
from gateway import Bench, make_model
from openai import AsyncOpenAI
from turns.material import write_replies
from turns.systems import Loader, Processes, System

from tidegate.errors import RewardError
from tidegate.gateway.client import GatewayClient, SessionSummary
from tidegate.gateway.environments.process import OwnedEnvironments
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Outcome, Task, Trajectory

ENVIRONMENT = f"--env.use={Path(__file__).with_name('acting_rewards.py')}:Acting"
TASK = Task("t", "acting", [{"role": "user", "content": "?"}])
REWARDS, REWARD_S, DEADLINE_S = 128, 0.5, 2.0
COMPUTING, SUMMANDS = 16, 5_000_000
SESSIONS, PACE_S, TURNS_S, LOCK_S = 32, 0.5, 25.0, 30.0


async def scored(arguments: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    """Scores outputs at the same time in an environment service; returns the time and the failures."""
    environments = OwnedEnvironments([ENVIRONMENT, *arguments], {"options": {}})
    await environments.start()
    try:
        began = time.perf_counter()
        results = await asyncio.gather(
            *(environments.score(f"e{n}", TASK, _trajectory(n, text)) for n, text in enumerate(outputs)),
            return_exceptions=True,
        )
        seconds = time.perf_counter() - began
    finally:
        await environments.close()
    errors = [result for result in results if isinstance(result, BaseException)]
    if unexpected := [error for error in errors if not isinstance(error, RewardError)]:
        raise unexpected[0]
    return {"rewards": len(results), "seconds": seconds, "failed": len(errors)}


def _trajectory(number: int, output: str) -> Trajectory:
    return Trajectory(f"e{number}", "t", "acting", "train", Outcome.COMPLETED, [], output=output)


def computing(workers: int) -> float:
    """Seconds of COMPUTING rewards that compute."""
    done = asyncio.run(scored([f"--env.workers={workers}"], [f"work {SUMMANDS}"] * COMPUTING))
    if done["failed"]:
        raise RuntimeError(f"{done['failed']} of {COMPUTING} rewards failed")
    return float(done["seconds"])


def lock_delay(bench: Bench, loader: Loader, system: System) -> dict[str, Any]:
    """Turns of SESSIONS sessions before a reward holds the lock, and meanwhile."""
    before = paced_turns(bench, loader, system)
    with ThreadPoolExecutor(1) as pool:
        locking = pool.submit(lambda: asyncio.run(finish_with_lock(system)))
        time.sleep(1.0)  # the reward begins
        during = paced_turns(bench, loader, system)
        if locking.done():
            raise RuntimeError(f"the reward ended before the turns did: {locking.result()}")
        ended = locking.result()
    if ended.reward is not None:
        raise RuntimeError(f"the reward that holds the lock returned {ended.reward}")
    return {
        "turns": during["turns"],
        "p50_ms_before": before["p50_ms"],
        "p50_ms_during": during["p50_ms"],
        "p99_ms_before": before["p99_ms"],
        "p99_ms_during": during["p99_ms"],
        "lock_delay_ms_p99": during["p99_ms"] - before["p99_ms"],
    }


def paced_turns(bench: Bench, loader: Loader, system: System) -> dict[str, Any]:
    """Runs a turn every PACE_S seconds in each of SESSIONS new sessions, for TURNS_S seconds."""
    sessions = bench.open(system, SESSIONS)
    bench.turns(system, sessions, 1)  # first prompts are rendered in full; sent together they would queue
    job = {"kind": "turns", "url": system.url, "sessions": sessions, "concurrency": SESSIONS}
    done = loader.ask({**job, "for_s": TURNS_S, "every_s": PACE_S, "stream": False})
    if done["errors"]:
        raise RuntimeError(f"{done['errors']} calls failed, first: {done['error']}")
    return done


async def finish_with_lock(system: System) -> SessionSummary:
    """Ends a session whose reward holds the interpreter's lock; returns after its deadline."""
    async with GatewayClient(system.url) as client:
        access = await client.open_session(task=TASK, deadline_s=600)
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as llm:
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        return await client.finish(access.session_id, output="lock", outcome=Outcome.COMPLETED)


def measure(directory: Path, processes: Processes) -> tuple[list[dict[str, Any]], list[Check]]:
    slow = asyncio.run(scored([f"--env.reward_timeout_s={DEADLINE_S:g}"], [f"sleep {REWARD_S:g}"] * REWARDS))
    one, two = computing(1), computing(2)
    model = make_model(directory / "model")
    write_replies(directory / "replies.json", Renderer.load(model))
    engine, loader = processes.engine(directory / "replies.json"), processes.load()
    system = processes.tidegate(engine, model, [ENVIRONMENT, f"--env.reward_timeout_s={LOCK_S:g}"])
    locked = lock_delay(Bench(loader), loader, system)
    rows = [
        {"what": f"rewards of {REWARD_S:g} s, deadline {DEADLINE_S:g} s", **slow},
        {"what": "rewards that compute", "s_1_worker": one, "s_2_workers": two, "speed_up": one / two},
        {"what": "a reward that holds the lock", **locked},
    ]
    checks = [
        Check("failed", slow["failed"], "==", 0),
        Check("lock_delay_ms_p99", locked["lock_delay_ms_p99"], "<=", 50),
    ]
    return rows, checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name, Processes(Path(name)) as processes:
        rows, checks = measure(Path(name), processes)
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
