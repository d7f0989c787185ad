"""Settings of models, engines, gateways and environments, and those that each server command reads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tidegate.gateway.parsing.tool_calls.registry import TOOL_PARSERS
from tidegate.settings.judge import JudgeSettings
from tidegate.settings.sections import HttpUrl, Processes, SecretKey, SettingsSection
from tidegate.settings.tinker import TinkerService

if TYPE_CHECKING:
    from tidegate.types import Sampling

GREEDY_BELOW = 1e-6
"""Temperature below which engines take the likeliest token, as SGLang does; logits are not divided then."""
MAX_KEPT = 1024
"""Limit of top-k in training: the kept ids are recorded in place of each token."""
DEFAULT_KEPT = 512
"""Top-k in training with top-p or min-p, if it is not set."""


class ModelSettings(SettingsSection):
    path: Path
    """Model directory in Hugging Face format: weights, config, tokenizer with a chat template."""


class EngineAddresses(SettingsSection):
    urls: list[HttpUrl] = []
    """Addresses of running engines, such as `http://host:30000`. Their key, if any, is given in
    TIDEGATE_ENGINE_KEY. Without them a run starts `count` engines."""
    pause: Literal["retract", "in_place"] = "retract"
    """How SGLang pauses for new weights. retract: keys and values of running requests are computed again;
    in_place: the requests keep them, and their turns have the oldest version as `kv_version`
    (docs/sglang.md)."""


class ExternalEngine(SettingsSection):
    python: Path | None = None
    """Python interpreter of the environment in which SGLang or vLLM is installed."""
    arguments: list[str] = []
    """Arguments passed unchanged to SGLang's or vLLM's server; {index} becomes the engine's number, from
    0."""

    def numbered(self, index: int) -> list[str]:
        """Returns the arguments of the engine with this number."""
        return [argument.replace("{index}", str(index)) for argument in self.arguments]

    @property
    def dtype_argument(self) -> str | None:
        return self.value_of("--dtype")

    def value_of(self, argument: str) -> str | None:
        """Returns the value of an argument in `arguments`; None if it is not there."""
        words = " ".join(self.arguments).replace(f"{argument}=", f"{argument} ").split()
        return next((value for name, value in itertools.pairwise(words) if name == argument), None)


class EmbeddedEngine(SettingsSection):
    device: str = "cpu"
    """Device of an embedded engine: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the engines' weights and cache, in which weights are published. None: float32 for an
    embedded engine on a CPU; bfloat16 on a GPU and for SGLang and vLLM, unless `arguments` has `--dtype`."""
    threads: Processes = 1
    """torch threads of an embedded engine; on shared cores one is faster than two."""
    max_slots: Annotated[int, Field(ge=1)] = 64
    """Number of requests that an embedded engine decodes at the same time."""
    max_context: Annotated[int, Field(ge=16)] = 1024
    """Limit of an embedded engine on the prompt + output tokens of one request."""
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 256
    """Memory of an embedded engine for keys and values of earlier sequences, in MB; a follow-up turn then
    computes only new tokens."""
    quantize: Literal["int8", "int4", "five_levels"] | None = None
    """Type to which an embedded engine rounds the weights that sample, to study a mismatch with the trainer;
    it is no faster. None: it samples from the weights as published."""

    @property
    def weights_dtype(self) -> str:
        """`dtype`, or its default."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


EMBEDDED_ONLY = tuple(name for name in EmbeddedEngine.model_fields if name != "dtype")


class EngineSettings(EmbeddedEngine, ExternalEngine, EngineAddresses):
    of_kind: ClassVar[Mapping[str, str]] = dict.fromkeys(EMBEDDED_ONLY, "embedded")

    kind: Literal["embedded", "sglang", "vllm", "tinker"] = "embedded"
    """Kind of the engines to start: Tidegate's own, SGLang or vLLM with the interpreter `python`, or tinker:
    a process that samples at the service of `trainer.tinker`."""
    count: Processes = 1
    """Number of engines to start, each in its own process with these settings."""

    @property
    def context(self) -> int | None:
        """`max_context` if it applies: to embedded engines that the run starts; else None."""
        return self.max_context if self.kind == "embedded" and not self.urls else None

    @property
    def weights_dtype(self) -> str:
        if self.kind == "embedded":
            return super().weights_dtype
        given = self.dtype_argument or self.dtype or "bfloat16"
        return "bfloat16" if given == "bfloat16" else "float32"  # from which an engine can make any other

    def numbered(self, index: int) -> list[str]:
        """Returns the arguments of the engine with this number, with its number types."""
        given = super().numbered(index)
        own = [] if self.dtype_argument else ["--dtype", self.weights_dtype]
        shorter = (self.dtype_argument or self.weights_dtype) not in ("float32", "float")
        if self.kind == "sglang" and shorter and "--enable-fp32-lm-head" not in given:
            own.append("--enable-fp32-lm-head")
        return [*own, *given]

    @model_validator(mode="after")
    def _consistent(self) -> EngineSettings:
        if self.dtype and self.dtype_argument:
            raise ValueError(
                f'engine.dtype = "{self.dtype}" and --dtype {self.dtype_argument} in engine.arguments are '
                "one setting; remove one of the two"
            )
        if self.urls and self.count != 1:
            raise ValueError(
                f"engine.count = {self.count} is the number of engines to start, but engine.urls names "
                "running ones; remove one of the two"
            )
        if self.pause == "in_place" and self.kind != "sglang":
            raise ValueError(
                f'engine.pause = "in_place" needs engine.kind = "sglang", not "{self.kind}": remove it'
            )
        if self.kind in ("embedded", "tinker") and (self.python or self.arguments):
            raise ValueError('engine.python and engine.arguments are for engine.kind = "sglang" or "vllm"')
        if self.kind != "embedded" and (idle := self.other_than_default(*EMBEDDED_ONLY)):
            raise ValueError(
                f'engine.{idle[0]} is for engine.kind = "embedded"; give engine.kind = "{self.kind}" its own '
                "arguments in engine.arguments"
            )
        if self.kind in ("sglang", "vllm") and not self.urls and self.python is None:
            raise ValueError(
                f'engine.kind = "{self.kind}" needs engine.python, the interpreter of a separate environment '
                "(it pins other versions of torch and openai than this one), or engine.urls"
            )
        return self


def _tool_parser(name: str) -> str:
    if name not in TOOL_PARSERS:
        raise ValueError(f"{name!r} is not one of {', '.join(TOOL_PARSERS)}")
    return name


class ServedGateway(SettingsSection):
    host: str = "127.0.0.1"
    """Address on which the gateway listens; 0.0.0.0 means all addresses of this machine."""
    public_url: HttpUrl | None = None
    """URL at which agents reach the gateway, such as `https://host:8000`, if it is behind a proxy or NAT.
    None: the address on which it listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which the gateway listens; 0 selects a free one."""
    admin_key: SecretKey | None = None
    """Key of the gateway's control routes; required if the gateway listens beyond loopback."""
    shards: Processes = 1
    """Gateway processes that share the sessions behind one address. A resumed run keeps their number."""
    tool_parser: Annotated[str, AfterValidator(_tool_parser)] = "auto"
    """Format of the model's tool calls. auto: detected from its chat template; none: they stay text."""
    structured_output: Literal["text", "grammar"] = "text"
    """How replies to requests with a JSON schema are sampled in training. text: freely, and the client parses
    them; grammar: constrained to the schema, and only tokens from whose distribution the grammar removed at
    most a probability of 1e-4 are trained on."""
    keys: Path | None = None
    """File with the project keys of clients (`tidegate keys`)."""
    conversation_idle_s: Annotated[float, Field(gt=0)] = 30.0
    """Time after the last call or feedback at which a client's conversation with feedback ends."""
    feedback_window_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time after the last call at which a client's conversation without feedback ends, `unrewarded`."""
    redact: str | None = None
    """Function `file.py:name` that removes personal data from a text of a request. Only its result is
    recorded and given to the model."""
    conversation_rewards: list[str] = []
    """Functions `file.py:name` that score a client's conversation when it ends; their values are added to its
    feedback. If any are set, a conversation ends after
    `conversation_idle_s` even without feedback."""
    reward_range: tuple[float, float] = (-1000.0, 1000.0)
    """Least and largest reward that a client may give, such as [0, 1]; others are refused."""
    tracing: bool = False
    """Sends an OpenTelemetry span per episode, turn and tool call, by OTLP over HTTP. Environment variables
    such as OTEL_EXPORTER_OTLP_ENDPOINT name the collector."""
    untrained_models: list[str] = []
    """Model names that agents use for auxiliary calls (titles, summaries): recorded, never trained on."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range = {list(self.reward_range)}: the first number must be smaller")
        return self

    @property
    def on_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


class GatewaySettings(ServedGateway):
    url: HttpUrl | None = None
    """Address of a gateway that runs already. The run uses it instead of starting one, and does not stop it.
    Of the gateway's settings only `admin_key` applies (or TIDEGATE_ADMIN_KEY in the environment)."""

    @model_validator(mode="after")
    def _consistent(self) -> GatewaySettings:
        names = [name for name in ServedGateway.model_fields if name != "admin_key"]
        if self.url is not None and (idle := self.other_than_default(*names)):
            raise ValueError(
                f"gateway.{idle[0]} has no effect with gateway.url: the gateway at {self.url} has its own"
            )
        return self


class ServedEnv(SettingsSection):
    use: str = "arithmetic"
    """Built-in name, `file.py:ClassOrObject`, or `library:environment` (docs/adapters.md)."""
    options: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    workers: Processes = 1
    """Worker processes of the environment service: rewards, states and tools of episodes."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of the rewards of one episode, from their start; time in the queue does not count."""
    call_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Timeout of a tool call, of an episode's set-up, and of a response of its counterpart."""
    judge: JudgeSettings = JudgeSettings()


class EnvSettings(ServedEnv):
    urls: list[HttpUrl] = []
    """Addresses of running environment services (`tidegate env serve`), such as `http://host:8010`. Their key
    is given in TIDEGATE_ENV_KEY. Without them a run starts its own."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.urls and (idle := self.other_than_default("workers", "call_timeout_s", "judge")):
            raise ValueError(
                f"env.{idle[0]} has no effect with env.urls: the services there have their own; give it to "
                "tidegate env serve"
            )
        return self


class EnvCommand(SettingsSection):
    """Settings of `tidegate env serve`."""

    env: ServedEnv = ServedEnv()


class EngineCommand(SettingsSection):
    """Settings of `tidegate engine`."""

    model: ModelSettings
    engine: EmbeddedEngine = EmbeddedEngine()


class VLLMEngine(ExternalEngine):
    python: Path
    """Python interpreter of the environment in which vLLM is installed."""


class VLLMCommand(SettingsSection):
    """Settings of `tidegate vllm`."""

    model: ModelSettings
    engine: VLLMEngine


class TinkerCommand(SettingsSection):
    """Settings of `tidegate tinker`."""

    model: ModelSettings
    tinker: TinkerService


class StandaloneGateway(ServedGateway):
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port on which the gateway listens; 0 selects a free one."""
    admin_key: SecretKey | None = None
    """Key of the gateway's control routes; better given by the environment variable TIDEGATE_ADMIN_KEY."""


class Rewards(EnvSettings):
    use: str = ""
    """Environment that computes the rewards: a built-in name, or `file.py:ClassOrObject`. Empty: none."""


class DefaultLimits(SettingsSection):
    """Default limits of a session."""

    turns: Annotated[int, Field(ge=1)] | None = None
    """Limit of a session's turns."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Limit of a session's sampled tokens."""
    seconds: Annotated[int, Field(ge=1)] | None = None
    """Seconds from the opening of a session in which calls may start."""
    calls: Annotated[int, Field(ge=1)] | None = None
    """Limit of a session's concurrent calls."""
    tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Limit of a session's calls of its environment's tools."""


class SamplingSettings(SettingsSection):
    temperature: Annotated[float, Field(ge=GREEDY_BELOW)] = 1.0
    """Temperature in training and in evaluations; the trainer divides logits by the same value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """In training, tokens are drawn from the fewest ids that hold this probability. The engine reports the
    ids that it kept, and the trainer renormalises over them (docs/losses.md)."""
    top_k: Annotated[int, Field(ge=1, le=MAX_KEPT)] | None = None
    """In training, tokens are drawn from this number of likeliest ids. None: 512 with `top_p` or `min_p`,
    which bounds the record; otherwise all ids."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """In training, tokens are drawn from ids that are at least this many times as likely as the likeliest."""
    narrowed_by_agents: bool = False
    """Whether the `top_p`, `top_k` and `min_p` of an agent's own requests apply in training, in place of
    these."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Token limit of one reply."""

    @property
    def records_kept_ids(self) -> bool:
        """Whether engines must report the ids that they keep."""
        narrows = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        return narrows or self.narrowed_by_agents

    def in_training(self, listed_ids: int = 0, routed_experts: bool = False) -> Sampling:
        """Returns the sampling parameters of a session whose tokens are trained on, with this number of
        likeliest ids for each token, and with the experts if `routed_experts`."""
        from tidegate.types import Sampling  # imports numpy, which the settings do without

        top_k = self.top_k or (DEFAULT_KEPT if self.top_p < 1 or self.min_p else -1)
        return Sampling(
            self.temperature, self.top_p, top_k, self.min_p, self.narrowed_by_agents, self.max_tokens,
            listed_ids, routed_experts,
        )  # fmt: skip


class ClientEpisodes(SamplingSettings):
    """Episodes of clients with a project key."""

    max_groups: Annotated[int, Field(ge=1)] = 64
    """Limit of their groups that have not ended; a run sets it to the capacity of its staleness bound."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Token limit of one reply."""
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    """Number of the engine's likeliest ids that are recorded in place of each sampled one."""
    routed_experts: bool = False
    """Whether the experts of every token are recorded."""
    deadline_s: Annotated[float, Field(gt=0)] = 3600.0
    """Deadline of an episode."""


def _policy_name(name: str) -> str:
    if re.fullmatch("[A-Za-z0-9_-]{1,64}", name) is None:
        raise ValueError(f"{name!r} is no name of a policy: it may have up to 64 letters, digits, - and _")
    if name == "policy":
        raise ValueError("'policy' is no name for one of several policies: it is that of the only one")
    return name


PolicyName = Annotated[str, AfterValidator(_policy_name)]
"""Name of one of several policies, by which agents choose it as their model."""


class ServedPolicySettings(SettingsSection):
    path: Path
    """Model directory of one of several policies: its tokenizer with a chat template."""
    tool_parser: Annotated[str, AfterValidator(_tool_parser)] = "auto"
    """As `gateway.tool_parser`."""
    train: bool = True
    """Whether it is trained. Turns of a frozen policy are recorded as context only."""
    engines: PolicyName | None = None
    """Policy whose engines serve it; None: it has its own."""
    adapter: bool = False
    """Whether these engines serve it as the LoRA adapter of its name."""


class GatewayCommand(SettingsSection):
    """Settings of `tidegate gateway`."""

    model: ModelSettings
    policies: dict[PolicyName, ServedPolicySettings] = {}
    """Policies by name, which requests name as their model; empty: there is one, that of `model.path`."""
    engine: EngineAddresses = EngineAddresses()
    env: Rewards = Rewards()
    gateway: StandaloneGateway = StandaloneGateway()
    limits: DefaultLimits = DefaultLimits()
    clients: ClientEpisodes = ClientEpisodes()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, policy in self.policies.items():
            if policy.engines is not None and policy.engines not in self.policies:
                raise ValueError(f"policies.{name}.engines = {policy.engines!r} is not the name of a policy")
        if self.policies and self.engine.urls:
            raise ValueError(
                "engine.urls does not say which policy an engine serves: add the engines of several policies "
                "by POST /engines, with their `policy`"
            )
        untrained = self.gateway.untrained_models if self.policies else []
        if unknown := [name for name in untrained if name not in self.policies]:
            raise ValueError(
                f"gateway.untrained_models has {unknown[0]!r}, which is no policy, so its calls are refused: "
                "let auxiliary calls name a policy, with the header x-tidegate-train: no"
            )
        return self
