"""`tidegate audit RUN`: verifies the ledger from the files alone, with none of the code that wrote it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.config import load_settings
from tidegate.trainer.ledger.audit_check import Audit, AuditedItem, LedgerCheck
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.ledger import read_ledger

MARKER = "COMMITTED"
METRICS = "metrics.jsonl"
_STEP = re.compile(r"step_(\d+)")
_MOVED = re.compile(r"(?P<epoch>\d+)_step_(?P<step>\d+)\.jsonl")


def audit_run(run_dir: Path) -> Audit:
    """Audit a run from its settings, ledger, checkpoint markers, `metrics.jsonl` and `trajectories/`."""
    settings = load_settings(run_dir / "config.toml")
    check = LedgerCheck(settings)
    # Before the ledger, which has the steps of both: the trainer may work during the audit.
    markers, recorded = _read_markers(run_dir, check), _size(run_dir / METRICS)
    for line in read_ledger(run_dir / "ledger.jsonl"):
        check.read(line)
    _check_markers(markers, check)
    check.close((markers[-1].position or 0) if markers else 0)
    _check_metrics(run_dir, check, recorded)
    _check_trajectories(run_dir, check)
    return check.audit


@dataclass(frozen=True, slots=True)
class _Marker:
    """A checkpoint's marker: its directory, step, and the number of ledger entries that it commits."""

    directory: str
    step: int
    position: int | None
    """None if the marker cannot be read."""


def _read_markers(run_dir: Path, check: LedgerCheck) -> list[_Marker]:
    """Read the markers of all checkpoints, in the order of their steps."""
    paths = {
        int(match[1]): path
        for path in (run_dir / "checkpoints").glob(f"step_*/{MARKER}")
        if (match := _STEP.fullmatch(path.parent.name))
    }
    markers = []
    for number, path in sorted(paths.items()):
        step, position = number, None
        try:
            content = json.loads(path.read_text())
            step, position = int(content["step"]), int(content["ledger"])
        except FileNotFoundError:  # the trainer has removed the checkpoint since
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            check.report(f"{path} cannot be read ({error}); the steps committed by it are unknown")
        markers.append(_Marker(path.parent.name, step, position))
    return markers


def _check_markers(markers: Iterable[_Marker], check: LedgerCheck) -> None:
    """Check that the ledger has the step of each checkpoint, before the checkpoint's position."""
    for marker in markers:
        if marker.directory != f"step_{marker.step}":
            check.report(f"the marker of checkpoint {marker.directory} is of step {marker.step}")
        if (
            marker.step > 0
            and marker.position is not None
            and not check.has_step(marker.step, marker.position)
        ):
            check.report(
                f"checkpoint {marker.directory} was committed at entry {marker.position}, and the ledger has "
                f"no step {marker.step} before it"
            )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _json_lines(
    path: Path, check: LedgerCheck, *, grows: bool = False, size: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield the lines in the first `size` bytes of a file and report damaged ones. The last may be incomplete
    if the file `grows`."""
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            if end > size or (grows and not line.endswith(b"\n")):
                return
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                check.report(f"{path.name}, line {number} is damaged: {error}")
                continue
            yield content


def _check_metrics(run_dir: Path, check: LedgerCheck, size: int) -> None:
    """Check in the first `size` bytes that a step has one line of metrics, and that it is in the ledger."""
    stepped = _steps_taken(check)
    lines: Counter[int] = Counter(
        line["step"] for line in _json_lines(run_dir / METRICS, check, grows=True, size=size)
    )
    for step, number in lines.items():
        if number > 1:
            check.report(f"{METRICS} has {number} lines for step {step}")
        if step > 0 and step not in stepped:
            check.report(f"{METRICS} has step {step}, which is not in the ledger")


def _steps_taken(check: LedgerCheck) -> set[int]:
    return {
        group.ended["step"]
        for group in check.groups.values()
        if group.ended is not None and group.stepped and not group.discarded
    }


def _check_trajectories(run_dir: Path, check: LedgerCheck) -> None:
    """Check the recorded tokens' versions against the ledger, and that every trained episode is recorded."""
    recorded: Counter[tuple[int, str]] = Counter()
    taken = _steps_taken(check)
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        versions: dict[str, set[int]] = defaultdict(set)
        step = int(path.stem.removeprefix("step_"))
        for line in _json_lines(path, check, grows=step not in taken):  # groups dropped for the next step
            # A step's file is written before its ledger entries, perhaps after the ledger was read.
            if line.get("state") != State.STEPPED or step not in taken:
                continue
            recorded[step, line["group_id"]] += 1
            turns = [turn for turn in line["turns"] if turn["delivered"] and not turn.get("exempt")]
            versions[line["group_id"]] |= {span[0] for turn in turns for span in turn["version_spans"]}
            versions[line["group_id"]] |= {
                turn["kv_version"] for turn in turns if turn.get("kv_version") is not None
            }
            check.audit.trained_tokens += sum(len(turn["output_ids"]) for turn in turns)
        for group, sampled in versions.items():
            _check_versions(f"{path.name}: group {group}", sampled, check, check.groups.get(group))
    _check_recorded(run_dir, check, recorded)


def _check_recorded(run_dir: Path, check: LedgerCheck, recorded: Counter[tuple[int, str]]) -> None:
    """Check that every trained episode is in its step's file.

    A start that undoes the step may have moved the file and crashed before it recorded that. The entry of an
    erasure precedes it, but may be newer than those that were read.
    """
    undone, missing = _undone_steps(run_dir, check.epoch), {}
    for name, group in check.groups.items():
        if group.ended is None or not group.stepped or group.discarded or name in check.erased:
            continue
        step, trained = group.ended["step"], check.trained_attempts(name)
        found = recorded[step, name]
        if found != trained and not (step in undone and not found):
            missing[name] = (
                f"group {name} was trained at step {step} with {trained} attempts, and "
                f"step_{step:06d}.jsonl has {found} of them"
            )
    lines = read_ledger(run_dir / "ledger.jsonl") if missing else ()
    erased = {line["group"] for line in lines if line["event"] == "erased"}
    for name, finding in missing.items():
        if name not in erased:
            check.report(finding)


def _undone_steps(run_dir: Path, epoch: int) -> set[int]:
    """Return the steps whose files a start after `epoch`, the last one in the ledger, has moved."""
    paths = (run_dir / "trajectories" / "taken_back").glob("*.jsonl")
    found = filter(None, (_MOVED.fullmatch(path.name) for path in paths))
    return {int(match["step"]) for match in found if int(match["epoch"]) > epoch}


def _check_versions(where: str, versions: set[int], check: LedgerCheck, item: AuditedItem | None) -> None:
    if item is not None and item.ended is None and not check.finished:
        return  # a step's file is written before its ledger entries
    if not versions:
        check.report(f"{where} has no tokens")
        return
    recorded = item.ended.get("oldest") if item is not None and item.ended is not None else None
    if recorded != min(versions):
        check.report(f"{where} has tokens of version {min(versions)}, but the ledger has {recorded}")
    ended = item.seq if item is not None else math.inf
    if abandoned := [version for version in versions if check.abandoned.get(version, math.inf) < ended]:
        check.report(f"{where} has tokens of version {min(abandoned)}, which is abandoned")
