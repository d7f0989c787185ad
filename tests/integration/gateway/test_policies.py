"""Several policies in one session: each call goes to the engines of the policy that it names, with the
policy's tokenizer and template, and extends only its turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.fakes import FakeEngine, Fault, eventually, served
from tests.local_rewards import LocalRewards
from tests.sharded_gateway import SHARDS, Inside, fake_engine, groups
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import EngineError, GatewayError
from tidegate.gateway.client import GatewayClient, SessionAccess
from tidegate.gateway.engines.engine import Affinity, PoolOptions
from tidegate.gateway.engines.protocol import GenerateRequest, SlowEnginesError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions, PolicyModel
from tidegate.gateway.project_keys import create_key
from tidegate.gateway.sharding.router import ShardRouter
from tidegate.types import Outcome, Task

TASK = Task("t", "e", [{"role": "user", "content": "1+2?"}])
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
TEMPLATES = {"solver": "qwen2", "verifier": "mistral"}


@dataclass
class Room:
    gateway: Gateway
    client: GatewayClient
    engines: dict[str, FakeEngine]
    stack: contextlib.AsyncExitStack

    async def open(self, **options: Any) -> SessionAccess:
        return await self.client.open_session(task=TASK, **options)

    async def llm(self, access: SessionAccess, **options: Any) -> AsyncOpenAI:
        made = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, **options)
        return await self.stack.enter_async_context(made)

    async def turns(self, access: SessionAccess, reward: Any = 1.0) -> list[Any]:
        await self.client.finish(access.session_id, reward=reward)
        return self.gateway.session(access.session_id).trajectory.turns  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def room(
    tmp_path: Path, engines: dict[str, FakeEngine] | None = None, train: bool = True, **options: Any
) -> AsyncIterator[Room]:
    """A gateway with two policies of different templates; its engines are kept if they are given."""
    policies = {}
    for name, template in TEMPLATES.items():
        if not (directory := tmp_path / name).exists():
            make_model_dir(directory, template)
        policies[name] = PolicyModel(directory, train=train or name == "solver")
    gateway = Gateway(
        GatewayOptions(
            tmp_path, admin_key="admin", policies=policies, environments=LocalRewards({}), **options
        )
    )
    async with contextlib.AsyncExitStack() as stack:
        known = engines or {}
        for name, policy in gateway.policies.by_name.items():
            if engines is None:
                renderer = policy.renderer
                known[name] = FakeEngine(renderer.decode, stop_id=renderer.stop_ids[0])
                await known[name].start()
                stack.push_async_callback(known[name].stop)
        url = await stack.enter_async_context(served(create_app(gateway)))
        client = await stack.enter_async_context(GatewayClient(url, "admin"))
        for name, engine in known.items() if engines is None else ():
            await client.add_engine(engine.url, policy=name)
        yield Room(gateway, client, known, stack)


async def chat(llm: AsyncOpenAI, model: str, messages: list[Any], **options: Any) -> Any:
    reply = await llm.chat.completions.create(model=model, messages=messages, **options)
    assert reply.model == model
    return reply.choices[0].message.model_dump(exclude_none=True)


async def test_a_session_calls_two_policies_each_with_its_engine_and_its_exact_ids(tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        access = await stage.open()
        llm = await stage.llm(access)
        said = await chat(llm, "solver", ASK)
        shown = [*ASK, said, {"role": "user", "content": "Is it right?"}]
        judged = await chat(llm, "verifier", shown)
        await chat(llm, "solver", [*ASK, said, {"role": "user", "content": "Again."}])
        await chat(llm, "verifier", [*shown, judged, {"role": "user", "content": "Sure?"}])
        await chat(llm, "verifier", ASK)
        turns = await stage.turns(access, {"solver": 1.0, "verifier": 0.0})
        names = ["solver", "verifier", "solver", "verifier", "verifier"]
        assert [turn.policy for turn in turns] == names
        assert [turn.parent for turn in turns] == [None, None, 0, 1, None]
        reasons = [turn.branch and turn.branch.partition(":")[0] for turn in turns]
        assert reasons == [None, "policy", "policy", "policy", "rewound"]
        assert turns[1].branch == "policy: turn 0, the newest, is of policy 'solver'"
        trajectory = stage.gateway.session(access.session_id).trajectory
        assert trajectory is not None
        asked: dict[str, list[Any]] = {name: list(stage.engines[name].requests) for name in TEMPLATES}
        for turn in turns:
            request = asked[turn.policy].pop(0)
            assert trajectory.prompt_ids(turn).tolist() == request["input_ids"]
            assert "lora_path" not in request
        assert not any(asked.values())
        solver, verifier = (stage.gateway.policies.by_name[name].renderer for name in TEMPLATES)
        # The other policy's reply is text of the prompt, in the own template.
        assert turns[0].delta_ids.tolist() == solver.encode_prompt(ASK, None, {}).tolist()
        assert turns[1].delta_ids.tolist() == verifier.encode_prompt(shown, None, {}).tolist()
        assert turns[4].delta_ids.tolist() != turns[0].delta_ids.tolist()
        assert (trajectory.reward, trajectory.policy_rewards) == (0.5, {"solver": 1.0, "verifier": 0.0})
        session = stage.gateway.session(access.session_id)
        assert {name: one.policy for name, one in session.affinities.items()} == {n: n for n in TEMPLATES}


async def test_an_unknown_or_missing_model_is_refused_with_the_names_in_every_dialect(tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        access = await stage.open()
        llm = await stage.llm(access)
        calls: list[Any] = [
            lambda model: llm.chat.completions.create(model=model, messages=ASK),
            lambda model: llm.completions.create(model=model, prompt="1+2?"),
            lambda model: llm.responses.create(model=model, input="1+2?"),
            lambda model: llm.models.retrieve(model),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as refused:
                await call("policy")
            assert refused.value.code == "model_not_found"
            assert "'policy' is not served; the models are solver, verifier; a call that must" in str(
                refused.value
            )
        with pytest.raises(openai.NotFoundError, match="model: is missing; the models are solver, verifier"):
            await llm.post("/chat/completions", cast_to=object, body={"messages": ASK})
        with pytest.raises(openai.NotFoundError, match="7 is not served"):
            await llm.post("/chat/completions", cast_to=object, body={"messages": ASK, "model": 7})
        claude = AsyncAnthropic(base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key)
        async with claude:
            for ask in (claude.messages.create, claude.messages.count_tokens):
                more = {"max_tokens": 9} if ask == claude.messages.create else {}
                with pytest.raises(Exception, match="'x' is not served; the models are solver, verifier"):
                    await ask(model="x", messages=ASK, **more)  # type: ignore[operator]
            counted = [
                (await claude.messages.count_tokens(model=name, messages=ASK)).input_tokens
                for name in TEMPLATES
            ]
            assert counted[0] != counted[1]
            assert [one.id async for one in claude.models.list()] == ["solver", "verifier"]
            reply = await claude.messages.create(model="verifier", messages=ASK, max_tokens=9)
            assert reply.model == "verifier"
        assert [one.id async for one in llm.models.list()] == ["solver", "verifier"]
        assert (await llm.models.retrieve("verifier")).id == "verifier"
        for call, name in zip(calls[:3], ("solver", "verifier", "solver"), strict=True):
            assert (await call(name)).model == name
        turns = await stage.turns(access)
        assert [turn.policy for turn in turns] == ["verifier", "solver", "verifier", "solver"]


async def test_raw_prompts_extend_turns_of_their_policy_alone(tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        access = await stage.open()
        llm = await stage.llm(access)
        prompt = [65, 66, 67]
        first = await llm.completions.create(model="solver", prompt=prompt)
        assert first.choices[0].text
        sampled = stage.gateway.session(access.session_id).tree.nodes[0].turn.output_ids.tolist()
        for name in ("verifier", "solver"):
            await llm.completions.create(model=name, prompt=[*prompt, *sampled, 68])
        turns = await stage.turns(access)
        assert [(turn.policy, turn.parent) for turn in turns] == [
            ("solver", None), ("verifier", None), ("solver", 0),
        ]  # fmt: skip
        assert [turn.branch and turn.branch[:7] for turn in turns] == [None, "policy:", "policy:"]


async def test_a_retry_gets_the_turn_of_its_own_policy(tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        access = await stage.open()
        llm = await stage.llm(access, max_retries=0)
        one = await chat(llm, "solver", ASK, extra_headers={"idempotency-key": "a"})
        assert one == await chat(llm, "solver", ASK, extra_headers={"idempotency-key": "a"})
        with pytest.raises(openai.BadRequestError, match="sent with another body before"):
            await chat(llm, "verifier", ASK, extra_headers={"idempotency-key": "a"})
        await chat(llm, "verifier", ASK, extra_headers={"x-stainless-retry-count": "1"})
        assert [turn.policy for turn in await stage.turns(access)] == ["solver", "verifier"]


async def test_the_turns_of_a_frozen_policy_are_context_only(tmp_path: Path) -> None:
    async with room(tmp_path, train=False) as stage:
        stage.engines["verifier"].version, stage.engines["solver"].version = 1, 7
        access = await stage.open()
        llm = await stage.llm(access)
        await chat(llm, "verifier", ASK, extra_headers={"x-tidegate-train": "yes"})
        await chat(llm, "solver", ASK)
        await chat(llm, "verifier", [*ASK, {"role": "user", "content": "And?"}])
        turns = await stage.turns(access)
        assert [turn.exempt for turn in turns] == [
            "policy 'verifier', which is frozen", None, "policy 'verifier', which is frozen",
        ]  # fmt: skip
        trajectory = stage.gateway.session(access.session_id).trajectory
        assert trajectory is not None
        assert (trajectory.oldest_version(), trajectory.outcome) == (7, Outcome.COMPLETED)
        alone = await stage.open()
        await chat(await stage.llm(alone), "verifier", ASK)
        assert "exempt from training, the last one by its policy 'verifier', which is frozen" in str(
            (await stage.client.finish(alone.session_id)).error
        )


async def test_calls_of_a_policy_wait_for_its_engines_while_the_other_serves(tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        access = await stage.open(deadline_s=1.5)
        llm = await stage.llm(access, max_retries=0)
        await stage.engines["verifier"].stop()
        await chat(llm, "solver", ASK)
        with pytest.raises(openai.APIError):
            await chat(llm, "verifier", ASK)
        await chat_fails(llm)
        summary = await stage.client.finish(access.session_id, outcome="timeout")
        assert (summary.outcome, summary.turns) == (Outcome.INFRA_ERROR, 1), "an outage, not a slow engine"
        assert [len(engine.requests) for engine in stage.engines.values()] == [1, 0]


async def test_a_clients_calls_extend_its_conversation_under_any_policy(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = create_key(keys, "me")
    async with room(tmp_path, keys=keys) as stage:
        llm = AsyncOpenAI(base_url=f"{stage.client.url}/v1", api_key=key)
        llm = await stage.stack.enter_async_context(llm)
        said = await chat(llm, "solver", ASK)
        shown = [*ASK, said, {"role": "user", "content": "Is it right?"}]
        judged = await chat(llm, "verifier", shown)
        await chat(llm, "verifier", [*shown, judged, {"role": "user", "content": "Sure?"}])
        await chat(llm, "solver", [*ASK, said, {"role": "user", "content": "Again."}])
        [session] = stage.gateway.sessions.all()
        assert [(node.turn.policy, node.turn.parent) for node in session.tree.nodes] == [
            ("solver", None), ("verifier", None), ("verifier", 1), ("solver", 0),
        ]  # fmt: skip


async def test_a_call_without_an_engine_of_its_policy_is_not_slow(tmp_path: Path) -> None:
    """It has met an outage, however busy the engines of other policies are."""
    async with room(tmp_path) as stage:
        await stage.client.remove_engine(stage.engines["verifier"].url)
        request = GenerateRequest(np.array([65], dtype=np.int32), {}, 4)
        now = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match="no engine in rotation") as failed:
            await stage.gateway.pool.sample(request, Affinity("s", "s", policy="verifier"), now)
        assert not isinstance(failed.value, SlowEnginesError)


async def chat_fails(llm: AsyncOpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="deadline passed"):
        await chat(llm, "solver", ASK)


async def test_a_restarted_gateway_routes_as_before(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with room(tmp_path, journal=journal) as stage:
        access = await stage.open()
        said = await chat(await stage.llm(access), "solver", ASK)
        judged = await chat(await stage.llm(access), "verifier", ASK)
        await stage.gateway.journal.close()
        async with room(tmp_path, stage.engines, journal=journal) as again:
            rows = {row["url"]: row["policy"] for row in await again.client.list_engines()}
            assert rows == {engine.url: name for name, engine in stage.engines.items()}
            await eventually(lambda: all(engine.serves for engine in again.gateway.pool.engines()))
            base_url = f"{again.client.url}/s/{access.session_id}/v1"
            llm = await again.llm(SessionAccess(access.session_id, base_url, access.api_key))
            await chat(llm, "solver", [*ASK, said, *ASK])
            await chat(llm, "verifier", [*ASK, judged, *ASK])
            turns = await again.turns(access)
        assert [(turn.policy, turn.parent) for turn in turns] == [
            ("solver", None), ("verifier", None), ("solver", 0), ("verifier", 1),
        ]  # fmt: skip
        assert [len(engine.requests) for engine in stage.engines.values()] == [2, 2]


async def test_an_engine_needs_a_policy_that_is_served(tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        url = stage.engines["solver"].url
        with pytest.raises(GatewayError, match="it names no policy; the policies are solver, verifier"):
            await stage.client.add_engine("http://127.0.0.1:9")
        with pytest.raises(GatewayError, match="policy 'critic' has no engines here; the policies are"):
            await stage.client.add_engine("http://127.0.0.1:9", policy="critic")
        with pytest.raises(
            GatewayError, match="serves policy 'solver': remove it, then add it for 'verifier'"
        ):
            await stage.client.add_engine(url, policy="verifier")
        assert (await stage.client.add_engine(url, admitted=True))["policy"] == "solver", "as before"


async def test_policies_may_share_engines_which_serve_their_adapters(tmp_path: Path) -> None:
    for name in ("base", "copy"):
        make_model_dir(tmp_path / name)
    shared = {
        "planner": PolicyModel(tmp_path / "base", engines="planner", adapter=True),
        "worker": PolicyModel(tmp_path / "copy", engines="planner", adapter=True),
        "fixed": PolicyModel(tmp_path / "base", train=False, engines="planner"),
    }
    pool = PoolOptions(probe_every_s=3600.0)  # a trainer announces new versions
    gateway = Gateway(GatewayOptions(tmp_path, policies=shared, environments=LocalRewards({}), pool=pool))
    renderers = [policy.renderer for policy in gateway.policies.by_name.values()]
    assert renderers[0] is renderers[1], "their tokenizers have the same content"
    engine = FakeEngine(renderers[0].decode, stop_id=renderers[0].stop_ids[0])
    await engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        url = await stack.enter_async_context(served(create_app(gateway)))
        client = await stack.enter_async_context(GatewayClient(url))
        await client.add_engine(engine.url, policy="planner")
        access = await client.open_session(task=TASK)
        llm = await stack.enter_async_context(AsyncOpenAI(base_url=access.base_url, api_key=access.api_key))
        engine.faults.append(Fault("status", 500))
        for name in ("worker", "planner"):
            await chat(llm, name, ASK)
        assert [one["lora_path"] for one in engine.requests] == ["worker", "worker", "planner"]
        engine.requests.clear()
        # SGLang serves them under names with their version, which its label tells.
        engine.version = "v3-"
        await client.admit_engine(engine.url, True)
        engine.faults += [Fault("none"), Fault("version", "v9-"), Fault("none"), Fault("switch", "v4-")]
        for name in ("worker", "planner", "fixed", "planner"):
            await chat(llm, name, ASK)
        named = [one.get("lora_path") for one in engine.requests]
        assert named == ["v3-worker", "v3-planner", None, "v3-planner", "v4-planner"]
        engine.requests.clear()
        engine.faults += [Fault("hold"), Fault("hold")]
        names = ("worker", "fixed")
        running = [asyncio.create_task(chat(llm, name, ASK)) for name in names]
        await engine.until(lambda: len(engine.requests) == 2)
        engine.version = "v5-"
        await client.admit_engine(engine.url, True)
        await engine.until(lambda: bool(engine.aborted))
        engine.release()
        await asyncio.gather(*running)
        aborted = [one.get("lora_path") for one in engine.requests if one["rid"] in engine.aborted]
        assert aborted == ["v4-worker"], "the base model stays the same"
        await client.finish(access.session_id, reward=1.0)
        turns = (await client.trajectory(access.session_id)).turns
        versions = [(turn.policy, turn.version_spans[-1].version) for turn in turns]
        assert versions[2:6] == [("worker", 3), ("planner", 3), ("fixed", 3), ("planner", 4)]
        assert set(versions[6:]) == {("worker", 4), ("fixed", 4)}, "those of the adapters that were named"


async def test_shards_send_the_calls_of_each_policy_to_its_engines(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    async with contextlib.AsyncExitStack() as stack:
        engines = {name: await fake_engine(model, stack) for name in TEMPLATES}
        shards = [Inside(index, model, stack, [*TEMPLATES]) for index in range(SHARDS)]
        router = ShardRouter(shards, "admin", pytest.fail)
        url = await stack.enter_async_context(served(router.create_app()))
        client = await stack.enter_async_context(GatewayClient(url, "admin"))
        for name, engine in engines.items():
            await client.add_engine(engine.url, policy=name)
        for group_id in groups("policies"):
            access = await client.open_session(task=TASK, group_id=group_id)
            llm = AsyncOpenAI(base_url=f"{url}/v1", api_key=access.api_key)
            await stack.enter_async_context(llm)
            assert [one.id for one in (await llm.models.list()).data] == [*TEMPLATES]
            for number, name in enumerate(TEMPLATES, 1):
                await chat(llm, name, ASK * number)
            with pytest.raises(openai.NotFoundError, match="solver, verifier"):
                await chat(llm, "critic", ASK)
        assert [len(engine.requests) for engine in engines.values()] == [SHARDS, SHARDS]
        lengths = {name: {len(one["input_ids"]) for one in engines[name].requests} for name in TEMPLATES}
        assert max(lengths["solver"]) < min(lengths["verifier"])
        rows = await client.list_engines()
        assert router.fleet.engines.keys() == {row["url"] for row in rows}, "for a shard that restarts"
        rows += router.fleet.engines.values()
        assert {row["url"]: row["policy"] for row in rows} == {engines[name].url: name for name in TEMPLATES}
