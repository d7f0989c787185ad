"""A fuzzed session: requests chosen by one random stream, and a check of every response.

Invariants: no response says that the gateway itself failed; every reply that the client has received is
recorded as it was received, and nothing else counts as delivered; the recorded prompt is the one that the
engine received; a request with an Idempotency-Key gets its reply again; a finished session stays finished.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import aiohttp
import numpy as np

from tests.fakes import FakeEngine, Stage
from tests.fuzzing.dialects.base import Answer, Dialect
from tests.fuzzing.histories import changed
from tests.fuzzing.values import spoiled, written
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.sessions.tree import TurnNode

_REPLIES = [
    "Four.", "", " ", "é🍎\n\nzz", "<tool_call>oops", '<tool_call>{"name": 1}</tool_call>',
    'So. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call> <tool_call>{"name": "g"}</tool_call>',
    "<think>\nhm\n</think>\n\nYes.", "<think>for ever", "</think>", "</tool_call>", "[INST]", "{{ x }}",
]  # fmt: skip
_MOST_CHOICES = 128  # of one request
_REFUSALS = frozenset({400, 413})


class Failure(AssertionError):
    """A case that shows a fault; says how to see it again."""

    def __init__(self, what: str, case: Case | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.case = case
        self.where = ""


class PromptEngine(FakeEngine):
    """Its reply depends on the prompt alone, so that whoever knows one can check the other."""

    encode: Callable[[str], list[int]]

    def output_for(self, prompt: Sequence[int], limit: int) -> list[int]:
        self.requests.clear()
        return reply_to(self, prompt)[:limit]


def reply_to(engine: PromptEngine, prompt: Sequence[int]) -> list[int]:
    digest = blake2b(np.asarray(prompt, dtype=np.int32).tobytes(), digest_size=16).digest()
    if digest[0] < 64:
        ids = [byte * 2 for byte in digest[2 : 3 + digest[1] % 12]]
    else:
        ids = engine.encode(_REPLIES[digest[1] % len(_REPLIES)])
    return ids if digest[0] % 16 == 0 and ids else [*ids, engine.stop_id]


@dataclass(slots=True)
class Case:
    """One request."""

    body: bytes
    headers: dict[str, str]
    dialect: Dialect
    history: list[Any]
    cut: int | None = None
    """After so many chunks the client hangs up; 0: before it read anything."""

    @property
    def authorized(self) -> bool:
        return "x-wrong" not in self.headers


class Story:
    """The client of one session."""

    def __init__(
        self, stage: Stage, access: SessionAccess, http: aiohttp.ClientSession, dialect: Dialect, seed: str
    ) -> None:
        self._stage = stage
        self._access = access
        self._http = http
        self._dialect = dialect
        self._rng = random.Random(seed)
        self._history: list[Any] = []
        self._last: Case | None = None
        self._keyed: dict[str, tuple[bytes, str]] = {}
        self._had: set[str] = set()
        self._unseen = 0
        """How many turns may have been delivered without a reply that the client read."""
        self.seen: Counter[str] = Counter()
        """Statuses, and how often the client hung up."""

    async def run(self, cases: int) -> None:
        """Raises Failure."""
        told = 0
        while told < cases:
            together = 3 if self._rng.random() < 0.03 else 1
            await asyncio.gather(*(self.send(self._next()) for _ in range(together)))
            told += together
        await self._end()

    def _next(self) -> Case:
        rng = self._rng
        if self._last is not None and rng.random() < 0.08:
            return self._again(self._last)
        history = changed(rng, self._history)
        if rng.random() < 0.05:
            history = []
        history = [*history, *self._dialect.question(rng, history)]
        body: Any = self._dialect.body(rng, history)
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            body = spoiled(rng, body)
        cut = rng.choice([0, 0, 1, 2, 5]) if rng.random() < 0.08 else None
        self._last = Case(written(rng, body), self._headers(), self._dialect, history, cut)
        return self._last

    def _again(self, last: Case) -> Case:
        """The last request once more, as an SDK repeats it, or just so."""
        headers = dict(last.headers)
        if self._rng.random() < 0.6:
            headers["x-stainless-retry-count"] = self._rng.choice(["1", "2", "-1", "x", "0", "9" * 5000])
        return Case(last.body, headers, last.dialect, last.history)

    def _headers(self) -> dict[str, str]:
        rng, key = self._rng, self._access.api_key
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        if rng.random() < 0.05:
            headers["authorization"] = rng.choice([f"bearer {key}", f"Bearer  {key} ", f"BEARER {key}"])
        if rng.random() < 0.1:
            headers["x-api-key"] = headers.pop("authorization").split()[1]
        elif rng.random() < 0.02:
            headers["authorization"] = rng.choice(
                ["", "Bearer", "Bearer x", key, "Basic eDp5", "Bearer \xff"]
            )
            headers["x-wrong"] = "1"
        if rng.random() < 0.1:
            headers["idempotency-key"] = rng.choice(["k1", "k2", "\xe9", f"k{rng.random()}"])
        if rng.random() < 0.05:
            headers["content-type"] = rng.choice(["text/plain", "application/json; charset=utf-16", "x"])
        return headers

    # -- sending and checking --------------------------------------------------------------------

    async def send(self, case: Case) -> None:
        url = self._access.base_url + case.dialect.path
        try:
            async with asyncio.timeout(20):
                async with self._http.post(url, data=case.body, headers=case.headers) as response:
                    if case.cut is not None:
                        await self._hang_up(response, case.cut)
                        return
                    data = await response.read()
        except TimeoutError:
            raise Failure("no answer within 20 s", case) from None
        except aiohttp.ClientError as error:
            raise Failure(f"the connection broke: {error!r}", case) from error
        try:
            self._check(case, response.status, response.headers, data)
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}\nanswered {response.status} with {data[:2000]!r}"
            raise Failure(what, case) from error

    async def _hang_up(self, response: aiohttp.ClientResponse, chunks: int) -> None:
        self._unseen += _MOST_CHOICES
        self.seen["hung up"] += 1
        for _ in range(chunks):
            await response.content.readany()
        response.close()

    def _check(self, case: Case, status: int, headers: Any, data: bytes) -> None:
        self.seen[str(status)] += 1
        if status != 200:
            complaint = case.dialect.complaint(json.loads(data))
            assert "internal gateway error" not in complaint, "the gateway failed inside"
            assert headers.get("x-should-retry") == "false", "an SDK would try it again"
            assert status in (_REFUSALS if case.authorized else {401}), f"status {status}"
            return
        assert case.authorized, "a key that opens nothing opened a session"
        if headers["content-type"].startswith("text/event-stream"):
            answer = case.dialect.streamed(data)
            assert answer is not None, "the stream does not end as it should"
        else:
            answer = case.dialect.whole(json.loads(data))
        self._had.add(answer.id)
        self._unseen += answer.more
        self._recorded(answer)
        self._repeats(case, answer)
        self._history = [*case.history, *answer.items]

    def _recorded(self, answer: Answer) -> None:
        node = next((node for node in self._nodes() if node.request.id == answer.id), None)
        assert node is not None, "a reply that is not recorded"
        assert node.turn.delivered, "a reply that does not count as delivered"
        assert (node.reply["content"] or "") == answer.text, f"recorded {node.reply['content']!r}"
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in node.reply.get("tool_calls") or ()
        ]
        assert calls == [(name, json.loads(told)) for name, told in answer.calls], f"recorded {calls}"

    def _repeats(self, case: Case, answer: Answer) -> None:
        key = case.headers.get("idempotency-key")
        if key is None:
            return
        known = self._keyed.setdefault(key, (case.body, answer.id))
        assert known == (case.body, answer.id), "an Idempotency-Key gave another reply"

    def _nodes(self) -> list[TurnNode]:
        return self._stage.gateway.session(self._access.session_id).tree.nodes

    async def _end(self) -> None:
        """What was recorded over the whole session; then it is over, and deleted."""
        client, session_id = self._stage.client, self._access.session_id
        summary = await client.finish(session_id, reward=0)
        nodes = self._nodes()
        try:
            delivered = {node.request.id for node in nodes if node.turn.delivered}
            assert self._had <= delivered
            assert len(delivered - self._had) <= self._unseen, "replies count as delivered that nobody had"
            assert summary.turns == len(nodes)
            for node in nodes:
                self._exact(node)
        except AssertionError as error:
            raise Failure(f"at the end of the session: {error}") from error
        body = json.dumps(self._dialect.body(self._rng, self._dialect.question(self._rng, []))).encode()
        headers = {"authorization": f"Bearer {self._access.api_key}"}
        async with self._http.post(
            self._access.base_url + self._dialect.path, data=body, headers=headers
        ) as over:
            if over.status != 403:
                raise Failure(f"a call to a session that is over was answered {over.status}")
        await client.delete_session(session_id)

    def _exact(self, node: TurnNode) -> None:
        """The engine's reply follows from the prompt: so the recorded prompt is what the engine had."""
        tree = self._stage.gateway.session(self._access.session_id).tree
        output = node.turn.output_ids.tolist()
        turn = node.turn
        while (turn.branch or "").startswith("unquoted:"):  # the rest of a reply that was split
            assert turn.parent is not None, "the rest of a reply has no beginning"
            turn = tree.nodes[turn.parent].turn
            output = [*turn.output_ids.tolist(), *output]
        prompt = tree.sequence(node.turn.index)[: -len(output) or None]
        wanted = reply_to(self._stage.engine, prompt)
        assert wanted[: len(output)] == output, (
            f"turn {node.turn.index}: not the recorded prompt was sampled from"
        )
        assert len(node.turn.logprobs) == len(node.turn.output_ids)
