"""The control plane: sessions, groups, secrets, health; over real HTTP, and as a process."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes import FakeEngine, Fault, Stage, eventually, served, staged
from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tidegate.errors import ConfigError, GatewayError, StartError
from tidegate.gateway import gateway as gateway_module
from tidegate.gateway.client import GatewayClient, SessionAccess
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.server import serve
from tidegate.service.serve import Listen
from tidegate.types import Message, Outcome, Sampling, Scored, Task, Trajectory

SECRET = "the answer is 4711"
TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer=SECRET, info={"why": SECRET})
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


class Sums:
    """A rewarder that sees what a rewarder sees."""

    names = ("exact",)

    def __init__(self) -> None:
        self.seen: list[tuple[Task, Trajectory, str | None, list[Message]]] = []
        self.hang: threading.Event | None = None

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored:
        self.seen.append((task, trajectory, output, messages))
        if self.hang is not None:
            self.hang.wait(30)
        exact = float(output == "3")
        return Scored(exact, {"exact": exact})


@pytest.fixture
def rewarder() -> Sums:
    return Sums()


@pytest.fixture
async def stage(tmp_path: Path, rewarder: Sums) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": rewarder}, reward_timeout_s=0.5) as made:
        yield made


async def episode(stage: Stage, output: str = "3", **options: Any) -> str:
    """A session with one turn, finished; its id."""
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    await ask(access)
    await stage.client.finish(access.session_id, output=output)
    return access.session_id


async def ask(access: SessionAccess) -> str:
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as llm:
        reply = await llm.chat.completions.create(model="m", messages=ASK)
        return reply.choices[0].message.content or ""


async def test_the_environments_reward_at_finish(stage: Stage, rewarder: Sums) -> None:
    access = await stage.client.open_session(task=TASK, slot=3, group_id="g", metadata={"attempt": "a"})
    stage.say("It is 3.")
    await ask(access)
    summary = await stage.client.finish(access.session_id, output="3", reward=0.25, metrics={"tries": 2})
    assert (summary.reward, summary.reward_parts, summary.agent_reward) == (1.0, {"exact": 1.0}, 0.25)
    [(task, _, output, messages)] = rewarder.seen
    assert (task, output) == (TASK, "3")
    assert messages == [*ASK, {"role": "assistant", "content": "It is 3."}]
    trajectory = await stage.client.trajectory(access.session_id)
    assert (trajectory.slot, trajectory.group_id, trajectory.task_id) == (3, "g", "t1")
    assert trajectory.metadata == {"attempt": "a"}
    assert trajectory.metrics == {"tries": 2.0}


async def test_a_task_that_is_no_json_is_refused_by_name(stage: Stage) -> None:
    with pytest.raises(GatewayError, match=r"POST /sessions: .* encoded as JSON: Object of type set"):
        await stage.client.open_session(task=Task("t", "env", [], info={"seen": {1}}))


async def test_a_hanging_reward_ends_as_reward_error_and_finish_stays_idempotent(
    stage: Stage, rewarder: Sums
) -> None:
    rewarder.hang = threading.Event()
    access = await stage.client.open_session(task=TASK)
    await ask(access)
    first, second = await asyncio.gather(
        *(stage.client.finish(access.session_id, output="3") for _ in range(2))
    )
    rewarder.hang.set()
    assert first == second
    assert (first.outcome, first.reward) == (Outcome.REWARD_ERROR, None)
    assert len(rewarder.seen) == 1


async def test_a_reward_may_take_longer_than_its_session_and_than_a_call(
    tmp_path: Path, rewarder: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finishes a session asks again while it is rewarded, and nobody forgets it meanwhile."""
    monkeypatch.setattr(gateway_module, "SWEEP_S", 0.02)
    rewarder.hang = threading.Event()
    async with staged(make_model_dir(tmp_path / "tiny"), rewarders={"sums": rewarder}, grace_s=0.1) as stage:
        access = await stage.client.open_session(task=TASK, deadline_s=3.0)
        await ask(access)
        finish = partial(stage.client.finish, access.session_id, output="3", timeout_s=1.0)
        finishing = asyncio.create_task(finish())
        session = stage.gateway.session(access.session_id)
        loop = asyncio.get_running_loop()
        await eventually(lambda: loop.time() > session.deadline + 1.0)
        rewarder.hang.set()
        summary = await finishing
        assert (summary.reward, await finish()) == (1.0, summary)
        assert len(rewarder.seen) == 1


async def test_a_reward_that_is_not_a_number_crosses_the_wire_as_such(stage: Stage) -> None:
    access = await stage.client.open_session(task=Task("t", "other", []))
    await ask(access)
    summary = await stage.client.finish(access.session_id, reward=math.nan)
    assert (summary.outcome, summary.reward) == (Outcome.REWARD_ERROR, None)
    assert "nan" in str(summary.error)


async def test_rewards_posted_while_it_runs(stage: Stage) -> None:
    access = await stage.client.open_session(task=Task("t", "other", []))
    await ask(access)
    await stage.client.post_reward(access.session_id, 0.5)
    summary = await stage.client.finish(access.session_id)
    assert (summary.reward, summary.reward_parts) == (0.5, {"reward": 0.5})
    with pytest.raises(GatewayError, match="is over"):
        await stage.client.post_reward(access.session_id, 1.0)


async def test_rewards_posted_for_single_turns(stage: Stage) -> None:
    access = await stage.client.open_session(task=Task("t", "other", []))
    await ask(access)
    await stage.client.post_reward(access.session_id, 0.5, turn=0)
    await stage.client.post_reward(access.session_id, 0.25, name="form", turn=0)
    with pytest.raises(GatewayError, match="has no turn 1; it has 1"):
        await stage.client.post_reward(access.session_id, 1.0, turn=1)
    summary = await stage.client.finish(access.session_id)
    assert (summary.reward, summary.reward_parts) == (0.0, {})
    trajectory = await stage.client.trajectory(access.session_id)
    assert [turn.reward for turn in trajectory.turns] == [0.75]


@pytest.mark.parametrize("outcome", ["agent_error", "timeout", "cancelled", "infra_error"])
async def test_what_the_caller_says_of_a_failure_stands(stage: Stage, outcome: str) -> None:
    access = await stage.client.open_session(task=TASK)
    await ask(access)
    summary = await stage.client.finish(access.session_id, output="3", outcome=outcome, error="why")
    assert (summary.outcome.value, summary.reward, summary.error) == (outcome, None, "why")


async def test_an_agent_that_never_called(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK)
    summary = await stage.client.finish(access.session_id, output="3")
    assert (summary.outcome, summary.reward) == (Outcome.AGENT_ERROR, None)
    assert "base_url" in str(summary.error)


async def test_groups_from_sealing_to_acknowledgement(stage: Stage) -> None:
    stage.engine.version = "7"
    live = await stage.client.open_session(task=TASK, group_id="a/1", slot=0)
    sessions = [await episode(stage, output, group_id="a/2", slot=s) for s, output in ((1, "3"), (0, "4"))]
    failed = await stage.client.open_session(task=TASK, group_id="a/2", slot=1)
    rows = {row.id: row for row in await stage.client.list_groups()}
    assert (rows["a/1"].state, rows["a/1"].oldest_version) == ("live", None)
    assert (rows["a/2"].state, rows["a/2"].oldest_version) == ("live", 7)
    waiting = asyncio.create_task(stage.client.lease(1, 4, 20.0))
    for _ in range(2):
        await stage.client.seal_group("a/2", "t1", sessions)
    [group] = await waiting
    assert (group.id, group.task_id, group.rewards()) == ("a/2", "t1", [0.0, 1.0])
    assert group.oldest_version() == 7
    assert {row.id: row.state for row in await stage.client.list_groups()} == {"a/1": "live", "a/2": "leased"}
    for _ in range(2):
        await stage.client.ack(1, group.lease_id, "trained")
    assert [row.id for row in await stage.client.list_groups()] == ["a/1"]
    assert {session.id for session in stage.gateway.sessions.all()} == {live.session_id}
    with pytest.raises(GatewayError) as raised:
        await stage.client.finish(failed.session_id)
    assert raised.value.status == 404
    with pytest.raises(GatewayError, match="accepts no more sessions") as raised:
        await stage.client.open_session(task=TASK, group_id="a/2")
    assert raised.value.status == 410


async def test_a_restarted_trainer_gets_what_the_dead_one_held(stage: Stage) -> None:
    await stage.client.seal_group("a", "t1", [await episode(stage, group_id="a", slot=0)])
    [old] = await stage.client.lease(1, 1)
    [new] = await stage.client.lease(2, 1)
    assert (old.id, old.lease_id != new.lease_id) == (new.id, True)
    for call in (stage.client.lease(1, 1), stage.client.ack(1, old.lease_id, "trained")):
        with pytest.raises(GatewayError) as raised:
            await call
        assert raised.value.status == 410
    await stage.client.ack(2, new.lease_id, "trained")


async def test_a_lease_whose_asker_left_is_free_for_the_next(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.client.lease(1, 1, 20.0))
    await eventually(lambda: stage.gateway.groups.epoch)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stage.client.seal_group("a", "t1", [await episode(stage, group_id="a", slot=0)])
    [group] = await stage.client.lease(1, 1, 5.0)
    assert group.id == "a"


async def test_text_that_no_encoding_has_cannot_block_a_lease(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK, group_id="a", slot=0)
    await ask(access)
    await stage.client.finish(access.session_id, output="a\ud800b", error="\udfff", metrics={"\ud800": 1})
    await stage.client.seal_group("a", "t1", [access.session_id])
    [group] = await stage.client.lease(1, 1)
    assert group.trajectories[0].output == "a?b"
    for body in ({"metadata": {"a": "\ud800"}}, {"env": "\ud800"}, {"metadata": {"a": 2**70}}):
        with pytest.raises(GatewayError, match="cannot be stored") as raised:
            await stage.client._json("POST", "/sessions", body)
        assert raised.value.status == 400


@pytest.mark.parametrize("wrong", ["unfinished", "stranger", "failed", "unknown", "none"])
async def test_only_finished_rewarded_members_are_sealed(stage: Stage, wrong: str) -> None:
    good = await episode(stage, group_id="a", slot=0)
    if wrong == "unfinished":
        bad = (await stage.client.open_session(task=TASK, group_id="a")).session_id
    elif wrong == "stranger":
        bad = await episode(stage, group_id="b")
    elif wrong == "failed":
        bad = (await stage.client.open_session(task=TASK, group_id="a")).session_id
        await stage.client.finish(bad, outcome="agent_error")
    else:
        bad = "nonsense"
    with pytest.raises(GatewayError) as raised:
        await stage.client.seal_group("a", "t1", [] if wrong == "none" else [good, bad])
    assert raised.value.status in (400, 404)
    assert await stage.client.lease(1, 1) == []


async def test_a_dropped_group_is_gone_for_good(stage: Stage) -> None:
    done = await episode(stage, group_id="a", slot=0)
    live = await stage.client.open_session(task=TASK, group_id="a", slot=1)
    sampled = len((await stage.client.trajectory(done)).turns[0].output_ids)
    recorded = sorted(await stage.client.drop_group("a"), key=lambda one: one.slot or 0)
    assert [(one.session_id, one.outcome) for one in recorded] == [
        (done, Outcome.COMPLETED), (live.session_id, Outcome.CANCELLED),
    ]  # fmt: skip
    assert [one.sampled_tokens() for one in recorded] == [sampled, 0]
    assert await stage.client.drop_group("a") == []
    for session in (done, live.session_id):
        with pytest.raises(GatewayError) as raised:
            await stage.client.finish(session)
        assert raised.value.status == 404
    with pytest.raises(openai.AuthenticationError):
        await ask(live)
    with pytest.raises(GatewayError) as raised:
        await stage.client.seal_group("a", "t1", [done])
    assert raised.value.status == 410
    assert await stage.client.list_groups() == []


async def test_orphans_expire_and_sealed_groups_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewarder: Sums
) -> None:
    monkeypatch.setattr(gateway_module, "SWEEP_S", 0.02)
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": rewarder}, grace_s=0.1, retention_s=0.1) as stage:
        sealed = await episode(stage, group_id="a")
        await stage.client.seal_group("a", "t1", [sealed])
        orphan = await stage.client.open_session(task=TASK, deadline_s=0.1)
        kept = await stage.client.open_session(task=TASK, deadline_s=60.0)
        await episode(stage)
        await eventually(lambda: len(stage.gateway.sessions) == 2)
        assert (await stage.client.trajectory(sealed)).reward == 1.0
        with pytest.raises(openai.AuthenticationError):
            await ask(orphan)
        assert await ask(kept)
        assert len(await stage.client.lease(1, 1)) == 1


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
        ({"sampling": {"top_p": 0.5}}, "top_p 1"),
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


async def test_the_client_says_who_did_not_answer() -> None:
    async with GatewayClient("http://127.0.0.1:9", call_s=0.3) as client:
        with pytest.raises(GatewayError, match=r"127\.0\.0\.1:9"):
            await client.list_groups()


async def test_a_gateway_that_is_given_up_is_waited_for_no_longer() -> None:
    """Calls wait for one that is started again, on a socket that its owner holds; then it is given up."""
    asked = asyncio.Event()
    held: list[asyncio.StreamWriter] = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        asked.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with GatewayClient(f"http://{host}:{port}") as client, asyncio.timeout(5):
            call = asyncio.create_task(client.list_engines())
            await asked.wait()
            client.abort("it died too often")
            for waited in (call, client.list_engines()):
                with pytest.raises(GatewayError, match="it died too often"):
                    await waited
        for writer in held:
            writer.close()


async def test_the_client_waits_for_a_gateway_that_comes_up(tmp_path: Path) -> None:
    engine = FakeEngine(make_tokenizer().decode)
    await engine.start()
    await engine.stop()  # its port is free now
    gateway = Gateway(GatewayOptions(model=make_model_dir(tmp_path / "tiny")))
    async with GatewayClient(engine.url, call_s=10.0) as client:
        waiting = asyncio.create_task(client.open_session(task=TASK))
        await asyncio.sleep(0)
        async with served(create_app(gateway), engine.port):
            assert (await waiting).api_key


PROCESS = """
import sys
from pathlib import Path
from tidegate.gateway.server import GatewayOptions, serve
from tidegate.service.serve import Listen
serve(GatewayOptions(model=Path(sys.argv[1]), admin_key="admin"),
      Listen(announce=Path(sys.argv[2]), owned=True))
assert "torch" not in sys.modules
"""


async def test_the_gateway_as_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    model, announce = make_model_dir(tmp_path / "tiny"), tmp_path / "gateway.json"
    command = [sys.executable, "-c", PROCESS, str(model), str(announce)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
    try:
        await eventually(lambda: announce.exists() or process.returncode is not None, 30)
        told = json.loads(announce.read_text())
        assert told["pid"] == process.pid
        async with GatewayClient(told["url"], "admin") as client:
            await client.open_session(task=TASK)
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_model_without_a_tokenizer_or_template_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="is not a directory"):
        Gateway(GatewayOptions(model=tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartError, match="cannot load the tokenizer"):
        Gateway(GatewayOptions(model=tmp_path / "empty"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(tmp_path / "bare"))
    with pytest.raises(StartError, match="no chat template"):
        Gateway(GatewayOptions(model=tmp_path / "bare"))
