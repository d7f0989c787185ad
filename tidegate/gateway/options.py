"""Options of one gateway process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from tidegate.gateway.engines.engine import PoolOptions
from tidegate.gateway.environments.base import EnvironmentService
from tidegate.gateway.sampling import StructuredOutput
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.turns.redaction import Redaction
from tidegate.types import Sampling


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """One of several policies."""

    model: Path
    """Directory with the tokenizer and its chat template."""
    tool_parser: str = "auto"
    """As in `GatewayOptions`."""
    train: bool = True
    """Whether it is trained. Turns of a frozen policy are context only, whatever their request says."""
    engines: str | None = None
    """Policy whose engines serve it; None: it has its own."""
    adapter: bool = False
    """Whether they serve it as the LoRA adapter of its name."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Options of a gateway; durations are in seconds."""

    model: Path
    """Directory with the tokenizer and its chat template; without effect if there are `policies`."""
    public_url: str | None = None
    """Address at which agents reach the gateway; None: the address of the request that opens a session."""
    engine_urls: list[str] = field(default_factory=list)
    admin_key: str | None = None
    worker_key: str | None = None
    """Key with which workers take attempts; None: none may."""
    keys: Path | None = None
    """File with the project keys of clients; None: there are none."""
    max_client_groups: int = 64
    """Limit of clients' groups that have not ended."""
    client_sampling: Sampling = field(default_factory=Sampling)
    """Sampling parameters of clients' episodes."""
    _: KW_ONLY
    policies: Mapping[str, PolicyModel] = field(default_factory=dict)
    """The policies, which requests name as their model, by name; empty: there is one, under any name."""
    client_deadline_s: float = 3600.0
    """Deadline of a client's episode."""
    conversation_idle_s: float = 30.0
    """Time after the last call or feedback at which a conversation with feedback ends."""
    feedback_window_s: float = 3600.0
    """Time after the last call at which a conversation without feedback ends."""
    reward_range: tuple[float, float] = (-1000.0, 1000.0)
    """Least and largest reward that a client may give."""
    redact: Redaction | None = None
    """Redacts the texts of requests before anything is recorded."""
    tool_parser: str = "auto"
    """Name of the model's tool-call format in `tidegate.gateway.parsing.tool_calls`; `auto`: the format that
    the chat template writes; `none`: tool calls stay text."""
    structured_output: StructuredOutput = "text"
    """How training sessions sample replies with a JSON schema: as free `text`, or under a `grammar`."""
    tracing: bool = False
    """Sends OpenTelemetry spans of episodes."""
    untrained_models: Sequence[str] = ()
    """Model names that mark auxiliary calls, which are recorded and not trained on."""
    environments: EnvironmentService | None = None
    """The environments of the tasks; None: agents and clients give the rewards."""
    session_deadline_s: float = 3600.0
    """Default deadline of a session."""
    grace_s: float = 60.0
    """Time after its deadline in which a session may still be finished before it is deleted."""
    retention_s: float = 3600.0
    """Time for which a finished session is kept if it is not in a sealed group."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    """Default budgets of a session."""
    journal: Path | None = None
    """Directory of the journal; None: all state is lost when the process ends."""
    pool: PoolOptions = field(default_factory=PoolOptions)
    id_prefix: str = ""
    """Prefix of session ids and keys, from which the shard router finds their shard."""
