"""The search agent, with the real SDK and a scripted model, the real retrieval client and server app."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.rag_stand import FakeIndex, serving
from tests.scripted_llm import Reply, scripted_llm, tool_call
from tidegate.agents.base import Result, Session, load_agent
from tidegate.agents.search import SearchAgent, gather_or_cancel
from tidegate.errors import ConfigError, InfrastructureError, RetrievalRefused, RetrievalUnavailable
from tidegate.rag.corpus.corpus import Document
from tidegate.types import TaskView

TASK = TaskView("t", [{"role": "user", "content": "What is in 7?"}])
ANSWER: Reply = {"content": "<answer>x</answer>"}


def calls(*each: tuple[str, Any]) -> Reply:
    """One reply with several calls."""
    made = [tool_call(name, arguments, f"c{n}")["tool_calls"][0] for n, (name, arguments) in enumerate(each)]
    return {"content": None, "tool_calls": made}


async def ask(
    reply: Callable[[Any], Reply] | Iterable[Reply], index: FakeIndex | None = None, **options: Any
) -> tuple[Result, list[Any]]:
    """The agent's result, and the requests that the model got."""
    left = None if callable(reply) else iter(reply)
    script = reply if left is None else lambda _: next(left)
    async with serving(index or FakeIndex()) as stand, scripted_llm(script) as (url, requests):
        session = Session(url, "key", "policy", None, time.monotonic() + 30)
        agent = SearchAgent(**{"urls": [stand.url], "k": 2, **options})
        try:
            return await agent.run(TASK, session), requests
        finally:
            await agent.aclose()


class Long(FakeIndex):
    """Documents with texts of so many characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = characters

    def document(self, row: int) -> Document:
        found = super().document(row)
        return Document(found.id, found.title, "x" * self.characters)


def tool_texts(request: Any) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


async def test_a_server_that_is_gone_at_the_deadline_is_no_timeout_of_the_policy() -> None:
    async with scripted_llm(lambda _: tool_call("search", {"query": "7"})) as (url, _):
        session = Session(url, "key", "policy", None, time.monotonic() + 5)
        agent = SearchAgent(urls=["http://127.0.0.1:9"], timeout_s=30.0)
        try:
            with pytest.raises(RetrievalUnavailable, match="before the episode's deadline"):
                await agent.run(TASK, session)
        finally:
            await agent.aclose()
        assert 0 < session.remaining() < 2


async def test_it_searches_opens_and_answers() -> None:
    script = [tool_call("search", {"query": "7"}), tool_call("open", {"id": "d/8"}), ANSWER]
    result, requests = await ask(script, instructions="Search.")
    assert result.output == "<answer>x</answer>"
    assert requests[0]["messages"] == [{"role": "system", "content": "Search."}, *TASK.messages]
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["search", "open"]
    found, document = tool_texts(requests[2])
    assert found == "[d/7] Title 7\nText 7 of a.\n[d/8] Title 8\nText 8 of a."
    assert document == "Title 8\nText 8 of a."
    assert {name: value for name, value in result.metrics.items() if value} == {
        "turns": 3,
        "searches": 1,
        "opens": 1,
    }


async def test_without_open_no_ids_are_shown() -> None:
    result, requests = await ask(
        [calls(("search", {"query": "7"}), ("open", {"id": "d/7"})), ANSWER], open=False
    )
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["search"]
    assert tool_texts(requests[1]) == [
        "Title 7\nText 7 of a.\nTitle 8\nText 8 of a.",
        "error: there is no tool 'open'; there is search(query)",
    ]
    assert result.metrics["tool_errors"] == 1


async def test_calls_of_one_reply_are_answered_in_order() -> None:
    script = [calls(*(("search", {"query": str(n)}) for n in range(4))), ANSWER]
    result, requests = await ask(script, k=1)
    told = [one for one in requests[1]["messages"] if one["role"] == "tool"]
    answers = [(one["tool_call_id"], one["content"]) for one in told]
    assert answers == [(f"c{n}", f"[d/{n}] Title {n}\nText {n} of a.") for n in range(4)]
    assert result.metrics["searches"] == 4


async def test_calls_are_made_at_the_same_time_and_a_failure_ends_the_others() -> None:
    all_there = asyncio.Barrier(3)
    ended = []

    async def call(name: str) -> str:
        await all_there.wait()
        if name == "b":
            raise RetrievalUnavailable("gone")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
        return name

    with pytest.raises(RetrievalUnavailable):
        await asyncio.wait_for(gather_or_cancel(call(name) for name in "abc"), 10)
    await asyncio.sleep(0)
    assert sorted(ended) == ["a", "c"]


async def test_a_repeated_query_is_reported_and_not_sent_again() -> None:
    index = FakeIndex()
    twice = calls(("search", {"query": "7"}), ("search", {"query": " 7 "}))
    result, requests = await ask([twice, tool_call("search", {"query": "7"}), ANSWER], index)
    first, second, third = tool_texts(requests[2])
    assert first.startswith("[d/7]")
    assert second == third
    assert third.startswith("note: this query was made before")
    assert index.batches == [("7",)]
    assert (result.metrics["duplicate_queries"], result.metrics["tool_errors"]) == (2, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("search", "not json", 'error: the arguments must be {"query": "..."}'),
        ("search", "[" * 5000, 'error: the arguments must be {"query": "..."}'),
        ("search", '["7"]', 'error: the arguments must be {"query": "..."}'),
        ("search", {"q": "7"}, 'error: the arguments must be {"query": "..."}'),
        ("search", {"query": ["7"]}, 'error: the arguments must be {"query": "..."}'),
        ("search", {"query": "  "}, 'error: the arguments must be {"query": "..."}'),
        ("search", {"query": "x" * 100_000}, "error: the search refuses this query"),
        (
            "search",
            '{"query": "\\ud800"}',
            r"error: the search refuses this query: '\ud800' is not valid text",
        ),
        ("open", '{"id": "\\ud800"}', "error: there is no document"),
        ("open", {"id": ".."}, "error: there is no document '..'"),
        ("open", {"id": "x" * 100_000}, "error: there is no document"),
        ("open", {"id": True}, 'error: the arguments must be {"id": "..."}'),
        ("open", {"id": "d/99"}, "error: there is no document 'd/99'"),
        ("browse", {"url": "x"}, "error: there is no tool 'browse'; there is search(query) and open(id)"),
    ],
)
async def test_what_is_wrong_with_a_call_goes_back_to_the_model(name: str, arguments: Any, text: str) -> None:
    result, requests = await ask([tool_call(name, arguments), ANSWER])
    assert tool_texts(requests[1])[0].startswith(text)
    assert result.metrics["tool_errors"] == 1
    assert result.output == ANSWER["content"]


async def test_a_call_that_the_server_could_not_read_goes_back_too() -> None:
    result, requests = await ask([{"content": '<tool_call>\n{"name": "search", \n</tool_call>'}, ANSWER])
    assert requests[1]["messages"][-1]["content"].startswith("error: the tool call could not be read")
    assert (result.metrics["tool_errors"], result.output) == (1, ANSWER["content"])


async def test_a_number_as_an_argument_is_a_text() -> None:
    _, requests = await ask([tool_call("search", {"query": 7}), ANSWER])
    assert tool_texts(requests[1])[0].startswith("[d/7]")


async def test_results_are_cut_to_the_rest_of_the_context_and_a_full_one_is_reported() -> None:
    """The scripted model reports no usage, so that a token is four characters."""

    script = [tool_call("search", {"query": str(n)}) for n in range(9)]
    result, requests = await ask(script, Long(500), k=1, context_tokens=500)
    texts = tool_texts(requests[-1])
    assert texts[-1] == "error: the context is full; give the answer now"
    assert texts[-2].endswith("… (cut: the context is full)")
    assert sum(map(len, texts)) < 2000
    assert len(requests) < 9
    assert result.metrics["cut_results"] == 1
    assert result.metrics["turns"] == len(requests)


async def test_long_passages_are_cut_and_opened_whole() -> None:
    script = [tool_call("search", {"query": "7"}), tool_call("open", {"id": "d/7"}), ANSWER]
    _, requests = await ask(script, Long(5_000), k=1)
    found, document = tool_texts(requests[2])
    assert len(found) < 2_100
    assert found.endswith("… (open it to read on)")
    assert document == "Title 7\n" + "x" * 5_000


async def test_a_model_that_never_answers_is_stopped() -> None:
    result, requests = await ask([tool_call("search", {"query": str(n)}) for n in range(9)], max_turns=3)
    assert len(requests) == 3
    assert result.output is None


async def test_a_retrieval_server_that_is_away_is_no_empty_result() -> None:
    script = iter([calls(("search", {"query": "7"}), ("search", {"query": "8"}))])
    async with scripted_llm(lambda _: next(script)) as (url, _):
        agent = SearchAgent(["http://127.0.0.1:9"], timeout_s=0.3)
        session = Session(url, "key", "policy", None, time.monotonic() + 30)
        with pytest.raises(RetrievalUnavailable) as raised:
            await agent.run(TASK, session)
        await agent.aclose()
    assert isinstance(raised.value, InfrastructureError)


@pytest.mark.parametrize(
    ("path", "options", "code"),
    [("", {"api_key": "secret"}, "wrong_key"), ("/api", {}, "no_such_route"), ("", {"k": 2000}, None)],
)
async def test_an_invalid_option_ends_the_run_and_is_not_sent_to_the_model(
    path: str, options: dict[str, Any], code: str | None
) -> None:
    """The model would be rewarded for what it did without a search that works."""
    server = {"api_key": options["api_key"]} if "api_key" in options else {}
    agent_options = {"k": options.get("k", 2)}
    async with (
        serving(FakeIndex(), **server) as stand,
        scripted_llm(lambda _: tool_call("search", {"query": "7"})) as (url, requests),
    ):
        agent = SearchAgent([stand.url + path], **agent_options)
        session = Session(url, "key", "policy", None, time.monotonic() + 30)
        with pytest.raises(RetrievalRefused) as raised:
            await agent.run(TASK, session)
        await agent.aclose()
    assert raised.value.code == (code or "invalid_request")
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls must be a list"),
        ({"urls": "http://127.0.0.1:1"}, "urls must be a list"),
        ({"urls": ["http://127.0.0.1:1"], "k": 0}, "k = 0"),
        ({"urls": ["http://127.0.0.1:1"], "api_key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY', but that variable"),
        ({"urls": ["http://127.0.0.1:1"], "refine": {"urls": ["http://x"]}}, "needs the option 'model'"),
        ({"urls": ["http://127.0.0.1:1"], "refine": {"ulrs": []}}, "no option 'ulrs'; did you mean 'urls'"),
        ({"url": ["http://127.0.0.1:1"]}, "no option 'url'; did you mean 'urls'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_agent("search", options)
