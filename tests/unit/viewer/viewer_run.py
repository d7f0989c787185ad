"""An invented run directory for tests of the viewer.

python tests/unit/viewer/viewer_run.py DIR   # writes one
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

CONFIG = """
[run]
name = "demo"
dir = "runs"
seed = 0

[model]
path = "examples/tiny_base/model"

[env]
use = "arithmetic"

[agent]
use = "solver"

[trainer]
steps = {steps}
max_staleness = 2
group_size = 8
groups_per_batch = 16
"""

SYSTEM = "Solve the problem. Use the calculator. End with #### and the number."
STATES = ("stepped", "stale", "filtered", "failed", "cancelled")


def skill(step: float, steps: int) -> float:
    return 0.33 + 0.60 / (1 + math.exp(-(step - 0.4 * steps) / (0.1 * steps)))


def metrics_row(step: int, steps: int, rng: random.Random, counts: Counter[str]) -> dict[str, Any]:
    mean = min(1.0, max(0.0, skill(step, steps) + rng.gauss(0, 0.045)))
    counts.update(
        stepped=16, filtered=rng.randint(0, 6), stale=rng.random() < 0.15, failed=rng.random() < 0.03
    )
    seconds = 1.5 + rng.random() * 0.4
    return {
        "step": step,
        "version": step,
        "time": 1_700_000_000.0 + step * 1.9,
        "reward/mean": mean,
        "reward/std": math.sqrt(mean * (1 - mean)),
        "staleness/mean": 0.7 + rng.random() * 0.5,
        "staleness/max": rng.choice([1, 2, 2]),
        "weight_version/mixed_turn_ratio": rng.random() * 0.3,
        "tokens/sampled": 7000 + rng.randint(-600, 600),
        "tokens/sampled_total": step * 8000 + rng.randint(-500, 500),
        "tokens/trained": 6400 + rng.randint(-600, 600),
        "time/step": seconds,
        "time/wait_for_batch": max(0.0, rng.gauss(0.5, 0.15)),
        "time/batch_queue": max(0.0, rng.gauss(0.3, 0.1)),
        "time/update": seconds * 0.5,
        "time/publish": 0.06 + rng.random() * 0.02,
        **{f"groups/{name}": counts[name] for name in STATES},
        "groups/stepped": counts["stepped"] % (25 * 16),
        "groups/trained": counts["stepped"] // (25 * 16) * 25 * 16,
        "groups/live": rng.randint(8, 16),
        "groups/ready": rng.randint(2, 14),
        "groups/leased": 16,
        "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.3 + rng.random() * 0.4,
        "mismatch_kl": 1e-6 * (1 + rng.random()),
        "lag_kl": 0.004 + rng.random() * 0.003,
        "entropy": 0.5 - 0.35 * step / steps + rng.random() * 0.03,
        "clip_fraction": rng.random() * 0.02,
        "ess": 0.96 + rng.random() * 0.03,
        "turns/mean": 2.1 + rng.random() * 0.2,
        "tool_calls/mean": 1.1 + rng.random() * 0.2,
        "length/mean": 52 + rng.random() * 6,
    }


def evaluation(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    value = skill(step, steps)
    return {
        "eval/episodes": 200 if step in (0, steps) else 64,
        "eval/reward": value + rng.gauss(0, 0.015),
        "eval/reward_greedy": min(1.0, value + 0.05 + rng.gauss(0, 0.01)),
        "eval/reward_unseen_templates": value * 0.8 + rng.gauss(0, 0.02),
    }


def trajectory(index: int, right: bool, version: int, rng: random.Random, **more: Any) -> dict[str, Any]:
    one, two = index + 11, 3 + index % 9
    said = one * two if right else one + two
    call = {
        "name": "calculator",
        "arguments": json.dumps({"expression": f"{one} {'*' if right else '+'} {two}"}),
    }
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c0", "type": "function", "function": call}],
    }
    spans = [
        [[version, 0, 17]],
        [[version, 0, 9], [version + 1, 9, 21]] if index % 3 == 0 else [[version, 0, 21]],
    ]
    turns = [
        {"index": 0, "parent": None, "output_ids": list(range(17)), "logprobs": [-0.5] * 17},
        {"index": 1, "parent": 0, "output_ids": list(range(21)), "logprobs": [-0.2] * 21},
    ]
    for turn, versions in zip(turns, spans, strict=True):
        turn |= {"version_spans": versions, "finish_reason": "stop", "delivered": True}
    return {
        "session_id": f"s{rng.randrange(16**8):08x}",
        "group_id": None,
        "slot": None,
        "task_id": f"heldout-{index}",
        "split": "eval",
        "outcome": "completed",
        "reward": float(right),
        "reward_parts": {"exact": float(right)},
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"A box holds {one} pencils. How many pencils are in {two} boxes?"},
            reply,
            {"role": "tool", "tool_call_id": "c0", "content": str(said)},
            {"role": "assistant", "content": f"There are {said} pencils in all.\n#### {said}"},
        ],
        "turns": turns,
        "seconds": 0.4,
        **more,
    }


def write_evaluation(run_dir: Path, step: int, share: float, rng: random.Random, tasks: int = 60) -> None:
    lines = []
    for name, mode in (("", "sampled"), ("", "greedy"), ("unseen_templates", "sampled")):
        for index in range(tasks):
            right = rng.random() < share
            lines.append(trajectory(index, right, step, rng, eval_set=name, mode=mode))
    rng.shuffle(lines)
    path = run_dir / "trajectories" / f"eval_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def write_ledger(run_dir: Path, steps: int, committed: int, rng: random.Random) -> None:
    """Groups of one attempt each: 16 stepped a step, and some that ended otherwise."""
    entries: list[dict[str, Any]] = [
        {"kind": "run", "event": "started", "epoch": 1, "version": 0, "position": None}
    ]
    position = 0
    for step in range(1, steps + 1):
        ends = ["stepped"] * 16 + rng.choices(
            ["filtered", "stale", "failed", "cancelled"], [20, 4, 1, 1], k=3
        )
        for number, state in enumerate(ends):
            group = f"g{step}-{number}"
            attempt = {"kind": "attempt", "id": f"{group}-0"}
            outcome = "agent_error" if state == "failed" else "completed"
            why = "ValueError: <b>no</b> number" if state == "failed" else None
            entries += [
                {"kind": "group", "event": "issued", "id": group, "task": group, "version": step},
                {**attempt, "event": "issued", "group": group, "slot": 0, "number": 1},
                {**attempt, "event": "ended", "state": state, "outcome": outcome, "why": why},
                {"kind": "group", "event": "ended", "id": group, "state": state, "step": step,
                 "staleness": rng.choice([0, 1, 1, 2])},
            ]  # fmt: skip
        if step == committed:
            position = len(entries)
    entries.append({"kind": "group", "event": "issued", "id": "open", "task": "open"})
    (run_dir / "ledger.jsonl").write_text(
        "".join(json.dumps({"seq": seq, "time": 0.0, **one}) + "\n" for seq, one in enumerate(entries))
    )
    marker = run_dir / "checkpoints" / f"step_{committed}" / "COMMITTED"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"ledger": position, "step": committed}))


def write_run(run_dir: Path, steps: int = 100, until: int | None = None, seed: int = 0) -> Path:
    """Write a run of `steps` steps, cut off after step `until`."""
    rng, counts = random.Random(seed), Counter[str]()
    until = steps if until is None else until
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(CONFIG.format(steps=steps))
    rows = [{"step": 0, "version": 0, "time": 1_700_000_000.0, **evaluation(0, steps, rng)}]
    write_evaluation(run_dir, 0, 0.33, rng)
    for step in range(1, until + 1):
        row = metrics_row(step, steps, rng, counts)
        rows.append(row | (evaluation(step, steps, rng) if step % 25 == 0 or step == steps else {}))
    if until == steps:
        write_evaluation(run_dir, steps, 0.93, rng)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if until > 0:
        write_ledger(run_dir, until, max(1, until // 25 * 25), rng)
    return run_dir


def text_of(value: Any) -> str:
    """All texts in JSON data, in their order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        value = " ".join(filter(None, map(text_of, value)))
    return " ".join(value.split()) if isinstance(value, str) else ""


if __name__ == "__main__":
    print(write_run(Path(sys.argv[1])))
