"""Settings of a run's directory, agents and cluster: the sections `[run]`, `[agent]` and `[cluster]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tidegate.settings.sections import DirectoryName, Processes, SettingsSection


class RunSettings(SettingsSection):
    name: DirectoryName = "run"
    """Name of the run; its directory is `<dir>/<name>`."""
    dir: Path = Path("runs")
    """Directory that contains the runs."""
    seed: int = 0
    """Seed of the policy's random generators and of the sampling in every session."""
    live_view: bool = True
    """Show the live view if the terminal supports it; otherwise plain lines."""
    loggers: list[Literal["tensorboard", "wandb", "mlflow", "trackio", "opentelemetry"]] = []
    """Metrics loggers in addition to `metrics.jsonl`; each is installed by the extra of the same name."""


LOCAL_ONLY = ("use", "options", "workers")


class AgentSettings(SettingsSection):
    selector: ClassVar[str] = "source"
    of_kind: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(LOCAL_ONLY, "local"), "heartbeat_s": "remote"
    }  # fmt: skip

    source: Literal["local", "remote", "client"] = "local"
    """Where episodes come from. local: agents in processes that the run starts; remote: agents in remote
    workers, which the command `tidegate worker` starts; client: your own programs, which form groups of
    episodes with `tidegate.client` and a key of `gateway.keys`, and for which the run starts nothing."""
    use: str = "solver"
    """Name of a built-in agent, or `file.py:ClassOrFunction`."""
    options: dict[str, Any] = {}
    """Arguments of the agent's constructor or function."""
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of an attempt, including its set-up; rewards have `env.reward_timeout_s`."""
    max_concurrency: Annotated[int, Field(ge=1)] = 128
    """Episodes that run at the same time. A group starts only if all of its episodes fit; a larger one runs
    alone."""
    workers: Processes = 1
    """Agent processes, which share the attempts."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 10.0
    """Interval of a remote worker's heartbeats. After three intervals without one its attempts are lost, and
    attempted again."""

    @model_validator(mode="after")
    def _consistent(self) -> AgentSettings:
        if self.source != "local" and (idle := self.other_than_default(*LOCAL_ONLY)):
            instead = "it is given to tidegate worker" if self.source == "remote" else "clients run the agent"
            raise ValueError(f'agent.{idle[0]} has no effect with agent.source = "{self.source}": {instead}')
        if self.source == "client" and self.other_than_default("max_concurrency"):
            raise ValueError('agent.max_concurrency has no effect with agent.source = "client"')
        if self.source != "remote" and self.other_than_default("heartbeat_s"):
            raise ValueError('agent.heartbeat_s has no effect without agent.source = "remote"')
        return self


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
