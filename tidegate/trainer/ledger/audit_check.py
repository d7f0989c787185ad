"""Verifies the entries of a ledger, one after another, and formats the result.

It shares no code with the writer, nor with `LedgerState`, on which recovery and the viewer rely: a defect
there must not hide itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.config import Settings
from tidegate.trainer.ledger.entries import ENDED, LedgerEntry, State


@dataclass(slots=True)
class Audit:
    """Result of an audit. `findings` is empty if the ledger is consistent."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    versions: int = 0
    trained_tokens: int = 0
    oldest_staleness: int | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def consistent(self) -> bool:
        return not self.findings


def summary(audit: Audit) -> str:
    """Format the audit as one line: the groups by state, and the verdict."""
    parts = [f"{number} {state}" for state in [*ENDED, State.LIVE] if (number := audit.groups[state.value])]
    return f"audit: {audit.groups.total()} groups = {' + '.join(parts) or '0'}; {_verdict(audit)}"


def table(audit: Audit) -> str:
    """Format the audit as text: one row per state, then the findings."""
    rows = [f"{'state':<12}{'groups':>10}{'attempts':>10}"]
    for state in [*ENDED, State.LIVE]:
        rows.append(f"{state.value:<12}{audit.groups[state.value]:>10}{audit.attempts[state.value]:>10}")
    rows.append(f"{'issued':<12}{audit.groups.total():>10}{audit.attempts.total():>10}")
    rows.append("")
    rows.append(
        f"{audit.steps} steps, {audit.versions} versions published, {audit.trained_tokens} tokens "
        f"trained on, the oldest at staleness {audit.oldest_staleness}"
    )
    rows += [f"inconsistent: {finding}" for finding in audit.findings]
    rows.append(_verdict(audit))
    return "\n".join(rows)


def _verdict(audit: Audit) -> str:
    if audit.consistent:
        return "the ledger is consistent"
    return f"the ledger is inconsistent: {len(audit.findings)} findings, the first: {audit.findings[0]}"


@dataclass(frozen=True, slots=True)
class AuditedRules:
    """Limits that the trainer had to respect."""

    groups_per_batch: int
    group_size: int
    min_group_size: int
    max_staleness: int | None
    max_attempts: int
    max_infra_attempts: int | None = None
    """None: the ledger predates this budget."""

    @classmethod
    def of(cls, settings: Settings) -> AuditedRules:
        trainer = settings.trainer
        return cls(
            trainer.groups_per_batch, trainer.group_size, trainer.smallest_group, trainer.staleness_bound,
            trainer.max_attempts,
        )  # fmt: skip


@dataclass(slots=True)
class AuditedItem:
    """A group or an attempt; `rules` are those under which it was issued."""

    issued: LedgerEntry
    rules: AuditedRules
    ended: LedgerEntry | None = None
    seq: int = -1
    discarded: bool = False
    """Ended `stepped` after the marker that a later start resumed from, and not restored yet."""

    @property
    def stepped(self) -> bool:
        return self.ended is not None and self.ended["state"] == State.STEPPED


class LedgerCheck:
    """Follows the entries of one ledger; `audit` has the findings after `close`.

    Args:
        settings: Settings of the run; a ledger entry of a start may replace their rules.
    """

    def __init__(self, settings: Settings) -> None:
        self.rules = AuditedRules.of(settings)
        self.batch_size: dict[int, int] = {}
        """Step → groups that it must have taken: `groups_per_batch` under its rules, less untrained ones."""
        self.starts: list[int] = []
        """Position from which each start discards steps."""
        self.taken: dict[tuple[int, int], int] = {}
        """(step, number of starts so far) → `seq` of the first entry that records the step."""
        self.audit = Audit()
        self.groups: dict[str, AuditedItem] = {}
        self.attempts: dict[str, AuditedItem] = {}
        self.members: dict[str, list[AuditedItem]] = defaultdict(list)
        self.replaced: dict[str, str] = {}
        self.last_version = -1
        self.candidates: set[int] = set()
        self.versions: list[tuple[int, int, int | None]] = []
        """`seq` of a version's entry, the version, and the position of the marker with its weights."""
        self.abandoned: dict[int, int] = {}
        """Version → `seq` of the entry since which its tokens may not be trained on."""
        self.erased: set[str] = set()
        self.expected_seq = 0
        self.recording = False
        """Whether the ledger ends among the entries of a step, which are recorded without another between."""
        self.epoch = 0
        """Number of the newest start."""
        self.finished = False
        self.paused = False
        """Whether an outage pauses the run."""
        self.quarantined: set[str] = set()
        self.last_resumed = -1
        """`seq` of the end of the last outage."""

    def report(self, text: str) -> None:
        self.audit.findings.append(text)

    def read(self, line: LedgerEntry) -> None:
        if line["seq"] != self.expected_seq:
            self.report(f"entry {self.expected_seq} is missing: the next one is {line['seq']}")
        self.expected_seq = line["seq"] + 1
        kind, event = line["kind"], line["event"]
        if not self._is_of_failed_start(line):
            self.recording = line.get("state") == State.STEPPED
        if kind == "run":
            self._run(line)
        elif event == "issued":
            self._issue(line, self.groups if kind == "group" else self.attempts)
        elif event == "put_back":
            self._put_back(line)
        else:
            self._end(line, self.groups if kind == "group" else self.attempts)

    def _run(self, line: LedgerEntry) -> None:
        event = line["event"]
        if event == "started":
            self.epoch = line.get("epoch", self.epoch)
            self.finished = self.paused = False
            if "rules" in line:
                self.rules = AuditedRules(**line["rules"])
            self._resume(line)
        elif event == "rolled_back":
            self._abandon(range(line["to"] + 1, line["version"] + 1), line["seq"])
        elif event == "promoted":
            self._check_promoted(line)
        elif event == "erased":
            self.erased.add(line["group"])
        elif event == "publishing":
            if line["version"] <= self.last_version:
                self.report(f"version {line['version']} was published after {self.last_version}")
            self.last_version = line["version"]
            self.versions.append((line["seq"], line["version"], None))
            self.audit.versions += not line.get("candidate")
            if line.get("candidate"):
                self.candidates.add(line["version"])
        elif event == "ended":
            self.finished |= not self._is_of_failed_start(line)
        elif event in ("paused", "resumed"):
            self.paused = event == "paused"
            self.last_resumed = line["seq"] if event == "resumed" else self.last_resumed
        elif event == "quarantined":
            self._check_quarantine(line)
        elif event == "lifted":
            if line["task"] not in self.quarantined:
                self.report(f"the quarantine of task {line['task']} was lifted, but it was not quarantined")
            self.quarantined.discard(line["task"])

    def _is_of_failed_start(self, line: LedgerEntry) -> bool:
        """Whether it ends a start that failed before its own entry, and leaves the groups to the next one."""
        ends = line["kind"] == "run" and line["event"] == "ended"
        return ends and line.get("epoch", self.epoch) != self.epoch

    def _check_quarantine(self, line: LedgerEntry) -> None:
        """A task may be quarantined only for failures charged to it."""
        if line.get("outcome") != "infra_error":
            self.quarantined.add(line["task"])
        elif self.rules.max_infra_attempts is not None:
            self.report(
                f"task {line['task']} was quarantined for an infra_error, which is not a failure of the task"
            )

    def _resume(self, line: LedgerEntry) -> None:
        """Steps taken and versions published after the checkpoint that a run resumes from are abandoned.

        The first version of an earlier start from the same checkpoint is not: it has the same weights.
        """
        position = line.get("position") or 0
        self.starts.append(position)
        for item in [*self.groups.values(), *self.attempts.values()]:
            item.discarded |= item.stepped and item.seq >= position
        late = [version for seq, version, of in self.versions if seq >= max(1, position) and of != position]
        self._abandon(late, line["seq"])
        self.versions.append((line["seq"], line["version"], position))

    def _abandon(self, versions: Iterable[int], seq: int) -> None:
        for version in versions:
            self.abandoned.setdefault(version, seq)

    def _check_promoted(self, line: LedgerEntry) -> None:
        """A version is promoted once, from a candidate that was not rolled back."""
        version = line["version"]
        if version not in self.candidates or version in self.abandoned:
            self.report(f"version {version} was promoted, but is not a candidate")
        self.candidates.discard(version)
        self.audit.versions += 1

    def _put_back(self, line: LedgerEntry) -> None:
        group = self.groups.get(line["id"])
        items = [*([group] if group is not None else []), *self.members[line["id"]]]
        discarded = [item for item in items if item.discarded]
        if not discarded:
            self.report(f"group {line['id']} was restored, but no step on it was discarded")
        for item in discarded:
            item.ended, item.discarded = None, False

    def _issue(self, line: LedgerEntry, items: dict[str, AuditedItem]) -> None:
        if line["id"] in items:
            self.report(f"{line['kind']} {line['id']} was issued twice")
        items[line["id"]] = AuditedItem(line, self.rules)
        if line["kind"] == "attempt":
            self._issue_attempt(line)
        elif line["task"] in self.quarantined and "index" in line:
            self.report(f"group {line['id']} was issued for task {line['task']}, which is quarantined")
        elif (old := line.get("replaces")) is not None:
            self._replace(line["id"], old)

    def _issue_attempt(self, line: LedgerEntry) -> None:
        self.members[line["group"]].append(self.attempts[line["id"]])
        group = self.groups.get(line["group"])
        if group is None or group.ended is not None:
            self.report(f"attempt {line['id']} was issued for group {line['group']}, which is not live")

    def _replace(self, new: str, old: str) -> None:
        ended = self.groups[old].ended if old in self.groups else None
        if ended is None or ended["state"] != State.STALE:
            self.report(f"group {new} replaces {old}, which did not end stale")
        if old in self.replaced:
            self.report(f"group {old} was replaced twice: by {self.replaced[old]} and {new}")
        self.replaced[old] = new

    def _end(self, line: LedgerEntry, items: dict[str, AuditedItem]) -> None:
        item = items.get(line["id"])
        if item is None:
            self.report(f"{line['kind']} {line['id']} ended but was never issued")
            return
        if item.ended is not None:
            self.report(
                f"{line['kind']} {line['id']} ended twice: {item.ended['state']}, then {line['state']}"
            )
        if line["state"] not in [state.value for state in ENDED if state is not State.TRAINED]:
            self.report(f"{line['kind']} {line['id']} ended as {line['state']!r}, which is not an end state")
        item.ended, item.seq = line, line["seq"]
        if line.get("spared") and not self.paused and self.last_resumed < item.issued["seq"]:
            self.report(f"attempt {line['id']} is marked as spared, but there was no outage while it ran")
        if line["kind"] == "group" and line["state"] == State.STEPPED:
            self._check_bound(line)
        elif line["kind"] == "group" and line["state"] == State.STALE:
            self._check_stale(line)

    def _check_bound(self, line: LedgerEntry) -> None:
        oldest, staleness, bound = line["oldest"], line["staleness"], self.rules.max_staleness
        self.taken.setdefault((line["step"], len(self.starts)), line["seq"])
        self.batch_size[line["step"]] = self.rules.groups_per_batch - line.get("untrained", 0)
        if oldest is None or staleness is None or line["version"] - oldest != staleness:
            self.report(f"group {line['id']}: staleness {staleness} is not {line['version']} − {oldest}")
        elif bound is not None and staleness > bound:
            self.report(f"group {line['id']} was trained at staleness {staleness}, over the bound {bound}")
        if oldest in self.abandoned:
            self.report(f"group {line['id']} was trained on tokens of version {oldest}, which is abandoned")
        if staleness is not None:
            self.audit.oldest_staleness = max(staleness, self.audit.oldest_staleness or 0)

    def _check_stale(self, line: LedgerEntry) -> None:
        """A stale group with known versions was over the bound, or has tokens of an abandoned version."""
        oldest, staleness, bound = line.get("oldest"), line.get("staleness"), self.rules.max_staleness
        if oldest is None:
            return
        newest = line.get("newest")
        sampled = range(oldest, (oldest if newest is None else newest) + 1)
        if line["version"] - oldest != staleness:
            self.report(f"group {line['id']}: staleness {staleness} is not {line['version']} − {oldest}")
        elif (bound is None or staleness <= bound) and self.abandoned.keys().isdisjoint(sampled):
            self.report(f"group {line['id']} ended stale at staleness {staleness}, within the bound {bound}")

    # -------------------------------------------------------------- conclusions

    def state_of(self, item: AuditedItem, committed: int) -> str:
        if item.ended is None:
            return State.LIVE.value
        if item.ended["state"] == State.STEPPED and item.seq < committed and not item.discarded:
            return State.TRAINED.value
        return item.ended["state"]

    def has_step(self, step: int, position: int) -> bool:
        """Whether the first `position` entries have the step, and no start discards it."""
        return any(
            self.taken.get((step, number), position) < min([position, *self.starts[number:]])
            for number in range(len(self.starts) + 1)
        )

    def close(self, committed: int) -> None:
        """Draw the conclusions. `committed` is the ledger's position in the newest checkpoint's marker."""
        self.audit.groups = Counter(self.state_of(group, committed) for group in self.groups.values())
        self.audit.attempts = Counter(self.state_of(item, committed) for item in self.attempts.values())
        # A run that was killed leaves live groups to its next start.
        if self.finished and (live := self.audit.groups["live"] + self.audit.attempts["live"]):
            self.report(f"the run ended with {live} groups or attempts still live")
        if self.finished and (lost := [name for name, group in self.groups.items() if group.discarded]):
            self.report(f"{len(lost)} groups of discarded steps were never restored: {lost[0]} …")
        self._check_groups()
        self._check_attempts_a_slot()

    def trained_attempts(self, group: str) -> int:
        """Number of attempts that a group was trained with."""
        return sum(attempt.stepped for attempt in self.members[group])

    def _check_groups(self) -> None:
        members = self.members
        sizes: Counter[int] = Counter()
        for name, group in self.groups.items():
            if group.ended is None:
                continue
            if any(attempt.ended is None for attempt in members[name]):
                self.report(f"group {name} ended with an attempt still live")
            if not group.stepped:
                continue
            trained = self.trained_attempts(name)
            if not group.rules.min_group_size <= trained <= group.rules.group_size:
                self.report(f"group {name} was trained with {trained} attempts")
            if not group.discarded:
                sizes[group.ended["step"]] += 1
        self.audit.steps = len(sizes)
        for step, size in sorted(sizes.items()):
            # The trainer may be writing a step's entries while the audit reads.
            torn = self.recording and step == max(sizes) and size < self.batch_size[step]
            if size != self.batch_size[step] and not torn:
                self.report(f"step {step} took {size} groups, not {self.batch_size[step]}")

    def _check_attempts_a_slot(self) -> None:
        failures: Counter[tuple[str, int, bool]] = Counter()
        for attempt in self.attempts.values():
            ended = attempt.ended
            if ended is None or ended.get("spared"):
                continue
            lost = ended.get("lost", False)
            failed = ended["state"] == State.FAILED and ended.get("outcome") not in ("completed", "truncated")
            if failed or lost:
                infra = lost or ended.get("slow", False) or ended.get("outcome") == "infra_error"
                failures[attempt.issued["group"], attempt.issued["slot"], infra] += 1
        for (group, slot, infra), number in failures.items():
            rules = self.groups[group].rules if group in self.groups else self.rules
            name = "max_attempts" if not infra or rules.max_infra_attempts is None else "max_infra_attempts"
            limit = getattr(rules, name)
            if number > limit:
                self.report(f"group {group} slot {slot} failed {number} times; {name} is {limit}")
