"""Random agents over a tree: sub-agents, parallel calls, compaction, edits, changed tools, in any spelling.

Ids and texts are drawn from counters, so each is unique and identifies one place.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.test_tree import Driver, calling, said, user
from tidegate.gateway.rendering.messages import meaning
from tidegate.gateway.sessions import history as lines
from tidegate.gateway.sessions.tree import TurnTree
from tidegate.trainer.batch.rows import rows_of
from tidegate.types import Message, Outcome, Trajectory

ANY = -1
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def respelled(message: Message, draw: st.DataObject) -> Message:
    """The same message as some client would send it back."""
    message = dict(message)
    content = message.get("content") or ""
    forms: list[Any] = [content, f"  {content}\n", [{"type": "text", "text": content}]]
    if not content:
        forms += [None, "", []]
    if message["role"] == "assistant":
        content = content.partition("</think>")[2] or content  # its reasoning, stripped
        forms.append(content.strip())
        message |= draw.draw(st.sampled_from([{}, {"refusal": None, "annotations": []}, {"name": None}]))
        if not message.get("tool_calls"):
            message |= draw.draw(st.sampled_from([{}, {"tool_calls": None}, {"tool_calls": []}]))
    message["content"] = draw.draw(st.sampled_from(forms))
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        arguments = json.loads(function["arguments"])
        style = draw.draw(st.sampled_from(["compact", "indent", "reversed", "float", "object"]))
        if style == "reversed":
            arguments = dict(reversed(arguments.items()))
        if style == "float":
            arguments = {key: float(value) for key, value in arguments.items()}
        indent = 2 if style == "indent" else None
        text = arguments if style == "object" else json.dumps(arguments, indent=indent)
        call = {"id": draw.draw(st.sampled_from(["a", "b"])), "type": "function"}
        message["tool_calls"] = [{**call, "function": {"name": function["name"], "arguments": text}}]
    return message


class World:
    """One session's agents: each conversation is a history with the turn that it ends with."""

    def __init__(self, draw: st.DataObject) -> None:
        self.draw = draw
        self.driver = Driver()
        self.conversations: list[tuple[list[Message], int, Any]] = []
        self.words = 0

    def word(self) -> str:
        self.words += 1
        return f"w{self.words}"

    def reply(self) -> Message:
        kind = self.draw.draw(st.sampled_from(["text", "thought", "call"]))
        if kind == "call":
            return calling(json.dumps({"x": 1, "n": self.words, "m": self.words + 1}))
        return said(f"<think>hm</think>{self.word()}" if kind == "thought" else self.word())

    def ask(
        self, messages: list[Message], tools: Any, expected: int | None
    ) -> tuple[Any, list[Message], Any]:
        """A request; `expected` is the turn that it must extend, ANY where several would be right."""
        sent = [respelled(message, self.draw) for message in messages]
        begun = self.driver.begin(sent, tools)
        parent = begun[0].parent
        assert expected in (ANY, parent), "it extends the turn whose reply it ends with, and no other"
        if parent is not None:
            recorded = self.driver.tree.sequence(parent)
            assert begun[2][: len(recorded)].tolist() == recorded.tolist(), "exact prefix"
        return begun, messages, tools

    def record(self, asked: tuple[Any, list[Message], Any]) -> None:
        begun, messages, tools = asked
        reply = self.reply()
        delivered = self.draw.draw(st.integers(0, 4)) > 0
        turn = self.driver.end(begun, reply, delivered)
        if delivered:
            self.conversations.append(([*messages, reply], turn.index, tools))

    def step(self, kind: str) -> None:
        system = [{"role": "system", "content": "you are helpful"}]
        if kind == "start" or not self.conversations:
            self.record(self.ask([*system, user(self.word())], None, None))
            return
        messages, turn, tools = self.draw.draw(st.sampled_from(self.conversations[-4:]))
        if kind == "follow":
            self.record(self.ask([*messages, user(self.word())], tools, turn))
        elif kind == "parallel":
            first = self.ask([*messages, user(self.word())], tools, turn)
            second = self.ask([*messages, user(self.word())], tools, turn)
            self.record(second)
            self.record(first)
        elif kind == "compact":
            summary = [*system, user(f"so far: {self.word()}"), *messages[-2:]]
            self.record(self.ask([*summary, user(self.word())], tools, None))
        elif kind == "edit":
            edited = [{**messages[0], "content": self.word()}, *messages[1:], user(self.word())]
            self.record(self.ask(edited, tools, None))
        elif kind == "tools":
            other = None if tools else TOOLS
            # With its first tools again it may go on from where they were.
            self.record(self.ask([*messages, user(self.word())], other, ANY))


KINDS = ["start", "follow", "follow", "follow", "parallel", "compact", "edit", "tools"]


@given(st.data(), st.lists(st.sampled_from(KINDS), min_size=1, max_size=14))
@settings(max_examples=150, deadline=None)
def test_any_agent_has_exact_prefixes_and_every_delivered_token_is_exported_once(
    data: st.DataObject, kinds: list[str]
) -> None:
    world = World(data)
    for kind in kinds:
        world.step(kind)
    tree = world.driver.tree
    turns = tree.turns()
    held = [one for turn in turns for ids in (turn.delta_ids, turn.output_ids) for one in ids.tolist()]
    assert sorted(held) == list(range(world.driver.ids)), "each distinct token is held once"
    trajectory = Trajectory("s", "t", "e", "train", Outcome.COMPLETED, turns)
    exported = Counter(int(one) for row in rows_of(trajectory, 1.0) for one in row.ids[row.mask])
    sampled = [int(one) for turn in turns if turn.delivered for one in turn.output_ids]
    assert exported == Counter(sampled), "every delivered sampled token in exactly one sequence"
    for turn in turns[1:]:
        assert (turn.branch is None) == (turn.parent == turn.index - 1), "a branch says why"
    # A tree that was restored goes on from each conversation as the first one would.
    restored = TurnTree.restored(tree.nodes)
    for messages, turn_index, tools in world.conversations[-3:]:
        more = [*(respelled(message, data) for message in messages), user("on")]
        assert restored.attach(more, tools, {}).parent == turn_index
        assert restored.attach(more, tools, {})[:3] == tree.attach(more, tools, {})[:3]


def test_a_restored_tree_gives_the_same_reasons() -> None:
    driver = Driver()
    one = [user("a")]
    two = [*one, said("b"), user("c")]
    driver.turn(one, said("b"))
    driver.turn(two, said("d"))
    asks = [
        (two, None),
        ([user("A"), said("b"), user("c")], None),
        ([user("a"), said("b"), user("c"), said("other"), user("e")], None),
        ([*one, user("x")], None),
        ([*two, said("d"), user("e")], TOOLS),
    ]
    for messages, tools in asks:
        fresh, kept = TurnTree.restored(driver.tree.nodes), TurnTree.restored(driver.tree.nodes)
        kept.attach(two, None, {})
        assert (
            fresh.attach(messages, tools, {}).branch_reason == kept.attach(messages, tools, {}).branch_reason
        )


# -- what a turn costs -------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every message that is hashed as part of a request."""
    sizes: list[int] = []
    chain = lines.chain

    def counted(key: bytes, form: Message) -> bytes:
        sizes.append(len(meaning(form)))
        return chain(key, form)

    monkeypatch.setattr(lines, "chain", counted)
    return sizes


def test_turn_50_hashes_what_turn_2_hashes(hashed: list[int]) -> None:
    driver = Driver()
    messages: list[Message] = [user("x" * 50)]
    cost = []
    for _ in range(50):
        hashed.clear()
        driver.turn(messages, said("y" * 50))
        cost.append((len(hashed), sum(hashed)))
        # A client sends new objects every time, and the reply in its own spelling.
        messages = [*map(dict, messages), said("y" * 50 + "\n"), user("x" * 50)]
    assert cost[49] == cost[2]


def test_agents_that_take_turns_hash_no_more_than_alone(hashed: list[int]) -> None:
    driver = Driver()
    histories: list[list[Message]] = [[user(f"agent {number}")] for number in range(8)]
    cost = []
    for _ in range(30):
        hashed.clear()
        for number, messages in enumerate(histories):
            driver.turn(messages, said(f"r{number}"))
            histories[number] = [*map(dict, messages), said(f"r{number}"), user("more")]
        cost.append(len(hashed))
    assert cost[29] == cost[1] == 8 * 2
    assert all(turn.parent is not None for turn in driver.tree.turns()[8:])


def test_a_history_that_requests_share_is_stored_once() -> None:
    driver = Driver()
    messages: list[Message] = [user("x")]
    for number in range(20):
        driver.turn(messages, said(f"r{number}"))
        messages = [*map(dict, messages), said(f"r{number}"), user("more")]
    driver.begin(messages)
    history = driver.tree._histories.newest
    held = {id(message) for node in driver.tree.nodes for message in node.new_messages}
    mine = [message for message in history.messages[:-1] if message["role"] == "user"]
    assert all(id(message) in held for message in mine)
