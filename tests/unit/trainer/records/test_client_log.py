"""`clients.jsonl`: a line for each group that is offered and each conversation without a reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidegate.errors import TidegateError
from tidegate.gateway.client import GroupRow
from tidegate.trainer.records.client_log import FILE, ClientLog
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Group, Outcome, Trajectory

UNREWARDED = GroupRow("shop.b", "live", 1, [], client="shop", outcome="unrewarded")
LISTED = [GroupRow("shop.open", "live", 1, [], unended=1, client="shop"), UNREWARDED]


def group(metadata: dict[str, Any], *versions: int) -> Group:
    ids = np.arange(len(versions), dtype=np.int32)
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    turn = Turn(0, None, ids, ids, ids.astype(np.float32), spans, "stop", 1.0)
    done = Trajectory(
        "s1", "conversation", "", "train", Outcome.COMPLETED, [turn], group_id="shop.a", slot=0, reward=1.0,
        reward_parts={"feedback": 1.0}, metadata=metadata, client="shop",
    )  # fmt: skip
    return Group("shop.a", "conversation", [done])


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]


def test_a_group_is_recorded_with_its_feedback_and_without_texts(tmp_path: Path) -> None:
    received = [{"name": "feedback", "value": 1.0, "reply": None, "after_s": 2.5}]
    notes = {"0.feedback": {"comment": "SECRET", "correction": [{"role": "user", "content": "SECRET"}]}}
    log = ClientLog(tmp_path)
    log.offered(group({"received": received, "feedback": notes}, 3, 4), None)
    log.offered(group({}, 3), "too many")
    taken, refused = lines(tmp_path)
    [episode] = taken["episodes"]
    assert (taken["group"], taken["client"], taken["state"]) == ("shop.a", "shop", "taken")
    assert episode["feedback"] == [{"name": "feedback", "value": 1.0, "after_s": 2.5}]
    assert (episode["reward"], episode["oldest"], episode["newest"]) == (1.0, 3, 4)
    assert (episode["comments"], episode["corrections"]) == (1, 1)
    assert (refused["state"], refused["why"]) == ("refused", "too many")
    assert "SECRET" not in (tmp_path / FILE).read_text()


@pytest.mark.parametrize(
    "received", ["x" * 9999, [1, {"name": 2}, {"name": "n" * 9999, "value": "v" * 9999, "after_s": None}], {}]
)
def test_metadata_of_a_clients_own_form_does_not_get_in(tmp_path: Path, received: Any) -> None:
    ClientLog(tmp_path).offered(group({"received": received, "feedback": ["comment", 1]}, 1), None)
    assert len((tmp_path / FILE).read_text()) < 600


def test_a_conversation_without_a_reward_is_recorded_once(tmp_path: Path) -> None:
    log = ClientLog(tmp_path)
    log.ended(LISTED)
    log.ended(LISTED)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"torn')  # by a crash
    log = ClientLog(tmp_path)
    log.ended([*LISTED, GroupRow("desk.c", "live", 1, [], client="desk", outcome="reward_error")])
    assert [(line["group"], line["client"], line["state"]) for line in lines(tmp_path)] == [
        ("shop.b", "shop", "unrewarded"), ("desk.c", "desk", "reward_error"),
    ]  # fmt: skip


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"state": "taken"}\nno\n')
    with pytest.raises(TidegateError, match=r"clients\.jsonl, line 2: not JSON"):
        ClientLog(tmp_path).ended([])
