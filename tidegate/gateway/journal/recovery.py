"""Reads the journal's rows into the sessions and groups of a restarted gateway."""

from __future__ import annotations

import asyncio
import functools
import json
import sqlite3
import time
from collections import defaultdict
from typing import Any

from tidegate import failpoints
from tidegate.gateway.engines.engine import EngineRecord
from tidegate.gateway.journal import schema
from tidegate.gateway.journal.base import GroupSummary, Recovered, StoredGroup
from tidegate.gateway.sessions.session import GatewaySession, trajectory_of
from tidegate.gateway.sessions.tool_calls import SessionToolCalls
from tidegate.gateway.sessions.tree import TurnNode, TurnTree
from tidegate.turn import CLIENT_CLOSED
from tidegate.types import Group, ToolCall, from_wire

INTERRUPTED = "the gateway was restarted while this session ran"


def load(connection: sqlite3.Connection) -> Recovered:
    """Read a journal; times are converted to the clock of the running event loop."""
    failpoints.reach("orphans.before")
    _drop_orphans(connection)
    failpoints.reach("orphans.after")
    stored = schema.read_turns(connection)
    sent = _sent(connection)
    rewards: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for number, turn, name, value in connection.execute("SELECT session, turn, name, value FROM rewards"):
        rewards[number][turn][name] = value
    tool_calls = _tool_calls(connection)
    offset = asyncio.get_running_loop().time() - time.time()
    sessions = []
    for row in connection.execute("SELECT * FROM sessions ORDER BY number"):
        number = row[0]
        session = _session(row, stored.pop(number, []), sent[number], tool_calls[number], offset)
        session.turn_rewards = dict(rewards[number])
        session.rewards = session.turn_rewards.pop(schema.WHOLE_SESSION, {})
        sessions.append(session)
    by_id = {session.id: session for session in sessions}
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    engines = connection.execute("SELECT url, control, joined, admitted, policy FROM engines")
    return Recovered(
        sessions=sessions,
        entries=_entries(connection, by_id),
        ended_groups=_ended(connection, "group"),
        ended_leases=_ended(connection, "lease"),
        erasures=list(_ended(connection, "erased")),
        epoch=meta.get("epoch", 0),
        last_order=next((order or 0 for (order,) in connection.execute("SELECT max(place) FROM groups")), 0),
        engines=[
            EngineRecord(url, tuple(json.loads(control)), bool(joined), bool(admitted), policy)
            for url, control, joined, admitted, policy in engines
        ],
        trainer_managed=bool(meta.get("led", False)),
    )


def _drop_orphans(connection: sqlite3.Connection) -> None:
    """Delete rows that were written after their session was deleted."""
    columns = dict.fromkeys(("turns", "packs", "rewards", "tool_calls"), "session")
    for table, number in {**columns, "sent": f"id >> {schema.TURN_BITS}"}.items():
        connection.execute(f"DELETE FROM {table} WHERE {number} NOT IN (SELECT number FROM sessions)")


def _sent(connection: sqlite3.Connection) -> dict[int, list[int]]:
    """The indices of the turns of each session whose replies were sent."""
    sent: dict[int, list[int]] = defaultdict(list)
    for (row_id,) in connection.execute("SELECT id FROM sent"):
        number, index = schema.session_and_index(row_id)
        sent[number].append(index)
    return sent


def _tool_calls(connection: sqlite3.Connection) -> dict[int, SessionToolCalls]:
    """The tool calls of each session in order."""
    calls: dict[int, SessionToolCalls] = defaultdict(SessionToolCalls)
    rows = connection.execute("SELECT session, number, key, call FROM tool_calls ORDER BY session, number")
    for session, number, key, call in rows:
        calls[session].restore(number, from_wire(call, ToolCall), key)
    return calls


def _session(
    row: tuple[Any, ...],
    stored: list[bytes],
    sent: list[int],
    tool_calls: SessionToolCalls,
    offset: float,
) -> GatewaySession:
    number, session_id, key_hash, about, opened, deadline, ending, delivered, result, forget_at = row
    session = schema.read_session(
        about,
        id=session_id,
        key_hash=key_hash,
        opened=opened + offset,
        deadline=deadline + offset,
        number=number,
    )
    session.tool_calls = tool_calls
    if ending is None:
        nodes = schema.turn_nodes(session.id, stored)
        for index in sent:
            # `sent` is written apart from the turns, and may name one whose write failed.
            if index < len(nodes):
                nodes[index].turn.delivered = True
        _mark_in_doubt(nodes)
        session.restart_reason = INTERRUPTED
        session.tree = TurnTree.restored(nodes)
        for node in nodes:
            session.calls.add_recorded(node)
        return session
    session.ending = schema.read_ending(ending, offset)
    session.closed = "it was finished"
    if result is None:
        session.tree = _closed_tree(session.id, stored, delivered)
    else:
        session.forget_at = forget_at + offset
        session.ended.set()
        session.read_back = functools.partial(_read_back, session, stored, delivered, result)
        # Unset attributes reach `__getattr__`, which reads them at their first use: a restart need not
        # decode all of them.
        del session.tree, session.trajectory
    return session


def _closed_tree(session_id: str, stored: list[bytes], delivered: bytes) -> TurnTree:
    nodes = schema.turn_nodes(session_id, stored, len(delivered))
    for node, went_out in zip(nodes, delivered, strict=True):
        node.turn.delivered = bool(went_out)
    return TurnTree.restored(nodes, closed=True)


def _read_back(session: GatewaySession, stored: list[bytes], delivered: bytes, result: str) -> None:
    """Set the tree and the trajectory of a finished session."""
    assert session.ending is not None, "it is finished"
    session.tree = _closed_tree(session.id, stored, delivered)
    trajectory = trajectory_of(session, session.ending)
    schema.restore_result(result, trajectory)
    session.trajectory, session.read_back = trajectory, None


def _mark_in_doubt(nodes: list[TurnNode]) -> None:
    """Mark quoted replies of a running session as delivered, and the other unsent ones as in doubt."""
    for node in nodes:
        if node.turn.parent is not None:
            nodes[node.turn.parent].turn.delivered = True
    for node in nodes:
        closed = node.turn.finish_reason == CLIENT_CLOSED
        node.delivery_unknown = not node.turn.delivered and bool(node.reply_hash) and not closed


def _entries(connection: sqlite3.Connection, sessions: dict[str, GatewaySession]) -> list[StoredGroup]:
    entries = []
    columns = "id, place, task_id, members, oldest, newest, reward, lease_id, lease_key"
    for group_id, place, task_id, members, *summary, lease_id, key in connection.execute(
        f"SELECT {columns} FROM groups ORDER BY place"
    ):
        ids = json.loads(members)
        read = functools.partial(_group, group_id, task_id, [sessions[session_id] for session_id in ids])
        entries.append(
            StoredGroup(group_id, place, ids, GroupSummary(*summary), read, lease_id=lease_id, key=key)
        )
    return entries


def _group(group_id: str, task_id: str, sessions: list[GatewaySession]) -> Group:
    trajectories = [session.trajectory for session in sessions if session.trajectory is not None]
    return Group(group_id, task_id, trajectories)


def _ended(connection: sqlite3.Connection, kind: str) -> dict[str, str]:
    return dict(connection.execute("SELECT id, why FROM ended WHERE kind = ? ORDER BY seq", (kind,)))
