"""Planted candidates for `trainer.promotion.mode = "canary"`, worse ones and equal ones, tested by users.

The live version is a trained model on one engine; each candidate is the same model with noise on its weights,
on another. Forty users of the plain openai SDK talk through a gateway, and the test decides by their thumbs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import demo
import torch
from common import Check
from safetensors.torch import load_file, save_file
from users import Users

from tidegate.config import Settings, load_settings
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.project_keys import create_key
from tidegate.service.process import run_together
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.trainer.publish.candidate_engines import CandidateEngines
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.promotion import Promotion
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter

EACH = 20
"""Number of worse candidates, and of equal ones."""
WORSE, EQUAL = (0.35, 0.50), 1e-4
"""Standard deviation of the noise, relative to that of each tensor: a range, and a constant."""
ADMIN_KEY = "an admin key of the benchmark"


class Prompt(Users):
    """Users who give their thumb at once, and always."""

    async def thumb(self, reply: str, right: float, delay_s: float) -> None:
        await super().thumb(reply, right, 0.0)


class Planter:
    """Writes a model with noise on its weights.

    Attributes:
        noise: Relative standard deviation of the noise of the next candidate.
        seed: Its seed.
    """

    noise, seed = 0.0, 0

    def __init__(self, live: Path) -> None:
        self._live = live

    def save(self, directory: Path, dtype: str) -> None:
        shutil.copytree(
            self._live, directory, ignore=shutil.ignore_patterns("COMMITTED", "trainer.pt", "checksum.json")
        )
        generator = torch.Generator().manual_seed(self.seed)
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            for tensor in tensors.values():
                scale = self.noise * float(tensor.std()) if tensor.numel() > 1 else 0.0
                tensor += scale * torch.randn(tensor.shape, generator=generator)
            save_file(tensors, file, metadata={"format": "pt"})


@contextlib.asynccontextmanager
async def stand(directory: Path, live: Path) -> AsyncIterator[tuple[Settings, GatewayClient, list[str], str]]:
    """Run two engines and a gateway; yields the settings, a client, the engines' URLs and a project key."""
    (directory / "logs").mkdir(parents=True)
    key = create_key(directory / "keys.json", "shop")
    settings = load_settings(
        demo.CONFIG,
        [
            f"--gateway.keys={directory / 'keys.json'}", "--gateway.port=0", "--engine.count=2",
            "--gateway.conversation_idle_s=0.5", "--trainer.promotion.mode=canary",
            "--trainer.promotion.share=0.5", "--trainer.promotion.margin=0.15",
            "--trainer.promotion.max_wait_s=120",
        ],
    )  # fmt: skip
    processes = LocalProcesses()
    engines = processes.engines(settings, directory, lambda: (live, 0))
    gateway = processes.gateway(settings, directory, {"admin_key": ADMIN_KEY}, directory / "journal")
    async with contextlib.AsyncExitStack() as stack:
        for server in (*engines, gateway):
            stack.push_async_callback(server.stop)
        await run_together([server.start() for server in (*engines, gateway)])
        client = await stack.enter_async_context(GatewayClient(gateway.url, ADMIN_KEY))
        yield settings, client, [engine.url for engine in engines], key


def planned() -> list[tuple[bool, float]]:
    """Return whether each candidate is worse, and its noise, in the order of the tests."""
    low, high = WORSE
    worse = [low + (high - low) * number / (EACH - 1) for number in range(EACH)]
    return [plan for noise in worse for plan in ((True, noise), (False, EQUAL))]


async def measure(directory: Path, live: Path) -> tuple[dict[str, Any], list[Check]]:
    """Test the planted candidates against the model in `live`."""
    began, ledger = time.monotonic(), list[LedgerEntry]()
    planter, stop = Planter(live), asyncio.Event()
    results: list[tuple[bool, bool | None, dict[str, float]]] = []
    async with stand(directory, live) as (settings, gateway, urls, key):
        membership = EngineMembership(gateway, print)
        await membership.open(urls)
        admission = Admission(Rules.of(settings), ledger.append)

        async def nothing(_: Any = None) -> None: ...

        publisher = Publisher(
            VersionWriter(directory / "weights", planter.save), membership.urls, nothing,
            membership.mark_unavailable, membership.restore, (live, 0), 30.0,
        )  # fmt: skip
        membership.set_publisher(publisher)
        promotion = settings.trainer.promotion
        engines = CandidateEngines(gateway, membership, publisher, promotion.engines, promotion.share)
        test = Promotion(
            promotion, admission, publisher, engines, gateway, _no_evaluation, nothing, print, stop
        )
        users = Prompt(gateway.url, key)
        talking = asyncio.create_task(users.run())
        try:
            for step, (worse, noise) in enumerate(planned(), start=1):
                planter.noise, planter.seed = noise, step
                metrics = await test.publish(step)
                results.append((worse, bool(metrics["promotion/promoted"]), metrics))
                await _forget(gateway)
                assert not talking.done(), talking
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
    return _report(results, time.monotonic() - began)


async def _no_evaluation(step: int, version: int | None) -> list[float]:
    raise AssertionError("a canary evaluates nothing")


async def _forget(gateway: GatewayClient) -> None:
    """Take the ended conversations, as a trainer would."""
    while groups := await gateway.lease(1, 100):
        await asyncio.gather(*(gateway.ack(1, group.lease_id, "stepped") for group in groups))


def _report(
    results: Sequence[tuple[bool, bool | None, dict[str, float]]], seconds: float
) -> tuple[dict[str, Any], list[Check]]:
    bad = [(promoted, figures) for worse, promoted, figures in results if worse]
    good = [(promoted, figures) for worse, promoted, figures in results if not worse]
    gaps = [figures["promotion/live_reward"] - figures["promotion/reward"] for _, figures in bad]
    row = {
        "run": "promotion", "worse": len(bad), "equal": len(good), "least_gap": min(gaps),
        "episodes_worse": _mean_episodes(bad), "episodes_equal": _mean_episodes(good), "seconds": seconds,
    }  # fmt: skip
    return row, [
        Check("candidates_tested", len(results), "==", 2 * EACH),
        Check("worse_candidate_promoted", sum(bool(promoted) for promoted, _ in bad), "==", 0),
        Check("good_candidate_rolled_back", sum(not promoted for promoted, _ in good), "<=", 1),
    ]


def _mean_episodes(tested: Sequence[tuple[bool | None, dict[str, float]]]) -> float:
    """Return the mean number of conversations in a test."""
    numbers = [one["promotion/episodes"] + one["promotion/live_episodes"] for _, one in tested]
    return sum(numbers) / len(numbers)
