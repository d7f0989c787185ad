"""Measures the CPU time per event of each component that is a single process, and the rate that fills a core.

Gateway and router: 64 sessions × 8 turns with one fake engine, replies of 64 and of 1,024 tokens and messages
of 400 words; 256 sessions opened and finished; groups of 8 sealed, leased and acknowledged; polls of workers
without attempts; probes of 256 engines. Trainer's process: admission, ledger, rows of a batch, trajectory
files, metrics. Publishing: a random Qwen3 with updates of RL size. All figures are the CPU time of the
measured process, in which waiting for a core does not count; medians of the rounds. Three rounds take about
five minutes.

    python benchmarks/ceilings.py [--json] [--rounds 3]

`python benchmarks/ceilings.py --json > costs.txt` writes a file that `tidegate simulate --costs` reads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import broadcast
import torch
from common import report
from costs import serving, training, weights
from gateway import Bench, make_model
from turns.material import TURN_TOKENS, write_replies
from turns.systems import Processes

from tidegate.gateway.rendering.renderer import Renderer

HIDDEN = 512
SHARDS = 2
"""Shards of the gateway whose router is measured."""


def serving_costs(directory: Path, processes: Processes, rounds: int) -> dict[str, float]:
    """Costs of a gateway, of a router, and of the trainer's calls to a gateway."""
    model = make_model(directory / "model")
    renderer = Renderer.load(model)
    engines = []
    for tokens in (TURN_TOKENS, serving.LONG_TOKENS):
        replies = directory / f"replies-{tokens}.json"
        write_replies(replies, renderer, tokens=tokens)
        engines.append(processes.engine(replies))
    short, long = (processes.tidegate(engine, model) for engine in engines)
    sharded = [processes.tidegate(engine, model, ["--gateway.shards", str(SHARDS)]) for engine in engines]
    routers = [serving.Router(one.name, one.url, one.process, one.path, one.log) for one in sharded]
    loader = processes.load()
    bench = Bench(loader)
    costs = serving.turn_costs(loader, bench, short, long, renderer, rounds)
    costs["gateway_session_s"], costs["trainer_session_s"] = serving.session_costs(bench, short, rounds)
    costs["router_session_s"], _ = serving.session_costs(bench, routers[0], rounds)
    groups = serving.group_costs(processes.load(), [short, long, *routers], rounds)
    more = serving.GROUP_SIZE * (serving.LONG_TOKENS - TURN_TOKENS)
    few = serving.GROUP_SIZE * TURN_TOKENS
    for name, one, many in (
        ("gateway", groups[0].server, groups[1].server),
        ("router", groups[2].server, groups[3].server),
        ("trainer", groups[0].trainer, groups[1].trainer),
    ):
        token = (many - one) / more
        costs |= {f"{name}_group_token_s": token, f"{name}_group_s": one - few * token}
    costs["gateway_probe_s"] = serving.probe_cost(short, engines[0])
    costs["gateway_poll_s"] = serving.poll_cost(directory / "polls")
    costs["router_poll_s"] = serving.poll_cost(directory / "routed", SHARDS)
    bytes_of = [serving.journal_bytes(processes, bench, engine, model, directory) for engine in engines]
    token = (bytes_of[1] - bytes_of[0]) / (serving.LONG_TOKENS - TURN_TOKENS)
    return costs | {"journal_turn_bytes": bytes_of[0] - TURN_TOKENS * token, "journal_token_bytes": token}


def publish_costs(directory: Path, rounds: int) -> dict[str, float]:
    broadcast.make_model(directory / "weights-model", HIDDEN)
    base = directory / "weights-model"
    return {
        **weights.file_costs(base, directory / "files"),
        **weights.send_costs(base, directory / "sent", HIDDEN, rounds),
    }


def row(name: str, value: float) -> dict[str, Any]:
    """A cost, and the events per second that fill a core."""
    seconds = name.endswith("_s")
    return {"cost": name, "value": value, "fills_a_core_at": 1 / value if seconds and value > 0 else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tidegate-ceilings-") as name:
        directory = Path(name)
        with Processes(directory) as processes:
            costs = serving_costs(directory, processes, arguments.rounds)
        costs |= training.admission_costs(directory, arguments.rounds)
        costs |= training.record_costs(directory, arguments.rounds)
        costs |= publish_costs(directory, arguments.rounds)
    # A cost is often a difference of two measurements, which noise can make negative.
    rows = [row(name, max(0.0, value)) for name, value in costs.items()]
    return report(rows, [], as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
