"""The control plane: sessions, groups, secrets, health; over real HTTP, and as a process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.fakes import Fault, Stage, eventually, served
from tests.integration.gateway.control_stage import ASK, SECRET, TASK, ask, rewarder, stage
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import ConfigError, GatewayError
from tidegate.gateway.client import GatewayClient, SessionAccess
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.http.openapi import SUMMARIES
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.server import serve
from tidegate.service.serve import Listen
from tidegate.types import Outcome, Sampling

__all__ = ["rewarder", "stage"]


async def test_a_session_opens_itself_only(stage: Stage) -> None:
    mine = await stage.client.open_session(task=TASK)
    other = await stage.client.open_session(task=TASK)
    for url, key in (
        (other.base_url, mine.api_key),
        (mine.base_url, "nonsense"),
        (mine.base_url, "admin"),
        (f"{stage.url}/v1", "nonsense"),
        (f"{stage.url}/s/nonsense/v1", mine.api_key),
    ):
        crossed = SessionAccess("", url, key)
        with pytest.raises(openai.AuthenticationError) as raised:
            await ask(crossed)
        assert raised.value.response.headers["x-should-retry"] == "false"
    assert stage.engine.requests == []
    assert mine.api_key not in repr(vars(stage.gateway.sessions))


async def test_an_open_whose_response_is_lost_leaves_one_session(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = stage.client._send, []

    async def losing(method: str, url: str, data: bytes | None = None) -> tuple[int, bytes]:
        answer = await send(method, url, data)
        if not lost:
            lost.append(answer)
            raise aiohttp.ServerDisconnectedError
        return answer

    monkeypatch.setattr(stage.client, "_send", losing)
    access = await stage.client.open_session(task=TASK)
    assert json.loads(lost[0][1])["session_id"] == access.session_id
    assert [session.id for session in stage.gateway.sessions.all()] == [access.session_id]
    await ask(access)
    await stage.client.open_session(task=TASK)
    assert len(stage.gateway.sessions) == 2


async def test_an_agent_reads_neither_answers_nor_the_control_plane(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK, group_id="g", slot=0)
    stage.engine.faults.append(Fault("no_logprobs"))
    seen = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {access.api_key}"}) as http:
        for method, path in (
            ("GET", f"/sessions/{access.session_id}"),
            ("GET", f"/sessions/{access.session_id}/trajectory"),
            ("POST", f"/sessions/{access.session_id}/finish"),
            ("POST", f"/sessions/{access.session_id}/reward"),
            ("DELETE", f"/sessions/{access.session_id}"),
            ("POST", "/sessions"),
            ("GET", "/sessions"),
            ("GET", "/groups"),
            ("POST", "/groups/lease"),
            ("POST", "/groups/ack"),
            ("POST", "/groups/g/seal"),
            ("DELETE", "/groups/g"),
            ("GET", "/engines"),
            ("POST", "/engines"),
            ("DELETE", "/engines"),
            ("GET", "/metrics"),
        ):
            async with http.request(method, stage.url + path, json={}) as response:
                seen.append(await response.text())
                assert (method, path, response.status) == (method, path, 401)
        for path in ("models", "chat/completions", "unknown"):
            for method in ("GET", "POST"):
                for data in (b"", b"{", b"[]", json.dumps({"messages": ASK}).encode()):
                    async with http.request(method, f"{access.base_url}/{path}", data=data) as response:
                        seen.append(await response.text())
                        assert response.status < 500
    assert not any(SECRET in text for text in seen)
    assert SECRET not in json.dumps(await stage.client._json("GET", f"/sessions/{access.session_id}"))


async def test_without_an_admin_key_the_gateway_stays_on_loopback(tmp_path: Path) -> None:
    options = GatewayOptions(model=make_model_dir(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match="set an admin key"):
        serve(options, Listen(host="0.0.0.0"))
    async with served(create_app(Gateway(options))) as url, GatewayClient(url) as client:
        assert (await client.health())["status"] == "ok"
        assert (await client.open_session(task=TASK)).base_url.startswith(url)


async def test_agents_are_given_the_public_address_where_there_is_one(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    gateway = Gateway(GatewayOptions(model=model, public_url="https://models.example.com/rl"))
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        access = await client.open_session(task=TASK)
    assert access.base_url == f"https://models.example.com/rl/s/{access.session_id}/v1"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"task": {"id": "t"}}, "task.env"),
        ({"splitt": "train"}, "splitt"),
        ({"split": "test"}, "split"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"sampling": {"temperature": 0}}, "temperature > 0"),
        ({"sampling": {"top_p": 0.5}}, "a top_k from 1 to 1024"),
        ({"sampling": {"top_k": 2000}}, "top_k = 2000"),
        ({"sampling": {"min_p": 1}}, "min_p"),
    ],
)
async def test_bad_sessions_are_refused_by_name(stage: Stage, body: dict[str, Any], what: str) -> None:
    with pytest.raises(GatewayError, match=what) as raised:
        await stage.client._json("POST", "/sessions", body)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "url",
    ["http://", "ftp://h", "http://\U000ec911@h", "http://h?q=1", "http://h:99999", f"http://{'h' * 64}"],
)
async def test_an_engine_that_cannot_be_called_is_refused(stage: Stage, url: str) -> None:
    """Probing it would fail in ways that no engine does."""
    with pytest.raises(GatewayError, match=r"body\.url"):
        await stage.client.add_engine(url)
    assert (await stage.client.health())["status"] == "ok"
    assert [row["url"] for row in await stage.client.list_engines()] == [stage.engine.url]


async def test_a_gateway_lists_its_newest_sessions_without_answers(stage: Stage) -> None:
    ids = [(await stage.client.open_session(task=TASK)).session_id for _ in range(3)]
    await stage.client.finish(ids[0])
    listed = await stage.client._json("GET", "/sessions")
    assert (listed["total"], [row["session_id"] for row in listed["sessions"]]) == (3, ids)
    assert SECRET not in json.dumps(listed)
    newest = await stage.client._json("GET", "/sessions?state=open&limit=1")
    assert (newest["total"], [row["session_id"] for row in newest["sessions"]]) == (2, ids[2:])


async def test_a_method_that_is_not_there_is_answered_with_those_that_are(stage: Stage) -> None:
    headers = {"Authorization": "Bearer admin"}
    async with aiohttp.ClientSession(stage.url, headers=headers) as http, http.put("/groups/ack") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == 405


async def test_the_openapi_tells_of_every_route(stage: Stage) -> None:
    async with aiohttp.ClientSession(stage.url) as http, http.get("/openapi.json") as response:
        document: Any = await response.json()
    paths = document["paths"]
    for path in ("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens"):
        assert {"200", "4XX", "5XX"} <= paths[f"/v1{path}"]["post"]["responses"].keys()
    assert {"/v1/models", "/groups/lease", "/sessions/{session_id}/finish"} <= paths.keys()
    open_to_all = {path for path, ways in paths.items() for way in ways.values() if not way["security"]}
    assert open_to_all == {"/health", "/ready"}
    described = {
        f"{way.upper()} {path}": call["summary"] for path, ways in paths.items() for way, call in ways.items()
    }
    assert described == SUMMARIES
    referred = set(re.findall(r'"\$ref": "(.*?)"', json.dumps(document)))
    assert (
        referred == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]} & referred
    )
    assert len(referred) > 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sessions/s/reward", {"value": 1.0, "message": "well done"}),
        ("/groups/ack", {"trainer_epoch": 1, "lease_id": "l", "outcome": "trained", "step": 3}),
    ],
)
async def test_what_would_be_dropped_is_not_accepted(stage: Stage, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(GatewayError, match=r"message|step") as raised:
        await stage.client._json("POST", path, body)
    assert raised.value.status == 400


async def test_evaluation_may_be_greedy(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK, split="eval", sampling=Sampling(temperature=0.0))
    await ask(access)
    assert stage.engine.requests[0]["sampling_params"]["temperature"] == 0.0


async def test_health_tells_the_instance_and_what_died(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await stage.client.health()
    assert first == {"instance": stage.gateway.instance, "status": "ok"}
    monkeypatch.setattr(stage.gateway.sessions, "all", lambda: 1 / 0)  # the next sweep dies of it
    await eventually(lambda: stage.gateway.failed)
    monkeypatch.undo()
    with pytest.raises(GatewayError, match="sweeper failed: ZeroDivisionError") as raised:
        await stage.client.health()
    assert raised.value.status == 503


async def test_a_deadline_that_passes_at_once_ends_the_session_as_timeout(stage: Stage) -> None:
    """Found by Schemathesis: the time of its replies, none, was divided by."""
    access = await stage.client.open_session(task=TASK, deadline_s=1e-300)
    summary = await stage.client.finish(access.session_id)
    assert summary.outcome is Outcome.TIMEOUT


async def test_a_trainer_that_speaks_another_lease_protocol_is_refused(stage: Stage) -> None:
    with pytest.raises(GatewayError, match=r"protocol.*1") as raised:
        await stage.client._json("POST", "/groups/lease", {"trainer_epoch": 1, "protocol": 2})
    assert raised.value.status == 400
