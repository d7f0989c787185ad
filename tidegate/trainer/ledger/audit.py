"""`tidegate audit RUN`: proves the book from the files alone, with none of the code that wrote it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.config import Settings, load_settings
from tidegate.trainer.ledger.entries import FINAL, LedgerEntry, State
from tidegate.trainer.ledger.ledger import read_ledger

MARKER = "COMMITTED"
_STEP = re.compile(r"step_(\d+)")


@dataclass(slots=True)
class Audit:
    """What the files say. `findings` is empty where every claim holds."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    versions: int = 0
    trained_tokens: int = 0
    oldest_staleness: int | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.findings


def audit_run(run_dir: Path) -> Audit:
    """Read `config.toml`, `ledger.jsonl`, the checkpoints' markers, `metrics.jsonl` and `trajectories/`."""
    settings = load_settings(run_dir / "config.toml")
    book = _Book(settings)
    for one in read_ledger(run_dir / "ledger.jsonl"):
        book.read(one)
    book.close(_committed(run_dir, book))
    _check_metrics(run_dir, book)
    _check_trajectories(run_dir, book)
    return book.audit


@dataclass(frozen=True, slots=True)
class _Rules:
    """What the trainer had to keep to."""

    groups_per_batch: int
    group_size: int
    min_group_size: int
    max_staleness: int | None
    max_attempts: int
    max_infra_attempts: int | None = None
    """None: the ledger is from before there was such a budget."""

    @classmethod
    def of(cls, settings: Settings) -> _Rules:
        trainer = settings.trainer
        return cls(
            trainer.groups_per_batch, trainer.group_size, trainer.smallest_group, trainer.staleness_bound,
            trainer.max_attempts,
        )  # fmt: skip


@dataclass(slots=True)
class _Item:
    """A group or an attempt, as the entries tell it; `rules` are those under which it was issued."""

    issued: LedgerEntry
    rules: _Rules
    ended: LedgerEntry | None = None
    seq: int = -1
    abandoned: bool = False
    """Stepped on behind the marker that a later start went on from, and not put back yet."""

    @property
    def stepped(self) -> bool:
        return self.ended is not None and self.ended["state"] == State.STEPPED


class _Book:
    def __init__(self, settings: Settings) -> None:
        self.rules = _Rules.of(settings)
        self.batch_size: dict[int, int] = {}
        """Of each step, by the rules under which it was taken."""
        self.audit = Audit()
        self.groups: dict[str, _Item] = {}
        self.attempts: dict[str, _Item] = {}
        self.members: dict[str, list[_Item]] = defaultdict(list)
        self.replaced: dict[str, str] = {}
        self.last_version = -1
        self.versions: list[tuple[int, int]] = []
        self.abandoned: set[int] = set()
        self.expected_seq = 0
        self.finished = False
        self.paused = False
        """An outage pauses the run."""

    def wrong(self, text: str) -> None:
        self.audit.findings.append(text)

    def read(self, one: LedgerEntry) -> None:
        if one["seq"] != self.expected_seq:
            self.wrong(f"entry {self.expected_seq} is missing: the next one is {one['seq']}")
        self.expected_seq = one["seq"] + 1
        kind, event = one["kind"], one["event"]
        if kind == "run":
            self._run(one)
        elif event == "issued":
            self._issue(one, self.groups if kind == "group" else self.attempts)
        elif event == "put_back":
            self._put_back(one)
        else:
            self._end(one, self.groups if kind == "group" else self.attempts)

    def _run(self, one: LedgerEntry) -> None:
        event = one["event"]
        if event == "started":
            self.finished = self.paused = False
            if "rules" in one:
                self.rules = _Rules(**one["rules"])
            self._resume(one)
        elif event == "publishing":
            if one["version"] <= self.last_version:
                self.wrong(f"version {one['version']} was published after {self.last_version}")
            self.last_version = one["version"]
            self.versions.append((one["seq"], one["version"]))
            self.audit.versions += 1
        elif event == "ended":
            self.finished = True
        elif event in ("paused", "resumed"):
            self.paused = event == "paused"
        elif event == "quarantined":
            self._check_blame(one)

    def _check_blame(self, one: LedgerEntry) -> None:
        """Tasks are given up for failures of their own alone."""
        if self.rules.max_infra_attempts is not None and one.get("outcome") == "infra_error":
            self.wrong(f"task {one['task']} was quarantined for an infra_error, of which it is not the cause")

    def _resume(self, one: LedgerEntry) -> None:
        """What was stepped on behind the checkpoint that a run resumes from is to be put back; versions
        published behind it are an abandoned lineage."""
        position = one.get("position") or 0
        for item in [*self.groups.values(), *self.attempts.values()]:
            item.abandoned |= item.stepped and item.seq >= position
        self.abandoned |= {version for seq, version in self.versions if seq >= max(1, position)}
        self.versions.append((one["seq"], one["version"]))

    def _put_back(self, one: LedgerEntry) -> None:
        group = self.groups.get(one["id"])
        items = [*([group] if group is not None else []), *self.members[one["id"]]]
        undone = [item for item in items if item.abandoned]
        if not undone:
            self.wrong(f"group {one['id']} was put back, and no step on it was lost")
        for item in undone:
            item.ended, item.abandoned = None, False

    def _issue(self, one: LedgerEntry, items: dict[str, _Item]) -> None:
        if one["id"] in items:
            self.wrong(f"{one['kind']} {one['id']} was issued twice")
        items[one["id"]] = _Item(one, self.rules)
        if one["kind"] == "attempt":
            self._issue_attempt(one)
        elif (old := one.get("replaces")) is not None:
            self._replace(one["id"], old)

    def _issue_attempt(self, one: LedgerEntry) -> None:
        self.members[one["group"]].append(self.attempts[one["id"]])
        group = self.groups.get(one["group"])
        if group is None or group.ended is not None:
            self.wrong(f"attempt {one['id']} was issued for group {one['group']}, which is not live")

    def _replace(self, new: str, old: str) -> None:
        ended = self.groups[old].ended if old in self.groups else None
        if ended is None or ended["state"] != State.STALE:
            self.wrong(f"group {new} replaces {old}, which did not end stale")
        if old in self.replaced:
            self.wrong(f"group {old} was replaced twice: by {self.replaced[old]} and {new}")
        self.replaced[old] = new

    def _end(self, one: LedgerEntry, items: dict[str, _Item]) -> None:
        item = items.get(one["id"])
        if item is None:
            self.wrong(f"{one['kind']} {one['id']} ended and was never issued")
            return
        if item.ended is not None:
            self.wrong(f"{one['kind']} {one['id']} ended twice: {item.ended['state']}, then {one['state']}")
        if one["state"] not in [state.value for state in FINAL if state is not State.TRAINED]:
            self.wrong(f"{one['kind']} {one['id']} ended as {one['state']!r}, which is no final state")
        item.ended, item.seq = one, one["seq"]
        if one.get("spared") and not self.paused:
            self.wrong(f"attempt {one['id']} was spared although no outage was on")
        if one["kind"] == "group" and one["state"] == State.STEPPED:
            self._check_bound(one)
        elif one["kind"] == "group" and one["state"] == State.STALE:
            self._check_stale(one)

    def _check_bound(self, one: LedgerEntry) -> None:
        oldest, staleness, bound = one["oldest"], one["staleness"], self.rules.max_staleness
        self.batch_size[one["step"]] = self.rules.groups_per_batch
        if oldest is None or staleness is None or one["version"] - oldest != staleness:
            self.wrong(f"group {one['id']}: staleness {staleness} is not {one['version']} − {oldest}")
        elif bound is not None and staleness > bound:
            self.wrong(f"group {one['id']} was trained at staleness {staleness}, over the bound {bound}")
        if oldest in self.abandoned:
            self.wrong(f"group {one['id']} was trained on tokens of version {oldest}, which is abandoned")
        if staleness is not None:
            self.audit.oldest_staleness = max(staleness, self.audit.oldest_staleness or 0)

    def _check_stale(self, one: LedgerEntry) -> None:
        """A group whose oldest version is known was over the bound, or has tokens of an abandoned version."""
        oldest, staleness, bound = one.get("oldest"), one.get("staleness"), self.rules.max_staleness
        if oldest is None:
            return
        newest = one.get("newest")
        sampled = range(oldest, (oldest if newest is None else newest) + 1)
        if one["version"] - oldest != staleness:
            self.wrong(f"group {one['id']}: staleness {staleness} is not {one['version']} − {oldest}")
        elif (bound is None or staleness <= bound) and self.abandoned.isdisjoint(sampled):
            self.wrong(f"group {one['id']} ended stale at staleness {staleness}, within the bound {bound}")

    # -------------------------------------------------------------- conclusions

    def state_of(self, item: _Item, committed: int) -> str:
        if item.ended is None:
            return State.LIVE.value
        if item.ended["state"] == State.STEPPED and item.seq < committed and not item.abandoned:
            return State.TRAINED.value
        return item.ended["state"]

    def close(self, committed: int) -> None:
        """`committed` is the ledger's position in the newest checkpoint's marker."""
        self.audit.groups = Counter(self.state_of(one, committed) for one in self.groups.values())
        self.audit.attempts = Counter(self.state_of(one, committed) for one in self.attempts.values())
        if self.finished and (live := self.audit.groups["live"] + self.audit.attempts["live"]):
            self.wrong(f"the run ended with {live} groups or attempts still live")
        if self.finished and (lost := [name for name, one in self.groups.items() if one.abandoned]):
            self.wrong(f"the steps on {len(lost)} groups were lost and they never put back: {lost[0]} …")
        self._check_groups()
        self._check_attempts_a_slot()

    def standing(self, group: str) -> int:
        """How many attempts a group was trained with."""
        return sum(one.ended is not None and one.ended["state"] == "stepped" for one in self.members[group])

    def _check_groups(self) -> None:
        members = self.members
        sizes: Counter[int] = Counter()
        for name, group in self.groups.items():
            if group.ended is None:
                continue
            if any(one.ended is None for one in members[name]):
                self.wrong(f"group {name} ended with an attempt still live")
            if group.ended["state"] != State.STEPPED:
                continue
            standing = self.standing(name)
            if not group.rules.min_group_size <= standing <= group.rules.group_size:
                self.wrong(f"group {name} was trained with {standing} attempts")
            if not group.abandoned:
                sizes[group.ended["step"]] += 1
        self.audit.steps = len(sizes)
        for step, size in sorted(sizes.items()):
            if size != self.batch_size[step]:
                self.wrong(f"step {step} took {size} groups, not {self.batch_size[step]}")

    def _check_attempts_a_slot(self) -> None:
        failures: Counter[tuple[str, int, bool]] = Counter()
        for attempt in self.attempts.values():
            ended = attempt.ended
            if ended is None or ended["state"] != State.FAILED or ended.get("spared"):
                continue
            if (outcome := ended.get("outcome")) not in ("completed", "truncated"):
                infra = outcome == "infra_error"
                failures[attempt.issued["group"], attempt.issued["slot"], infra] += 1
        for (group, slot, infra), number in failures.items():
            known = self.groups.get(group)
            rules = self.rules if known is None else known.rules
            name = "max_attempts" if not infra or rules.max_infra_attempts is None else "max_infra_attempts"
            limit = getattr(rules, name)
            if number > limit:
                self.wrong(f"group {group} slot {slot} failed {number} times; {name} is {limit}")


def _committed(run_dir: Path, book: _Book) -> int:
    """The ledger's position in the newest checkpoint's marker; 0 where there is none."""
    found = {
        int(match[1]): path
        for path in (run_dir / "checkpoints").glob(f"step_*/{MARKER}")
        if (match := _STEP.fullmatch(path.parent.name))
    }
    if not found:
        return 0
    newest = found[max(found)]
    try:
        return int(json.loads(newest.read_text())["ledger"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        book.wrong(f"{newest} cannot be read ({error}); what it commits is not known")
        return 0


def _json_lines(path: Path, book: _Book, *, grows: bool = False) -> Iterator[dict[str, Any]]:
    """The lines of a file; of one that `grows` the last may be cut. What is damaged is a finding."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if grows and not line.endswith(b"\n"):
                return
            try:
                one = json.loads(line)
            except ValueError as error:
                book.wrong(f"{path.name}, line {number} is damaged: {error}")
                continue
            yield one


def _check_metrics(run_dir: Path, book: _Book) -> None:
    """Each step has one line of metrics, and each line of a step has its groups in the ledger."""
    stepped = {
        group.ended["step"]
        for group in book.groups.values()
        if group.ended is not None and group.stepped and not group.abandoned
    }
    lines: Counter[int] = Counter(
        one["step"] for one in _json_lines(run_dir / "metrics.jsonl", book, grows=True)
    )
    for step, number in lines.items():
        if number > 1:
            book.wrong(f"metrics.jsonl has {number} lines for step {step}")
        if step > 0 and step not in stepped:
            book.wrong(f"metrics.jsonl has step {step}, of which the ledger knows nothing")


def _check_trajectories(run_dir: Path, book: _Book) -> None:
    """The recorded tokens bear out the ledger's versions, and are there of all that was trained on."""
    recorded: Counter[tuple[int, str]] = Counter()
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        versions: dict[str, set[int]] = defaultdict(set)
        for one in _json_lines(path, book):
            if one.get("state") != State.STEPPED:
                continue
            recorded[int(path.stem.removeprefix("step_")), one["group_id"]] += 1
            turns = [turn for turn in one["turns"] if turn["delivered"]]
            versions[one["group_id"]] |= {span[0] for turn in turns for span in turn["version_spans"]}
            versions[one["group_id"]] |= {
                turn["kv_version"] for turn in turns if turn.get("kv_version") is not None
            }
            book.audit.trained_tokens += sum(len(turn["output_ids"]) for turn in turns)
        for group, found in versions.items():
            _check_versions(f"{path.name}: group {group}", found, book, book.groups.get(group))
    _check_recorded(run_dir, book, recorded)


def _check_recorded(run_dir: Path, book: _Book, recorded: Counter[tuple[int, str]]) -> None:
    """Every episode that was stepped on is in its step's file; or aside, where a start that undoes the step
    was cut short before it could say so."""
    for name, group in book.groups.items():
        if group.ended is None or not group.stepped or group.abandoned:
            continue
        step, standing = group.ended["step"], book.standing(name)
        aside = any((run_dir / "trajectories" / "taken_back").glob(f"*_step_{step:06d}.jsonl"))
        if recorded[step, name] != standing and not (aside and not recorded[step, name]):
            book.wrong(
                f"group {name} was trained at step {step} with {standing} attempts, and "
                f"step_{step:06d}.jsonl has {recorded[step, name]} of them"
            )


def _check_versions(where: str, versions: set[int], book: _Book, item: _Item | None) -> None:
    if item is not None and item.ended is None and not book.finished:
        return  # the step's file is written before its entries are
    if not versions:
        book.wrong(f"{where} has no token")
        return
    said = item.ended.get("oldest") if item is not None and item.ended is not None else None
    if said != min(versions):
        book.wrong(f"{where} has tokens of version {min(versions)}, the ledger says {said}")
    if gone := versions & book.abandoned:
        book.wrong(f"{where} has tokens of version {min(gone)}, which is abandoned")


def summary(audit: Audit) -> str:
    """The audit in a line: the groups by state, and whether the book holds."""
    parts = [f"{number} {state}" for state in [*FINAL, State.LIVE] if (number := audit.groups[state.value])]
    verdict = "the book holds" if audit.holds else f"the book does not hold: {audit.findings[0]}"
    return f"audit: {audit.groups.total()} groups = {' + '.join(parts) or '0'}; {verdict}"


def table(audit: Audit) -> str:
    """The audit as text: one row a state, then the findings."""
    rows = [f"{'state':<12}{'groups':>10}{'attempts':>10}"]
    for state in [*FINAL, State.LIVE]:
        rows.append(f"{state.value:<12}{audit.groups[state.value]:>10}{audit.attempts[state.value]:>10}")
    rows.append(f"{'issued':<12}{audit.groups.total():>10}{audit.attempts.total():>10}")
    rows.append("")
    rows.append(
        f"{audit.steps} steps, {audit.versions} versions published, {audit.trained_tokens} tokens "
        f"trained on, the oldest at staleness {audit.oldest_staleness}"
    )
    rows += [f"WRONG: {finding}" for finding in audit.findings]
    rows.append(
        "the book holds" if audit.holds else f"the book does not hold: {len(audit.findings)} findings"
    )
    return "\n".join(rows)
