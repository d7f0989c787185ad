"""Where a run begins: at the base model, or at a checkpoint with what the ledger remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import ConfigError, FinishedError
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import AdmissionProgress, GroupState, Phase, Slot, TaskSlot
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.integrity import check_files
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.recovery import LedgerState, cancel_lost, read_ledger_state, reinstate
from tidegate.trainer.preflight import check_model
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.types import Group


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The book of a run that goes on, and what became of the groups that it was about to train on."""

    admission: Admission
    held: list[Group] = field(default_factory=list)
    """Whose tokens the trainer has: they may be trained on now."""
    stale: list[str] = field(default_factory=list)
    """Taken back, and too old by now, or of versions that are abandoned."""
    cancelled: list[str] = field(default_factory=list)

    @property
    def going(self) -> int:
        """How many groups go on."""
        return len(self.admission.groups)


@dataclass(slots=True)
class Start:
    """The weights to begin with, after which step, and the version they are published as."""

    weights: Path
    step: int = 0
    version: int = 0
    past: LedgerState = field(default_factory=LedgerState)
    checkpoint: checkpoints.Checkpoint | None = None
    lift_quarantine: bool = False
    """Tasks that were given up are issued again."""

    @classmethod
    def of(cls, settings: Settings, resume: bool) -> Start:
        """Raises ConfigError where the directory is taken, or holds nothing to resume, or a run of another
        model; FinishedError where it has taken all its steps."""
        run_dir = settings.run_dir.absolute()
        used = (run_dir / "ledger.jsonl").exists() or bool(checkpoints.committed(run_dir))
        if not resume:
            if used:
                raise ConfigError(
                    f"{settings.run_dir} holds a run already: go on with it (--resume), choose another "
                    "run.name, or set it aside (--fresh)"
                )
            return cls(settings.model.path.absolute())
        if not used:
            raise ConfigError(f"{settings.run_dir} holds no run to resume; leave --resume out to start one")
        found = checkpoints.latest(run_dir)
        check_model(settings.run_dir, settings.model.path, found.path if found is not None else None)
        check_files(run_dir, found)
        past = read_ledger_state(run_dir / "ledger.jsonl")
        version = past.highest_version + 1
        if found is None:
            start = cls(settings.model.path.absolute(), 0, version, past)
        else:
            start = cls(found.path, found.step, version, past, found)
        past.abandon(start.position)
        if start.step >= settings.trainer.steps and not start.unended():
            raise FinishedError(
                f"the run in {settings.run_dir} has taken {start.step} steps, and trainer.steps = "
                f"{settings.trainer.steps}: nothing is left to do. To train on: --resume --trainer.steps "
                f"{2 * start.step}"
            )
        return start

    @property
    def position(self) -> int:
        """The ledger's position in the marker that is gone on from; nothing is committed without one."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["ledger"])

    def unended(self) -> set[str]:
        """The groups that may go on, if their tokens are kept."""
        return {*self.past.live(), *self.past.taken_back()}

    def open_book(
        self,
        book: Callable[[LedgerEntry], None],
        rules: Rules,
        kept: Mapping[str, Group],
        ready: Collection[str] = (),
    ) -> ResumedRun:
        """Admission as the ledger and the checkpoint left it, in a new epoch.

        `kept` are the groups whose tokens are in `trajectories/`, `ready` the ids of those that the gateway
        holds. What was stepped on behind the marker is put back, and may be trained on again; where it is
        too old by now, or not kept, it ends `stale`. Of the other groups that have not ended those in
        `kept` or `ready` go on, and the rest is cancelled, as its agents are gone.
        """
        past, epoch = self.past, self.past.epoch + 1
        position = self.position if epoch > 1 else None
        book(
            entry(
                "run", "started", epoch=epoch, step=self.step, version=self.version, position=position,
                rules=rules.proved(),
            )
        )  # fmt: skip
        for task in sorted(past.quarantined) if self.lift_quarantine else ():
            lifted = entry("run", "lifted", task=task)
            book(lifted)
            past.read(lifted)
        undone = past.taken_back()
        for name in undone:
            reinstate(past, name, book)
        found = {name: self._found(name, kept.get(name), name in ready) for name in past.live()}
        cancelled = [name for name, group in found.items() if group is None and name not in undone]
        for name in cancelled:
            cancel_lost(past, name, book)
        admission = Admission(rules, book, epoch=epoch, version=self.version, step=self.step)
        admission.group_counts += past.counts(past.groups)
        admission.attempt_counts += past.counts(past.attempts)
        admission.abandoned = past.abandoned
        if self.checkpoint is not None:
            admission.restore(_progress(self.checkpoint.state))
        admission.quarantined = set(past.quarantined)
        for name in [*undone, *(name for name in found if name not in undone and name not in cancelled)]:
            admission.go_on(found[name] or self._state(name, Phase.LEASED))
        stale = admission.sweep()
        held = [kept[name] for name, group in admission.groups.items() if group.phase is Phase.LEASED]
        return ResumedRun(admission, held, stale, cancelled)

    def _found(self, name: str, tokens: Group | None, ready: bool) -> GroupState | None:
        """A group that can go on: all of its attempts' tokens are there, or the gateway has them."""
        slots = self.past.live_attempts(name).keys()
        if tokens is not None and {one.slot for one in tokens.trajectories} == slots:
            group = self._state(name, Phase.LEASED)
            group.oldest, group.newest = tokens.oldest_version(), tokens.newest_version()
            for one in tokens.trajectories:
                group.slots[one.slot or 0].outcome = one.outcome
            return group
        return self._state(name, Phase.READY) if ready and slots else None

    def _state(self, name: str, phase: Phase) -> GroupState:
        issued, standing = self.past.groups[name].issued, self.past.live_attempts(name)
        slots = [Slot(done=standing.get(slot)) for slot in range(1 + max(standing, default=-1))]
        return GroupState(name, issued["task"], TaskSlot(issued["index"]), slots, phase)


def _progress(state: Mapping[str, Any]) -> AdmissionProgress:
    """The tasks to go on with, as a checkpoint's marker has them."""
    tickets = [TaskSlot(**ticket) for ticket in state["tickets"]]
    return AdmissionProgress(state["cursor"], tickets)


async def take_over(
    start: Start,
    gateway: GatewayClient,
    files: TrajectoryFiles,
    book: Callable[[LedgerEntry], None],
    rules: Rules,
) -> ResumedRun:
    """Begin as the trainer of a new epoch, with what the one before it left in files and at the gateway.

    The gateway keeps the groups that go on from there, ends the run's others, and leaves those of others
    alone.
    """
    epoch = start.past.epoch + 1
    await gateway.enter(epoch)
    there = await gateway.list_groups()
    await asyncio.to_thread(files.take_back, start.step, epoch)
    kept = await asyncio.to_thread(files.taken_back, start.unended())
    opened = start.open_book(book, rules, kept, {one.id for one in there if one.state != "live"})
    groups = opened.admission.groups
    for one in there:
        goes_on = one.id in groups and groups[one.id].phase is Phase.READY
        if one.id in start.past.groups and not goes_on:
            await gateway.drop_group(one.id, epoch)
    return opened


def base_model(settings: Settings, weights: Path) -> Path:
    """What a policy is loaded from that begins with these weights: with LoRA the model that the run began
    with, for an adapter cannot be told from the weights that it was merged into."""
    return settings.model.path.absolute() if settings.trainer.lora_rank else weights


def rules_of(settings: Settings) -> Rules:
    """The settings that admission obeys."""
    trainer = settings.trainer
    return Rules(
        groups_per_batch=trainer.groups_per_batch,
        group_size=trainer.group_size,
        min_group_size=trainer.smallest_group,
        max_staleness=trainer.staleness_bound,
        publish_interval=trainer.publish_interval if isinstance(trainer.publish_interval, int) else 1,
        publishes=trainer.publish_interval != "never",
        max_attempts=trainer.max_attempts,
        max_stale_retries=trainer.max_stale_retries,
        max_running=settings.agent.max_concurrency,
        steps=None if trainer.may_filter else trainer.steps,
    )
