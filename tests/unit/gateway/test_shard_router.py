"""The router of a sharded gateway when a client disconnects or a shard does not respond."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from tidegate.envs.base import load_environment
from tidegate.errors import ConfigError, GatewayError
from tidegate.gateway.sharding.fleet import Answer
from tidegate.gateway.sharding.proxy import ReverseProxy
from tidegate.gateway.sharding.router import ShardRouter
from tidegate.gateway.sharding.shard import shard_of_id

ENGINE = {"url": "http://127.0.0.1:30000", "control": [], "admitted": True, "policy": "solver"}


def request(method: str, body: Any) -> Request:
    """One whose client has left by the time it is read."""
    messages = [{"type": "http.request", "body": orjson.dumps(body)}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    return Request({"type": "http", "method": method, "headers": [], "path": "/"}, receive)


async def test_a_lease_that_is_ready_as_its_client_leaves_is_given_back() -> None:
    router = ShardRouter([], None, lambda _: None)
    returned: list[Any] = []

    async def lease(*_: Any) -> list[Any]:
        return [{"lease_id": "0.a"}]

    async def release(groups: list[Any]) -> None:
        returned.extend(groups)

    router._leases = SimpleNamespace(lease=lease, release=release)  # type: ignore[assignment]
    answer = await router._lease(request("POST", {"trainer_epoch": 1}))
    assert (answer.status_code, returned) == (499, [{"lease_id": "0.a"}])


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_what_one_shard_did_with_an_engine_is_remembered_for_the_others(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 0 does not answer; when it is started again it is told."""
    shards: Any = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    router = ShardRouter(shards, None, lambda _: None)
    if method == "DELETE":
        router.fleet.engines[ENGINE["url"]] = ENGINE  # type: ignore[index]

    async def call(index: int, *_: Any) -> Answer:
        if index == 0:
            raise GatewayError("shard 0 did not answer", status=503)
        return Answer(200, orjson.dumps(ENGINE))

    monkeypatch.setattr(router.fleet, "call", call)
    with pytest.raises(GatewayError, match="shard 0 did not answer"):
        await router._engines(request(method, ENGINE))
    assert list(router.fleet.engines.values()) == ([ENGINE] if method == "POST" else [])


def test_a_reward_that_is_called_as_another_metric_is_refused(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from tidegate.envs.arithmetic import Arithmetic\n"
        "from tidegate.envs.rewards import Reward\n"
        "class Mine(Arithmetic):\n"
        "    rewards = (Reward('mean', lambda output: 1.0),)\n"
    )
    with pytest.raises(ConfigError, match="a reward is named 'mean', but reward/mean"):
        load_environment(f"{tmp_path}/mine.py:Mine", {})


@pytest.mark.parametrize("name", ["2.x", "9" * 5000 + ".x", "-1.x", "٣.x", "01.x", ".x", "x", ""])
async def test_an_id_that_names_no_shard_is_unknown(name: str) -> None:
    """Python refuses to read integers of more than 4300 digits."""
    shards: Any = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    assert [shard_of_id(f"{prefix}{index}.x", 2) for prefix in ("", "tg-") for index in (0, 1)] == [0, 1] * 2
    assert shard_of_id(name, 2) is None
    router = ShardRouter(shards, None, lambda _: None)
    with pytest.raises(GatewayError, match=r"there is no session") as refused:
        router._shard_of("session", name)
    assert refused.value.status == 404
    proxy = ReverseProxy(router.fleet)
    for path in (f"/s/{name}/v1/chat/completions", f"/attempts/{name}/heartbeat"):
        scope = {"path": path, "headers": [(b"x-api-key", f"tg-{name}".encode())]}
        assert proxy._shard(scope) is shards[0], "which refuses it"
