"""Makes the publisher of a run from its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from tidegate.config import Settings
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.policy.protocol import TrainedPolicy
from tidegate.trainer.processes.provider import ProcessProvider
from tidegate.trainer.processes.servers import restart_s
from tidegate.trainer.publish.broadcast import BUCKET_BYTES, DEVICE_BUCKET_BYTES, WeightBroadcaster
from tidegate.trainer.publish.engine_control import SampleCheck
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.layout import engine_weights
from tidegate.trainer.publish.publisher import KEPT_VERSIONS, Publisher
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.trainer.start import Start


def make_publisher(
    *,
    settings: Settings,
    start: Start,
    policy: TrainedPolicy,
    engines: EngineMembership,
    provider: ProcessProvider,
    ledger: Ledger,
    cancel_stale: Callable[[int], Awaitable[None]],
    in_outage: Callable[[], bool],
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
) -> Publisher:
    """Return the publisher, with a sender of weights if the run broadcasts them, which `stack` closes."""
    sender, dtype = None, settings.engine.weights_dtype
    if settings.trainer.publish_transport == "broadcast":
        on_device = settings.trainer.device != "cpu"
        source = partial(policy.weight_buckets, as_files=dtype, on_device=on_device)
        sender = WeightBroadcaster(
            source, note, DEVICE_BUCKET_BYTES if on_device else BUCKET_BYTES,
            settings.trainer.device,
        )  # fmt: skip
        stack.callback(sender.close)
    # SGLang loads whole models only, a service its own; a node without the run's files has no base.
    # Of several policies `save_adapter` writes what the engines of each load.
    adapters = settings.trainer.lora.publish == "adapter" or bool(settings.policies)
    whole = settings.engine.kind not in ("embedded", "vllm") or adapters
    deltas = provider.delivers_in_place and not whole
    writer = VersionWriter(
        directory=settings.run_dir.absolute() / "weights",
        save_weights=policy.save_adapter if adapters else policy.save_weights,
        buckets=policy.weight_buckets,
        dtype=dtype, full_every=settings.trainer.publish_full_every if deltas else 1,
        note=note,
    )  # fmt: skip
    # By the labels of SGLang engines; the others find adapters by the policies' names.
    own = map(settings.of_policy, settings.policy_names)
    named = any(one.engine.kind == "sglang" and one.trainer.lora.publish == "adapter" for one in own)

    async def deliver(url: str, weights: Path) -> Path:
        """Deliver what an engine loads of a version; returns its path there."""
        return await provider.deliver(url, engine_weights(settings, weights, engines.serves(url)))

    return Publisher(
        writer=writer, engines=engines.urls, cancel_stale=cancel_stale,
        quarantine=engines.mark_unavailable, restore=engines.restore,
        current=(start.weights, start.version),
        retry_s=restart_s(settings.engine), sender=sender,
        deliver=deliver, serves=engines.serves,
        # An earlier self links the files of the version so many publishes ago.
        kept_versions=max([KEPT_VERSIONS, *(own.behind + 1 for own in settings.policies.values())]),
        in_outage=in_outage,
        durable=ledger.durable, keeps_kv=settings.engine.pause == "in_place",
        samples=SampleCheck(
            settings.trainer.loss.listed_ids, kept_ids=settings.sampling.records_kept_ids,
            routed=settings.trainer.routing_replay,
        ),
        announce=engines.announce if named else None,
    )  # fmt: skip
