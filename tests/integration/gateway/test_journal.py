"""A gateway that starts from another one's journal has its sessions, turns, groups and leases."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.fakes import Stage, eventually, staged
from tests.journal_copy import copy_journal
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import GatewayError, StartError
from tidegate.gateway import gateway as gateway_module
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.journal import schema, writer
from tidegate.gateway.journal.sqlite import FILE, DiskJournal
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.project_keys import create_key
from tidegate.gateway.sessions.session import GatewaySession, SessionRequest
from tidegate.gateway.sessions.tree import TurnNode, TurnRequestInfo
from tidegate.turn import Turn
from tidegate.types import Group, Sampling, Task, Trajectory, to_wire

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer="the secret 4711", info={"a": [1]})
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "tiny")


@pytest.fixture
async def stage(model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(model, journal=tmp_path / "journal") as made:
        yield made


def killed(tmp_path: Path, name: str = "after") -> Path:
    """What a `kill -9` at this moment would leave of the journal."""
    return copy_journal(tmp_path / "journal", tmp_path / name)


async def talk(stage: Stage, access: SessionAccess, turns: int, messages: list[Any] = ASK) -> list[Any]:
    """A conversation; its messages up to the last reply."""
    async with client_of(stage, access) as llm:
        for number in range(turns):
            said = messages if number == 0 else [*messages, {"role": "user", "content": f"more {number}"}]
            reply = await llm.chat.completions.create(model="m", messages=said)
            messages = [*said, {"role": "assistant", "content": reply.choices[0].message.content}]
    return messages


def client_of(stage: Stage, access: SessionAccess, **options: Any) -> AsyncOpenAI:
    """The session's client, wherever the gateway serves now."""
    options = {"max_retries": 0, **options}
    return AsyncOpenAI(base_url=f"{stage.url}/s/{access.session_id}/v1", api_key=access.api_key, **options)


def essence(trajectory: Trajectory) -> bytes:
    return to_wire(trajectory)


async def test_a_session_continues_with_the_same_key(stage: Stage, model: Path, tmp_path: Path) -> None:
    access = await stage.client.open_session(
        task=TASK, group_id="g", slot=1, seed=7, metadata={"attempt": "a"}
    )
    history = await talk(stage, access, 3)
    await stage.client.post_reward(access.session_id, 0.5, "part")
    await stage.client.post_reward(access.session_id, 0.25, "part", turn=2)
    before = stage.gateway.session(access.session_id)
    async with staged(model, journal=killed(tmp_path)) as later:
        after = later.gateway.session(access.session_id)
        assert (after.task, after.sampling, after.seed, after.slot) == (TASK, before.sampling, 7, 1)
        assert abs(after.deadline - before.deadline) < 1
        assert (after.rewards, after.turn_rewards) == ({"part": 0.5}, {2: {"part": 0.25}})
        delivered = [replace(node.turn, delivered=True) for node in after.tree.nodes]
        assert to_wire(delivered) == to_wire([node.turn for node in before.tree.nodes])
        await talk(later, access, 1, [*history, {"role": "user", "content": "and now?"}])
        summary = await later.client.finish(access.session_id)
        trajectory = await later.client.trajectory(access.session_id)
        assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2]
        assert [turn.reward for turn in trajectory.turns] == [0, 0, 0.25, 0]
        assert all(turn.delivered and turn.branch is None for turn in trajectory.turns)
        assert (summary.turns, summary.reward) == (4, 0.5)
        with pytest.raises(openai.AuthenticationError):
            await talk(later, SessionAccess(access.session_id, "", "tg-wrong"), 1)


async def test_what_finished_is_the_same_trajectory(stage: Stage, model: Path, tmp_path: Path) -> None:
    access = await stage.client.open_session(task=TASK, group_id="g", slot=0)
    await talk(stage, access, 2)
    await stage.client.post_reward(access.session_id, 0.25, turn=1)
    first = await stage.client.finish(access.session_id, output="3", reward=1.0, metrics={"tries": 2})
    before = essence(await stage.client.trajectory(access.session_id))
    async with staged(model, journal=killed(tmp_path)) as later:
        assert await later.client.finish(access.session_id, output="other", reward=0.0) == first
        assert essence(await later.client.trajectory(access.session_id)) == before
        with pytest.raises(openai.PermissionDeniedError):
            await talk(later, access, 1)


async def test_groups_keep_their_order_and_leases_their_trainer(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    for name in "cab":
        access = await stage.client.open_session(task=TASK, group_id=name, slot=0)
        await talk(stage, access, 1)
        await stage.client.finish(access.session_id, reward=1.0)
        await stage.client.seal_group(name, "t1", [access.session_id])
    [held] = await stage.client.lease(3, 1)
    async with staged(model, journal=killed(tmp_path)) as later:
        await later.client.seal_group("a", "t1", [])  # again
        rows = await later.client.list_groups()
        assert [(row.id, row.state) for row in rows] == [("c", "leased"), ("a", "ready"), ("b", "ready")]
        with pytest.raises(GatewayError, match="epoch 2 is over"):
            await later.client.lease(2, 1)
        [group] = await later.client.lease(3, 1)
        assert group.id == "a"
        await later.client.ack(3, held.lease_id, "trained")
        assert {row.id for row in await later.client.list_groups()} == {"a", "b"}
        await later.client.drop_group("b")
        journal = copy_journal(tmp_path / "after", tmp_path / "later")
    async with staged(model, journal=journal) as last:
        await last.client.ack(3, held.lease_id, "trained")
        assert [row.id for row in await last.client.list_groups()] == ["a"]
        assert len(last.gateway.sessions) == 1
        with pytest.raises(GatewayError, match="has ended: trained"):
            await last.client.seal_group("c", "t1", [access.session_id])
        with pytest.raises(GatewayError, match="accepts no more sessions"):
            await last.client.open_session(task=TASK, group_id="b")
        assert [one.id for one in await last.client.lease(4, 9)] == ["a"]
        with pytest.raises(GatewayError, match="newer trainer"):
            await last.client.ack(4, group.lease_id, "trained")


async def test_turns_of_finished_sessions_are_read_at_their_first_use(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    before = {}
    for name in ("leased", "listed"):
        access = await stage.client.open_session(task=TASK, group_id=name, slot=0)
        await talk(stage, access, 3)
        await stage.client.finish(access.session_id, reward=0.5)
        await stage.client.seal_group(name, "t1", [access.session_id])
        before[name] = essence(await stage.client.trajectory(access.session_id))
    rows = await stage.client.list_groups()
    async with staged(model, journal=killed(tmp_path)) as later:
        unread = lambda: [one.group_id for one in later.gateway.sessions.all() if one.read_back]  # noqa: E731
        assert await later.client.list_groups() == rows
        await later.gateway.finisher.expire(0.0)
        assert unread() == ["leased", "listed"]
        [group] = await later.client.lease(1, 1)
        assert [essence(one) for one in group.trajectories] == [before["leased"]]
        assert unread() == ["listed"]
        entry = later.gateway.groups.get("listed")
        assert entry is not None
        read, served = entry.read, threading.Event()

        def read_slowly() -> Group:
            assert served.wait(10), "the gateway served nothing while it read a group"
            return read()

        entry.read = read_slowly
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(later.client.lease(1, 1))
            await eventually(lambda: entry.lease_id is not None)
            await later.client.list_groups()
            served.set()
        [group] = await leasing
        assert [essence(one) for one in group.trajectories] == [before["listed"]]


async def test_a_group_whose_turns_are_damaged_is_refused_with_its_session(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    access = await stage.client.open_session(task=TASK, group_id="g", slot=0)
    await talk(stage, access, 2)
    await stage.client.finish(access.session_id, reward=0.5)
    await stage.client.seal_group("g", "t1", [access.session_id])
    journal = killed(tmp_path)
    with contextlib.closing(sqlite3.connect(journal / FILE)) as connection, connection:
        connection.execute("UPDATE packs SET turns = substr(turns, 1, length(turns) - 9)")
    async with staged(model, journal=journal) as later:
        with pytest.raises(GatewayError, match=rf"session {access.session_id} in the journal are damaged"):
            await later.client.lease(1, 1)


async def test_turns_of_closed_sessions_are_packed_and_leave_the_files(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAINTAIN_S", 0.01)
    access = await stage.client.open_session(task=TASK)
    await talk(stage, access, 3, [{"role": "user", "content": "once more, once more, once more"}])
    await stage.client.finish(access.session_id, reward=1.0)
    with contextlib.closing(sqlite3.connect(killed(tmp_path) / FILE)) as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchall() == [(0,)]
        [(pack,)] = connection.execute("SELECT turns FROM packs").fetchall()
    pieces = [pack[at : at + 16] for at in range(0, len(pack) - 15, 16)]  # most of them are on one page each

    def left() -> int:
        files = [path.read_bytes() for path in (tmp_path / "journal").iterdir()]
        return sum(any(piece in file for file in files) for piece in pieces)

    assert left() > len(pieces) / 2
    await stage.client.delete_session(access.session_id)
    await eventually(lambda: left() == 0)


async def test_one_journal_has_one_gateway(stage: Stage, model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="in use by another gateway"):
        Gateway(GatewayOptions(model=model, journal=tmp_path / "journal"))


async def test_a_gateway_that_is_refused_leaves_its_journal_free(model: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with pytest.raises(StartError, match="model"):
        Gateway(GatewayOptions(model=tmp_path / "no model", journal=journal))
    gateway = Gateway(GatewayOptions(model=model, journal=journal))
    await gateway.journal.close()


async def test_a_journal_that_cannot_be_read_is_said_so(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StartError, match="cannot open the journal"):
        Gateway(GatewayOptions(model=model, journal=tmp_path / "file"))
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / FILE).write_text("this is no database at all, but long enough" * 100)
    with pytest.raises(StartError, match="not a database"):
        Gateway(GatewayOptions(model=model, journal=tmp_path / "garbage"))
    for version in (schema.VERSION - 1, 99):
        with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(StartError, match=f"schema version {version}"):
            Gateway(GatewayOptions(model=model, journal=tmp_path))


# -- retention ---------------------------------------------------------------------------------------


def holds(directory: Path, words: str) -> bool:
    """Whether the words stand in any of the journal's files."""
    return any(words.encode() in path.read_bytes() for path in directory.iterdir())


async def test_a_deleted_session_is_gone_for_good(stage: Stage, model: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    kept = await stage.client.open_session(task=TASK)
    access = await stage.client.open_session(task=Task("t2", "e", ASK, answer="private 0815"))
    await talk(stage, access, 2, [{"role": "user", "content": "my private words"}])
    assert holds(journal, "private")
    assert not holds(journal, access.api_key), "only its hash is kept"
    await stage.client.delete_session(access.session_id)
    await stage.client.delete_session(access.session_id)  # again
    await eventually(lambda: not holds(journal, "private"))
    async with staged(model, journal=killed(tmp_path)) as later:
        assert [session.id for session in later.gateway.sessions.all()] == [kept.session_id]


async def test_a_member_of_a_sealed_group_goes_with_its_group(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK, group_id="g", slot=0)
    await talk(stage, access, 1)
    await stage.client.finish(access.session_id, reward=1.0)
    await stage.client.seal_group("g", "t1", [access.session_id])
    with pytest.raises(GatewayError, match="sealed group g"):
        await stage.client.delete_session(access.session_id)


async def test_orphans_expire_after_a_restart_and_sealed_groups_do_not(
    stage: Stage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "SWEEP_S", 0.01)
    orphan = await stage.client.open_session(task=TASK, deadline_s=0.2)
    sealed = await stage.client.open_session(task=TASK, group_id="g", slot=0)
    loose = await stage.client.open_session(task=TASK)
    for access in (sealed, loose):
        await talk(stage, access, 1)
        await stage.client.finish(access.session_id, reward=1.0)
    await stage.client.seal_group("g", "t1", [sealed.session_id])
    times = {"grace_s": 0.05, "retention_s": 3600.0}
    async with staged(model, journal=killed(tmp_path), **times) as later:
        left = later.gateway.sessions
        assert orphan.session_id
        await eventually(lambda: {one.id for one in left.all()} == {sealed.session_id, loose.session_id})
        # The finished session's time goes on where it was: nothing keeps it beyond its retention.
        later.gateway.session(loose.session_id).forget_at = 0.0
        await eventually(lambda: {one.id for one in left.all()} == {sealed.session_id})
        assert [group.id for group in await later.client.lease(1, 9)] == ["g"]


async def test_a_clock_that_is_set_back_keeps_no_session_for_longer(
    stage: Stage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now() + 1e6)
        access, ended = [await stage.client.open_session(task=TASK, deadline_s=60) for _ in range(2)]
        await stage.client.finish(ended.session_id, reward=1.0)
        journal = killed(tmp_path)
    async with staged(model, journal=journal, retention_s=50.0) as later:
        left_s = later.gateway.session(access.session_id).deadline - asyncio.get_running_loop().time()
        forget_at = later.gateway.session(ended.session_id).forget_at
        assert forget_at is not None
        assert (left_s <= 60, forget_at - asyncio.get_running_loop().time() <= 50) == (True, True)


async def test_repeated_openings_share_one_write(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, no repetition returns a session that is then deleted; a later one opens it."""
    gateway, request = stage.gateway, SessionRequest(task=TASK, key="k" * 32)
    write: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with monkeypatch.context() as patched:
        patched.setattr(gateway.journal, "opened", lambda session: write)
        gone, *waiting = [asyncio.create_task(gateway.open_session(request)) for _ in range(3)]
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        assert len(gateway.sessions.all()) == 1
        assert not write.cancelled()
        write.set_exception(GatewayError("the disk is full", status=503))
        for refusal in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(refusal, GatewayError)
    assert gateway.sessions.all() == []
    opened, key = await gateway.open_session(request)
    with monkeypatch.context() as patched:
        patched.setattr(gateway.journal._writer, "write", None)  # a repetition needs no write
        assert await gateway.open_session(request) == (opened, key)
    assert gateway.sessions.all() == [opened]


async def test_a_conversation_that_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk answers 503, which SDKs repeat; 400 would end the user's conversation."""
    key = create_key(tmp_path / "keys.json", "me")
    model = make_model_dir(tmp_path / "tiny")
    async with (
        staged(model, keys=tmp_path / "keys.json", journal=tmp_path / "journal") as stage,
        AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as user,
    ):
        hello: Any = [{"role": "user", "content": "hello"}]
        with monkeypatch.context() as full:

            def opened(_: GatewaySession) -> asyncio.Future[None]:
                write: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                write.set_exception(GatewayError("the journal cannot be written", status=503))
                return write

            full.setattr(stage.gateway.journal, "opened", opened)
            with pytest.raises(InternalServerError, match="the journal cannot be written") as refused:
                await user.chat.completions.create(model="m", messages=hello)
            assert refused.value.status_code == 503
        assert (await user.chat.completions.create(model="m", messages=hello)).choices


async def test_the_file_stays_bounded(tmp_path: Path) -> None:
    """A thousand sessions that come and go take no more room than the few that are there at a time."""
    journal = DiskJournal(tmp_path / "journal")
    journal.load()
    turn = read_only_turn()
    now = asyncio.get_running_loop().time()
    for number in range(1, 1001):
        session = GatewaySession(
            id=f"s{number}", key_hash=b"%d" % number, task=TASK, env="e", split="train",
            sampling=Sampling(), opened=now, deadline=now + 9, number=number,
        )  # fmt: skip
        await journal.opened(session)
        said: list[Any] = [{"role": "user", "content": "x" * 2000}]
        nodes = [
            TurnNode(replace(turn, index=index), TurnRequestInfo(), b"", b"", b"k", said, {}, 2)
            for index in range(4)
        ]
        await journal.recorded(session, nodes)
        await journal.ended(f"g{number}", "trained", None, [session])
    await journal.close()
    size = sum(path.stat().st_size for path in (tmp_path / "journal").iterdir())
    assert size < 4 * 2**20, f"{size} bytes for nothing; what went through it was over 10 MiB"


def read_only_turn() -> Turn:
    ids = np.arange(200, dtype=np.int32)
    return Turn(0, None, ids, ids, np.zeros(200, np.float32), (), "stop", 1.0)


async def test_consumed_sessions_leave_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAINTAIN_S", 0.01)
    monkeypatch.setattr(writer, "_SPARE_PAGES", 4)
    monkeypatch.setattr(writer, "_VACUUM_PAGES", 16)
    journal = DiskJournal(tmp_path)
    now = asyncio.get_running_loop().time()
    sessions = [
        GatewaySession(
            id=str(number), key_hash=b"", opened=now, deadline=now, number=number,
            metadata={"large": secrets.token_hex(4000)},
        )
        for number in range(1, 101)
    ]  # fmt: skip
    await asyncio.gather(*map(journal.opened, sessions))
    await journal.forgotten(sessions[1:])
    await eventually(lambda: sum(path.stat().st_size for path in tmp_path.iterdir()) < 250_000)
    await journal.close()
    later = DiskJournal(tmp_path)
    assert [session.metadata for session in later.load().sessions] == [sessions[0].metadata]
    await later.close()
