"""Which processes a run has, what each asks of a cluster, and which of them sit together. Nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.config import Settings
from tidegate.errors import ConfigError
from tidegate.trainer.processes.servers import agent_names, engine_names

HOME = "trainer-0"
"""The first trainer rank, which is the run itself."""


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """A process's place: a bundle, and what it takes of that."""

    name: str
    bundle: int
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """The seats of a run. What has one bundle is on one node."""

    seats: tuple[ActorSlot, ...]

    @classmethod
    def of(cls, settings: Settings) -> Placement:
        """The first rank and the gateway share a bundle: the gateway's journal is in the run's directory.
        Every other rank, engine and process of agents has a bundle of its own. Raises ConfigError."""
        _check(settings)
        asks = settings.cluster
        together = [
            [
                ActorSlot(HOME, 0, _trainer(settings)),
                ActorSlot("gateway", 0, _asked({"CPU": settings.gateway.shards}, asks.gateway)),
            ],
            *(
                [ActorSlot(f"trainer-{rank}", 0, _trainer(settings))]
                for rank in range(1, settings.trainer.ranks)
            ),
            *([ActorSlot(name, 0, _engine(settings))] for name in engine_names(settings)),
            *([ActorSlot(name, 0, _asked({"CPU": 1}, asks.agents))] for name in agent_names(settings)),
        ]
        return cls(
            tuple(
                ActorSlot(seat.name, bundle, seat.resources)
                for bundle, seats in enumerate(together)
                for seat in seats
            )
        )

    def __getitem__(self, name: str) -> ActorSlot:
        return next(seat for seat in self.seats if seat.name == name)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each bundle asks for: the sum of its seats."""
        found: list[dict[str, float]] = [{} for _ in range(1 + max(seat.bundle for seat in self.seats))]
        for seat in self.seats:
            bundle = found[seat.bundle]
            for resource, amount in seat.resources.items():
                bundle[resource] = round(bundle.get(resource, 0.0) + amount, 4)  # as finely as Ray counts
        return found

    @property
    def total(self) -> dict[str, float]:
        """What all bundles ask for."""
        resources = dict.fromkeys(name for bundle in self.bundles for name in bundle)
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in resources}

    def lines(self) -> list[str]:
        """A line for each bundle, and one for the sum."""
        rows = [
            (" + ".join(seat.name for seat in self.seats if seat.bundle == index), readable(bundle))
            for index, bundle in enumerate(self.bundles)
        ]
        width = max(len(names) for names, _ in rows)
        return [*(f"{names:<{width}}   {asks}" for names, asks in rows), f"in all: {readable(self.total)}"]


def _check(settings: Settings) -> None:
    for key, device in (("trainer", settings.trainer.device), ("engine", settings.engine.device)):
        if ":" in device:
            raise ConfigError(
                f"{key}.device = {device!r} names one GPU of a machine; on a cluster Ray gives each process "
                f"its own: set it to {device.partition(':')[0]!r}"
            )


def readable(resources: Mapping[str, float]) -> str:
    """As in `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _trainer(settings: Settings) -> dict[str, float]:
    trainer = settings.trainer
    return _asked(_usual(trainer.threads, trainer.device), settings.cluster.trainer)


def _engine(settings: Settings) -> dict[str, float]:
    engine = settings.engine
    usual = _usual(engine.threads, engine.device if engine.kind == "embedded" else "cuda")
    return _asked(usual, settings.cluster.engine)


def _usual(threads: int, device: str) -> dict[str, float]:
    gpu = {"GPU": 1.0} if device.startswith("cuda") else {}
    return {"CPU": float(threads), **gpu}


def _asked(usual: Mapping[str, float], asked: Mapping[str, float]) -> dict[str, float]:
    return {**usual, **asked}
