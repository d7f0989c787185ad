"""Every field of a turn and of request bodies is the same after writing and reading the journal."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tidegate.gateway.ids import hash_key
from tidegate.gateway.journal import schema
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sessions.session import GatewaySession, SessionResult
from tidegate.gateway.sessions.tree import TurnNode, TurnRequestInfo
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Outcome, Sampling, Task, to_wire

VALUES: dict[str, Any] = {
    "index": 5,
    "parent": 3,
    "delta_ids": np.array([1, 2, 70_000], dtype=np.int32),
    "output_ids": np.array([9, 8], dtype=np.int32),
    "logprobs": np.array([-0.5, -1e-7], dtype=np.float32),
    "version_spans": (VersionSpan(3, 0, 1), VersionSpan(2**40, 1, 2)),
    "finish_reason": "length",
    "temperature": 0.7,
    "delivered": False,
    "kv_version": 2,
    "cached_tokens": 17,
    "output_mask": np.array([1, 0], dtype=np.uint8),
    "branch": "edited: message 1 (user) differs",
    "started": 1e9 + 0.25,
    "seconds": 0.125,
    "parse": "malformed",
    "reward": 0.25,
    "exempt": "the request's header",
    "structured": "grammar",
    "teacher_logprobs": np.array([-0.25, -3.0], dtype=np.float32),
    "teacher_top_ids": np.array([9, 1, 8, 70_000], dtype=np.int32),
    "teacher_top_logprobs": np.array([-0.25, -2.0, -3.0, -0.125], dtype=np.float32),
    "top_ids": np.array([9, 1, 8, 70_000], dtype=np.int32),
    "top_logprobs": np.array([-0.5, -2.0, -9999.0, -0.125], dtype=np.float16),
    "kept_ids": np.array([9, 70_000, 8], dtype=np.int32),
    "kept_counts": np.array([2, 1], dtype=np.int32),
    "experts": np.array([0, 127, 65_535, 1, 2], dtype=np.uint16),
    "policy": "solver",
}
"""A value of each field of a turn, in their order."""
TURN = Turn(**VALUES)


def test_each_field_of_a_turn_belongs_to_a_version_of_the_schema() -> None:
    """Rows have no names: a field in another place would make journals of before mean something else."""
    assert [*VALUES] == [one.name for one in fields(Turn)]
    assert (len(VALUES), schema.VERSION) == (28, 10), "a turn with other fields needs the next version"


def test_every_field_of_a_turn_comes_back() -> None:
    said = [{"role": "user", "content": "ä\U0001f600"}]
    node = TurnNode(
        TURN, TurnRequestInfo("id", b"d", "key", 4), b"root", b"asked", b"key", said, {"role": "assistant"}, 0
    )
    first, last = schema.turn_range(7)
    assert first <= schema.turn_id(7, 5) <= last < schema.turn_id(8, 0)
    assert schema.session_and_index(schema.turn_id(7, 5)) == (7, 5)
    database = sqlite3.connect(":memory:")
    database.executescript(schema.TABLES)
    database.execute(schema.INSERT_TURN, schema.turn_row(7, node))
    rows = schema.turn_nodes("s", schema.read_turns(database)[7])
    schema.pack_turns(database, 7)
    for nodes in (rows, schema.turn_nodes("s", schema.read_turns(database)[7])):
        assert [before.turn.finish_reason for before in nodes[:-1]] == ["lost"] * 5
        check_node(nodes[5], node)
    database.close()


def check_node(back: TurnNode, node: TurnNode) -> None:
    assert to_wire(back.turn) == to_wire(TURN)
    hashes = (back.tools_hash, back.history_hash, back.reply_hash)
    assert (back.request, *hashes) == (node.request, b"root", b"asked", b"key")
    assert (back.new_messages, back.reply) == (node.new_messages, node.reply)
    assert back.turn.output_ids.dtype == np.int32
    assert back.turn.logprobs.dtype == np.float32
    assert back.turn.top_logprobs is not None
    assert back.turn.top_logprobs.dtype == np.float16


@pytest.mark.parametrize("absent", ["top_ids", "kept_ids", "policy"])
def test_a_turn_does_not_store_that_the_last_fields_are_absent(absent: str) -> None:
    stored = [*VALUES].index(absent)
    values = {one.name: one.default for one in fields(Turn)[stored:]}
    node = TurnNode(
        replace(TURN, index=0, parent=None, **values),
        TurnRequestInfo(), b"", b"", b"", [], {"role": "assistant"}, 0,
    )  # fmt: skip
    _, data = schema.turn_row(1, node)
    assert len(msgspec.msgpack.decode(data)[0]) == stored
    assert to_wire(schema.turn_nodes("s", [data])[0].turn) == to_wire(node.turn)


def test_a_turn_that_is_written_again_counts_once_before_and_after_packing() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(schema.TABLES)
        asked: list[Any] = [{"role": "user", "content": "a text of the first turn"}]
        for index, parse in ((0, "ok"), (1, "ok"), (0, "malformed"), (2, "ok")):
            said = asked if index == 0 else []
            turn = replace(TURN, index=index, parent=None, parse=parse)
            node = TurnNode(turn, TurnRequestInfo(), b"", b"", b"", said, {"role": "assistant"}, 0)
            database.execute(schema.INSERT_TURN, schema.turn_row(4, node))
            if index == 1:
                schema.pack_turns(database, 4)
        rows = [data for (data,) in database.execute("SELECT node FROM turns")]
        assert [b"a text of the first turn" in data for data in rows] == [True, False], "only in its own turn"
        before = schema.turn_nodes("s", schema.read_turns(database)[4])
        schema.pack_turns(database, 4)
        schema.pack_turns(database, 4)  # again, as after a failed finish
        assert database.execute("SELECT count(*) FROM turns").fetchall() == [(0,)]
        after = schema.turn_nodes("s", schema.read_turns(database)[4], 4)
    assert [node.turn.parse for node in before] == ["malformed", "ok", "ok"]
    assert to_wire(after[:3]) == to_wire(before)
    assert [node.turn.finish_reason for node in after[3:]] == ["lost"]


def test_what_a_session_was_opened_with_comes_back() -> None:
    odd = {"big": 10**30, "nan": float("inf"), "half": "\ud83d", "nested": [None, {"a": 0.1}]}
    task = Task("t", "e", [{"role": "user", "content": "\ud83d"}], answer=odd, info=odd)
    session = GatewaySession(
        "id", hash_key("k"), 1.0, 2.0, number=9, task=task, env="e", split="train", sampling=Sampling(0.5),
        deadline_s=1.0, group_id="g", slot=3, seed=4, metadata=odd, limits=SessionLimits(turns=3),
        untrained_models=("titles",), trainer_epoch=2,
    )  # fmt: skip
    about = schema.session_row(session)
    back = schema.read_session(about, id="id", key_hash=session.key_hash, opened=1.0, deadline=2.0, number=9)
    for one in fields(GatewaySession):
        if one.init and one.name not in ("tree", "calls", "tool_calls"):
            assert getattr(back, one.name) == getattr(session, one.name), one.name


def test_how_a_session_ended_comes_back() -> None:
    ending = SessionResult(Outcome.TIMEOUT, "late", 5.0, "out", {"not": "a number"}, {"tries": 2.0})
    assert schema.read_ending(schema.ending_row(ending, 1005.0), -1000.0) == ending
