"""The tables and charts of a standing service, as the dashboard and the report show them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.state import LedgerItem, LedgerState
from tidegate.trainer.ledger.versions import VersionRecord
from tidegate.viewer.chart import STEP, Chart, Series, lines
from tidegate.viewer.clients.history import VersionHistory
from tidegate.viewer.clients.records import REFUSED, TAKEN, ClientRecords, NamedReward
from tidegate.viewer.clients.running_mean import RunningMean
from tidegate.viewer.formatting import as_mapping, known, printable
from tidegate.viewer.run_files import RunFiles

Wire = dict[str, Any]
COLUMNS = ("trained", "waiting", "filtered", "stale", "unrewarded", "refused", "cancelled", "failed")
"""What became of conversations and groups; each is in one of them."""
ALWAYS = ("trained", "unrewarded", "refused", "stale")
"""Columns that are shown although they are empty."""
_COLUMN = {
    State.TRAINED: "trained", State.STEPPED: "trained", State.LIVE: "waiting", State.FILTERED: "filtered",
    State.STALE: "stale", State.CANCELLED: "cancelled",
}  # fmt: skip
MOST_VERSIONS = 100
MOST_NAMES = 50
MOST_REASONS = 8


@dataclass(frozen=True, slots=True)
class ServiceData:
    """Records of a run's clients, from files. `committed` is the newest checkpoint's place in the ledger."""

    files: RunFiles
    ledger: LedgerState
    committed: int
    records: ClientRecords
    history: VersionHistory
    test: Mapping[str, Any]
    """`canary.json`: the state of the test that runs, or of the last one."""

    def to_wire(self) -> Wire:
        """Returns all tables and charts. All texts are safe to print."""
        counts, records = ends_by_key(self.ledger, self.committed, self.records), self.records
        versions = self.history.versions()
        total = sum(counts.values(), Counter())
        columns = [name for name in COLUMNS if total[name] or name in ALWAYS]
        return {
            "columns": columns,
            "total": _key_row("", total, RunningMean.of(records.rewards.values()), columns),
            "keys": [
                _key_row(key, counts[key], records.rewards.get(key, RunningMean()), columns)
                for key in sorted(counts)
            ],
            "refusals": records.refusals.most_common(MOST_REASONS),
            "erased": len(self.ledger.erased),
            "feedback": feedback_rows(records.named),
            "names": len(records.named),
            "comments": records.comments,
            "corrections": records.corrections,
            "versions": version_rows(versions, records.versions),
            "older": max(0, len(versions) - MOST_VERSIONS),
            "mixed": records.mixed.to_wire(),
            "rewards_chart": reward_chart(versions, records.versions),
            "gate": self._gate(),
            "promotion": self._promotion(versions),
        }

    def waited_s(self) -> float | None:
        """Returns for how long a publish has waited for conversations; None if none waits."""
        since = self.history.publish_waits_since(as_mapping(self.files.settings.get("trainer")))
        return None if since is None else max(0.0, time.time() - since)

    def _gate(self) -> Wire | None:
        """Returns the waits before publishes; None if no publish may wait."""
        trainer = as_mapping(self.files.settings.get("trainer"))
        if trainer.get("max_stale_share") is None:
            return None
        waits = self.files.series("time/publish_gate")
        seconds = [value for _, value in waits]
        note = "How long the publish after a step waited for open conversations."
        return {
            "share": trainer.get("max_stale_share"),
            "limit_s": known(trainer.get("gate_timeout_s")),
            "publishes": len(waits),
            "waited": sum(value >= 1.0 for value in seconds),
            "mean": float(np.mean(seconds)) if seconds else None,
            "largest": max(seconds, default=None),
            "chart": lines(
                "Waits before publishes",
                [Series("wait", waits)],
                note=note,
                axes=(STEP, "seconds"),
                y_range=(0.0, None),
                size=(960, 220),
            ),
        }

    def _promotion(self, versions: Sequence[VersionRecord]) -> Wire | None:
        """Returns the tests of versions; None if the run has none and was not rolled back."""
        settings = as_mapping(as_mapping(self.files.settings.get("trainer")).get("promotion"))
        mode = printable(settings.get("mode") or "always")
        states = Counter(record.state for record in versions)
        tested = [record for record in versions if record.why is not None]
        if mode == "always" and not tested:
            return None
        running = next((record for record in versions if record.state == "in test"), None)
        is_its = running is not None and self.test.get("version") == running.version
        return {
            "mode": mode,
            "margin": known(settings.get("margin")),
            "promoted": sum(record.state in ("live", "superseded") for record in tested),
            "rolled_back": states["rolled back"],
            "in_test": None if running is None else running.version,
            "test": _test_row(self.test) if is_its else None,
        }


def ends_by_key(ledger: LedgerState, committed: int, records: ClientRecords) -> dict[str, Counter[str]]:
    """Returns the number of each project key's groups and conversations by their end, by COLUMNS.

    The ledger decides on those that it has.
    """
    ends = Counter((item.issued.get("client"), _column(item, committed)) for item in ledger.groups.values())
    others = {TAKEN: "waiting", REFUSED: "refused", "unrewarded": "unrewarded"}
    ends.update(
        (client, others.get(state, "failed"))
        for group, (client, state) in records.groups.items()
        if group not in ledger.groups
    )
    counts: dict[str, Counter[str]] = {}
    for (client, column), count in ends.items():
        if isinstance(client, str):
            counts.setdefault(client, Counter())[column] += count
    return counts


def _column(item: LedgerItem, committed: int) -> str:
    state = State.LIVE if item.discarded else item.final(committed)
    return _COLUMN.get(state, "failed")


def _key_row(name: str, counts: Counter[str], rewards: RunningMean, columns: Sequence[str]) -> Wire:
    ends = [counts[column] for column in columns]
    return {"name": printable(name), "count": counts.total(), "ends": ends, "reward": rewards.to_wire()}


def feedback_rows(named: Mapping[str, NamedReward]) -> list[Wire]:
    """Returns a row for each name of a reward, the most frequent first."""
    ordered = sorted(named.items(), key=lambda item: -item[1].values.count)
    return [
        {
            "name": printable(name),
            **reward.values.to_wire(),
            "least": reward.values.least,
            "largest": reward.values.largest,
            "delays": _quantiles(reward.delays),
        }
        for name, reward in ordered[:MOST_NAMES]
    ]


def _quantiles(delays: Sequence[float]) -> list[float] | None:
    """Returns the median, the 90th percentile and the maximum; None without values."""
    if not len(delays):
        return None
    return [float(value) for value in np.quantile(np.asarray(delays), (0.5, 0.9, 1.0))]


def version_rows(versions: Sequence[VersionRecord], rewards: Mapping[int, RunningMean]) -> list[Wire]:
    """Returns the newest versions, the newest first: the rows of `tidegate versions list`, with rewards."""
    return [
        {
            **asdict(record),
            "why": None if record.why is None else printable(record.why),
            "rewards": rewards.get(record.version, RunningMean()).to_wire(),
        }
        for record in reversed(versions[-MOST_VERSIONS:])
    ]


def reward_chart(versions: Iterable[VersionRecord], rewards: Mapping[int, RunningMean]) -> Chart | None:
    """Returns the mean reward of each version with its interval, by the step that wrote the version.

    None for fewer than two versions.
    """
    newest = {record.step: rewards[record.version] for record in versions if record.version in rewards}
    if len(newest) < 2:
        return None
    points = [(float(step), newest[step]) for step in sorted(newest)]
    means = [(step, one.mean) for step, one in points]
    bounds = [(step, interval) for step, one in points if (interval := one.interval()) is not None]
    series = [
        Series("mean", means, "accent", "dots" if len(means) <= 40 else "line"),
        Series("95% interval, low", [(step, low) for step, (low, _) in bounds], "muted", "thin"),
        Series("high", [(step, high) for step, (_, high) in bounds], "muted", "thin"),
    ]
    values = [value for one in series for _, value in one.points]
    unit = (0.0, 1.0) if all(0.0 <= value <= 1.0 for value in values) else (None, None)
    note = "Episodes with all tokens of one version, by the step that wrote it."
    axes = (STEP, "mean reward")
    return lines("Reward by policy version", series, note=note, axes=axes, y_range=unit, size=(960, 280))


def _test_row(test: Mapping[str, Any]) -> Wire:
    names = ("reward", "live_reward", "episodes", "live_episodes", "low", "high", "margin", "least")
    return {name: known(test.get(name)) for name in names}


def read_test(run_dir: Path) -> Mapping[str, Any]:
    """Returns the contents of `canary.json`; empty if there is none."""
    try:
        return as_mapping(json.loads((run_dir / "canary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
