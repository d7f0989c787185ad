"""Runs long conversations through the gateway: timeouts, lag of the event loop, and memory.

The whole load is 2,500 sessions × 36 turns that grow to 120,000 tokens. This machine runs `--sessions` of
them at once, with the same turns and lengths: 1 / `factor`. Memory is extrapolated: the gateway's before the
run, and `factor` times what the sessions added. Lag and timeouts are not: they are those of one gateway
process at the reported `turns_per_s`.

    python benchmarks/long_context.py [--json] [--sessions 50] [--every 12]

The lag is the time of `GET /health` on a kept connection, measured every 20 ms during the run by another
process, so it includes the delays of the operating system. The same load runs on rllm-model-gateway if its
environment exists.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Check, report
from gateway import ROOT, Bench, make_model
from turns.material import TURN_TOKENS, passage, write_replies
from turns.systems import Loader, Processes, System

from tidegate.gateway.rendering.renderer import Renderer

SESSIONS, TURNS, TOKENS = 2500, 36, 120_000
CONTEXT = 131_072
PROBE_S = 0.02


def words_of_a_turn(renderer: Renderer) -> int:
    """Words to add in each turn, such that TURNS turns have TOKENS tokens with the replies."""
    tokens_per_word = len(renderer.encode(passage("measured", 10_000))) / 10_000
    return round((TOKENS / TURNS - TURN_TOKENS) / tokens_per_word)


def run(
    bench: Bench,
    loader: Loader,
    prober: Loader,
    system: System,
    directory: Path,
    sessions: int,
    every_s: float,
    words: int,
) -> dict[str, Any]:
    """Runs the sessions while /health is probed."""
    opened = bench.open(system, sessions)
    before, cpu = system.rss_mb(), system.cpu_seconds()
    until = directory / f"{system.name}-ended"
    probe = {"kind": "probe", "url": system.url, "path": "/health", "every_s": PROBE_S, "until": str(until)}
    job = {"kind": "turns", "url": system.url, "sessions": opened, "turns": TURNS, "every_s": every_s}
    job |= {"added": words, "concurrency": sessions, "stream": False}
    with ThreadPoolExecutor(1) as pool:
        probed = pool.submit(prober.ask, probe)
        try:
            done = loader.ask(job)
        finally:
            until.touch()
        lag = probed.result()
    added = system.rss_mb() - before
    return {
        "system": system.name,
        "sessions": sessions,
        "turns": done["turns"],
        "timeouts": done["errors"],
        "error": done["error"],
        "seconds": done["seconds"],
        "turns_per_s": done["turns"] / done["seconds"],
        "turn_p50_ms": done["p50_ms"],
        "turn_p99_ms": done["p99_ms"],
        "loop_lag_ms_p50": lag["p50_ms"],
        "loop_lag_ms_p99": lag["p99_ms"],
        "cpu_ms_per_turn": 1e3 * (system.cpu_seconds() - cpu) / max(1, done["turns"]),
        "rss_mb_before": before,
        "rss_mb_per_session": added / sessions,
        "rss_gb_extrapolated": (before + added * SESSIONS / sessions) / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--sessions", type=int, default=50, help="number of sessions")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between two turns of a session")
    parser.add_argument(
        "--rllm-venv", type=Path, default=ROOT / ".venv-rllm", help="the peer's virtual environment"
    )
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tidegate-long-") as name, Processes(Path(name)) as processes:
        directory = Path(name)
        model = make_model(directory / "model", CONTEXT)
        renderer = Renderer.load(model)
        write_replies(directory / "replies.json", renderer)
        words = words_of_a_turn(renderer)
        engine = processes.engine(directory / "replies.json")
        systems = [processes.tidegate(engine, model)]
        python = arguments.rllm_venv / "bin" / "python"
        if python.exists():
            systems.append(processes.rllm(python, engine, tuned=True))
        else:
            print(f"rllm-model-gateway is not compared: {python} is missing", file=sys.stderr)
        for system in systems:
            loader, prober = processes.load(), processes.load()
            bench = Bench(loader)
            rows.append(
                run(bench, loader, prober, system, directory, arguments.sessions, arguments.every, words)
            )
            print(f"{system.name}: {rows[-1]['turns']} turns", file=sys.stderr)
    factor = SESSIONS / arguments.sessions
    load = {
        "whole_sessions": SESSIONS,
        "factor": factor,
        "turns": TURNS,
        "tokens": TOKENS,
        "words_of_a_turn": words,
    }
    ours = rows[0]
    checks = [
        Check("timeouts", ours["timeouts"], "==", 0),
        Check("loop_lag_ms_p99", ours["loop_lag_ms_p99"], "<=", 100),
        Check("rss_gb", ours["rss_gb_extrapolated"], "<=", 4),
    ]
    return report([load, *rows], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
