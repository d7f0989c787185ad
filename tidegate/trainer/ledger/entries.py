"""Ledger entries, and the states in which attempts and groups end."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, TypedDict, cast

from tidegate.types import Outcome


class State(StrEnum):
    """State of an attempt or a group. An attempt or group has ended in every state but `live`.

    `stepped` becomes `trained` when the next checkpoint's marker is written; the ledger gets no entry then,
    because the marker alone is the commit point. A resume from an earlier marker restores the group: it is
    live again, and ends once more.
    """

    LIVE = "live"
    TRAINED = "trained"
    STEPPED = "stepped"
    STALE = "stale"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = tuple(state for state in State if state is not State.LIVE)

Kind = Literal["group", "attempt", "run"]


class LedgerEntry(TypedDict, total=False):
    """One line of `ledger.jsonl`. The ledger adds `seq` and `time`.

    * group issued: `task`, `version`, and `index` (in the training split), `replaces` and `task_kind`;
      instead of these three, if a client formed the group, `client`, the name of its key, and `episodes`,
      their number
    * group ended: `state`; if `stepped` also `step`, `version`, `oldest`, `staleness`, and `untrained` if the
      batch had groups in no step that was taken; if `stale` also `version` (against which it was too stale),
      `oldest`, `newest`, `staleness`; if it was leased also `solved`, of `episodes` with a reward
    * attempt issued: `group`, `slot`, `number` (1 for the first of a slot)
    * attempt ended: `state`, `outcome`, `why`; `spared` if an outage was in progress while it ran, so that
      its failure is charged to no budget; `lost` if the run's own process that ran its agent exited; `slow`
      if its deadline passed while a call waited for engines that serve
    * group put_back: a resume undid its step; it and its attempts that ended `stepped` are live again
    * run quarantined / lifted: `task`, `why`
    * run promoted: `version`, `step`, `why`, and the figures of its test: `reward` and `episodes` of the
      candidate, `live_reward` and `live_episodes` of the version that was live
    * run rolled_back: `version`, `to`, `step`, `why`, and figures as above; the versions after `to` up to
      `version` are abandoned, and the policy after `step` is that of `to`
    * run erased: `group`, of which its client had all texts and tokens deleted
    * run paused / resumed: `why`; an outage began or ended; in between only probes start
    * run started / publishing / ended: `epoch`, `step`, `version`; if ended also `status`, and `why` if it
      failed or reached `trainer.until`; a second end follows if the last checkpoint failed (an end whose
      `epoch` has no start is of one that failed before that entry and took no group over); if publishing also
      `candidate` if the version is tested before it goes live; if started also `rules`, which may differ from
      earlier ones, and `position`, the ledger's position in the marker it resumed from
    """

    seq: int
    """Position of the line in the file, from 0."""
    time: float
    """Unix time in seconds."""
    kind: Kind
    """`group`, `attempt` or `run`."""
    event: Literal[
        "issued",
        "ended",
        "put_back",
        "started",
        "publishing",
        "promoted",
        "rolled_back",
        "quarantined",
        "lifted",
        "erased",
        "paused",
        "resumed",
    ]
    """Event: the list above names the fields of each."""
    id: str
    """Id of the group or the attempt."""
    state: str
    """State in which a group or attempt ended."""
    task: str
    """Id of the task."""
    task_kind: str
    """Kind of the task (`Task.kind`)."""
    index: int
    """Index of the task in the environment's training split."""
    version: int
    """Policy version: at its issue for a group, of the trainer for an ended one, of the event for the run."""
    to: int
    """Version to which the run was rolled back."""
    candidate: bool
    """Whether the version is tested before it goes live."""
    reward: float
    """Mean reward of the candidate in its test."""
    live_reward: float
    """Mean reward of the live version in the test."""
    live_episodes: int
    """Number of rewards of the live version in the test."""
    untrained: int
    """Number of groups of the batch that are in no step that was taken."""
    replaces: str | None
    """Id of the stale group whose task is issued again; null for others."""
    client: str | None
    """Name of the key whose client formed the group; null if the trainer issued it."""
    episodes: int
    """Number of episodes with a reward, or that a client formed."""
    solved: int
    """Number of episodes whose reward counts as solved."""
    step: int
    """Step of the trainer."""
    oldest: int | None
    """Oldest version among the sampled tokens."""
    newest: int | None
    """Newest version among the sampled tokens."""
    staleness: int | None
    """Versions between the trainer and the oldest one."""
    group: str
    """Id of the group of an attempt."""
    slot: int
    """Slot of the attempt in its group, from 0."""
    number: int
    """Number of the attempt for its slot, from 1."""
    outcome: str | None
    """Outcome of the episode (docs/glossary.md)."""
    why: str | None
    """Cause, as text for readers."""
    status: str
    """How the run ended: `completed`, `interrupted` or `failed`."""
    spared: bool
    """Whether an outage was in progress while it ran; its failure then counts towards no budget."""
    lost: bool
    """Whether the process that ran its agent exited."""
    slow: bool
    """Whether its deadline passed while a call waited for engines that serve."""
    epoch: int
    """Number of the start of the trainer, from 1."""
    position: int | None
    """Position of the ledger in the checkpoint's marker from which the run resumed; null for a new run."""
    rules: dict[str, Any]
    """Settings of admission that hold from this start."""


def failure_cause(outcome: str, *, spared: bool, slow: bool = False) -> str:
    """Return the cause of a failed attempt in metrics: its outcome, and whether an outage touched it.

    `worker_lost` is the cause of an attempt that is `cancelled` because its process exited, `slow_engines` of
    a `timeout` whose call waited for engines that serve.
    """
    cause = "worker_lost" if outcome == Outcome.CANCELLED else "slow_engines" if slow else str(outcome)
    return f"{cause}_in_outage" if spared else cause


def entry(kind: Kind, event: Any, **fields: Any) -> LedgerEntry:
    return cast(LedgerEntry, {"kind": kind, "event": event, **fields})
