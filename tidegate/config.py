"""The settings of a run: a section each for its parts.

settings = load_settings(Path("config.toml"), ["--trainer.max_staleness", "1"])
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tidegate.settings.cluster import ClusterSettings
from tidegate.settings.sections import DirectoryName, HttpUrl, SettingsSection, load


class RunSettings(SettingsSection):
    name: DirectoryName = "run"
    """The run's directory is `<dir>/<name>`."""
    dir: Path = Path("runs")
    """Where runs are kept."""
    seed: int = 0
    """Of the policy's generators and of every session's sampling."""
    live: bool = True
    """Show the live view where the terminal allows it; plain lines otherwise."""
    loggers: list[Literal["tensorboard", "wandb"]] = []
    """Who gets the metrics besides `metrics.jsonl`; each is an extra of the same name."""


class ModelSettings(SettingsSection):
    path: Path
    """A directory in Hugging Face format: weights, config, tokenizer with a chat template."""


ToolParser = Literal[
    "auto", "hermes", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "llama3_json", "mistral", "granite",
    "none",
]  # fmt: skip


class EngineSettings(SettingsSection):
    urls: list[HttpUrl] = []
    """Engines that already run, as `http://host:30000`. Empty: the run starts `count` of its own."""
    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    """What is started where no urls are given: Tidegate's own engine, or SGLang or vLLM from `python`."""
    count: Annotated[int, Field(ge=1)] = 1
    """Engines that are started, each a process of its own with the settings below."""
    python: Path | None = None
    """The interpreter of the environment that SGLang or vLLM is installed in."""
    arguments: list[str] = []
    """Passed to its server as they are; {index} becomes the engine's number, from 0."""
    device: str = "cpu"
    """Of the embedded engines: cpu, cuda, cuda:1; all of them share it. So with the rest below."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of an embedded engine's weights and cache."""
    threads: Annotated[int, Field(ge=1)] = 1
    """torch threads of an embedded engine; on shared cores one is faster than two."""
    max_slots: Annotated[int, Field(ge=1)] = 64
    """Requests that are decoded at the same time."""
    max_context: Annotated[int, Field(ge=16)] = 1024
    """Prompt + output tokens of one request. Other engines have a limit of their own."""
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 256
    """Keys and values kept of earlier sequences, so that a follow-up turn computes only what is new."""

    @property
    def context(self) -> int | None:
        """`max_context` where it holds: of the embedded engines that a run starts."""
        return self.max_context if self.kind == "embedded" and not self.urls else None

    @model_validator(mode="after")
    def _consistent(self) -> EngineSettings:
        if self.urls and self.count != 1:
            raise ValueError(
                f"engine.count = {self.count} is of engines to start, but engine.urls names running ones"
            )
        if self.kind == "embedded" and (self.python or self.arguments):
            raise ValueError('engine.python and engine.arguments are for engine.kind = "sglang" or "vllm"')
        if self.kind != "embedded" and not self.urls and self.python is None:
            raise ValueError(
                f'engine.kind = "{self.kind}" needs engine.python: the interpreter of the environment that '
                "it is in, as it pins other versions of torch and openai than this one; or engine.urls"
            )
        return self

    def numbered(self, index: int) -> list[str]:
        """The arguments of one of several engines."""
        return [one.replace("{index}", str(index)) for one in self.arguments]


class GatewaySettings(SettingsSection):
    host: str = "127.0.0.1"
    """Where the gateway listens; 0.0.0.0 is every address of this machine."""
    public_url: HttpUrl | None = None
    """Where agents reach the gateway, as `https://host:8000`: past a proxy or NAT. None: where it listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""
    admin_key: str | None = None
    """Needed to listen on anything but loopback."""
    shards: Annotated[int, Field(ge=1)] = 1
    """Processes that share the sessions, behind one address. A run that is resumed keeps their number."""
    tool_parser: ToolParser = "auto"
    """The form of the model's tool calls. auto: what its chat template writes; none: they stay text."""
    structured_output: Literal["text", "grammar"] = "text"
    """How replies to requests with a JSON schema are sampled in training. text: freely, and the client parses
    them; grammar: bound to the schema, and only tokens that it left to the policy are trained on."""
    untrained_models: list[str] = []
    """Model names that agents give for auxiliary calls (titles, summaries): recorded, never trained on."""


class EnvSettings(SettingsSection):
    use: str = "arithmetic"
    """A built-in environment's name, or `file.py:ClassOrObject`."""
    options: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Of the rewards of one episode, from when they start to run: they may queue for longer."""


class AgentSettings(SettingsSection):
    use: str = "solver"
    """A built-in agent's name, or `file.py:ClassOrFunction`."""
    options: dict[str, Any] = {}
    """Passed to the agent's constructor."""
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """One deadline over set-up and agent of a slot attempt; the reward has its own."""
    max_concurrency: Annotated[int, Field(ge=1)] = 128
    """Episodes that run at the same time; groups start while all of their episodes have a place."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Processes that share them, each attempt in the one that has the fewest."""


class SamplingSettings(SettingsSection):
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of split `train`, and of `eval/reward`; the trainer divides by the same temperature."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Of one reply."""


def _bound(value: int | str) -> int | str:
    if isinstance(value, int) and value < 0:
        raise ValueError("a staleness bound is a number of versions ≥ 0, or 'none'")
    return value


LOSSES = (
    "truncated", "truncated_sequence", "masked", "masked_sequence", "cispo", "grpo", "dr_grpo", "dapo",
    "gspo", "decoupled_ppo",
)  # fmt: skip
"""What `trainer.loss` may be; `trainer.loss.LOSSES` makes them."""
DECOUPLED = ("decoupled_ppo",)
"""Those that go on from π_old, so that a batch may be trained on in several optimiser steps."""


def _loss(name: str) -> str:
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.0)
        raise ValueError(f"there is no such loss; did you mean {close[0]!r}? Known: {', '.join(LOSSES)}")
    return name


class TrainerSettings(SettingsSection):
    steps: Annotated[int, Field(ge=1)] = 100
    """Optimiser steps of the run."""
    groups_per_batch: Annotated[int, Field(ge=1)] = 16
    """Groups of one optimiser step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Slots of a group: attempts at one task that are compared."""
    min_group_size: Annotated[int, Field(ge=2)] | None = None
    """A group with fewer trainable slots is failed. None: `group_size`, no partial group is trained."""
    max_staleness: Annotated[int | Literal["none"], AfterValidator(_bound)] = 2
    """The hard bound on a trained token's age in policy versions; `none` switches it off."""
    on_policy: bool = False
    """Exactly synchronous: `max_staleness` is 0 and `publish_interval` 1; other values are refused."""
    publish_interval: Annotated[int, Field(ge=1)] | Literal["never"] = 1
    """Optimiser steps between publishes; the last step is published too. `never` is for benchmarks: the
    engines keep the weights that they began with, and nobody waits for a publish."""
    publish_transport: Literal["files", "broadcast"] = "files"
    """How weights reach engines: as files that they read, or sent over a process group: NCCL where both
    are on GPUs, else gloo. They are written either way, for engines that are started again."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts of one slot before its group is partial or failed and its task is quarantined."""
    max_stale_retries: Annotated[int, Field(ge=0)] = 2
    """How often one task is recycled after its group went stale, before another task takes its place."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """AdamW's, after the warm-up; the default suits models of a billion parameters, tiny ones want more."""
    schedule: Literal["constant", "linear"] = "constant"
    """Of the learning rate; `linear` falls to a tenth at the last step."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's, on matrices."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear, from 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    loss: Annotated[str, AfterValidator(_loss)] = "truncated"
    """By name, see docs/losses.md: truncated, truncated_sequence, masked, masked_sequence, cispo, grpo,
    dr_grpo, dapo, gspo, decoupled_ppo."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """C of the losses that cap π/μ, by default −Σ sg[min(π/μ, C)]·A·log π ÷ N."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """How far below 1 a clipped ratio may be. None: the loss's own."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """How far above 1 a clipped ratio may be. None: the loss's own."""
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """The constant that dr_grpo divides by, in tokens a trajectory."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Parts of a batch, of as many groups each: an optimiser step each, which needs decoupled_ppo, unless
    `streaming`."""
    streaming: bool = False
    """Each minibatch is cut and learned from as soon as its groups are ready, while the others are still
    sampled; their gradients are summed into the batch's one optimiser step."""
    reference: Path | None = None
    """A frozen model in Hugging Face format, whose distance is measured, and penalised if one wants."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the penalty KL(π_θ‖π_ref)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that is estimated: k1 lowers the advantages, k2 and k3 are added to the loss."""
    dynamic_sampling: bool = True
    """Groups whose rewards are all alike are filtered and replaced; off: they train at advantage 0."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """What advantages are divided by: the standard deviation of the group's rewards (GRPO), of the batch's,
    or nothing (Dr. GRPO). None: nothing for dr_grpo, the group's for the others."""
    truncated_episodes: Literal["train", "mask"] = "train"
    """mask: their rewards count in the group, but they are not trained on (DAPO's overlong filtering)."""
    length_penalty: tuple[int, int] | None = None
    """Two numbers of sampled tokens: between them the reward falls by up to 1 (DAPO's overlong penalty)."""
    microbatch_tokens: Annotated[int, Field(ge=64)] = 8192
    """Padded tokens of one forward and backward pass."""
    device: str = "cpu"
    """Of the trainer: cpu, cuda, cuda:1."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Processes that train together, each with a shard of the policy (FSDP2); on `cuda` a GPU each."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward passes compute in. Parameters, their gradients, AdamW's moments and what is
    written and published are float32 either way."""
    activation_checkpointing: bool = False
    """Keep only what goes into each decoder layer, and compute the rest again on the way back: less memory
    for a third more arithmetic, and the same gradients."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """LoRA: matrices of this rank beside linear layers are trained instead of the model; published merged.
    0: the model itself is trained."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """What the matrices add is multiplied by this ÷ `lora_rank`."""
    lora_targets: list[str] = []
    """The linear layers that get them, by the end of their names, as q_proj. Empty: all but the head."""
    threads: Annotated[int, Field(ge=1)] = 1
    """torch threads of the trainer."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 25
    """Optimiser steps between checkpoints; one is always written at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Older ones are removed."""
    outage_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest outage (no engine, no retrieval server) that a run waits for; then it ends, to be resumed."""
    watchdog_s: Annotated[float, Field(gt=0)] = 300.0
    """Nothing moved for so long (or for two of `agent.deadline_s` + `env.reward_timeout_s`): print the ledger
    and stop."""

    @property
    def staleness_bound(self) -> int | None:
        """`max_staleness` as a number, None where there is no bound."""
        return None if self.max_staleness == "none" else int(self.max_staleness)

    @property
    def scale(self) -> str:
        """`advantage_scale`, or what the loss has by default."""
        return self.advantage_scale or ("none" if self.loss == "dr_grpo" else "group")

    @property
    def may_filter(self) -> bool:
        """Whether a ready group may be replaced by another, for nothing of it would be trained on."""
        return self.dynamic_sampling or self.truncated_episodes == "mask"

    def publishes(self, step: int) -> bool:
        """Whether the weights after `step` are published: those that the run ends with always are."""
        interval = self.publish_interval
        return isinstance(interval, int) and (step % interval == 0 or step == self.steps)

    @property
    def cuts(self) -> list[int]:
        """How many groups are cut at a time for one batch: all of them, or a minibatch when streaming."""
        parts = self.minibatches if self.streaming else 1
        bounds = [self.groups_per_batch * part // parts for part in range(parts + 1)]
        return [end - start for start, end in itertools.pairwise(bounds)]

    @property
    def smallest_group(self) -> int:
        return self.min_group_size or self.group_size

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.on_policy:
            self._force("max_staleness", 0)
            self._force("publish_interval", 1)
        if self.smallest_group > self.group_size:
            raise ValueError(
                f"min_group_size = {self.min_group_size} is more than group_size = {self.group_size}"
            )
        if self.length_penalty is not None and not 0 <= self.length_penalty[0] < self.length_penalty[1]:
            raise ValueError(
                f"length_penalty = {list(self.length_penalty)}: it begins before it ends, at ≥ 0"
            )
        if self.ranks > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"device = {self.device!r} is one device, but ranks = {self.ranks} have one each: "
                "set it to 'cuda'"
            )
        if self.lora_targets and not self.lora_rank:
            raise ValueError("lora_targets are of LoRA, which lora_rank switches on")
        self._loss_is_consistent()
        return self

    def _force(self, name: str, value: int) -> None:
        """Set what `on_policy` means; raises ValueError where something else was set."""
        found = getattr(self, name)
        if name in self.model_fields_set and found != value:
            raise ValueError(
                f"trainer.on_policy = true means {name} = {value}, but trainer.{name} = {found!r} is set: "
                "take one of the two out"
            )
        object.__setattr__(self, name, value)

    def _loss_is_consistent(self) -> None:
        """Raises ValueError where the loss's settings do not go together."""
        self._streaming_is_consistent()
        if self.minibatches > 1 and self.loss not in DECOUPLED and not self.streaming:
            raise ValueError(
                f"minibatches = {self.minibatches} with loss = {self.loss!r}: after the first optimiser step "
                f"π/μ is age and update in one. Several steps need loss = {DECOUPLED[0]!r}, which recomputes "
                "π_old at the cut"
            )
        if self.minibatches > 1 and self.on_policy and not self.streaming:
            raise ValueError("on_policy is one optimiser step a batch; minibatches must be 1")
        if self.minibatches > self.groups_per_batch:
            raise ValueError(
                f"minibatches = {self.minibatches} is more than groups_per_batch = {self.groups_per_batch}; "
                "a group is not split"
            )
        if self.kl_coefficient and self.reference is None:
            raise ValueError("kl_coefficient needs trainer.reference, the frozen model to stay close to")

    def _streaming_is_consistent(self) -> None:
        """Raises ValueError where streaming would be something else, or nothing."""
        if not self.streaming:
            return
        if self.minibatches == 1:
            raise ValueError("streaming is by minibatches: set trainer.minibatches to 2 or more")
        if self.loss in DECOUPLED:
            raise ValueError(
                f"streaming sums the minibatches' gradients into one optimiser step, {self.loss} is for "
                f"several. A step a minibatch is a smaller batch: groups_per_batch = "
                f"{max(1, self.groups_per_batch // self.minibatches)}, publish_interval = {self.minibatches}"
            )
        if self.scale == "batch":
            raise ValueError(
                "advantage_scale = 'batch' needs all rewards of a batch, of which streaming does not wait"
            )


class EvalSettings(SettingsSection):
    every: Annotated[int, Field(ge=0)] = 25
    """Optimiser steps between evaluations; 0: only before the first step and after the last."""
    tasks: Annotated[int, Field(ge=1)] = 200
    """Problems of each held-out set, before the first step and after the last."""
    interim_tasks: Annotated[int, Field(ge=1)] = 64
    """Problems of the evaluations in between."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """Episodes at the same time."""
    deadline_s: Annotated[float, Field(gt=0)] = 300.0
    """A whole evaluation; what has not ended by then is counted as unfinished."""


class Settings(SettingsSection):
    """All settings of a run; `tidegate train --settings` lists them with their defaults."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    env: EnvSettings = EnvSettings()
    agent: AgentSettings = AgentSettings()
    sampling: SamplingSettings = SamplingSettings()
    trainer: TrainerSettings = TrainerSettings()
    eval: EvalSettings = EvalSettings()
    cluster: ClusterSettings = ClusterSettings()

    @property
    def patience_s(self) -> float:
        """How long nothing may move: agents and rewards have their deadlines, whatever the watchdog says."""
        return max(self.trainer.watchdog_s, 2 * (self.agent.deadline_s + self.env.reward_timeout_s))

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        context = self.engine.context
        if context is not None and self.sampling.max_tokens >= context:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_context = {context}"
            )
        if self.gateway.structured_output == "grammar" and self.engine.kind != "embedded":
            raise ValueError(
                'gateway.structured_output = "grammar" needs engine.kind = "embedded": other engines do not '
                "report which tokens a grammar left to the policy, so no token of such a reply could be "
                'trained on; use gateway.structured_output = "text"'
            )
        if self.engine.kind == "vllm" and self.trainer.publish_transport == "broadcast":
            raise ValueError(
                'trainer.publish_transport = "broadcast": vLLM takes weights from files only (engine.kind = '
                '"vllm"); leave it at "files"'
            )
        loopback = self.gateway.host in ("127.0.0.1", "localhost", "::1")
        if not loopback and self.gateway.admin_key is None:
            raise ValueError(
                f"gateway.host = {self.gateway.host!r} is reachable by others: set gateway.admin_key"
            )
        return self


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> Settings:
    """A run's settings from a TOML file and dotted overrides, as `sections.load` reads them."""
    return load(Settings, path, overrides)
