"""Measures what the likeliest ids that score centering needs cost, by default 32 for each token.

    python benchmarks/offpolicy_cost.py [--json] [--rounds 16] [--listed 32]

- *Turns*: CPU seconds of gateway and embedded engine in turns that record the ids, divided by those in turns
  that do not: 64 sessions × 4 turns with equal seeds through two gateways and one engine, alternating. The
  model is `examples/tiny_base/model`: its passes take so little that all other costs show.
- *Journal*: bytes of the rows of unfinished sessions that the ids add, per generated token.
- *Step*: CPU seconds of the trainer's step with score centering divided by those without, alternating, on
  episodes of `step.py`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import step as steps
import torch
from common import Check, parser_of, place, report
from turns.systems import Processes, System

from tidegate.config import TrainerSettings
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.journal import schema
from tidegate.gateway.journal.sqlite import FILE
from tidegate.trainer.policy.policy import Policy
from tidegate.turn import Turn
from tidegate.types import Sampling, Trajectory

MODEL = Path(__file__).parents[1] / "examples" / "tiny_base" / "model"
SESSIONS, TURNS = 64, 4
MAX_TOKENS = 64


async def opened(gateway: System, number: int, listed: int) -> list[tuple[str, str, str]]:
    """(name, path, key) of the new sessions of a round."""
    found = []
    async with GatewayClient(gateway.url) as client:
        for one in range(SESSIONS):
            seed = number * SESSIONS + one
            sampling = Sampling(max_tokens=MAX_TOKENS, top_logprobs=listed)
            access = await client.open_session(sampling=sampling, deadline_s=3600, seed=seed)
            path = "/" + access.base_url.split("/", 3)[3] + "/chat/completions"
            found.append((f"{listed}-{seed}", path, access.api_key))
    return found


def measure_turns(directory: Path, rounds: int, listed: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Costs without and with the ids, and the ratio of CPU seconds of each round."""
    seconds: dict[int, list[tuple[float, float]]] = {0: [], listed: []}
    count = SESSIONS * TURNS
    with Processes(directory) as processes:
        engine, loader = processes.embedded(MODEL), processes.load()
        gateways = {top: processes.tidegate(engine, MODEL) for top in seconds}
        for number in range(rounds + 1):
            # The second of a pair meets a warmer machine: each comes second in every other round.
            for top, gateway in sorted(gateways.items(), reverse=number % 2 == 1):
                sessions = asyncio.run(opened(gateway, number, top))
                before = [system.cpu_seconds() for system in (gateway, engine)]
                done = loader.turns(gateway, sessions, TURNS)
                if done["errors"]:
                    raise RuntimeError(f"{done['errors']} calls failed, first: {done['error']}")
                after = [system.cpu_seconds() for system in (gateway, engine)]
                seconds[top].append((after[0] - before[0], after[1] - before[1]))
    journals = [journal(path) for path in sorted(directory.glob(f"journal-*/{FILE}"))]
    results = [
        {
            "turns": f"{top} ids", **found,
            **{
                f"{name}_cpu_ms": 1e3 * statistics.median(own) / count
                for name, own in zip(("gateway", "engine"), zip(*used[1:], strict=True), strict=True)
            },
        }
        for (top, used), found in zip(seconds.items(), journals, strict=True)
    ]  # fmt: skip
    pairs = zip(seconds[listed][1:], seconds[0][1:], strict=True)  # the first round warms up
    return results, [sum(with_ids) / sum(without) for with_ids, without in pairs]


def journal(path: Path) -> dict[str, float]:
    """Mean length of a reply, and bytes of the rows per generated token."""
    rows: dict[int, list[bytes]] = defaultdict(list)
    with sqlite3.connect(path) as database:
        for session, node in database.execute("SELECT session, node FROM turns ORDER BY id"):
            rows[session].append(node)
    found = [node.turn for stored in rows.values() for node in schema.turn_nodes("", stored)]
    tokens = sum(len(turn.output_ids) for turn in found)
    size = sum(len(node) for stored in rows.values() for node in stored)
    return {"tokens_per_turn": tokens / len(found), "bytes_per_token": size / tokens}


def with_ids(turn: Turn, listed: int, rng: np.random.Generator) -> Turn:
    """The turn with distinct random ids, whose logprobs are those of a uniform distribution."""
    first, count = rng.integers(0, steps.VOCABULARY, (len(turn.output_ids), 1)), listed * len(turn.output_ids)
    ids = (first + np.arange(listed) * 7) % steps.VOCABULARY
    logprobs = np.full(count, -np.log(steps.VOCABULARY), np.float16)
    return replace(turn, top_ids=ids.astype(np.int32).reshape(-1), top_logprobs=logprobs)


def measure_step(rounds: int, listed: int) -> dict[str, list[float]]:
    """CPU seconds of the steps without and with score centering."""
    rng = np.random.default_rng(0)
    plain = steps.episodes(4, 8, 2)
    made: list[Trajectory] = [
        replace(one, turns=[with_ids(turn, listed, rng) for turn in one.turns]) for one in plain
    ]
    found = {}
    for name, used, episodes in (("plain", 0, plain), ("centered", listed, made)):
        settings = TrainerSettings(threads=1, loss={"score_centering": used}, **steps.SETTINGS)
        policy = Policy(steps.make_model(), Path(), settings)
        found[name] = steps.our_step(policy, steps.merged(episodes), [])
    return steps.compare(found, rounds)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--listed", type=int, default=32, help="ids for each token")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with place(None, "offpolicy-cost") as directory:
        results, ratios = measure_turns(directory, arguments.rounds, arguments.listed)
    seconds = measure_step(arguments.rounds, arguments.listed)
    results += [{"step": name, "seconds": statistics.median(own)} for name, own in seconds.items()]
    added = results[1]["bytes_per_token"] - results[0]["bytes_per_token"]
    checks = [
        Check("turn_cpu_ratio", statistics.median(ratios), "<=", 1.1),
        Check("bytes_per_token", added, "<=", 200),
        Check("step_cpu_ratio", steps.median_ratio(seconds["centered"], seconds["plain"]), "<=", 1.1),
    ]
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
