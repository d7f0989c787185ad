"""Compares a search through the retrieval server with one in this process, and with a server without batches.

50,000 vectors of 384 numbers, searched exactly; all-MiniLM-L6-v2, which `tidegate convert minilm` fetches
if --encoder is not there; distinct queries of 8 to 16 tokens, so that no cache is hit. Every system
searches with one thread, each round runs all systems in turns, and the figures are medians of the rounds.
`cpu_ms`, the CPU time of the server per answer, depends less on other work than requests per second.
`unbatched` searches one query at a time, without limits and deadlines. Then 4,096 clients send a query
simultaneously: more than fit in the queue, and more than can be answered before the deadline. Recall@5 is
the share of 192 questions whose passage, in other words, is among five (examples/small_agents).

    python benchmarks/rag.py [--json] [--rounds 3] [--encoder build/minilm]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Check, parser_of, report
from retrieval.material import make_index, queries, recalls
from retrieval.systems import RagProcesses, Searches
from retrieval.unbatched import K
from turns.systems import System

from tidegate.rag.index.searcher import Searcher

LONE, CLIENTS = 1, (64, 256)
LONE_QUERIES = 60
SECONDS = 5.0  # duration of a system's turn with many clients
SAMPLE = 200  # number of answers compared with the plain search
BURST, QUEUE, DEADLINE_S = 4096, 3072, 6.0
Rows = dict[tuple[str, int], list[dict[str, Any]]]


class Bench:
    """A plain search in this process, the servers, and a load generator."""

    def __init__(self, searcher: Searcher, encoder: Path, searches: Searches) -> None:
        self._searcher = searcher
        self._encoder = encoder
        self._searches = searches
        self._seeds = itertools.count()
        self.wrong = 0

    def _queries(self, count: int) -> list[str]:
        return queries(self._encoder, count, next(self._seeds))

    def bare(self) -> dict[str, Any]:
        """Sends one query after another to the plain search."""
        latencies = []
        for query in self._queries(LONE_QUERIES):
            began = time.perf_counter()
            self._searcher.search([query], [K])
            latencies.append(time.perf_counter() - began)
        return row(latencies, len(latencies), sum(latencies))

    def lone(self, system: System) -> dict[str, Any]:
        """One client that sends one query after another."""
        asked = self._queries(LONE_QUERIES)
        done = self._searches.searches(system, asked, 1)
        return row(done["latencies"], done["in_time"], done["seconds"])

    def many(self, system: System, clients: int) -> dict[str, Any]:
        """Clients that send the next query as soon as the previous one is answered; answers are checked."""
        before = system.cpu_seconds()
        done = self._searches.searches(system, self._queries(20_000), clients, SECONDS)
        if done["unanswered"] or done["codes"]:
            raise RuntimeError(f"{system.name}: {done['unanswered']} unanswered, errors {done['codes']}")
        sample = list(done["first"].items())[:SAMPLE]
        plain = self._searcher.search([query for query, _ in sample], [1] * len(sample))
        self.wrong += sum(hits[0].id != best for hits, (_, best) in zip(plain, sample, strict=True))
        cpu_ms = 1e3 * (system.cpu_seconds() - before) / len(done["latencies"])
        return row(done["latencies"], done["in_time"], done["seconds"]) | {"cpu_ms": cpu_ms}

    def burst(self, system: System) -> dict[str, Any]:
        """Sends more queries at once than can be answered; each must end with documents or an error code."""
        before = system.rss_mb()
        done = self._searches.searches(system, self._queries(BURST), BURST)
        answered = len(done["latencies"])
        errors = sum(done["codes"].values())
        return {
            "system": system.name,
            "clients": BURST,
            "documents": answered,
            **done["codes"],
            "unanswered": BURST - answered - errors,
            "rss_mb_before": before,
            "rss_mb_after": system.rss_mb(),
        }


def row(latencies: list[float], answered: int, seconds: float) -> dict[str, Any]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"requests_per_s": answered / seconds, "p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


def rounds(bench: Bench, systems: list[System], count: int) -> Rows:
    """Results by system and number of clients, one per round; each round measures all systems."""
    taken: Rows = {}
    for _ in range(count):
        taken.setdefault(("bare", LONE), []).append(bench.bare())
        for system in systems:
            taken.setdefault((system.name, LONE), []).append(bench.lone(system))
        for clients in CLIENTS:
            for system in systems:
                taken.setdefault((system.name, clients), []).append(bench.many(system, clients))
    return taken


def pairs(taken: Rows, one: str, other: str, clients: int, key: str) -> Iterator[tuple[float, float]]:
    for mine, theirs in zip(taken[one, clients], taken[other, clients], strict=True):
        yield mine[key], theirs[key]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--encoder", type=Path, default=Path("build/minilm"), help="directory of the encoder")
    arguments = parser.parse_args()
    arguments.encoder = arguments.encoder.resolve()  # the servers have another working directory
    if not arguments.encoder.is_dir():
        convert = [sys.executable, "-m", "tidegate", "convert", "minilm", "--out", str(arguments.encoder)]
        subprocess.run(convert, check=True)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name, RagProcesses(Path(name)) as processes:
        return measure(Path(name), processes, arguments)


def measure(directory: Path, processes: RagProcesses, arguments: argparse.Namespace) -> int:
    recall = recalls(directory, arguments.encoder, K)
    index = make_index(directory, arguments.encoder)
    bench = Bench(Searcher(index, threads=1), arguments.encoder, processes.load())
    ours = processes.server(index)
    systems = [ours, processes.unbatched(index)]
    taken = rounds(bench, systems, arguments.rounds)
    impatient = processes.server(index, "--queue", str(QUEUE), "--deadline-s", str(DEADLINE_S))
    bench.lone(impatient)  # a server's memory grows with its first answers
    burst = bench.burst(impatient)
    rows = [
        {"system": name, "clients": clients}
        | {key: statistics.median(one[key] for one in all) for key in all[0]}
        for (name, clients), all in taken.items()
    ]
    lone = list(pairs(taken, "tidegate", "bare", LONE, "p50_ms"))
    batched = pairs(taken, "tidegate", "unbatched", 64, "requests_per_s")
    cpu = pairs(taken, "unbatched", "tidegate", 64, "cpu_ms")
    checks = [
        Check("lone_vs_bare", statistics.median(a / b for a, b in lone), "<=", 1.2),
        Check("lone_overhead_ms", statistics.median(a - b for a, b in lone), "<=", 5),
        Check("vs_unbatched_64", statistics.median(a / b for a, b in batched), ">=", 4),
        Check("cpu_vs_unbatched_64", statistics.median(a / b for a, b in cpu), ">=", 4),
        Check("wrong_documents", bench.wrong, "==", 0),
        Check("recall_at_5", recall["minilm"], ">=", 0.75),
        Check("unanswered_at_4096", burst["unanswered"], "==", 0),
        Check("rss_mb_at_4096", burst["rss_mb_after"] - burst["rss_mb_before"], "<=", 256),
    ]
    recalled = [{"system": name, "recall_at_5": value} for name, value in recall.items()]
    return report([*rows, burst, *recalled], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
