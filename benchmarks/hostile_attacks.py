"""The attacks of `hostile.py`: each must be refused, or change nothing that others notice."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from hostile_world import (
    LIMIT_S,
    MODEL,
    START_S,
    Answer,
    Honest,
    Server,
    call,
    client,
    connect,
    many,
    raw,
    started,
    until,
)

from tidegate.errors import GatewayError
from tidegate.gateway.client import ADMIN_KEY, WORKER_KEY, GatewayClient
from tidegate.types import Task

DOWN_S = 20.0
"""Longest stop of the trainer, whose calls have time limits of 30 s."""
BIG, DEEP = "x" * 2**20, "[" * 100_000 + "]" * 100_000


@dataclass
class Attacker:
    """One attack: what it uses, and what it achieved."""

    server: Server
    key: str
    honest: Honest
    scale: argparse.Namespace
    http: aiohttp.ClientSession
    secrets: list[str] = field(default_factory=list)
    """Texts that no file of the run may contain."""
    answers: Counter[int] = field(default_factory=Counter)
    effects: list[str] = field(default_factory=list)

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        status, text = await call(self.http, method, more.pop("url", self.server.url) + path, body, **more)
        self.answers[status] += 1
        if status >= 500 and status != 503:
            self.effects.append(f"{method} {path[:60]}: {status} {text[:200]}")
        return status, text

    async def refused(self, method: str, path: str, body: Any = None, **more: Any) -> None:
        """Sends what must be refused."""
        status, text = await self.call(method, path, body, **more)
        if status < 400:
            self.effects.append(f"{method} {path[:60]} {str(body)[:80]}: {status} {text[:100]}")

    async def chat(self, text: str, **more: Any) -> Answer:
        body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}], **more}
        return await self.call("POST", "/v1/chat/completions", body)

    async def episode(self, key: str | None = None) -> dict[str, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        path = f"/v1/groups/{secrets.token_hex(8)}/episodes"
        status, text = await self.call("POST", path, {"task_id": "t"}, headers=headers)
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def check(self, holds: bool, effect: str) -> None:
        if not holds:
            self.effects.append(effect)


async def own_groups(a: Attacker) -> None:
    """Deletes groups of conversations that go on, then begins as many as it can."""
    for number in range(100):
        text, name = f"own {number}", {"x-tidegate-session": f"own-{number}"}
        body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        _, said = await a.call("POST", "/v1/chat/completions", body, headers=name)
        _, said = await a.call("POST", "/v1/feedback", {"id": json.loads(said)["id"], "value": 0.5})
        await a.call("DELETE", f"/v1/groups/{json.loads(said)['group']}")
        await a.call("POST", "/v1/chat/completions", body, headers=name)
    await many(a.scale.conversations, 48, lambda number: a.chat(f"many {number}"))


async def feedback(a: Attacker) -> None:
    """Rewards that no step can hold, alone and together."""
    values = (1e308, -1e308, 1e200, 1001, 10**400, [1.0], {"a": 1}, True, "1", None)
    written = [json.dumps(value) for value in values] + ["NaN", "Infinity", "-Infinity", "1e999", DEEP]
    for value in written:
        _, said = await a.chat(f"feedback {value[:20]}")
        reply = json.loads(said)["id"]
        for more in ("", ', "reply_only": true'):
            await a.refused("POST", "/v1/feedback", f'{{"id": "{reply}", "value": {value}{more}}}'.encode())
        episode = await a.episode()
        finish = {"Authorization": f"Bearer {episode['finish_key']}"}
        path = f"/s/{episode['episode']}/finish"
        await a.call("POST", path, f'{{"reward": {value}}}'.encode(), headers=finish)
    _, said = await a.chat("sum")
    reply, given = json.loads(said)["id"], 0
    for number in range(100):
        body = {"id": reply, "value": 999.0, "name": f"n{number}"}
        given += (await a.call("POST", "/v1/feedback", body))[0] == 200
    a.check(given <= 1, f"{given} feedbacks of 999 were added")


async def redaction(a: Attacker) -> None:
    """Personal texts behind escapes, split over parts, and in unknown fields of all dialects."""

    def personal(inner: str = "{}@secret.example") -> str:
        a.secrets.append("p" + secrets.token_hex(8))
        return inner.format(a.secrets[-1])

    def arguments(text: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": text}
        return {"role": "assistant", "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}]}  # fmt: skip

    def text(*parts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": part} for part in parts]

    user, result = {"role": "user", "content": "hello"}, {"role": "tool", "tool_call_id": "c1"}
    escaped = "{}\\u0040secret.example"
    twice = json.dumps({"a": json.dumps({"b": "{}@secret.example"})})
    conversations: list[list[Any]] = [
        [user, arguments(f'{{"to": "{personal(escaped)}"}}'), {**result, "content": personal()}],
        [user, arguments(f'{{"{personal(escaped)}": [{{"a": "{personal(escaped)}"}}]}}')],
        [user, arguments(twice.replace("{}", personal("{}")))],
        [user, arguments(personal('{{"a": "{}@secret.example'))],
        [{"role": "user", "content": text("to ", personal("{}"), "@secret.example")}],
        [{"role": "user", "content": text(personal("{}@"), "secret", ".example")}],
        [{"role": "user", "content": text(personal("{}"), "@", "secret.example")}],
        [{**user, personal(): personal(), "nested": {personal(): [personal()]}}],
        [{**user, "name": personal(), "reasoning_content": personal(), "refusal": personal()}],
    ]
    short = {"model": "m", "max_tokens": 1}
    for messages in conversations:
        unknown = {"metadata": {personal(): personal()}, "user": personal(), personal(): personal()}
        for more in (unknown, {"metadata": {personal(): personal()}, "user": personal()}, {}):
            await a.call("POST", "/v1/chat/completions", {**short, "messages": messages, **more})
    given = f'{{"a": "{personal(escaped)}"}}'
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": personal(), personal(): personal()}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": given},
        {"type": "function_call_output", "call_id": "1", "output": personal()},
    ]
    await a.call("POST", "/v1/responses", {"model": "m", "max_output_tokens": 16, "input": items,
                 "instructions": personal(), "metadata": {"a": personal()}})  # fmt: skip
    blocks = [{"type": "tool_use", "id": "t1", "name": "f", "input": {personal(): personal()}}]
    results = [{"type": "tool_result", "tool_use_id": "t1", "content": text(personal("{}"), "@s.e")}]
    turns = [user, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    system = text(personal("{}"), "@s.e")
    await a.call("POST", "/v1/messages", {**short, "system": system, "messages": turns})
    await a.call("POST", "/v1/completions", {**short, "prompt": personal()})
    _, said = await a.chat(f"for feedback {personal()}")
    body = {"id": json.loads(said)["id"], "value": 0.5, "comment": personal(), "correction": personal()}
    await a.call("POST", "/v1/feedback", body)
    await a.call("POST", f"/v1/groups/{secrets.token_hex(8)}/episodes",
                 {"task_id": "t", "metadata": {personal(): {"a": [personal()]}}})  # fmt: skip
    a.check(200 in a.answers, "no call was served")


async def finishes(a: Attacker) -> None:
    """A program that ends its own episode, a client that stores what it likes, and one that ends others'."""
    foreign = await a.episode(a.honest.key)
    for outcome in ("infra_error", "completed", "cancelled", "timeout", None):
        own = await a.episode()
        for path in (f"/s/{own['episode']}/finish", f"/sessions/{own['episode']}/finish"):
            body = {"outcome": outcome, "reward": 1.0}
            await a.refused("POST", path, body, headers={"Authorization": f"Bearer {own['api_key']}"})
        for key in (own["finish_key"], own["api_key"], a.key):
            await a.refused(
                "POST", f"/s/{foreign['episode']}/finish", body, headers={"Authorization": f"Bearer {key}"}
            )
    own = await a.episode()
    key = {"Authorization": f"Bearer {own['finish_key']}"}
    path = f"/s/{own['episode']}/finish"
    for name, value in (("output", BIG * 50), ("metrics", {f"m{n}": 1.0 for n in range(100_000)}),
                        ("metrics", {BIG: 1.0}), ("outcome", "unrewarded"), ("output", ["x"])):  # fmt: skip
        await a.refused("POST", path, {name: value}, headers=key)
    await a.call("POST", path, f'{{"metrics": {{"deep": {DEEP}}}}}'.encode(), headers=key)
    await a.call("POST", path, {"reward": 0.5, "error": BIG, "metrics": {"a": "b", "c": 1e308}}, headers=key)
    deep = f'{{"task_id": "t", "metadata": {{"a": {DEEP}}}}}'.encode()
    await a.call("POST", f"/v1/groups/{secrets.token_hex(8)}/episodes", deep)


async def headers(a: Attacker) -> None:
    """Heads without end, in bytes, in number and in time, on many connections without a key."""
    line, field = b"GET /health HTTP/1.1\r\n", b"x-%d: " + b"y" * 1000 + b"\r\n"
    for url in (a.server.url, a.server.address("engine")["url"]):
        endless = [line, *(field % number for number in range(20_000))]
        for parts in (endless, [b"GET /" + b"a" * 2**20] * 20, [line + b"x: " + b"y" * 2**20] * 20):
            said = await raw(url, *parts)
            a.check(b" 200 " not in said[:20], f"endless headers were answered: {said[:60]!r}")
        streams = [await connect(url) for _ in range(a.scale.connections)]
        for number, (_, writer) in enumerate(streams):
            writer.write(line + b"x: y\r\n" if number % 2 else b"")
        status, _ = await call(a.http, "GET", url + "/health")
        a.check(status == 200, f"{len(streams)} open connections: {status}")
        for _, writer in streams:
            writer.close()


async def slow_headers(a: Attacker) -> None:
    """Sends a head a byte a second."""
    streams = [await connect(a.server.url) for _ in range(100)]
    for _, writer in streams:
        writer.write(b"GET /health HTTP/1.1\r\nx-slow: ")
    began, reads = time.monotonic(), [asyncio.create_task(reader.read()) for reader, _ in streams]
    while not all(read.done() for read in reads) and time.monotonic() - began < 45:
        for _, writer in streams:
            writer.write(b"x")
        await asyncio.sleep(1)
    a.check(all(read.done() for read in reads), "slow headers are accepted for more than 45 s")
    for (_, writer), read in zip(streams, reads, strict=True):
        read.cancel()
        writer.close()
    await asyncio.gather(*reads, return_exceptions=True)


async def erasures(a: Attacker) -> None:
    """Erases names that never existed while a trainer that is down has an honest erasure to read."""
    text = "p" + secrets.token_hex(8)
    trainer = a.server.address("trainer")["pid"]
    async with client(a.honest.key) as http:
        group = await a.honest.talk(http, f"to be erased: {text}")
        os.kill(trainer, signal.SIGSTOP)
        try:
            status, said = await call(http, "DELETE", f"{a.server.url}/v1/conversations/{group}")
            a.check(status == 200, f"an honest erasure: {status} {said}")
            a.honest.thumbs.pop(group)
            flooding = asyncio.create_task(flood(a))
            await asyncio.wait((flooding,), timeout=DOWN_S)
        finally:
            os.kill(trainer, signal.SIGCONT)
        await flooding
    a.secrets.append(text)


async def flood(a: Attacker) -> None:
    """Sends the DELETEs on few connections, a hundred at once on each."""
    key, batch = a.key.encode(), 100

    async def send(number: int) -> None:
        reader, writer = await connect(a.server.url)
        for begun in range(number * batch, a.scale.deletes, 8 * batch):
            for one in range(begun, min(begun + batch, a.scale.deletes)):
                path = b"groups" if one % 2 else b"conversations"
                writer.write(b"DELETE /v1/%b/g%d HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n"
                             % (path, one, key))  # fmt: skip
            await writer.drain()
            for _ in range(begun, min(begun + batch, a.scale.deletes)):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                a.answers[int(head.split(b" ", 2)[1])] += 1
        writer.close()

    await asyncio.gather(*(send(number) for number in range(8)))
    a.check(a.answers[404] == a.scale.deletes, f"DELETEs of unknown names: {dict(a.answers)}")


async def pages(a: Attacker) -> None:
    """What a web page can send to servers on this machine, and what needs the admin key."""
    engine = a.server.address("engine")["url"]
    load = json.dumps({"model_path": str(MODEL), "weight_version": "666"}).encode()
    for more in ({"Host": "evil.example"}, {"Content-Type": "text/plain"}, {"Origin": "http://evil.example"},
                 {"Host": "127.0.0.1.evil.example"}, {"Host": "evil.example:80@127.0.0.1"},
                 {"Origin": "null"}, {"Content-Type": "multipart/form-data; boundary=a"}):  # fmt: skip
        for path in ("/update_weights_from_disk", "/pause_generation", "/abort_request", "/generate"):
            await a.refused("POST", path, load, url=engine, headers=more)
    a.check("666" not in (await a.call("GET", "/model_info", url=engine))[1], "a web page changed the engine")
    lease = {"trainer_epoch": 2**40, "max": 1000}
    for key in ("", f"Bearer {a.key}", "Bearer " + "é" * 100, "Basic x", f"Bearer {BIG[:60_000]}"):
        for path in ("/groups/lease", "/groups/ack", "/groups/end", "/groups/erased", "/sessions", "/engines",
                     "/groups/wait", "/groups/return", "/attempts/next", "/attempts/leave"):  # fmt: skip
            await a.refused("POST", path, lease, headers={"Authorization": key})
        for path in ("/groups", "/groups/erased", "/sessions", "/engines", "/attempts", "/metrics"):
            await a.refused("GET", path, headers={"Authorization": key})


async def half_closes(a: Attacker) -> None:
    """Clients that close their side get the reply; those that leave keep nothing."""
    body = json.dumps(
        {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "h"}]}
    ).encode()
    head = f"authorization: Bearer {a.key}\r\ncontent-type: application/json\r\nhost: 127.0.0.1\r\n"
    post = f"POST /v1/chat/completions HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body
    for request in (post, f"GET /v1/models HTTP/1.1\r\n{head}\r\n".encode()):
        said = await asyncio.gather(*(raw(a.server.url, request, half_close=True) for _ in range(50)))
        unanswered = sum(b" 200 OK" not in one for one in said)
        a.check(unanswered == 0, f"{unanswered} of 50 clients that closed their side got no reply")
    for _ in range(500):
        _, writer = await connect(a.server.url)
        writer.write(post[: random.Random(0).choice((20, len(post) - 5, len(post)))])
        writer.write_eof()
        writer.close()


async def bodies(a: Attacker) -> None:
    """Bodies that are too large, too deep, too slow, or never come."""
    routes = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/v1/feedback",
              "/v1/groups/g/episodes", "/v1/groups/g/seal")  # fmt: skip
    for path in routes:
        await a.refused("POST", path, f'{{"messages": {DEEP}}}'.encode())
        await a.refused("POST", path, b"\xff" * 1000)
        await a.refused("POST", path, b'{"model": "m", "messages": [' + b"[]," * 2**22 + b"1]}")
        await a.refused("POST", path, b'{"a": "' + BIG.encode() * 65 + b'"}')
    most = b'{"model": "m", "x": "' + BIG.encode() * 20 + b'"}'
    for path in ("/v1/feedback", "/v1/groups/g/episodes", "/v1/chat/completions"):
        await many(32, 32, lambda _, path=path: a.call("POST", path, most))  # type: ignore[misc]
    await many(32, 32, lambda _: a.call("GET", "/health", most, headers={"Authorization": ""}))
    for url in (a.server.url, a.server.address("engine")["url"]):
        post = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 999999999999\r\n\r\n"
        await raw(url, post, *([BIG.encode()] * 70), limit_s=2)


async def workers(a: Attacker) -> None:
    """At a gateway with workers of one key, a worker ends another one's attempts by its name."""
    place, keys = a.server.run_dir.parent, {ADMIN_KEY: "the admin's key", WORKER_KEY: "the workers' key"}
    announced = place / "workers.json"
    command = [sys.executable, "-m", "tidegate", "gateway", f"--model.path={MODEL}", "--gateway.port=0"]
    with (place / "workers.out").open("wb") as out:
        process = started([*command, f"--announce={announced}"], out, **keys)
    try:
        await until(announced.exists, "the gateway", START_S, process)
        url = json.loads(announced.read_text())["url"]
        async with GatewayClient(url, keys[ADMIN_KEY]) as admin, client(keys[WORKER_KEY]) as http:
            offered = [await admin.open_session(task=Task("t", "arithmetic", []), offer_heartbeat_s=30)
                       for _ in range(4)]  # fmt: skip
            own = {"worker": "honest", "secret": "s3cret"}
            _, said = await call(http, "POST", url + "/attempts/next", {**own, "capacity": 4, "wait_s": 5})
            taken = [row["attempt"] for row in json.loads(said)["attempts"]]
            a.check(len(taken) == 4, f"the honest worker got {said[:200]}")
            auth = {"Authorization": f"Bearer {keys[WORKER_KEY]}"}
            for one in ({"worker": "honest"}, {"worker": "honest", "secret": "guess"}):
                for path in ("/attempts/leave", "/attempts/next", f"/attempts/{taken[0]}/heartbeat"):
                    await a.refused("POST", path, one, url=url, headers=auth)
            for attempt in taken:
                status, said = await call(http, "POST", f"{url}/attempts/{attempt}/heartbeat", own)
                a.check(status == 200, f"a worker lost its attempt: {status} {said[:200]}")
            a.check(len(offered) == 4, "sessions")
    except GatewayError as error:
        a.effects.append(repr(error))
    finally:
        process.kill()
        process.wait()


ATTACKS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    pages, feedback, redaction, finishes, half_closes, workers, bodies, headers, erasures, own_groups,
)  # fmt: skip
"""In this order, `slow_headers` beside them."""
