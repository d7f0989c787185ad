"""A start that fails after the ledger was opened, and before training begins, is recorded with its end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from tidegate.config import Settings, load_settings
from tidegate.errors import GatewayError, TidegateError
from tidegate.observer import Silent
from tidegate.trainer import run as runs
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger import ledger as ledgers
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.audit_check import table
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.state import LedgerState, read_ledger_state
from tidegate.trainer.run import Run
from tidegate.trainer.start import Start
from tidegate.types import Outcome

BROKEN = "the held-out tasks cannot be read"


class Environment:
    """An environment that fails when the run's components are made."""

    def eval_sets(self) -> dict[str, list[Any]]:
        raise TidegateError(BROKEN)


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(None, ["--model.path=x", f"--run.dir={tmp_path}", "--run.name=run"])


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The gateway of a run whose processes have started."""
    client = AsyncMock()
    client.list_groups.return_value, client.erased_groups.return_value = [], []

    async def start(*_: object) -> Any:
        return SimpleNamespace(gateway=client, engines=SimpleNamespace(urls=[]))

    monkeypatch.setattr(runs, "start_processes", start)
    monkeypatch.setattr(Run, "_load_policy", AsyncMock())
    return client


def killed(settings: Settings) -> str:
    """The ledger of a run that was killed while a group was sealed; returns the group's id."""
    settings.run_dir.mkdir(parents=True)
    rules = Rules.of(settings)
    with Ledger(settings.run_dir / "ledger.jsonl") as ledger:
        ledger.record(
            entry("run", "started", epoch=1, step=0, version=0, position=None, rules=rules.for_ledger())
        )
        admission = Admission(rules, ledger.record)
        group = admission.start_group(admission.cursor.next(), "task")
        assert group is not None
        for slot in range(len(group.slots)):
            admission.end_attempt(admission.start_attempt(group.id, slot), Outcome.COMPLETED)
    return group.id


async def failed(settings: Settings, error: type[BaseException], *, resume: bool = False) -> LedgerState:
    """Start a run, which fails; returns the ledger's state after it. The audit holds."""
    run = Run(settings, cast(Any, Environment()), notes := Notes(), start=Start.of(settings, resume))
    with pytest.raises(error):
        await run.train()
    assert not [note for note in notes.notes if "not in the ledger" in note]
    audit = audit_run(settings.run_dir)
    assert audit.consistent, table(audit)
    return read_ledger_state(settings.run_dir / "ledger.jsonl")


def how(state: LedgerState) -> tuple[str | None, str | None]:
    assert state.end is not None, "the ledger has no end"
    return state.end["status"], state.end["why"]


async def test_a_gateway_that_refuses_the_run_is_the_reason_of_its_end(
    settings: Settings, gateway: Any
) -> None:
    gateway.begin_epoch.side_effect = GatewayError("another trainer leads it")
    assert how(await failed(settings, GatewayError)) == ("failed", "another trainer leads it")


async def test_a_start_that_failed_before_its_entry_leaves_groups_to_the_next_one(
    settings: Settings, gateway: Any
) -> None:
    group = killed(settings)
    gateway.begin_epoch.side_effect = GatewayError("another trainer leads it")
    state = await failed(settings, GatewayError, resume=True)
    assert how(state) == ("failed", "another trainer leads it")
    assert state.live() == [group]


async def test_a_start_that_failed_after_its_entry_ends_the_groups_that_it_took_over(
    settings: Settings, gateway: Any
) -> None:
    group = killed(settings)
    gateway.list_groups.return_value = [SimpleNamespace(id=group, state="ready")]
    state = await failed(settings, TidegateError, resume=True)
    assert how(state) == ("failed", BROKEN)
    assert (state.epoch, state.live(), state.groups[group].state) == (2, [], "cancelled")


async def test_a_start_that_was_cancelled_is_interrupted(settings: Settings, gateway: Any) -> None:
    gateway.begin_epoch.side_effect = asyncio.CancelledError
    assert how(await failed(settings, asyncio.CancelledError)) == ("interrupted", None)


async def test_an_end_that_cannot_be_recorded_is_reported_and_hides_no_error(
    settings: Settings, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handles: Sequence[int]) -> None:
        for handle in handles:
            os.close(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ledgers, "_sync_and_close", fail)
    run = Run(settings, cast(Any, Environment()), notes := Notes())
    with pytest.raises(TidegateError, match="cannot sync"):
        await run.train()
    (note,) = (note for note in notes.notes if "not in the ledger" in note)
    assert "cannot sync" in note
