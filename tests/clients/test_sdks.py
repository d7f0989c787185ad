"""The SDKs, in the versions of their environments, on the gateway with the embedded engine."""

from __future__ import annotations

import pytest

from tests.clients.support import PROGRAMS, Episode, python, run_client
from tidegate.gateway.client import GatewayClient
from tidegate.types import Sampling

pytestmark = pytest.mark.clients
OPENAI = pytest.mark.parametrize("environment", ["openai2", "openai3"])


def solved(episode: Episode) -> None:
    """Checks that the model called the calculator and answered, in one sequence of turns."""
    assert episode.saw["answer"] == "#### 140"
    assert episode.saw["calls"] == [["calculator", {"expression": "10 * 5 + 6 * 15"}]]
    episode.assert_one_line(2)
    assert [turn.parse for turn in episode.trajectory.turns] == ["ok", None]


@OPENAI
@pytest.mark.parametrize(
    "way", ["chat", "chat-stream", "responses", "responses-stream", "responses-previous"]
)
async def test_openai_with_a_tool(client: GatewayClient, environment: str, way: str) -> None:
    episode = await run_client(client, [python(environment), str(PROGRAMS / "openai_sdk.py"), way])
    solved(episode)
    assert episode.saw["version"].startswith(environment[-1] + ".")
    if way.endswith("stream"):
        assert episode.saw["pieces"][-1] > 1, "the answer came in one piece"


@OPENAI
@pytest.mark.parametrize("way", ["chat-parse", "responses-parse"])
async def test_openai_with_a_reply_of_a_pydantic_type(
    client: GatewayClient, environment: str, way: str
) -> None:
    """Uses an evaluation session, where a grammar constrains the reply."""
    episode = await run_client(
        client,
        [python(environment), str(PROGRAMS / "openai_sdk.py"), way],
        split="eval",
        sampling=Sampling(1.0, max_tokens=400),
    )
    assert set(episode.saw["parsed"]) == {"correct", "size"}
    episode.assert_one_line(1)


@OPENAI
async def test_what_openai_is_refused_it_raises_once(client: GatewayClient, environment: str) -> None:
    episode = await run_client(client, [python(environment), str(PROGRAMS / "openai_sdk.py"), "refused"])
    assert episode.saw["code"] == "unsupported_parameter"
    assert "image_url" in episode.saw["message"]
    assert episode.trajectory.turns == []


@pytest.mark.parametrize("way", ["whole", "stream", "runner"])
async def test_anthropic_with_a_tool(client: GatewayClient, way: str) -> None:
    episode = await run_client(client, [python("openai3"), str(PROGRAMS / "anthropic_sdk.py"), way])
    solved(episode)
    turns = episode.trajectory.turns
    assert episode.saw["counted"] == [len(episode.trajectory.prompt_ids(turn)) for turn in turns]
    assert episode.saw["billed"] == episode.saw["counted"]
    if way == "stream":
        assert episode.saw["pieces"][-1] > 1, "the answer came in one piece"


async def test_anthropic_with_a_reply_of_a_pydantic_type(client: GatewayClient) -> None:
    episode = await run_client(
        client,
        [python("openai3"), str(PROGRAMS / "anthropic_sdk.py"), "parse"],
        split="eval",
        sampling=Sampling(1.0, max_tokens=400),
    )
    assert set(episode.saw["parsed"]) == {"correct", "size"}
    episode.assert_one_line(1)
