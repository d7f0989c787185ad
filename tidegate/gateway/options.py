"""What one gateway is started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.gateway.engines.pool import PoolOptions
from tidegate.gateway.groups.rewards import Rewarder
from tidegate.gateway.sampling import StructuredOutput
from tidegate.gateway.sessions.limits import SessionLimits


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Durations are in seconds."""

    model: Path
    """A directory with a tokenizer and its chat template."""
    public_url: str | None = None
    """Where agents reach it; None: where it was called."""
    engine_urls: list[str] = field(default_factory=list)
    admin_key: str | None = None
    tool_parser: str = "auto"
    """Format of the model's tool calls, by its name in `tidegate.gateway.parsing.tool_calls`; `auto`: the
    format that the chat template writes; `none`: calls stay text."""
    structured_output: StructuredOutput = "text"
    """How replies with a JSON schema are sampled in training sessions: as free text, or under the grammar."""
    untrained_models: Sequence[str] = ()
    """Model names that agents give for auxiliary calls, which are recorded and not trained on."""
    rewarders: Mapping[str, Rewarder] = field(default_factory=dict)
    """By environment name."""
    reward_timeout_s: float = 60.0
    """Of the rewards of one episode, from when they start to run."""
    session_deadline_s: float = 3600.0
    """Of a session that is opened without a deadline."""
    grace_s: float = 60.0
    """How long after its deadline a session may still be finished before it is forgotten."""
    retention_s: float = 3600.0
    """How long a finished session that is in no sealed group is kept."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    """Of a session that is opened without its own."""
    journal: Path | None = None
    """The directory in which everything is kept; None: all is lost with the process."""
    pool: PoolOptions = field(default_factory=PoolOptions)
    mark: str = ""
    """What its ids and keys begin with, so that a front finds the shard that knows them."""
