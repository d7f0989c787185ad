"""Creates actors in a run's placement group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.errors import StartError
from tidegate.trainer.cluster.placement import Placement

NAMESPACE = "tidegate"
CALLS = 10_000
"""Limit on concurrent calls of one actor; idle capacity costs nothing."""


@dataclass(frozen=True, slots=True)
class ActorSlots:
    """The resources that a run has reserved on a cluster."""

    run: str
    placement: Placement
    group: Any
    """Ray's placement group."""

    def create_actor(self, name: str, cls: type, *arguments: object, restarts: int = 0) -> Any:
        """Create the actor `name` in its slot; Ray restarts it up to `restarts` times. Raises StartError."""
        slot = self.placement[name]
        resources = dict(slot.resources)
        options: dict[str, Any] = {
            "name": f"tidegate-{self.run}-{name}",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": restarts,
            "max_concurrency": CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=slot.bundle
            ),
        }
        try:
            return ray.remote(cls).options(**options).remote(*arguments)
        except ValueError as error:  # ActorAlreadyExistsError is one
            raise StartError(
                f"{options['name']} could not be created: {error}. If a run of this name is on the cluster, "
                "choose another run.name"
            ) from None
