"""The tree: histories are matched by meaning, recorded ids are extended exactly, branches have a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.gateway.errors import ApiError
from tidegate.gateway.sessions.tree import TurnRequestInfo, TurnTree, keep_tokens
from tidegate.turn import Turn
from tidegate.types import Message, Outcome, Trajectory


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calling(arguments: str, key: str = "c1", content: str | None = None) -> Message:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": key, "type": "function", "function": function}],
    }


class Driver:
    """A client and a gateway around a tree; ids are drawn from a counter, so each is its own."""

    def __init__(self) -> None:
        self.tree = TurnTree()
        self.ids = 0

    def fresh(self, count: int) -> np.ndarray:
        self.ids += count
        return np.arange(self.ids - count, self.ids, dtype=np.int32)

    def begin(self, messages: list[Message], tools: Any = None, policy: str = "") -> Any:
        place = self.tree.attach(messages, tools, {}, policy=policy)
        delta = self.fresh(1 + len(messages) - place.start)
        return place, delta, self.tree.prompt(place.parent, delta), messages[place.start :]

    def end(self, begun: Any, reply: Message, delivered: bool = True, policy: str = "") -> Turn:
        place, delta, prompt, new = begun
        output = self.fresh(3)
        turn = Turn(
            -1, place.parent, delta, output, np.zeros(3, np.float32), (), "stop", 1.0, delivered=False,
            policy=policy,
        )  # fmt: skip
        self.tree.append(turn, prompt, place, new, reply, TurnRequestInfo())
        if delivered:
            self.tree.mark_delivered(turn.index)
        return turn

    def turn(self, messages: list[Message], reply: Message, tools: Any = None, policy: str = "") -> Turn:
        return self.end(self.begin(messages, tools, policy), reply, policy=policy)


def test_a_follow_up_extends_the_recorded_ids() -> None:
    driver = Driver()
    first = driver.turn([user("a")], said("b"))
    _, _, prompt, new = driver.begin([user("a"), said("b"), user("c")])
    assert new == [user("c")]
    assert prompt[:5].tolist() == [*first.delta_ids, *first.output_ids]


@pytest.mark.parametrize(
    ("recorded", "sent"),
    [
        (said("b"), said(" b\n")),
        (said(""), {"role": "assistant", "content": None}),
        (said(""), {"role": "assistant"}),
        (said("<think>\nhm\n</think>\n\nb"), said("b")),
        (said("b"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}),
        (said("b"), {**said("b"), "refusal": None, "tool_calls": None, "annotations": []}),
        (calling('{"x":1,"y":2}'), calling('{ "y": 2, "x": 1 }', "another id", "")),
        (calling('{"x":1}', content="b"), calling('{"x": 1}', content="b\n")),
        # As JavaScript spells integers that no float64 holds.
        (calling('{"x":9007199254740993}'), calling('{"x":9007199254740992}')),
        (calling('{"x":12345678901234567890}'), calling('{"x":12345678901234567000}')),
        (calling('{"x":[-1234567890123456789012]}'), calling('{"x":[-1.2345678901234568e+21]}')),
    ],
)
def test_a_reply_is_known_however_it_is_spelled(recorded: Message, sent: Message) -> None:
    driver = Driver()
    driver.turn([user("a")], recorded)
    place = driver.tree.attach([user(" a"), sent, user("c")], None, {})
    assert (place.parent, place.start, place.branch_reason) == (0, 2, None)


@pytest.mark.parametrize(
    "sent",
    [
        said("B"),
        calling('{"x":2}'),
        calling('{"x":"1"}'),
        calling("{"),
        calling('{"x":9007199254740992}'),
        user("b"),
    ],
)
def test_what_differs_in_meaning_is_another_history(sent: Message) -> None:
    driver = Driver()
    driver.turn([user("a")], calling('{"x":1}'))
    place = driver.tree.attach([user("a"), sent, user("c")], None, {})
    assert (place.parent, place.start) == (None, 0)
    assert place.branch_reason == f"edited: message 1 ({sent['role']}) is not the recorded reply"


def test_reasons_of_branches() -> None:
    driver = Driver()
    tools = [{"type": "function", "function": {"name": "f"}}]
    one = [user("a")]
    two = [*one, said("b"), user("c")]
    three = [*two, said("d"), user("e")]
    assert driver.turn(one, said("b")).branch is None
    assert driver.turn(two, said("d")).branch is None
    assert driver.turn(three, said("f")).branch is None
    assert driver.turn(two, said("x")).branch == "resampled: the messages of turn 1 again"
    other = driver.turn([*two, said("d"), user("other")], said("g"))
    assert other.parent == 1
    assert other.branch == "older: turn 1 is continued, the newest is turn 3"
    edited = driver.turn([user("A"), said("b"), user("c")], said("h"))
    assert edited.parent is None
    assert edited.branch == "edited: message 0 (user) differs from the last request's"
    changed = driver.turn(three, said("i"), tools)
    assert changed.parent is None
    assert changed.branch == "tools: they or the template's options differ from those of turn 5"


def test_the_reason_names_an_edited_reply_though_an_older_turn_is_continued() -> None:
    driver = Driver()
    one = [user("a")]
    two = [*one, said("b"), user("c")]
    driver.turn(one, said("b"))
    driver.turn(two, said("d"))
    place = driver.tree.attach([*two, said("D"), user("e")], None, {})
    assert (place.parent, place.branch_reason) == (
        0,
        "edited: message 3 (assistant) is not the recorded reply",
    )
    place = driver.tree.attach([*one, said("b"), user("C"), said("d"), user("e")], None, {})
    assert (place.parent, place.branch_reason) == (
        0,
        "edited: message 2 (user) differs from the last request's",
    )


def test_the_reason_compares_with_the_request_that_is_continued() -> None:
    """Two agents in one session: another one's request came last."""
    driver = Driver()
    mine, other = [user("a")], [user("x")]
    driver.turn(mine, said("b"))
    driver.turn(other, said("y"))
    place = driver.tree.attach([*mine, said("b"), user("c")], None, {})
    assert place.branch_reason == "older: turn 0 is continued, the newest is turn 1"
    driver = Driver()
    driver.turn(mine, said("b"))
    driver.turn(other, said("y"))
    place = driver.tree.attach([*mine, said("B"), user("c")], None, {})
    assert place.branch_reason == "edited: message 1 (assistant) is not the recorded reply"
    place = driver.tree.attach([*other, said("y"), user("z")], None, {})
    assert place.branch_reason is None


def test_a_shorter_history_is_rewound() -> None:
    driver = Driver()
    driver.turn([user("a"), user("b"), user("c")], said("d"))
    turn = driver.turn([user("a"), user("b")], said("e"))
    assert turn.branch == "rewound: 2 messages, the last request had 3"


def test_parallel_calls_are_siblings() -> None:
    driver = Driver()
    root = driver.turn([user("a")], said("b"))
    history = [user("a"), said("b")]
    left, right = driver.begin([*history, user("l")]), driver.begin([*history, user("r")])
    second, first = driver.end(right, said("R")), driver.end(left, said("L"))
    assert first.parent == second.parent == root.index
    assert second.branch is None
    assert first.branch == "parallel: turn 1 was recorded meanwhile"
    follow = driver.tree.attach([*history, user("l"), said("L"), user("more")], None, {})
    assert follow.parent == first.index


def test_of_two_replies_that_read_alike_the_delivered_one_is_continued() -> None:
    driver = Driver()
    driver.end(driver.begin([user("a")]), said("b"), delivered=False)
    kept = driver.turn([user("a")], said("b"))
    assert driver.tree.attach([user("a"), said("b"), user("c")], None, {}).parent == kept.index
    driver = Driver()
    kept = driver.turn([user("a")], said("b"))
    lost = driver.end(driver.begin([user("a")]), said("b"), delivered=False)
    assert lost.index == 1
    assert driver.tree.attach([user("a"), said("b"), user("c")], None, {}).parent == kept.index


def test_of_two_delivered_replies_that_read_alike_the_newest_is_continued() -> None:
    driver = Driver()
    driver.turn([user("a")], said("b"))
    driver.turn([user("a")], said("b"))
    assert driver.tree.attach([user("a"), said("b"), user("c")], None, {}).parent == 1


def test_an_injected_assistant_message_is_only_more_prompt() -> None:
    driver = Driver()
    driver.turn([user("a")], said("b"))
    place = driver.tree.attach([user("a"), said("b"), user("c"), said("mine"), user("d")], None, {})
    assert (place.parent, place.start, place.branch_reason) == (0, 2, None)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input_audio"),
        ({"role": "user", "content": 3}, "neither text nor a list"),
        ({"role": "function", "content": "x"}, "'function'"),
        ({"content": "x"}, "role"),
        ("x", "not an object"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "function calls"),
    ],
)
def test_unsupported_messages_are_refused_by_name(message: Any, what: str) -> None:
    with pytest.raises(ApiError, match=r"messages\[1\]") as raised:
        TurnTree().attach([user("a"), message], None, {})
    assert what in str(raised.value)
    assert raised.value.status == 400


def test_a_refused_request_leaves_no_trace() -> None:
    driver = Driver()
    driver.turn([user("a")], said("b"))
    with pytest.raises(ApiError):
        driver.tree.attach([user("a"), said("b"), {"role": "nobody"}], None, {})
    assert driver.tree.attach([user("a"), said("b"), user("c")], None, {}).branch_reason is None


def test_a_part_of_a_reply_keeps_its_own_likeliest_and_kept_ids() -> None:
    ids = np.arange(5, dtype=np.int32)
    turn = Turn(
        0, None, ids, ids, np.zeros(5, np.float32), (), "stop", 1.0,
        top_ids=np.arange(10, dtype=np.int32), top_logprobs=-np.arange(10).astype(np.float16),
        kept_ids=np.arange(9, dtype=np.int32), kept_counts=np.array([2, 1, 3, 2, 1], dtype=np.int32),
    )  # fmt: skip
    keep_tokens(turn, 1, 3)
    assert turn.top_ids is not None
    assert turn.top_logprobs is not None
    assert (turn.top_k, turn.top_ids.tolist(), turn.top_logprobs.tolist()) == (
        2, [2, 3, 4, 5], [-2.0, -3.0, -4.0, -5.0],
    )  # fmt: skip
    assert turn.kept_ids is not None
    assert turn.kept_counts is not None
    assert (turn.kept_ids.tolist(), turn.kept_counts.tolist()) == ([2, 3, 4, 5], [1, 3])


def test_parts_of_a_reply_keep_the_experts_of_the_tokens_before_theirs() -> None:
    """Those of a root begin with the second token; those of the rest with the first part's last."""
    for parent, first in ((None, [1, 1, 2, 2]), (0, [0, 0, 1, 1, 2, 2])):
        ids = np.arange(5, dtype=np.int32)
        turn = Turn(
            1, parent, ids[:2], ids[:4], np.zeros(4, np.float32), (), "stop", 1.0,
            experts=np.repeat(np.arange(parent is None, 6), 2).astype(np.uint16),
        )  # fmt: skip
        assert turn.routed_tokens == 6 - (parent is None)
        rest = replace(turn)
        keep_tokens(turn, 0, 1)
        keep_tokens(rest, 1, 4)
        assert turn.experts is not None
        assert rest.experts is not None
        assert (turn.experts.tolist(), rest.experts.tolist()) == (first, [3, 3, 4, 4, 5, 5])


def spelled(message: Message, style: int) -> Message:
    """The same message as another client would write it."""
    message = {**message}
    if style == 1 and message.get("content"):
        message["content"] = f" {message['content']}\n"
    if style == 2 and not message.get("content"):
        message.pop("content", None)
    if style and "tool_calls" in message:
        function = message["tool_calls"][0]["function"]
        arguments = dict(reversed(json.loads(function["arguments"]).items()))
        again = {"name": function["name"], "arguments": json.dumps(arguments, indent=style)}
        message["tool_calls"] = [{"id": f"other{style}", "type": "function", "function": again}]
    return message


STEP = st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.booleans())


@given(st.lists(STEP, min_size=1, max_size=12))
@settings(max_examples=150)
def test_every_prompt_starts_with_recorded_ids_and_every_token_is_in_one_place(
    steps: list[tuple[int, int, int, int, bool]],
) -> None:
    """A random client: it continues any of its turns, or starts afresh, spelling history as it likes."""
    driver = Driver()
    histories: list[list[Message]] = []
    for number, (which, style, kind, words, delivered) in enumerate(steps):
        base = histories[which % len(histories)] if histories and which else []
        messages = [spelled(message, style) for message in base] + [user(f"{words}") for _ in range(1 + kind)]
        begun = driver.begin(messages)
        reply = said(f"r{number}") if kind else calling(json.dumps({"x": 1, "n": number}))
        turn = driver.end(begun, reply, delivered)
        if delivered:
            histories.append([*messages, reply])
        parent = turn.parent
        if base:
            assert parent is not None
        if parent is not None:
            recorded = driver.tree.sequence(parent).tolist()
            assert begun[2][: len(recorded)].tolist() == recorded
    turns = driver.tree.turns()
    held = [one for turn in turns for ids in (turn.delta_ids, turn.output_ids) for one in ids.tolist()]
    assert sorted(held) == list(range(driver.ids))
    trajectory = Trajectory("s", "t", "e", "train", Outcome.COMPLETED, turns)
    for turn in turns:
        whole = [*trajectory.prompt_ids(turn).tolist(), *turn.output_ids.tolist()]
        assert whole == driver.tree.sequence(turn.index).tolist()
        assert turn.parent is None or turn.parent < turn.index


def test_history_gives_the_messages_of_a_branch() -> None:
    driver = Driver()
    driver.turn([user("a")], said("b"))
    driver.turn([user("a"), said("b"), user("c")], said("d"))
    driver.turn([user("a"), said("b"), user("x")], said("y"))
    assert driver.tree.history(1) == [user("a"), said("b"), user("c"), said("d")]
    assert driver.tree.history(2) == [user("a"), said("b"), user("x"), said("y")]


def test_a_thousand_turns_hold_each_token_once() -> None:
    driver = Driver()
    messages: list[Message] = []
    for number in range(1000):
        messages = [*messages, user(f"u{number}")]
        driver.turn(messages, said(f"r{number}"))
        messages = [*messages, said(f"r{number}")]
    assert sum(len(turn.delta_ids) + len(turn.output_ids) for turn in driver.tree.turns()) == driver.ids
    assert all(turn.branch is None for turn in driver.tree.turns())


def test_a_turn_of_another_policy_is_never_extended() -> None:
    driver = Driver()
    driver.turn([user("a")], said("b"), policy="solver")
    shown = [user("a"), said("b"), user("c")]
    other = driver.turn(shown, said("d"), policy="verifier")
    assert (other.parent, other.branch) == (None, "policy: turn 0, the newest, is of policy 'solver'")
    again = driver.turn(shown, said("d"), policy="solver")
    assert (again.parent, again.branch) == (0, "policy: turn 1, the newest, is of policy 'verifier'")
    alone = driver.turn([user("a")], said("b"), policy="verifier")
    assert (alone.parent, alone.branch) == (None, "rewound: 1 messages, the last request had 3")
    restored = TurnTree.restored(driver.tree.nodes)
    for policy, parent in (("solver", 2), ("verifier", 1), ("critic", None), ("", None)):
        place = restored.attach([*shown, said("d"), user("e")], None, {}, record=False, policy=policy)
        assert place.parent == parent
