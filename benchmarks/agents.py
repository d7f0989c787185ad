"""Measures the CPU time of a turn on the agents' side: `Session.openai()`, the openai SDK's own client, and a
client without any features.

32 sessions × 8 turns at the same time in one process per client, against a fake engine that answers at once;
whole and streamed replies. Rounds of all clients are interleaved; the figures are medians of the rounds.

    python benchmarks/agents.py [--json] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from common import Check, report
from gateway import make_model
from turns.material import write_replies
from turns.systems import Processes

from tidegate.gateway.rendering.renderer import Renderer

CLIENTS = ("raw", "stock", "tidegate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name, Processes(Path(name)) as processes:
        directory = Path(name)
        write_replies(directory / "replies.json", Renderer.load(make_model(directory / "model")))
        engine = processes.engine(directory / "replies.json")
        agents = {client: processes.agent(client, engine) for client in CLIENTS}
        taken: dict[tuple[str, str], list[float]] = {}
        for number in range(arguments.rounds + 1):  # the first is a warm-up
            for kind in ("whole", "streamed"):
                for client, agent in agents.items():
                    cost = agent(kind)
                    if number > 0:
                        taken.setdefault((client, kind), []).append(cost)
    rows = [
        {"client": client, "replies": kind, "cpu_ms": statistics.median(costs)}
        for (client, kind), costs in taken.items()
    ]

    def ratio(other: str, kind: str) -> float:
        pairs = zip(taken["tidegate", kind], taken[other, kind], strict=True)
        return statistics.median(own / others for own, others in pairs)

    rows += [{"replies": kind, "cpu_vs_raw": ratio("raw", kind)} for kind in ("whole", "streamed")]
    checks = [
        Check("cpu_vs_stock", ratio("stock", "whole"), "<=", 0.35),
        Check("streamed_vs_stock", ratio("stock", "streamed"), "<=", 0.6),
    ]
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
