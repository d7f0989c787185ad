"""Measures the cost of a turn through the gateway, a peer, a bare forwarder and the engine called directly.

64 sessions × 8 turns of 64 tokens, one fake engine, one load generator, each system in its own process;
rounds of all systems interleaved, medians of the rounds. Tidegate runs with all features: keys, the tree,
rendering with a tokenizer of realistic size, tool parsing, the journal. CPU is the user + system time of the
system's process during the turns, without opening the sessions.

    python benchmarks/gateway.py [--json] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Check, parser_of, report
from turns.material import write_replies
from turns.systems import Loader, Processes, System, rllm_python

from tidegate.gateway.client import GatewayClient
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Sampling

ROOT = Path(__file__).parents[1]
SESSIONS, TURNS = 64, 8
EPISODES = 256
WAVES = 2  # new sessions per round
LONG_SESSIONS, LONG_PAIRS = 16, 5
LARGE_POST = 20_000_000
STALL_S, PACE_S = 8.0, 0.5
Access = tuple[str, str, str]


class Bench:
    """A load generator and the sessions opened for it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._opened = 0

    def open(self, system: System, count: int) -> list[Access]:
        """Opens sessions; returns (name, path, key) of each."""
        names = [str(self._opened + n) for n in range(count)]
        self._opened += count
        if system.name == "tidegate":
            return asyncio.run(_open_sessions(system, names))
        return [(name, system.path.replace("{session}", f"{system.name}-{name}"), "key") for name in names]

    def turns(
        self,
        system: System,
        sessions: list[Access],
        turns: int,
        *,
        concurrency: int | None = None,
        stream: bool = False,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Runs turns; returns their cost. Raises RuntimeError if one fails, unless failures are counted."""
        before = system.cpu_seconds()
        done = self._loader.turns(system, sessions, turns, concurrency=concurrency, stream=stream)
        cpu = system.cpu_seconds() - before
        if done["errors"] and strict:
            raise RuntimeError(f"{system.name}: {done['errors']} calls failed, first: {done['error']}")
        return {
            "cpu_ms": 1e3 * cpu / done["turns"],
            "turns_per_s": done["turns"] / done["seconds"],
            "errors": done["errors"],
        }

    def round(self, system: System, *, stream: bool = False) -> dict[str, Any]:
        waves = []
        for _ in range(WAVES):
            sessions = self.open(system, SESSIONS)
            waves.append(self.turns(system, sessions, TURNS, stream=stream))
        return {key: statistics.mean(wave[key] for wave in waves) for key in ("cpu_ms", "turns_per_s")}


async def _open_sessions(system: System, names: list[str]) -> list[Access]:
    async with GatewayClient(system.url) as client:
        accesses = []
        for name in names:
            access = await client.open_session(sampling=Sampling(max_tokens=256), deadline_s=3600)
            path = "/" + access.base_url.split("/", 3)[3] + "/chat/completions"
            accesses.append((name, path, access.api_key))
        return accesses


def interleaved(
    bench: Bench, systems: list[System], streamed: list[System], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Results of the rounds by system name, those with streams by the name and `_streamed`. Each round runs
    every system; a warm-up round comes first."""
    runs = [(system.name, system, False) for system in systems]
    runs += [(f"{system.name}_streamed", system, True) for system in streamed]
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in runs}
    for number in range(rounds + 1):
        for name, system, stream in runs:
            row = bench.round(system, stream=stream)
            if number > 0:
                taken[name].append(row)
    return taken


def ratio(taken: dict[str, list[dict[str, Any]]], key: str, one: str, other: str) -> float | None:
    """Median over the rounds of one system's figure ÷ another's; None if a system is missing."""
    pairs = list(zip(taken.get(one, ()), taken.get(other, ()), strict=False))
    return statistics.median(a[key] / b[key] for a, b in pairs) if pairs else None


def late_turn(bench: Bench, systems: list[System], number: int, pairs: int) -> dict[str, Any]:
    """CPU ms of turn `number` and of turn 2 in each system; all sessions of a system run each turn together,
    the turns and the systems interleaved. Medians over the pairs."""
    taken: dict[str, list[float]] = {}
    for _ in range(pairs):
        old = {system.name: bench.open(system, LONG_SESSIONS) for system in systems}
        young = {system.name: bench.open(system, LONG_SESSIONS) for system in systems}
        for system in systems:
            bench.turns(system, old[system.name], number - 1)
            bench.turns(system, young[system.name], 1)
        for _ in range(3):  # turns `number` to `number` + 2, and 2 to 4
            for system in systems:
                for turn, sessions in ((number, old), (2, young)):
                    cost = bench.turns(system, sessions[system.name], 1)["cpu_ms"]
                    taken.setdefault(f"{system.name}_turn_{turn}_cpu_ms", []).append(cost)
    return {name: statistics.median(costs) for name, costs in taken.items()}


def growth(row: dict[str, Any], number: int) -> float:
    """A late turn's cost ÷ that of turn 2, without the bare forwarder's own growth."""
    own = row[f"bare_turn_{number}_cpu_ms"] - row["bare_turn_2_cpu_ms"]
    return float((row[f"tidegate_turn_{number}_cpu_ms"] - own) / row["tidegate_turn_2_cpu_ms"])


def control_plane(bench: Bench, system: System, rounds: int) -> dict[str, Any]:
    """CPU ms of opening an episode and of finishing it, and their sum ÷ a turn's. Medians of the rounds."""
    taken = []
    for _ in range(rounds):
        before = system.cpu_seconds()
        sessions = bench.open(system, EPISODES)
        opened = system.cpu_seconds()
        turn = bench.turns(system, sessions, TURNS, concurrency=SESSIONS)["cpu_ms"]
        ran = system.cpu_seconds()
        asyncio.run(_finish_sessions(system, [path.split("/")[2] for _, path, _ in sessions]))
        costs = [1e3 * seconds / EPISODES for seconds in (opened - before, system.cpu_seconds() - ran)]
        taken.append((*costs, sum(costs) / turn))
    names = ("open_cpu_ms", "finish_cpu_ms", "episode_vs_turn")
    return {
        name: statistics.median(column) for name, column in zip(names, zip(*taken, strict=True), strict=True)
    }


async def _finish_sessions(system: System, session_ids: list[str]) -> None:
    async with GatewayClient(system.url) as client:
        for session_id in session_ids:
            await client.finish(session_id)


def crowd(bench: Bench, system: System, sessions: int) -> dict[str, Any]:
    """Runs TURNS turns in each of many concurrent sessions; counts errors and quarantines of the engine."""
    done = bench.turns(system, bench.open(system, sessions), TURNS, strict=False)
    assert system.log is not None
    return {**done, "quarantined": system.log.read_text().count("is in quarantine")}


def stalls(bench: Bench, loader: Loader, poster: Loader, system: System, rounds: int) -> dict[str, Any]:
    """Measures how much longer the turns of SESSIONS sessions take while another session repeatedly posts a
    message of 20 MB. Each session runs a turn every PACE_S seconds, so that latency is measured and not
    throughput. Each round runs turns without and with the posts; medians of the rounds."""
    alone, beside, posted = [], [], []
    for number in range(2 * rounds):
        job = {"url": system.url, "for_s": STALL_S, "every_s": PACE_S, "stream": False}
        job["concurrency"] = SESSIONS
        sessions = bench.open(system, SESSIONS)
        bench.turns(system, sessions, 1)  # first prompts are rendered in full; sent together they would queue
        turns = {**job, "kind": "turns", "sessions": sessions}
        posting = number % 2 == 1
        with ThreadPoolExecutor(1) as pool:
            posts = {**job, "kind": "posts", "sessions": bench.open(system, 1), "size": LARGE_POST}
            sent = pool.submit(poster.ask, posts) if posting else None
            done = loader.ask(turns)
            if sent is not None:
                posted.append(sent.result())
        if done["errors"]:
            raise RuntimeError(f"{done['errors']} calls failed, first: {done['error']}")
        (beside if posting else alone).append(done["p99_ms"])
    if any(one["statuses"].keys() != {"400"} for one in posted):
        raise RuntimeError(f"posts of {LARGE_POST} bytes were not refused as too long: {posted}")
    return {
        "p99_ms_alone": statistics.median(alone),
        "p99_ms_beside_posts": statistics.median(beside),
        "seconds_a_post": statistics.median(one["seconds_each"] for one in posted),
        "stall_ms_p99": statistics.median(b - a for a, b in zip(alone, beside, strict=True)),
    }


def make_model(directory: Path, context: int = 32768) -> Path:
    """The model files that a gateway reads: a tokenizer of 130,000 tokens, a template in Qwen 3's format."""
    sys.path.append(str(ROOT))  # the tests' tokenizer
    from tests.families import family_tokenizer

    family_tokenizer("qwen3", "real").save_pretrained(str(directory))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return directory


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument(
        "--rllm-venv", type=Path, default=ROOT / ".venv-rllm", help="the peer's virtual environment"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name, Processes(Path(name)) as processes:
        return measure(Path(name), processes, arguments)


def measure(directory: Path, processes: Processes, arguments: argparse.Namespace) -> int:
    model = make_model(directory / "model")
    write_replies(directory / "replies.json", Renderer.load(model))
    engine = processes.engine(directory / "replies.json")
    loader = processes.load()
    bench = Bench(loader)
    tidegate = processes.tidegate(engine, model)
    bare = processes.bare(engine)
    systems = [engine, bare, tidegate]
    try:
        python = rllm_python(arguments.rllm_venv)
        systems += [processes.rllm(python, engine, tuned=tuned) for tuned in (False, True)]
    except RuntimeError as error:
        print(f"rllm-model-gateway is not compared: {error}", file=sys.stderr)
    taken = interleaved(bench, systems, [bare, tidegate], arguments.rounds)
    rows = [
        {"system": name, **{key: statistics.median(row[key] for row in runs) for key in runs[0]}}
        for name, runs in taken.items()
    ]
    control = control_plane(bench, tidegate, arguments.rounds)
    late = late_turn(bench, [bare, tidegate], 200, LONG_PAIRS)
    stalled = stalls(bench, loader, processes.load(), tidegate, arguments.rounds)
    crowds = {number: crowd(bench, processes.tidegate(engine, model), number) for number in (1024, 4096)}
    rss = open_ten_thousand(bench, processes.tidegate(engine, model))
    rows += [
        {"what": "long sessions", **late},
        {"what": "control plane of an episode", **control},
        {"what": "posts of 20 MB", **stalled},
        *({"what": f"{number} sessions", **done} for number, done in crowds.items()),
        {"what": "10000 open sessions", "rss_mb": rss},
    ]
    checks = [
        Check("cpu_vs_bare", ratio(taken, "cpu_ms", "tidegate", "bare"), "<=", 1.3),
        Check(
            "streamed_vs_bare_streamed",
            ratio(taken, "cpu_ms", "tidegate_streamed", "bare_streamed"),
            "<=",
            1.6,
        ),
        Check("throughput_vs_rllm", ratio(taken, "turns_per_s", "tidegate", "rllm_tuned"), ">=", 8),
        Check("turn200_vs_turn2", growth(late, 200), "<=", 1.5),
        Check("stall_ms_p99", stalled["stall_ms_p99"], "<=", 50),
        Check("errors_at_1024_sessions", crowds[1024]["errors"], "==", 0),
        Check("errors_at_4096_sessions", crowds[4096]["errors"], "==", 0),
        Check("quarantined_at_4096", crowds[4096]["quarantined"], "==", 0),
        Check("rss_mb_10000_open_sessions", rss, "<=", 1500),
    ]
    return report(rows, checks, as_json=arguments.json)


def open_ten_thousand(bench: Bench, system: System) -> float:
    """Memory of a gateway with 10,000 open sessions of TURNS turns each."""
    bench.turns(system, bench.open(system, 10_000), TURNS, concurrency=SESSIONS)
    return system.rss_mb()


if __name__ == "__main__":
    sys.exit(main())
