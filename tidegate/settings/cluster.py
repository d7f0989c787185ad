"""What a run's processes ask of a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.settings.sections import SettingsSection

Resources = dict[str, Annotated[float, Field(gt=0)]]


class ClusterSettings(SettingsSection):
    """What processes ask of a Ray cluster (`tidegate train --cluster`), as `{CPU = 4, GPU = 1}`. What is left
    out: as many CPUs as a process has threads, and a GPU where its device is cuda."""

    trainer: Resources = {}
    """Of each trainer rank."""
    engine: Resources = {}
    """Of each engine; SGLang and vLLM have a GPU each where nothing else is said."""
    gateway: Resources = {}
    """Of the gateway with its shards, on the node of the first trainer rank."""
    agents: Resources = {}
    """Of each of the agents' processes."""
    environment: list[str] = []
    """Variables that processes on other nodes need besides those that are passed on anyway (docs/ray.md)."""
    patience_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the cluster may take to give what is asked."""
