"""Users of a plain SDK talk and give feedback while engine, gateway and trainer are killed with `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests import REPO
from tests.e2e.runs import held, ledger, server, training
from tests.waiting import eventually
from tidegate.gateway.project_keys import create_key
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.service import service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
CONFIG = REPO / "examples" / "online" / "config.toml"
SMALL = [
    "--run.live_view=false", "--trainer.groups_per_batch=8", "--trainer.checkpoint_every=2",
    "--gateway.conversation_idle_s=0.3", "--gateway.feedback_window_s=600",
]  # fmt: skip
STEPS = 9


class Users:
    """Twelve users with questions of their own; what they asked and the feedback that was accepted."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"}
        self.llm = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=30)
        self.accepted: dict[str, float] = {}
        self.groups: dict[str, str] = {}
        self.erased: set[str] = set()

    async def run(self) -> None:
        async with aiohttp.ClientSession(headers=self.headers) as self.http, asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(self.user(number))

    async def user(self, number: int) -> None:
        rng = random.Random(number)
        for question in range(100_000):
            text = f"user {number}, question {question}"
            messages = [{"role": "user", "content": text}]
            for words in ("and then?", None):
                reply = await self.llm.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
                content = reply.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": words or ""},
                ]
            if rng.random() < 0.9:
                await self.thumb(reply.id, text, float(len(content) % 2))

    async def thumb(self, reply: str, question: str, value: float) -> None:
        """Sends the feedback until it is accepted, as a service with a queue of its own would."""
        while True:
            try:
                body = {"id": reply, "value": value}
                async with self.http.post(f"{self.url}/v1/feedback", json=body) as response:
                    answer = await response.json()
                    assert response.status in (200, 503), answer
                    if response.status == 200:
                        self.accepted[question] = value
                        self.groups[question] = answer["group"]
                        return
            except aiohttp.ClientError:
                pass  # the gateway is restarting
            await asyncio.sleep(0.1)

    async def serve(self, more: int, talking: asyncio.Task[None], within_s: float) -> None:
        """Waits until so many more conversations got their feedback accepted."""
        asked = len(self.accepted)
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: talking.done() or len(self.accepted) > asked + more, within_s)
        assert len(self.accepted) > asked + more, f"{len(self.accepted) - asked} in {within_s} s; {talking}"

    async def erase(self, question: str) -> None:
        async with self.http.delete(f"{self.url}/v1/conversations/{self.groups[question]}") as response:
            assert response.status == 200
        self.erased.add(question)


async def test_users_meet_no_error_and_no_feedback_is_lost_or_doubled(tmp_path: Path) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys.json"
    key = create_key(keys, "shop")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = [f"--gateway.port={port}", f"--gateway.keys={keys}", f"--trainer.steps={STEPS}"]
    users = Users(f"http://127.0.0.1:{port}", key)
    with training(run_dir, *place, config=CONFIG, small=SMALL, command="serve") as run:
        await asyncio.to_thread(run.until_said, "agents ready in")
        talking = asyncio.create_task(users.run())
        try:
            for step, name in ((2, "gateway"), (3, "engine"), (5, "trainer"), (7, "gateway")):
                await asyncio.to_thread(run.until_step, step)
                if name == "trainer":  # it forgets as well what it reads again after its restart
                    await users.erase(trained_questions(run_dir)[0])
                os.kill(run.owned(name), signal.SIGKILL)
            await asyncio.to_thread(run.until_said, "training has ended")
            await users.serve(12, talking, 60)
            late = trained_questions(run_dir)[-1]
            await users.erase(late)
            await eventually(lambda: late not in trained_questions(run_dir), 60)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
            await users.llm.close()
        run.process.terminate()
        assert await asyncio.to_thread(run.wait) == 0, run.output()
    check_books(run_dir, users)


async def test_what_clients_ask_as_soon_as_the_service_serves_is_trained_on(tmp_path: Path) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys.json"
    key = create_key(keys, "shop")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = [f"--gateway.port={port}", f"--gateway.keys={keys}", "--trainer.steps=1"]
    users = Users(f"http://127.0.0.1:{port}", key)
    small = [*SMALL, "--trainer.groups_per_batch=2"]
    with training(run_dir, *place, config=CONFIG, small=small, command="serve") as run:
        await asyncio.to_thread(run.until_said, "serving at")
        async with users.llm, aiohttp.ClientSession(headers=users.headers) as users.http:
            for text, value in (("first", 1.0), ("second", 0.0)):
                reply = await users.llm.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": text}]
                )
                await users.thumb(reply.id, text, value)
        await asyncio.to_thread(run.until_said, "training has ended")
        assert sorted(trained_questions(run_dir)) == ["first", "second"]
        run.process.terminate()
        assert await asyncio.to_thread(run.wait) == 0, run.output()


async def test_a_gateway_that_runs_already_serves_users_while_trainers_come_and_go(tmp_path: Path) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys.json"
    key, model = create_key(keys, "shop"), REPO / "examples" / "tiny_base" / "model"
    engine = server("engine", tmp_path, f"--model.path={model}", "--engine.max_slots=32", "--port=0")
    gateway = server(
        "gateway", tmp_path, f"--model.path={model}", f"--gateway.keys={keys}", "--gateway.port=0",
        "--gateway.conversation_idle_s=0.3", "--gateway.feedback_window_s=600", "--clients.max_tokens=48",
        f"--journal={tmp_path / 'journal'}",
    )  # fmt: skip
    small = [one for one in SMALL if not one.startswith("--gateway.")]
    config = tmp_path / "config.toml"
    text = CONFIG.read_text()
    config.write_text(text[: text.index("[engine]")] + text[text.index("[sampling]") :])
    with engine as engine_url, gateway as url:
        place = [f"--gateway.url={url}", f"--engine.urls={engine_url}", f"--model.path={model}"]
        users = Users(url, key)
        with training(run_dir, *place, f"--trainer.steps={STEPS}", config=config, small=small) as run:
            await asyncio.to_thread(run.until_said, "agents ready in")
            talking = asyncio.create_task(users.run())
            await asyncio.to_thread(run.until_step, 5)
            run.kill()
        try:
            await users.serve(24, talking, 60)
            place += ["--resume", f"--trainer.steps={STEPS}"]
            with training(run_dir, *place, config=config, small=small) as run:
                assert await asyncio.to_thread(run.wait) == 0, run.output()
            await users.serve(24, talking, 60)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
            await users.llm.close()
    check_books(run_dir, users)


def trained_questions(run_dir: Path) -> list[str]:
    """The first messages of the conversations that were trained on, in the order of the steps."""
    paths = sorted((run_dir / "trajectories").glob("step_*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [line["messages"][0]["content"] for line in lines if line["state"] == "stepped"]


def check_books(run_dir: Path, users: Users) -> None:
    """Checks that each conversation was trained on at most once, with its user's feedback."""
    audit = held(run_dir)
    assert audit.groups["trained"] == STEPS * 8
    trained = [
        episode
        for path in (run_dir / "trajectories").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
        if (episode := json.loads(line))["state"] == "stepped"
    ]
    questions = [episode["messages"][0]["content"] for episode in trained]
    ended = {
        line["id"]: line["state"] for line in ledger(run_dir) if line["kind"] == "group" and "state" in line
    }
    gone = [question for question in users.erased if ended.get(f"shop.{users.groups[question]}") == "stepped"]
    assert len(trained) == STEPS * 8 - len(gone)
    assert max(Counter(questions).values()) == 1, "a conversation was trained on twice"
    rewards = {question: one["reward"] for question, one in zip(questions, trained, strict=True)}
    assert rewards == {question: users.accepted[question] for question in questions}
    assert all(len(one["turns"]) == 2 for one in trained), "both calls are one conversation"
    assert set(ended.values()) <= {"stepped", "stale", "cancelled"}
    texts = [path.read_text() for path in (run_dir / "trajectories").rglob("*.jsonl")]
    for question in users.erased:
        assert not any(json.dumps(question) in text for text in texts), "an erased conversation is in a file"
    check_client_records(run_dir, trained)


def check_client_records(run_dir: Path, trained: list[Any]) -> None:
    """Checks that each accepted conversation has its feedback and delay in `clients.jsonl`, and no text."""
    records = {line["group"]: line for line in map(json.loads, (run_dir / "clients.jsonl").open())}
    groups = [line for line in ledger(run_dir) if line["kind"] == "group"]
    issued = {line["id"] for line in groups if line["event"] == "issued"}
    # A trainer that was killed while it accepted a group cancels it, and has not written its line.
    cut = {line["id"] for line in groups if line.get("state") == "cancelled"}
    assert issued - cut <= set(records)
    for one in trained:
        [episode] = records[one["group_id"]]["episodes"]
        [given] = episode["feedback"]
        assert (given["name"], given["value"], episode["reward"]) == (
            "feedback",
            one["reward"],
            one["reward"],
        )
        assert 0 <= given["after_s"] < 280
    assert "question" not in (run_dir / "clients.jsonl").read_text()
    shown = service(FollowedRun(run_dir))
    total = shown["total"]
    assert dict(zip(shown["columns"], total["ends"], strict=True))["trained"] == STEPS * 8
