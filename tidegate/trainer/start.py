"""Starting point of a run: the base model, or a checkpoint and the state in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import ConfigError, NothingToDo
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import AdmissionProgress, GroupState, Phase, Slot, TaskTicket
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.integrity import check_files
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.state import LedgerState, cancel_lost, read_ledger_state, reinstate
from tidegate.trainer.preflight import check_model
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.types import Group


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """Admission of a resumed run, and the groups that had not ended."""

    admission: Admission
    leased: list[Group] = field(default_factory=list)
    """Groups whose tokens the trainer has: they may be trained on now."""
    stale: list[str] = field(default_factory=list)
    """Groups that are too old now, or have tokens of abandoned versions."""
    cancelled: list[str] = field(default_factory=list)

    @property
    def continued(self) -> int:
        """Number of groups that continue."""
        return len(self.admission.groups)


@dataclass(slots=True)
class Start:
    """Initial weights, the step after which they were saved, and the version they are published as."""

    weights: Path
    step: int = 0
    version: int = 0
    past: LedgerState = field(default_factory=LedgerState)
    checkpoint: checkpoints.Checkpoint | None = None
    lift_quarantine: bool = False
    """Issue quarantined tasks again."""

    @classmethod
    def of(cls, settings: Settings, resume: bool) -> Start:
        """Return where the run starts.

        Raises ConfigError if the directory holds a run that is not resumed, none to resume, or one of another
        model, and NothingToDo if the run has taken all its steps.
        """
        run_dir = settings.run_dir.absolute()
        used = (run_dir / "ledger.jsonl").exists() or bool(checkpoints.committed(run_dir))
        if not resume:
            if used:
                raise ConfigError(
                    f"{settings.run_dir} holds a run already: continue it (--resume), choose another "
                    "run.name, or set it aside (--fresh)"
                )
            return cls(settings.model.path.absolute())
        if not used:
            raise ConfigError(f"{settings.run_dir} holds no run to resume; leave --resume out to start one")
        checkpoint = checkpoints.latest(run_dir)
        check_model(settings.run_dir, settings.model.path, None if checkpoint is None else checkpoint.path)
        check_files(run_dir, checkpoint)
        ledger = run_dir / "ledger.jsonl"
        past = read_ledger_state(ledger) if ledger.exists() else LedgerState()
        version = past.highest_version + 1
        if checkpoint is None:
            start = cls(settings.model.path.absolute(), 0, version, past)
        else:
            start = cls(checkpoint.path, checkpoint.step, version, past, checkpoint)
        past.abandon(start.position)
        if start.step >= settings.trainer.steps and not start.open_groups():
            raise NothingToDo(
                f"the run in {settings.run_dir} has taken {start.step} steps, and trainer.steps = "
                f"{settings.trainer.steps}: nothing is left to do. To continue, raise the limit: --resume "
                f"--trainer.steps {2 * start.step}"
            )
        return start

    @property
    def position(self) -> int:
        """Ledger position in the marker that the run resumes from; 0 without one, as nothing is committed."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["ledger"])

    def open_groups(self) -> set[str]:
        """Return the groups that may continue if their tokens are kept."""
        return {*self.past.live(), *self.past.rolled_back()}

    def restore_admission(
        self,
        record: Callable[[LedgerEntry], None],
        rules: Rules,
        kept: Mapping[str, Group],
        ready: Collection[str] = (),
    ) -> ResumedRun:
        """Restore admission from the ledger and the checkpoint, in a new epoch.

        Groups trained on after the marker are reinstated and may be trained on again; they end `stale` if
        they are too old now or not in `kept`. Other groups that have not ended continue if they are in `kept`
        or `ready`; the remaining ones are cancelled, as their agents have exited.

        Args:
            record: Receives ledger entries.
            rules: Limits to enforce.
            kept: Groups whose tokens are in `trajectories/`, by id.
            ready: Ids of the groups that the gateway holds.
        """
        past, epoch = self.past, self.past.epoch + 1
        position = self.position if epoch > 1 else None
        record(
            entry(
                "run", "started", epoch=epoch, step=self.step, version=self.version, position=position,
                rules=rules.audited(),
            )
        )  # fmt: skip
        for task in sorted(past.quarantined) if self.lift_quarantine else ():
            lifted = entry("run", "lifted", task=task)
            record(lifted)
            past.apply(lifted)
        reinstated = past.rolled_back()
        for name in reinstated:
            reinstate(past, name, record)
        live = {name: self._continued(name, kept.get(name), name in ready) for name in past.live()}
        cancelled = [name for name, group in live.items() if group is None and name not in reinstated]
        for name in cancelled:
            cancel_lost(past, name, record)
        admission = Admission(rules, record, epoch=epoch, version=self.version, step=self.step)
        admission.group_counts += past.counts(past.groups)
        admission.attempt_counts += past.counts(past.attempts)
        admission.abandoned = past.abandoned
        if self.checkpoint is not None:
            admission.restore(_progress(self.checkpoint.state))
        admission.quarantined = set(past.quarantined)
        others = [name for name in live if name not in reinstated and name not in cancelled]
        for name in [*reinstated, *others]:
            admission.resume_group(live[name] or self._state(name, Phase.LEASED))
        stale = admission.sweep()
        leased = [kept[name] for name, group in admission.groups.items() if group.phase is Phase.LEASED]
        return ResumedRun(admission, leased, stale, cancelled)

    def _continued(self, name: str, tokens: Group | None, ready: bool) -> GroupState | None:
        """Return the state of a group that can continue: all its tokens are kept, or the gateway has them."""
        slots = self.past.live_attempts(name).keys()
        if tokens is not None and {trajectory.slot for trajectory in tokens.trajectories} == slots:
            group = self._state(name, Phase.LEASED)
            group.oldest, group.newest = tokens.oldest_version(), tokens.newest_version()
            for trajectory in tokens.trajectories:
                group.slots[trajectory.slot or 0].outcome = trajectory.outcome
            return group
        return self._state(name, Phase.READY) if ready and slots else None

    def _state(self, name: str, phase: Phase) -> GroupState:
        issued, attempts = self.past.groups[name].issued, self.past.live_attempts(name)
        slots = [Slot(done=attempts.get(slot)) for slot in range(1 + max(attempts, default=-1))]
        return GroupState(name, issued["task"], TaskTicket(issued["index"]), slots, phase)


def _progress(state: Mapping[str, Any]) -> AdmissionProgress:
    """Return the admission progress in a checkpoint's marker."""
    tickets = [TaskTicket(**ticket) for ticket in state["tickets"]]
    return AdmissionProgress(state["cursor"], tickets)


async def take_over(
    start: Start,
    gateway: GatewayClient,
    files: TrajectoryFiles,
    record: Callable[[LedgerEntry], None],
    rules: Rules,
) -> ResumedRun:
    """Begin a new epoch, with the state that the previous one left in files and at the gateway.

    The gateway keeps the groups that continue and drops the run's other groups. Groups of other runs stay.
    """
    epoch = start.past.epoch + 1
    await gateway.begin_epoch(epoch)
    groups = await gateway.list_groups()
    await asyncio.to_thread(files.set_aside, start.step, epoch)
    kept = await asyncio.to_thread(files.read_set_aside, start.open_groups())
    ready = {group.id for group in groups if group.state != "live"}
    resumed = start.restore_admission(record, rules, kept, ready)
    admitted = resumed.admission.groups
    for group in groups:
        continues = group.id in admitted and admitted[group.id].phase is Phase.READY
        if group.id in start.past.groups and not continues:
            await gateway.drop_group(group.id, epoch)
    return resumed


def base_model(settings: Settings, weights: Path) -> Path:
    """Return the model to load a policy from that starts with `weights`.

    With LoRA it is the run's original model, as an adapter cannot be separated from merged weights.
    """
    return settings.model.path.absolute() if settings.trainer.lora.rank else weights


def admission_rules(settings: Settings) -> Rules:
    """Return the settings that admission enforces."""
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
