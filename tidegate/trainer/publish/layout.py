"""Directories of the weights of several policies.

    weights/v000012/solver/             a policy with engines of its own: its model, or its adapter
    weights/v000012/planner/planner/    policies that share engines: their adapters, in the directory of the
    weights/v000012/planner/worker/     first of them, which an engine loads as a whole
    checkpoints/step_8/solver/          the whole model of each trained policy

A frozen policy has none: its engines load its model's own directory; shared ones serve it without an adapter.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.config import Settings
from tidegate.weights.files import is_adapter


def shares_engines(settings: Settings, name: str) -> bool:
    """Return whether a policy's engines serve other policies, too, each by its adapter."""
    return len(settings.engine_sets[engine_set(settings, name)]) > 1


def engine_set(settings: Settings, name: str) -> str:
    """Return the name of the engines that serve a policy: of the first one that they serve."""
    return next(first for first, names in settings.engine_sets.items() if name in names)


def published(settings: Settings, version: Path, name: str) -> Path:
    """Return the directory of a policy's weights in that of a version."""
    return version / engine_set(settings, name) / name if shares_engines(settings, name) else version / name


def is_fixed(settings: Settings, engines: str) -> bool:
    """Return whether the engines of this name serve frozen policies alone, and are published nothing."""
    served = [settings.policies.get(name) for name in settings.engine_sets[engines]]
    return all(policy is not None and not policy.train for policy in served)


def engine_weights(settings: Settings, weights: Path, engines: str) -> Path:
    """Return what the engines of this name load of a version or a checkpoint.

    It is a base model before the first version, and where adapters are published, after a resume, until the
    run has written them: a server keeps the model that it starts with as their base.
    """
    if not engines:
        return weights
    own = weights / engines
    adapter = settings.of_policy(engines).trainer.lora.publish == "adapter"
    exists = is_adapter(own) if adapter else own.is_dir()
    # A checkpoint has a policy, too, that is frozen since.
    loads = exists and not is_fixed(settings, engines)
    return own if loads else settings.of_policy(engines).model.path.absolute()
