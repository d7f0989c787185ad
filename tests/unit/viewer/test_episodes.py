"""The report's example episodes: the same tasks before and after training, chosen by a stated rule."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.unit.viewer.viewer_run import trajectory, write_run
from tidegate.viewer.run_files import evaluations
from tidegate.viewer.transcripts import (
    LONGEST_MESSAGE,
    MOST_MESSAGES,
    ToolLine,
    as_text,
    choose,
    episode,
    pair,
    tool_lines,
)

RNG = random.Random(0)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tried(
    task: str, reward: float | None, *, eval_set: str = "", mode: str = "sampled", **more: Any
) -> dict[str, Any]:
    outcome = "completed" if reward is not None else "agent_error"
    messages = [
        {"role": "user", "content": f"problem {task}"},
        {"role": "assistant", "content": f"answer {reward}"},
    ]
    return {"task_id": task, "eval_set": eval_set, "mode": mode, "reward": reward, "outcome": outcome,
            "messages": messages, "turns": [], **more}  # fmt: skip


def text_of(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_the_problems_that_gained_most_come_first(tmp_path: Path) -> None:
    before = write(
        tmp_path / "eval_000000.jsonl", *(tried(f"p-{n}", 0.0) for n in (10, 9, 2, 1)), tried("p-3", 1.0)
    )
    after = write(
        tmp_path / "eval_000050.jsonl",
        *(tried(f"p-{n}", 1.0) for n in (2, 10, 9)),
        tried("p-1", 0.0),
        tried("p-3", 0.0),
        tried("p-77", 1.0),  # not there before
    )
    chosen = choose([before, after])
    assert [one.task_id for one in chosen.pairs] == ["p-2", "p-9", "p-10"]
    assert chosen.how == (
        "5 problems were scored before and after: 3 scored higher after, 1 the same, 1 lower. "
        "These are the 3 with the largest gain (ties by task id): "
        "examples of what was learned, not a fair sample."
    )
    assert all(one.before.reward == 0 and one.after and one.after.reward == 1 for one in chosen.pairs)


def test_where_too_few_improved_the_rest_is_shown_as_it_is(tmp_path: Path) -> None:
    before = write(tmp_path / "eval_000000.jsonl", *(tried(f"p-{n}", 1.0) for n in range(3)))
    after = write(tmp_path / "eval_000009.jsonl", tried("p-0", 0.0), tried("p-1", 1.0), tried("p-2", 1.0))
    chosen = choose([before, after])
    assert [one.task_id for one in chosen.pairs] == ["p-1", "p-2", "p-0"]
    assert "0 scored higher after, 2 the same, 1 lower" in chosen.how


def test_a_failure_is_no_score(tmp_path: Path) -> None:
    before = write(tmp_path / "eval_000000.jsonl", tried("p-0", None), tried("p-1", 0.0))
    after = write(tmp_path / "eval_000009.jsonl", tried("p-0", 1.0), tried("p-1", 0.5))
    chosen = choose([before, after])
    assert [one.task_id for one in chosen.pairs] == ["p-1"]
    assert chosen.how.startswith("1 problem was scored before and after: 1 scored higher")


def test_an_evaluation_that_is_not_the_first_state_is_not_called_before(tmp_path: Path) -> None:
    """With eval.every = 8 and no evaluation at step 0, the first one is of trained weights."""
    first = write(tmp_path / "eval_000008.jsonl", tried("p-0", 0.0))
    last = write(tmp_path / "eval_000120.jsonl", tried("p-0", 1.0))
    alone = text_of(as_text(choose([first]).pairs[0]))
    both = text_of(as_text(choose([first, last]).pairs[0]))
    assert "before" not in alone + both
    assert "step 8 " in alone
    assert "step 120 " in both


def test_only_one_set_and_mode_is_compared(tmp_path: Path) -> None:
    """The sampled mode of the main set, which is what eval/reward measures, though others come first."""
    kinds = [("unseen_templates", "sampled"), ("", "greedy"), ("", "sampled")]
    before = write(tmp_path / "a", *(tried("p-0", 0.0, eval_set=name, mode=mode) for name, mode in kinds))
    after = write(
        tmp_path / "b",
        *(tried("p-0", 0.1 * n, eval_set=name, mode=mode) for n, (name, mode) in enumerate(kinds, start=1)),
    )
    (only,) = choose([before, after]).pairs
    assert only.after is not None
    assert only.after.reward == 0.1 * 3


def test_one_evaluation_or_none(tmp_path: Path) -> None:
    assert choose([]).pairs == ()
    one = write(tmp_path / "eval_000000.jsonl", *(tried(f"p-{n}", 0.0) for n in range(9)))
    chosen = choose([one])
    assert [each.task_id for each in chosen.pairs] == ["p-0", "p-1", "p-2"]
    assert all(each.after is None for each in chosen.pairs)
    assert "one evaluation only" in chosen.how
    empty = write(tmp_path / "eval_000005.jsonl")
    assert choose([one, empty]).pairs == ()


def test_evaluations_of_an_abandoned_lineage_are_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=30)
    (run_dir / "trajectories" / "eval_000031.jsonl").write_text("")
    (run_dir / "trajectories" / "eval_notes.jsonl").write_text("")
    assert [path.name for path in evaluations(run_dir, 30)] == ["eval_000000.jsonl", "eval_000030.jsonl"]
    assert evaluations(tmp_path / "nowhere") == []


def test_each_reply_says_where_it_came_from() -> None:
    one = episode(trajectory(3, True, 7, RNG))
    origins = [line.sampled for line in one.lines]
    assert origins == ["", "", "version 7, 17 tokens", "", "versions 7 → 8, straddles a publish, 21 tokens"]
    assert one.lines[2].calls == ('calculator({"expression": "14 * 6"})',)
    assert one.lines[3].text == "84"


def test_replies_are_matched_along_the_newest_branch() -> None:
    """Assistant messages that the agent gave as examples, and turns of an older branch, have no origin."""
    record = tried("p", 1.0)
    record["messages"] = [
        {"role": "user", "content": "example"},
        {"role": "assistant", "content": "given by the agent"},
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "second"},
    ]
    spans = {0: 4, 1: 5, 2: 6, 3: 9}
    parents = {0: None, 1: 0, 2: 0, 3: 0}
    record["turns"] = [
        {"index": n, "parent": parents[n], "output_ids": [1], "version_spans": [[spans[n], 0, 1]],
         "finish_reason": "length" if n == 2 else "stop", "delivered": n != 3}
        for n in range(4)
    ]  # fmt: skip
    lines = episode(record).lines
    assert [line.sampled for line in lines] == [
        "", "", "", "version 4, 1 tokens", "", "version 6, 1 tokens, cut at the token limit",
    ]  # fmt: skip


def test_a_reply_names_its_policy_and_an_exempt_turn_is_no_end_of_the_messages() -> None:
    record = tried("p", 1.0)
    record["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    turn = {"parent": None, "output_ids": [1], "version_spans": [[4, 0, 1]], "finish_reason": "stop"}
    frozen = {"policy": "verifier", "exempt": "policy 'verifier', which is frozen"}
    record["turns"] = [{**turn, "index": 0, "policy": "solver"}, {**turn, "index": 1, **frozen}]
    assert episode(record).lines[1].sampled == "solver, version 4, 1 tokens"
    del record["turns"][0]
    assert episode(record).lines[1].sampled == "verifier, version 4, 1 tokens", "all are exempt"


def test_odd_records_are_shown_as_far_as_they_go() -> None:
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}, "plain"]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}, {}, 3],
            },
            {"role": "tool", "content": {"result": 4}},
            "not a message",
        ],
        "turns": [{"index": 0, "parent": 0, "version_spans": None, "output_ids": None}],
        "reward_parts": {"exact": 1.0, "format": 0.5},
    }
    one = episode(record)
    assert one.lines[0].text == "look\n[image_url]\nplain"
    assert one.lines[1].calls == ('f({"a": 1})', "[call without a function]")
    assert one.lines[2].text == '{"result": 4}'
    assert one.parts == "exact 1.000, format 0.500"
    assert one.reward is None
    assert episode({}).lines == ()


def test_calls_of_tools_are_shown_with_result_time_and_error() -> None:
    calls = [
        {"name": "enter", "arguments": {"digit": 4}, "result": "closed", "error": False, "turn": 0,
         "seconds": 0.5},
        {"name": "read\x1b[2J", "arguments": {}, "result": "x" * 30_000, "error": True, "turn": None},
        "odd",
    ]  # fmt: skip
    first, second = tool_lines({"tool_calls": calls})
    assert first == ToolLine(0, 'enter({"digit": 4})', "closed", False, 0.5)
    assert (second.turn, second.error, second.seconds) == (None, True, None)
    assert "\x1b" not in second.call
    assert second.result.endswith("(10,000 more characters)")
    assert tool_lines({}) == []


def test_the_verdict_says_why_there_is_no_reward() -> None:
    assert (
        episode(tried("p", None, error="Timeout after 60 s")).verdict
        == "no reward: agent_error (Timeout after 60 s)"
    )
    assert episode({**tried("p", 0.0), "outcome": "truncated"}).verdict == "reward 0.000, truncated"


def test_the_common_beginning_of_two_episodes_is_shown_once() -> None:
    before, after = (episode(trajectory(1, right, 0, RNG)) for right in (False, True))
    shown = pair(before, after)
    assert [line.role for line in shown.problem] == ["system", "user"]
    assert shown.before.lines[0].role == "assistant"
    text = text_of(as_text(shown))
    assert text.count("How many pencils") == 1
    assert text.index("before  reward 0.00") < text.index("12 + 4") < text.index("after  reward 1.00")
    assert text.index("after") < text.index("12 * 4")
    assert "####" in text


def test_the_gold_answer_and_what_the_agent_returned_are_shown() -> None:
    """An output that repeats the last reply is not shown twice; a record may have neither."""
    first = episode(tried("p", 0.0, output="four", answer={"number": 4}))
    last = episode(tried("p", 1.0, output=" answer 1.0\n"))
    assert (first.returned_last_reply, last.returned_last_reply) == (False, True)
    text = text_of(as_text(pair(first, last)))
    assert [word for word in ("gold", "returned") if text.count(word) != 1] == []
    assert text.index('{"number": 4}') < text.index("before") < text.index("four") < text.index("after")
    assert pair(last, first).answer == '{"number": 4}'
    neither = episode(tried("p", 1.0))
    assert (neither.output, neither.answer, neither.returned_last_reply) == (None, "", False)


def test_a_reply_is_never_part_of_the_problem() -> None:
    """Also where both gave the same one, and nothing is known of how it came about."""
    shown = pair(episode(tried("p", 1.0)), episode(tried("p", 1.0)))
    assert [line.role for line in shown.problem] == ["user"]
    assert [line.role for line in shown.before.lines] == ["assistant"]


def test_no_text_of_a_model_drives_the_terminal() -> None:
    record = tried("p\x1b[31m", 1.0)
    record["messages"][1]["content"] = "[bold]\x1b]0;owned\x07[/x] \u202edesrever \ud800 ok"
    text = text_of(as_text(pair(episode(record), None)))
    assert "[bold]" in text
    assert "[/x]" in text
    assert not any(one in text for one in "\x1b\x07\u202e")
    text.encode()


def test_a_very_long_episode_is_shortened_in_the_terminal_and_says_so() -> None:
    record = tried("p", 1.0)
    record["messages"] = [{"role": "user", "content": "x" * 3 * LONGEST_MESSAGE}]
    record["messages"] += [{"role": "assistant", "content": f"reply {n}"} for n in range(1000)]
    text = text_of(as_text(pair(episode(record), None)))
    assert f"{2 * LONGEST_MESSAGE} more characters" in text
    assert f"{1000 - MOST_MESSAGES} more messages" in text
    assert "reply 0" in text
    assert "reply 999" in text
    assert len(text.splitlines()) < 200


def test_long_words_wrap_beside_their_role() -> None:
    record = tried("p", 1.0)
    record["messages"][1]["content"] = "y" * 200
    lines = text_of(as_text(pair(episode(record), None)), width=40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert sum(line.count("y") for line in lines) == 200
