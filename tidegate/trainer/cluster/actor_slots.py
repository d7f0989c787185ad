"""Actors on their seats: made, named, and told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.errors import StartError
from tidegate.trainer.cluster.placement import Placement

NAMESPACE = "tidegate"
CALLS = 10_000
"""Of one actor at the same time; an idle one costs nothing."""


@dataclass(frozen=True, slots=True)
class ActorSlots:
    """What a run has reserved of a cluster."""

    run: str
    placement: Placement
    group: Any
    """Ray's placement group."""

    def take(self, name: str, host: type, *arguments: object, restarts: int = 0) -> Any:
        """An actor on the seat of that name; Ray starts it again so many times. Raises StartError."""
        seat = self.placement[name]
        resources = dict(seat.resources)
        options: dict[str, Any] = {
            "name": f"tidegate-{self.run}-{name}",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": restarts,
            "max_concurrency": CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=seat.bundle
            ),
        }
        try:
            return ray.remote(host).options(**options).remote(*arguments)
        except ValueError as error:  # ActorAlreadyExistsError is one
            raise StartError(
                f"{options['name']} could not be made: {error}. If a run of this name is on the cluster, "
                "choose another run.name"
            ) from None
