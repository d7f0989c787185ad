"""Builds, searches and restarts an index of many vectors with the index type that the build chooses.

The vectors are synthetic (benchmarks/retrieval/synthetic.py) and made in blocks. `build` is
`tidegate rag build` in a process of its own, with documents of 60 words: reading, encoding (here: making the
vectors), training, adding, and measuring the recall. Its memory is sampled from /proc: `anon_mb` is memory
proper, `rss_mb` also has the pages of mapped files, which the system can reclaim. `search` compares it with a
Flat index of the same vectors in memory, lone and in batches of 64, in turns, with one thread; the times are
CPU time, so that other work on the machine distorts them less. `restart` is the time from starting a server's
process to `/ready` and to the first answer, with files in the system's cache and without an encoder's model;
the fastest of five.

    python benchmarks/rag_scale.py [--vectors 1000000] [--dim 384] [--index KIND] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from common import Check, report
from retrieval.synthetic import BLOCK, SyntheticEncoder, query_of, write_corpus
from retrieval.systems import RagProcesses

from tidegate.progress import Progress
from tidegate.rag.build import Plan, build
from tidegate.rag.index.manifest import Manifest
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.index.vector_index import VectorIndex, require_faiss

K, QUERIES, BATCH, RESTARTS = 10, 512, 64, 5
_SAMPLE_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--index", help="type of the index, in place of the chosen one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the build")
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--build", type=Path, metavar="DIR", help=argparse.SUPPRESS)  # in the child process
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
    encoder = SyntheticEncoder(arguments.vectors, arguments.dim)
    if arguments.build is not None:
        build_index(arguments, encoder)
        return 0
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        return measure(Path(name), arguments, encoder)


def measure(directory: Path, arguments: argparse.Namespace, encoder: SyntheticEncoder) -> int:
    write_corpus(directory / "corpus.jsonl", arguments.vectors)
    built = build_in_child(directory, arguments)
    index = directory / "index"
    manifest = Manifest.read(index)
    assert manifest.index is not None
    sizes = {file.name: file.bytes for file in manifest.files}
    vectors = sum(size for name, size in sizes.items() if name.startswith("vectors."))
    built |= {
        "index": manifest.index.summary,
        "vectors_mb": vectors / 1e6,
        "documents_mb": sizes["documents.jsonl"] / 1e6,
    }
    restarted = restart(index, arguments)
    searched = search(index, arguments, encoder)
    rows = [{"part": "build"} | built, {"part": "search"} | searched, {"part": "restart"} | restarted]
    checks = [
        Check("recall_at_10", searched["recall_at_10"], ">=", 0.94),
        Check("build_anon_mb", built["anon_mb"], "<=", 1024),
        Check("lone_vs_flat", searched["flat_lone_ms"] / searched["lone_ms"], ">=", 1),
        Check("batch_vs_flat", searched["flat_batch_ms"] / searched["batch_ms"], ">=", 1),
        Check("restart_s", restarted["ready_s"], "<=", 2),
    ]
    return report(rows, checks, as_json=arguments.json)


# -- the build ---------------------------------------------------------------------------------------


def build_index(arguments: argparse.Namespace, encoder: SyntheticEncoder) -> None:
    directory = arguments.build
    plan = Plan(
        [directory / "corpus.jsonl"], directory / "index", encoder.name, kind=arguments.index,
        threads=arguments.threads,
    )  # fmt: skip
    with Progress() as progress:
        build(plan, progress, encoder)


def build_in_child(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--build", str(directory), "--threads", str(arguments.threads)]
    command += ["--vectors", str(arguments.vectors), "--dim", str(arguments.dim)]
    command += ["--index", arguments.index] if arguments.index else []
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = {"RssAnon": 0, "VmHWM": 0}
    while process.poll() is None:
        memory = _memory(process.pid)
        peak = {name: max(most, memory.get(name, 0)) for name, most in peak.items()}
        time.sleep(_SAMPLE_S)
    if process.returncode:
        raise RuntimeError(f"the build ended with {process.returncode}")
    usage = os.times()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": usage.children_user + usage.children_system,
        "anon_mb": peak["RssAnon"] / 1e6,
        "rss_mb": peak["VmHWM"] / 1e6,
    }


def _memory(pid: int) -> dict[str, int]:
    """Memory of a process in bytes, by the names of /proc/PID/status; empty if it has ended."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    return {}


# -- searches ----------------------------------------------------------------------------------------


def search(index: Path, arguments: argparse.Namespace, encoder: SyntheticEncoder) -> dict[str, Any]:
    """Recall and times beside a Flat index of the same vectors, which this process holds in memory."""
    faiss = require_faiss()
    chance = np.random.default_rng(9)
    numbers = chance.choice(arguments.vectors, min(QUERIES, arguments.vectors), replace=False)
    queries = encoder.queries([query_of(number) for number in numbers.tolist()])
    began = time.perf_counter()
    searcher = Searcher(index, threads=1, encoder=encoder)
    opened = time.perf_counter() - began
    flat = faiss.IndexFlatIP(arguments.dim)
    for start in range(0, arguments.vectors, BLOCK):
        flat.add(encoder.block(start // BLOCK)[: arguments.vectors - start])
    manifest = searcher.manifest
    assert manifest.index is not None
    inside = index / manifest.generation
    mine = VectorIndex(inside, manifest.index.kind, manifest.index.nprobe, threads=1)
    systems = {"": mine.search, "flat_": flat.search}
    faiss.omp_set_num_threads(1)
    times: dict[str, list[float]] = {}
    found: dict[str, list[list[int]]] = {name: [] for name in systems}
    for start in range(0, len(queries) - BATCH + 1, BATCH):
        for name, searched in systems.items():
            began = time.process_time()
            found[name] += searched(queries[start : start + BATCH], K)[1].tolist()
            times.setdefault(f"{name}batch_ms", []).append((time.process_time() - began) / BATCH)
            for row in range(start, start + BATCH // 8):
                began = time.process_time()
                searched(queries[row : row + 1], K)
                times.setdefault(f"{name}lone_ms", []).append(time.process_time() - began)
    pairs = zip(found[""], found["flat_"], strict=True)
    recall = statistics.mean(len(set(rows) & set(exact)) / K for rows, exact in pairs)
    return (
        {"recall_at_10": recall}
        | {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
        | {"open_s": opened}
    )


# -- restarts ----------------------------------------------------------------------------------------


def restart(index: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with RagProcesses(index.parent) as processes:
        for _ in range(RESTARTS + 1):  # the first one writes the bytecode of modules
            began = time.perf_counter()
            system = processes.synthetic(index, arguments.vectors, arguments.dim)
            ready = time.perf_counter() - began
            body = json.dumps({"query": query_of(0), "k": K}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{system.url}/v1/search", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert len(json.load(answer)["results"][0]) == K
            answered = time.perf_counter() - began
            memory = _memory(system.process.pid)
            rows.append({
                "ready_s": ready, "answered_s": answered, "cpu_s": system.cpu_seconds(),
                "rss_mb": memory["VmRSS"] / 1e6, "anon_mb": memory["RssAnon"] / 1e6,
            })  # fmt: skip
            system.process.terminate()
            system.process.wait()
    return min(rows[1:], key=lambda row: row["ready_s"])


if __name__ == "__main__":
    sys.exit(main())
