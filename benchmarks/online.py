"""Learning from users of a standing service, while its processes are killed and a hostile key floods it.

Three runs. The online demo (`examples/online/demo.py`): forty users of the plain openai SDK, with gateway,
engine and trainer killed (-9) once each, and a foreign group with a reward of -99 offered on the way. Then a
short run in which a second key rewards everything, with `trainer.max_client_share` as its bound. At last the
trained model serves users while planted candidates are tested against it (`promotion.py`).

    python benchmarks/online.py [--json] [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Check, report

from tidegate.config import load_settings
from tidegate.errors import GatewayError, TidegateError
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.project_keys import create_key
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.ledger.audit import audit_run

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "online"))

import demo  # noqa: E402
import promotion  # noqa: E402
from users import Users  # noqa: E402

ADMIN_KEY = "an admin key of the benchmark"
FOREIGN_REWARD = -99.0
SHARE = 0.25
"""Bound on the hostile key's share of a batch."""
POISON_STEPS = 4


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def trained(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the step and the episode of everything that a step trained on."""
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        for episode in lines(path):
            if episode["state"] == "stepped":
                yield int(path.stem.removeprefix("step_")), episode


async def learn(directory: Path, steps: int) -> tuple[dict[str, Any], list[Check]]:
    """Runs the demo, offers it a foreign group, and accounts for every feedback."""
    overrides = [f"--run.dir={directory}", f"--trainer.steps={steps}", f"--gateway.admin_key={ADMIN_KEY}"]
    overrides.append("--gateway.port=0")
    bound = load_settings(demo.CONFIG, overrides).trainer.staleness_bound
    foreign, errors = Foreign(), 0
    try:
        result = await demo.run(overrides, foreign.offer)
    except* Exception as failures:  # noqa: BLE001 - counted and shown
        print(repr(failures), file=sys.stderr)
        errors = len(failures.exceptions)
        result = demo.Result(directory / "online")
    run_dir, metrics = result.run_dir, lines(result.run_dir / "metrics.jsonl")
    ledger = lines(run_dir / "ledger.jsonl")
    put_back = {line["id"] for line in ledger if line["event"] == "put_back"}
    rewards = {episode["group_id"]: episode["reward"] for _, episode in trained(run_dir)}
    lost = [
        group
        for group, end in result.ends.items()
        if end.isdigit()
        or (end == "stepped" and f"shop.{group}" not in put_back
            and rewards.get(f"shop.{group}") != result.thumbs[group])
    ]  # fmt: skip
    times = Counter(episode["group_id"] for _, episode in trained(run_dir))
    stepped = [line for line in ledger if line["kind"] == "group" and line.get("state") == "stepped"]
    findings = audit_run(run_dir).findings
    row = {
        "run": "users", "before": result.before, "after": result.after, "seconds": result.seconds,
        "thumbs": len(result.thumbs), "ends": dict(Counter(result.ends.values())),
    }  # fmt: skip
    checks = [
        Check("before", result.before, "<=", 0.5),
        Check("after", result.after, ">=", 0.85),
        Check("seconds", result.seconds, "<=", 360),
        Check("client_errors", errors, "==", 0),
        Check("feedback", len(result.thumbs), ">=", 100 * steps),
        Check("feedback_lost", len(lost), "==", 0),
        Check("feedback_doubled", sum(number > 1 for number in times.values()), "==", 0),
        Check("bound_broken", sum(line["staleness"] > (bound or 0) for line in stepped), "==", 0),
        Check("audit_findings", len(findings), "==", 0),
        Check("foreign_groups_refused", foreign.refusals, "==", 1),
        Check("foreign_metrics_changed", sum(m.get("reward/mean", 0.0) < 0 for m in metrics), "==", 0),
    ]
    return row, checks


class Foreign:
    """A group that the trainer did not issue, with a reward that would show in any mean."""

    refusals = 0

    async def offer(self, url: str) -> None:
        async with GatewayClient(url, ADMIN_KEY) as gateway:
            session = await gateway.open_session(group_id="foreign", slot=0)
            await gateway.finish(session.session_id, reward=FOREIGN_REWARD)
            try:
                await gateway.seal_group("foreign", "t", [session.session_id])
            except GatewayError as refusal:
                self.refusals += refusal.status == 403


async def resist(directory: Path) -> tuple[dict[str, Any], list[Check]]:
    """Runs users beside a key that rewards everything at once; measures that key's share of each batch."""
    run_dir = directory / "poison"
    run_dir.mkdir()
    keys = directory / "poison.json"
    shop, poison = create_key(keys, "shop"), create_key(keys, "poison")
    overrides = [
        f"--run.dir={directory}", "--run.name=poison", f"--trainer.steps={POISON_STEPS}", "--gateway.port=0",
        f"--trainer.max_client_share={SHARE}", "--trainer.groups_per_batch=32",
    ]  # fmt: skip
    others = [create_key(keys, f"team{number}") for number in range(3)]
    began = time.monotonic()
    async with demo.serving(overrides, keys) as service:
        url = await service.address()
        talking = [asyncio.create_task(Users(url, key).run()) for key in (shop, *others)]
        flooding = asyncio.create_task(Flood(url, poison).run())
        waiting = asyncio.create_task(service.until_step(POISON_STEPS + 1))
        tasks = [*talking, flooding, waiting]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    steps = Counter(step for step, _ in trained(run_dir))
    hostile = Counter(step for step, one in trained(run_dir) if one["group_id"].startswith("poison."))
    shares = [hostile[step] / number for step, number in steps.items()]
    row = {"run": "poison", "steps": len(steps), "shares": shares, "seconds": time.monotonic() - began}
    return row, [
        Check("poisoned_steps", len(steps), ">=", POISON_STEPS),
        Check("poison_trained", sum(hostile.values()), ">=", 1),
        Check("poison_share", max(shares, default=1.0), "<=", SHARE),
    ]


class Flood(Users):
    """Users who like every answer, at once."""

    async def thumb(self, reply: str, right: float, delay_s: float) -> None:
        await super().thumb(reply, 1.0, 0.0)


async def measure(steps: int, directory: Path) -> tuple[list[dict[str, Any]], list[Check]]:
    rows, checks = [], []
    for part in (learn(directory, steps), resist(directory), promote(directory)):
        row, more = await part
        rows.append(row)
        checks += more
    return rows, checks


async def promote(directory: Path) -> tuple[dict[str, Any], list[Check]]:
    """Tests planted candidates against the newest checkpoint of the first run."""
    saved = checkpoints.latest(directory / "online")
    if saved is None:
        raise TidegateError(f"{directory / 'online'} has no checkpoint: the first run failed, see above")
    return await promotion.measure(directory / "promotion", saved.path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=load_settings(demo.CONFIG).trainer.steps)
    parser.add_argument("--keep", type=Path, help="directory of the runs, which is kept")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = arguments.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-online-"))
        )
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):
            rows, checks = asyncio.run(measure(arguments.steps, place))
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
