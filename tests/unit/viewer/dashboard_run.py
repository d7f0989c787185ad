"""A small run written by the trainer's own writers, with everything the dashboard must explain:
a turn across a publish, a branch, an undelivered turn, tokens forced by a grammar, groups filtered and
stale, failures, a quarantined task, and text that would be markup if it could."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.tiny_tokenizer import make_model_dir
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Group, Outcome, ToolCall, Trajectory

EVIL = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
PROMPT = "<|im_start|>user\nWhat is 3 + 4? é 水 🙂<|im_end|>\n<|im_start|>assistant\n"
SECRET = "sk-very-secret"

CONFIG = """
[run]
name = "small"
[model]
path = "{model}"
[gateway]
admin_key = "{secret}"
[env]
use = "arithmetic"
[agent]
use = "solver"
[trainer]
steps = 4
max_staleness = 2
"""


class Writer:
    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        run_dir.mkdir(parents=True)
        model = make_model_dir(run_dir.parent / "model")
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        (run_dir / "config.toml").write_text(CONFIG.format(model=model, secret=SECRET))
        self.files = TrajectoryFiles(run_dir)
        self.log = MetricsLog(run_dir)
        self.ledger = Ledger(run_dir / "ledger.jsonl")

    def ids(self, text: str) -> np.ndarray[Any, Any]:
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int32)

    def turn(self, index: int, parent: int | None, given: str, said: str, **more: Any) -> Turn:
        output = self.ids(said)
        count = len(output)
        fields: dict[str, Any] = {
            "logprobs": -0.5 * (np.arange(count) % 7).astype(np.float32),
            "version_spans": (VersionSpan(1, 0, count),),
            "finish_reason": "stop",
            "temperature": 1.0,
            "seconds": 0.25,
        }
        return Turn(index, parent, self.ids(given), output, **(fields | more))

    def trajectory(
        self, group: str | None, slot: int, turns: list[Turn], reward: float | None, **more: Any
    ) -> Trajectory:
        fields: dict[str, Any] = {
            "outcome": Outcome.COMPLETED,
            "reward_parts": {} if reward is None else {"exact_answer": reward, "form": 1.0},
            "metrics": {"tool_calls": 1.0},
            "output": "#### 7",
            "seconds": 1.5,
            "messages": [
                {"role": "user", "content": f"What is 3 + 4? {EVIL}"},
                {"role": "assistant", "content": f"#### 7 {EVIL}"},
            ],
            "metadata": {"attempt": f"{group}.{slot}.1"},
            "answer": f"7 {EVIL}",
        }
        return Trajectory(
            f"s-{group}-{slot}", f"task-{group}", "arithmetic", "train", turns=turns, group_id=group,
            slot=slot, reward=reward, **(fields | more),
        )  # fmt: skip

    def simple(
        self, group: str | None, slot: int, reward: float | None, said: str = "#### 7<|im_end|>", **more: Any
    ) -> Trajectory:
        return self.trajectory(group, slot, [self.turn(0, None, PROMPT, said)], reward, **more)

    def straddling(self, group: str, slot: int, reward: float) -> Trajectory:
        said = f"{EVIL} 水 🙂 is #### 9<|im_end|>"
        count = len(self.ids(said))
        spans = (VersionSpan(1, 0, 5), VersionSpan(2, 5, count))
        return self.trajectory(
            group, slot, [self.turn(0, None, PROMPT, said, version_spans=spans)], reward,
        )  # fmt: skip

    def branching(self, group: str, slot: int, reward: float) -> Trajectory:
        forced = np.ones(len(self.ids("<tool_call>3 + 4</tool_call>")), dtype=np.uint8)
        forced[0] = forced[-1] = 0
        turns = [
            self.turn(0, None, PROMPT, "<tool_call>3 + 4</tool_call>", output_mask=forced, parse="ok"),
            self.turn(1, 0, "\ntool 7\n", "#### 7<|im_end|>", delivered=False),
            self.turn(2, 0, "\ntool 7\n", "#### 7<|im_end|>", finish_reason="length"),
            self.turn(3, 0, "\nuser again\n", "It is 7.", branch="the history was edited at message 2"),
        ]
        calls = [
            ToolCall("look", {"at": EVIL}, f"There is no {EVIL}.", True, None, 12.0, 0.5),
            ToolCall("add", {"left": 3, "right": 4}, "7", False, 0, 13.0, 0.125),
        ]
        return self.trajectory(group, slot, turns, reward, tool_calls=calls)

    def metrics(self, step: int, **more: Any) -> None:
        base = {
            "step": step,
            "version": step,
            "time": 1_700_000_000.0 + 2 * step,
            "tokens/sampled_total": 100.0 * step,
        }
        trained = {
            "reward/mean": 0.25 * step, "reward/std": 0.4, "staleness/mean": 0.5, "staleness/max": 1.0,
            "tokens/trained": 90.0, "time/step": 2.0, "time/wait_for_batch": 0.5,
            "time/batch_queue": 0.25, "lag_kl": 1e-3, "mismatch_kl": 1e-9, "entropy": 0.5,
            "groups/stepped": float(step), "groups/filtered": 1.0, "reward/exact_answer": 0.2 * step,
        } if step else {}  # fmt: skip
        self.log.append({**base, **trained, **more})


def write_dashboard_run(run_dir: Path) -> Writer:
    """Steps 1 to 3, evaluations at 0 and 3, a checkpoint's marker behind step 2. Returns the writer, so that
    the run can go on."""
    run = Writer(run_dir)
    run.ledger.record(entry("run", "started", epoch=1, step=0, version=0, position=None))
    for step, share in ((0, 0.0), (3, 1.0)):
        run.files.evaluation(step, _episodes(run, share))
    run.metrics(0, **{"eval/reward": 0.0, "eval/episodes": 3.0})
    write_step(run, 1)
    write_step(run, 2)
    (run_dir / "checkpoints" / "step_2").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_2" / "COMMITTED").write_text(f'{{"ledger": {run.ledger.position}}}')
    write_step(run, 3, **{"eval/reward": 1.0, "eval/episodes": 3.0})
    lost = run.simple("g1-lost", 0, None, outcome=Outcome.AGENT_ERROR, error=f"ValueError: {EVIL}")
    run.files.append([lost], State.FAILED)
    run.files.append([run.simple("g3-late", slot, float(slot)) for slot in range(2)], State.STALE)
    run.ledger.record(
        entry("group", "issued", id="g1-lost", task="task-g1-lost", index=9, version=3, replaces=None)
    )
    run.ledger.record(entry("attempt", "issued", id="g1-lost.0.1", group="g1-lost", slot=0, number=1))
    run.ledger.record(
        entry(
            "attempt",
            "ended",
            id="g1-lost.0.1",
            state="failed",
            outcome="agent_error",
            why=f"ValueError: {EVIL}",
        )
    )
    run.ledger.record(
        entry("run", "quarantined", task="task-g1-lost", group="g1-lost", outcome="agent_error", why=EVIL)
    )
    return run


def _episodes(run: Writer, reward: float) -> list[tuple[str, str, Trajectory]]:
    found = []
    for name, mode in (("", "sampled"), ("", "greedy"), ("unseen_templates", "sampled")):
        for index in range(3):
            one = run.simple(None, index, reward)
            one.task_id = f"held_out-{index}"
            found.append((name, mode, one))
    return found


def write_step(run: Writer, step: int, **metrics: Any) -> None:
    """One step with a trained, a filtered and a stale group."""
    names = {one: f"g{step}-{one}" for one in ("good", "alike", "old")}
    good = Group(
        names["good"], "t", [run.straddling(names["good"], 0, 0.0), run.branching(names["good"], 1, 1.0)]
    )
    alike = Group(names["alike"], "t", [run.simple(names["alike"], slot, 1.0) for slot in range(2)])
    old = Group(names["old"], "t", [run.simple(names["old"], slot, float(slot)) for slot in range(2)])
    batch = Batch(step, [1], [good], [(alike, State.FILTERED), (old, State.STALE)], 0.5, 0.1)
    batch.advantages = [[-0.7071, 0.7071]]
    run.files.batch(batch, step)
    book = run.ledger.record
    for index, group in enumerate((good, alike, old)):
        replaces = f"g{step - 1}-old" if group is good and step > 1 else None
        book(
            entry(
                "group",
                "issued",
                id=group.id,
                task=group.trajectories[0].task_id,
                index=index,
                version=step - 1,
                replaces=replaces,
            )
        )
        for slot in range(2):
            book(entry("attempt", "issued", id=f"{group.id}.{slot}.1", group=group.id, slot=slot, number=1))
    for group, state in ((alike, "filtered"), (old, "stale"), (good, "stepped")):
        for slot in range(2):
            book(
                entry(
                    "attempt", "ended", id=f"{group.id}.{slot}.1", state=state, outcome="completed", why=None
                )
            )
        more = (
            {"step": step, "version": step - 1, "oldest": step - 1, "staleness": 1}
            if state == "stepped"
            else {}
        )
        book(entry("group", "ended", id=group.id, state=state, **more))
    book(entry("run", "publishing", version=step, step=step))
    run.metrics(step, **metrics)


if __name__ == "__main__":
    write_dashboard_run(Path(sys.argv[1]))
