"""Slots and bundles of a run's processes on a cluster. Does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.config import Settings
from tidegate.errors import ConfigError
from tidegate.trainer.processes.servers import agent_names, engine_names

HOME = "trainer-0"
"""Slot of trainer rank 0, which is the run itself."""


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """The bundle of a process, and the resources that the process takes from it."""

    name: str
    bundle: int
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a run. Slots of one bundle are on one node."""

    slots: tuple[ActorSlot, ...]

    @classmethod
    def of(cls, settings: Settings) -> Placement:
        """Build the placement of a run. Raises ConfigError.

        Rank 0 and the gateway share a bundle, as the gateway's journal is in the run's directory. Every other
        rank, engine, agents' process and environment service has its own bundle.
        """
        _check(settings)
        requests = settings.cluster
        bundles: list[dict[str, dict[str, float]]] = [
            {HOME: _trainer(settings), "gateway": {"CPU": settings.gateway.shards, **requests.gateway}},
            *({f"trainer-{rank}": _trainer(settings)} for rank in range(1, settings.trainer.ranks)),
            *({name: _engine(settings)} for name in engine_names(settings)),
            *({name: {"CPU": 1, **requests.agents}} for name in agent_names(settings)),
            *({name: {"CPU": settings.env.workers, **requests.env}} for name in _environments(settings)),
        ]
        slots = [
            ActorSlot(name, bundle, resources)
            for bundle, together in enumerate(bundles)
            for name, resources in together.items()
        ]
        return cls(tuple(slots))

    def __getitem__(self, name: str) -> ActorSlot:
        return next(slot for slot in self.slots if slot.name == name)

    @property
    def bundles(self) -> list[dict[str, float]]:
        bundles: list[dict[str, float]] = [{} for _ in range(1 + max(slot.bundle for slot in self.slots))]
        for slot in self.slots:
            bundle = bundles[slot.bundle]
            for resource, amount in slot.resources.items():
                bundle[resource] = round(bundle.get(resource, 0.0) + amount, 4)  # Ray's resolution
        return bundles

    @property
    def total(self) -> dict[str, float]:
        resources = dict.fromkeys(name for bundle in self.bundles for name in bundle)
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in resources}

    def lines(self) -> list[str]:
        rows = [
            (" + ".join(slot.name for slot in self.slots if slot.bundle == index), format_resources(bundle))
            for index, bundle in enumerate(self.bundles)
        ]
        width = max(len(names) for names, _ in rows)
        return [
            *(f"{names:<{width}}   {requests}" for names, requests in rows),
            f"in all: {format_resources(self.total)}",
        ]


def _check(settings: Settings) -> None:
    for key, device in (("trainer", settings.trainer.device), ("engine", settings.engine.device)):
        if ":" in device:
            raise ConfigError(
                f"{key}.device = {device!r} names one GPU of a machine, but on a cluster Ray assigns GPUs: "
                f"set it to {device.partition(':')[0]!r}"
            )


def format_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _environments(settings: Settings) -> list[str]:
    """Return the names of the run's own environment services."""
    own = settings.agent.source != "client" and settings.gateway.url is None and not settings.env.urls
    return ["env"] if own else []


def _trainer(settings: Settings) -> dict[str, float]:
    trainer = settings.trainer
    return {**_default_resources(trainer.threads, trainer.device), **settings.cluster.trainer}


def _engine(settings: Settings) -> dict[str, float]:
    engine = settings.engine
    device = engine.device if engine.kind == "embedded" else "cuda"
    return {**_default_resources(engine.threads, device), **settings.cluster.engine}


def _default_resources(threads: int, device: str) -> dict[str, float]:
    return {"CPU": float(threads), **({"GPU": 1.0} if device.startswith("cuda") else {})}
