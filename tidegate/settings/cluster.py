"""Settings of runs on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.settings.sections import SettingsSection

Resources = dict[str, Annotated[float, Field(gt=0)]]


class ClusterSettings(SettingsSection):
    """Resources that processes reserve on a Ray cluster (`tidegate train --cluster`), such as
    `{CPU = 4, GPU = 1}`. Defaults: a CPU per thread of the process, and a GPU if its device is cuda."""

    trainer: Resources = {}
    """Resources of each trainer rank, such as `{CPU = 4, GPU = 1}`."""
    engine: Resources = {}
    """Resources of each engine; SGLang and vLLM reserve one GPU by default."""
    gateway: Resources = {}
    """Resources of the gateway with its shards, on the node of the first trainer rank."""
    agents: Resources = {}
    """Resources of each agent process."""
    env: Resources = {}
    """Resources of the environment service."""
    environment: list[str] = []
    """Environment variables for processes on other nodes, in addition to those of docs/ray.md."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of the reservation of these resources on the cluster."""
