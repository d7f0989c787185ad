"""Publishing: the order of calls, failures in the middle, and notifications."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.fakes import FakeEngine, Fault
from tests.waiting import eventually
from tidegate.errors import EngineError, PublishError
from tidegate.trainer.publish import engine_control
from tidegate.trainer.publish import publisher as publish
from tidegate.trainer.publish.engine_control import EngineControl, SampleCheck
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.weights import files


@dataclass
class ControlEngine:
    """Only the control calls; `broken` maps a path to the status that it answers."""

    version: str = "0"
    calls: list[str] = field(default_factory=list)
    broken: dict[str, list[int]] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    lies: str | None = None
    staged: bool = False
    modes: list[str] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path.strip("/")
        self.calls.append(path)
        if self.broken.get(path):
            return web.json_response({"error": "no"}, status=self.broken[path].pop(0))
        await asyncio.sleep(self.slow.get(path, 0.0))
        body: dict[str, Any] = await request.json() if request.method == "POST" else {}
        if path == "pause_generation":
            self.modes.append(body["mode"])
        if path == "update_weights_from_disk":
            assert body["flush_cache"] is (self.modes[-1:] != ["in_place"])
            assert body["abort_all_requests"] is False
            self.version = body["weight_version"]
        return web.json_response({"weight_version": self.lies or self.version, "staged": self.staged})


SIZE = 1_000_000
"""Of published weights, in bytes."""
MOVES = ["model_info", "pause_generation", "update_weights_from_disk", "model_info", "continue_generation"]


@pytest.fixture
async def engines() -> AsyncIterator[list[ControlEngine]]:
    found, servers = [], []
    for _ in range(2):
        engine, app = ControlEngine(), web.Application()
        app.router.add_route("*", "/{path:.*}", engine.handle)
        server = TestServer(app)
        await server.start_server()
        engine.url = str(server.make_url("")).rstrip("/")
        found.append(engine)
        servers.append(server)
    yield found
    for server in servers:
        await server.close()


@dataclass
class Stage:
    """A publisher before engines, and what it told."""

    publisher: Publisher
    doomed: list[int]
    quarantined: list[str]
    restored: list[str]
    urls: list[str]


@pytest.fixture
def stage(tmp_path: Path, engines: list[ControlEngine], monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(publish, "BACKOFF_S", 0.001)
    doomed: list[int] = []
    quarantined: list[str] = []
    urls = [engine.url for engine in engines]

    async def cancel_doomed(version: int) -> None:
        assert all("pause_generation" not in engine.calls for engine in engines), "cancel before pause"
        doomed.append(version)

    async def quarantine(url: str, why: str) -> None:
        quarantined.append(url)

    def save(directory: Path, dtype: str) -> None:
        directory.mkdir(parents=True)
        with open(directory / "model.safetensors", "wb") as file:
            file.truncate(SIZE)  # with nothing in it

    restored: list[str] = []

    async def restore(url: str) -> None:
        restored.append(url)

    publisher = Publisher(
        writer=VersionWriter(directory=tmp_path, save_weights=save),
        engines=lambda: urls,
        cancel_stale=cancel_doomed,
        quarantine=quarantine,
        restore=restore,
        current=(tmp_path, 0),
        retry_s=0.05,
    )
    return Stage(publisher, doomed, quarantined, restored, urls)


async def test_a_publish_makes_its_control_calls_in_order_on_every_engine(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    await stage.publisher.publish(1)
    assert [engine.calls for engine in engines] == [MOVES, MOVES]
    assert [engine.modes for engine in engines] == [["retract"], ["retract"]]
    assert [engine.version for engine in engines] == ["1", "1"]
    assert stage.doomed == [1]
    assert stage.publisher.current[1] == 1


async def test_only_a_publish_after_the_version_before_keeps_keys_and_values(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    """An engine with other weights may have keys and values that are older than the gateway knows."""
    stage.publisher.keeps_kv = True
    engines[1].version = "7"
    await published(stage, engines, 1)
    await published(stage, engines, 2)
    await stage.publisher.update_all()
    assert [engine.modes for engine in engines] == [
        ["in_place", "in_place", "retract"],
        ["retract", "in_place", "retract"],
    ]
    assert [engine.version for engine in engines] == ["2", "2"]


async def test_the_ledger_is_on_disk_before_any_weights_of_a_version_exist(
    stage: Stage, engines: list[ControlEngine], tmp_path: Path
) -> None:
    found: list[list[str]] = []

    async def durable() -> None:
        found.append(sorted(os.listdir(tmp_path)))

    stage.publisher.durable = durable
    await stage.publisher.publish(1)
    for engine in engines:
        engine.calls.clear()
    weights = await stage.publisher.write_candidate(2)
    await stage.publisher.publish_candidate(weights, 2)
    assert found == [[], ["v000001"], ["candidate-v000002", "v000001"]]


async def test_an_engine_that_refuses_is_resumed_and_quarantined(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    engines[0].broken["update_weights_from_disk"] = [400]
    await stage.publisher.publish(1)
    assert engines[0].calls == [
        "model_info",
        "pause_generation",
        "update_weights_from_disk",
        "continue_generation",
    ]
    assert stage.quarantined == [engines[0].url]
    assert engines[1].version == "1"


async def test_an_engine_with_the_wrong_version_is_taken_out_of_service(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    engines[0].lies = "7"
    engines[1].lies = "default"
    with pytest.raises(PublishError) as caught:
        await stage.publisher.publish(1)
    assert "reports version 7 after loading 1" in str(caught.value)
    assert "'default', which is not a number" in str(caught.value)
    assert [engine.calls[-1] for engine in engines] == ["continue_generation"] * 2


async def test_server_errors_are_tried_again(stage: Stage, engines: list[ControlEngine]) -> None:
    engines[0].broken["update_weights_from_disk"] = [503, 500]
    await stage.publisher.publish(1)
    assert engines[0].version == "1"
    assert stage.quarantined == []
    assert engines[0].calls.count("continue_generation") == 3, "resumed after every try"


async def test_an_engine_that_keeps_failing_beside_another_is_not_waited_for(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    engines[0].broken["update_weights_from_disk"] = [503] * 10
    await stage.publisher.publish(1)
    assert engines[0].calls.count("update_weights_from_disk") == publish.ATTEMPTS_BESIDE_OTHERS
    assert stage.quarantined == [engines[0].url]


async def test_the_only_engine_is_waited_for_while_it_is_started_again(
    stage: Stage, engines: list[ControlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BACKOFF_MAX_S", 0.002)
    stage.urls[:] = [engines[0].url]
    stage.publisher.retry_s = 60.0
    engines[0].broken["pause_generation"] = [503] * 30
    await stage.publisher.publish(1)
    assert (engines[0].version, stage.quarantined) == ("1", [])
    stage.publisher.retry_s = 0.0
    engines[0].calls.clear()
    engines[0].broken["pause_generation"] = [503] * 30
    with pytest.raises(PublishError, match="503"):
        await stage.publisher.publish(2)
    assert len(engines[0].broken["pause_generation"]) == 29, "no longer than its patience"


async def test_in_an_outage_engines_are_waited_for_beyond_that(
    stage: Stage, engines: list[ControlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BACKOFF_MAX_S", 0.001)
    stage.urls[:] = [engines[0].url]
    engines[0].broken["pause_generation"] = [503] * 30
    stage.publisher.in_outage = lambda: True
    await stage.publisher.publish(1)
    assert engines[0].version == "1"


async def published(stage: Stage, engines: list[ControlEngine], version: int) -> list[int]:
    """Publish; how often each engine was asked to load."""
    for engine in engines:
        engine.calls.clear()
    await stage.publisher.publish(version)
    return [engine.calls.count("update_weights_from_disk") for engine in engines]


async def test_an_engine_out_of_service_comes_back_at_the_next_publish_that_it_answers(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    engines[0].broken["update_weights_from_disk"] = [400]
    assert await published(stage, engines, 1) == [1, 1]
    engines[0].broken["model_info"] = [503]
    assert await published(stage, engines, 2) == [0, 1], "it did not answer, and was let be"
    assert (stage.quarantined, stage.restored) == ([engines[0].url], [])
    assert await published(stage, engines, 3) == [1, 1]
    assert [engine.version for engine in engines] == ["3", "3"]
    assert (stage.quarantined, stage.restored) == ([engines[0].url], [engines[0].url])
    await published(stage, engines, 4)
    assert len(stage.restored) == 1, "it is in service again"


async def test_an_engine_that_responds_and_fails_again_stays_out_of_service(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    engines[0].broken["update_weights_from_disk"] = [400, 503]
    await published(stage, engines, 1)
    assert await published(stage, engines, 2) == [1, 1], "tried once, so that it delays nobody"
    assert (stage.quarantined, stage.restored) == ([engines[0].url], [])


async def test_no_engine_left_is_an_error_that_names_them(stage: Stage) -> None:
    stage.urls[:] = ["http://127.0.0.1:9"]
    with pytest.raises(PublishError, match=r"version 1 could not be published to any engine.*127\.0\.0\.1:9"):
        await stage.publisher.publish(1)
    stage.urls.clear()
    with pytest.raises(PublishError, match="the run has none"):
        await stage.publisher.publish(2)


async def test_the_last_two_published_are_kept(
    stage: Stage, tmp_path: Path, engines: list[ControlEngine]
) -> None:
    """Also of those that the run published before it was resumed."""
    (tmp_path / "v000000").mkdir()
    for version in range(1, 7):
        for engine in engines:
            engine.calls.clear()
        await stage.publisher.publish(version)
        if version == 4:
            assert sorted(os.listdir(tmp_path)) == ["v000003", "v000004"]
            stage.publisher.kept = tmp_path / "v000003"
    assert sorted(os.listdir(tmp_path)) == ["v000003", "v000005", "v000006"], "one is evaluated"


async def test_a_failed_save_touches_no_engine(stage: Stage, engines: list[ControlEngine]) -> None:
    def full(_: Path, dtype: str) -> None:
        raise OSError(28, "No space left on device")

    stage.publisher.writer.save_weights = full
    with pytest.raises(OSError, match="No space"):
        await stage.publisher.publish(1)
    assert [engine.calls for engine in engines] == [[], []]
    assert stage.publisher.current[1] == 0


async def test_a_hanging_engine_has_a_deadline(
    stage: Stage, engines: list[ControlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "CALL_S", 0.05)

    async def hang(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    stage.urls[0] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await stage.publisher.publish(1)
    assert stage.quarantined == [stage.urls[0]]
    server.close()


async def test_a_load_may_take_as_long_as_its_bytes(
    stage: Stage, engines: list[ControlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "CALL_S", 0.5)
    monkeypatch.setattr(files, "SLOWEST_BYTES_S", SIZE / 60)
    engines[0].slow |= {"update_weights_from_disk": 0.6}
    await stage.publisher.publish(1)
    assert [engine.version for engine in engines] == ["1", "1"]
    engines[0].slow |= {"model_info": 0.6}
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match="TimeoutError"):
            await EngineControl(engines[0].url, http).version()  # it moves nothing


@pytest.mark.parametrize("during", ["pause_generation", "update_weights_from_disk", "continue_generation"])
async def test_a_cancelled_load_leaves_no_engine_paused(engines: list[ControlEngine], during: str) -> None:
    engine = engines[0]
    engine.slow[during] = 60.0
    async with aiohttp.ClientSession() as http:
        load = asyncio.create_task(EngineControl(engine.url, http).load(Path("weights"), 1))
        await eventually(lambda: during in engine.calls)
        calls = len(engine.calls)
        engine.slow.clear()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    assert engine.calls[calls:] == ["continue_generation"]


@pytest.mark.parametrize("failing", ["model_info", "pause_generation", "continue_generation"])
async def test_a_failed_load_leaves_no_engine_paused(engines: list[ControlEngine], failing: str) -> None:
    """An earlier trainer may have paused it; and a pause may take effect though its reply is lost."""
    engines[0].broken[failing] = [500]
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match=failing):
            await EngineControl(engines[0].url, http).load(Path("weights"), 1)
    assert engines[0].calls[-1] == "continue_generation"
    assert engines[0].calls.count("continue_generation") == (2 if failing == "continue_generation" else 1)


async def test_an_engine_that_reads_weights_while_requests_run_is_not_paused(
    engines: list[ControlEngine],
) -> None:
    """A trainer that is killed during the load would leave it paused."""
    engines[0].staged = True
    async with aiohttp.ClientSession() as http:
        await EngineControl(engines[0].url, http).load(Path("weights"), 1)
    assert engines[0].version == "1"
    assert "pause_generation" not in engines[0].calls


async def test_a_cancelled_load_is_cancelled_though_its_engine_cannot_be_resumed(
    engines: list[ControlEngine],
) -> None:
    engine = engines[0]
    engine.slow["update_weights_from_disk"] = 60.0
    engine.broken["continue_generation"] = [500]
    async with aiohttp.ClientSession() as http:
        load = asyncio.create_task(EngineControl(engine.url, http).load(Path("weights"), 1))
        await eventually(lambda: "update_weights_from_disk" in engine.calls)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load


def test_engine_errors_say_whether_to_try_again() -> None:
    assert EngineError("x", retryable=True).retryable
    assert not EngineError("x").retryable


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_versions", "lacks the version of the weights behind it"),
        ("no_logprobs", "lacks its logprob"),
        ("no_top", r"lacks its likeliest ids \(trainer.loss.score_centering = 4\), which"),
        ("no_kept", r"lacks the ids that top-p and top-k kept \(sampling.top_p"),
        ("garbage", "lacks its logprob and the version"),
        ("refuse", "400: "),
        (
            "no_experts",
            r"lacks the experts of its prompt \(trainer.routing_replay: SGLang needs --enable-return",
        ),
        ("none", None),
        ("status", None),  # it is told by whoever owns it
        ("drop", None),
    ],
)
async def test_an_engine_whose_tokens_could_not_be_trained_on_is_found_out(
    tmp_path: Path, fault: str, words: str | None
) -> None:
    engine = FakeEngine(lambda _: "", faults=deque([Fault(fault, 503 if fault == "status" else "no")]))
    await engine.start()

    async def nothing(*_: object) -> None:
        return

    publisher = Publisher(
        writer=VersionWriter(directory=tmp_path, save_weights=lambda place, dtype: None),
        engines=lambda: [engine.url],
        cancel_stale=nothing,
        quarantine=nothing,
        restore=nothing,
        current=(tmp_path, 0),
        retry_s=5.0,
        samples=SampleCheck(
            4 if fault == "no_top" else 0, kept_ids=fault == "no_kept", routed=fault == "no_experts"
        ),
    )
    try:
        if words is None:
            await publisher.samples.of_all(publisher.engines())
        else:
            with pytest.raises(EngineError, match=words):
                await publisher.samples.of_all(publisher.engines())
    finally:
        await engine.stop()
    assert len(engine.requests) == 1


async def closed_address() -> str:
    """A URL at which nothing listens any more."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    return url


async def test_engines_that_are_all_out_of_service_and_away_are_named(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    away = await closed_address()
    stage.urls[:] = [away]
    stage.publisher.mark_unavailable([away])
    with pytest.raises(PublishError, match=f"to any engine: engine {away}"):
        await stage.publisher.publish(1)


async def test_an_engine_that_failed_at_the_start_is_not_trusted_by_its_label(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    """Before adapters of policies are written, engines start with the base model under a resumed version."""
    stage.publisher.current = (stage.publisher.current[0], 5)
    for engine in engines:
        engine.version = "5"
    engines[1].broken["update_weights_from_disk"] = [503] * 3
    await stage.publisher.publish_start()
    assert stage.quarantined == [engines[1].url]
    assert not await stage.publisher.resync(engines[1].url), "it has the base model"
    for engine in engines:
        engine.calls.clear()
    await stage.publisher.publish(6)
    assert stage.restored == [engines[1].url]
    assert await stage.publisher.resync(engines[1].url)


async def test_the_only_engine_is_waited_for_also_if_it_is_out_of_service(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    stage.urls[:] = [engines[0].url]
    stage.publisher.mark_unavailable(stage.urls)
    stage.publisher.retry_s = 10.0
    engines[0].broken["pause_generation"] = [503, 503]
    await stage.publisher.publish(1)
    assert engines[0].version == "1"
    assert stage.restored == [engines[0].url]


async def test_a_policys_only_engine_is_waited_for_also_beside_those_of_others(
    stage: Stage, engines: list[ControlEngine]
) -> None:
    away = await closed_address()
    stage.urls[:] = [engines[0].url, away]
    stage.publisher.serves = {engines[0].url: "solver", away: "verifier"}.__getitem__
    stage.publisher.mark_unavailable([away])
    with pytest.raises(PublishError, match="any engine of the policy verifier"):
        await stage.publisher.publish(1)
