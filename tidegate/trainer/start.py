"""Where a run begins: at the base model, or at a checkpoint with what the ledger remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tidegate.config import Settings
from tidegate.errors import ConfigError
from tidegate.gateway.client import GatewayClient
from tidegate.trainer import checkpoint as checkpoints
from tidegate.trainer.admission import Admission, Progress, Rules, Ticket
from tidegate.trainer.entries import entry
from tidegate.trainer.ledger import Ledger
from tidegate.trainer.resume import Past, bury, read_past


@dataclass(slots=True)
class Start:
    """The weights to begin with, after which step, and the version they are published as."""

    weights: Path
    step: int = 0
    version: int = 0
    past: Past = field(default_factory=Past)
    checkpoint: checkpoints.Checkpoint | None = None

    @classmethod
    def of(cls, settings: Settings, resume: bool) -> Start:
        """Raises ConfigError where the directory is taken, or holds nothing to resume."""
        run_dir = settings.run_dir.absolute()
        used = (run_dir / "ledger.jsonl").exists()
        if not resume:
            if used:
                raise ConfigError(
                    f"{settings.run_dir} holds a run already: go on with it (--resume), choose another "
                    "run.name, or set it aside (--fresh)"
                )
            return cls(settings.model.path.absolute())
        if not used:
            raise ConfigError(f"{settings.run_dir} holds no run to resume; leave --resume out to start one")
        past = read_past(run_dir / "ledger.jsonl")
        found = checkpoints.latest(run_dir)
        version = past.highest_version + 1
        if found is None:
            return cls(settings.model.path.absolute(), 0, version, past)
        return cls(found.path, found.step, version, past, found)

    @property
    def position(self) -> int:
        """The ledger's position in the marker that is gone on from; nothing is committed without one."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["ledger"])

    def open_book(self, ledger: Ledger, rules: Rules) -> tuple[Admission, int]:
        """Admission as the ledger and the checkpoint left it, in a new epoch; and how many groups were
        in flight when the run before it ended, which end `cancelled` now."""
        epoch = self.past.epoch + 1
        ledger.book(
            entry(
                "run", "started", epoch=epoch, step=self.step, version=self.version,
                position=self.position if epoch > 1 else None,
            )
        )  # fmt: skip
        self.past.abandon(self.position)
        lost = bury(self.past, ledger.book)
        admission = Admission(rules, ledger.book, epoch=epoch, version=self.version, step=self.step)
        admission.group_counts += self.past.counts(self.past.groups, self.position)
        admission.attempt_counts += self.past.counts(self.past.attempts, self.position)
        if self.checkpoint is not None:
            state = self.checkpoint.state
            tickets = [Ticket(**ticket) for ticket in state["tickets"]]
            abandoned = range(state["version"] + 1, self.version)
            admission.restore(Progress(state["cursor"], tickets, state["quarantined"]), [abandoned])
        return admission, lost


async def take_over(gateway: GatewayClient, epoch: int) -> None:
    """Begin as the trainer of `epoch`: what the gateway kept of older ones ends, as in the ledger."""
    await gateway.enter(epoch)
    for group in await gateway.list_groups():
        await gateway.drop_group(group.id)


def rules_of(settings: Settings) -> Rules:
    """The settings that admission obeys."""
    trainer = settings.trainer
    return Rules(
        groups_per_batch=trainer.groups_per_batch,
        group_size=trainer.group_size,
        min_group_size=trainer.smallest_group,
        max_staleness=trainer.staleness_bound,
        publish_interval=trainer.publish_interval,
        max_attempts=trainer.max_attempts,
        max_stale_retries=trainer.max_stale_retries,
        max_running=max(1, settings.agent.max_concurrency // trainer.group_size),
        steps=None if trainer.may_filter else trainer.steps,
    )
