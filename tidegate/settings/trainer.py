"""Settings of the trainer: the section `[trainer]` and its parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tidegate.settings.losses import SEVERAL_STEPS, AnyLoss, DPPOLoss
from tidegate.settings.promotion import PromotionSettings
from tidegate.settings.sections import Processes, SettingsSection
from tidegate.settings.teacher import TeacherSettings
from tidegate.settings.tinker import TinkerSettings

ENDLESS = 10**9
"""`trainer.steps` of a standing service whose settings give no limit."""


OWN_ONLY = (
    "loss", "minibatches", "streaming", "reference_model", "kl_coef", "teacher", "ess_scaling", "ranks",
    "replicas", "device", "compute_dtype", "activation_checkpointing", "compile", "publish_transport",
    "microbatch_tokens", "routing_replay",
)  # fmt: skip
"""Settings of gradients that are computed here."""


def _staleness(value: int | str) -> int | str:
    if isinstance(value, int) and value < 0:
        raise ValueError("a staleness bound is a number of versions ≥ 0, or 'none'")
    return value


class LoRASettings(SettingsSection):
    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the LoRA matrices, which are trained instead of the model. 0: no LoRA, the whole model is
    trained."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """LoRA scale: the matrices' output is multiplied by this ÷ `rank`."""
    targets: list[str] = []
    """Linear layers with LoRA matrices, by the end of their names, such as q_proj. Empty: all but the
    head."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engines get. merged: a whole model, which any engine serves. adapter: the matrices alone, a few
    percent of its bytes, which the engines apply beside the base model."""

    @model_validator(mode="after")
    def _consistent(self) -> LoRASettings:
        if not self.rank and (idle := self.other_than_default("alpha", "targets", "publish")):
            raise ValueError(f"{idle[0]} has no effect without LoRA: set trainer.lora.rank, or remove it")
        return self


class TrainerSettings(SettingsSection):
    backend: Literal["own", "tinker"] = "own"
    """Where gradients are computed: own, by this trainer; tinker, by the service of `trainer.tinker`, which
    trains LoRA matrices of rank `trainer.lora.rank`."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Number of steps of the run; each step trains on one batch."""
    until: float | None = None
    """Held-out reward, sampled as in training, at which the run ends before `steps`. If an evaluation between
    the first and the last step reaches it, it is repeated on `eval.tasks` tasks, and the run ends if these
    reach it, too. None: the run takes all steps."""
    groups_per_batch: Annotated[int, Field(ge=1)] = 16
    """Groups in one batch."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Episodes of one task, whose rewards are compared; 1 needs `baseline` = batch or key, or a teacher alone
    (`trainer.teacher.reward_weight` = 0)."""
    min_group_size: Annotated[int, Field(ge=1)] | None = None
    """Least number of trainable episodes of a group; with fewer it fails. None: `group_size`."""
    max_staleness: Annotated[int | Literal["none"], AfterValidator(_staleness)] = 2
    """Hard bound on the age of trained tokens, in policy versions; `none` switches it off."""
    on_policy: bool = False
    """Synchronous training: implies `max_staleness` = 0 and `publish_interval` = 1; other values are
    refused."""
    publish_interval: Annotated[int, Field(ge=1)] | Literal["never"] = 1
    """Steps between publishes; the last step is published, too. `never`, for benchmarks: no step
    is, and the engines keep their initial weights."""
    publish_transport: Literal["files", "broadcast"] = "files"
    """How weights reach engines: as files, or sent over a process group (NCCL if both sides are on GPUs, else
    gloo). The files are written in either case, for engines that restart."""
    publish_full_every: Annotated[int, Field(ge=1)] = 8
    """Versions from one that is written with all weights to the next; the ones between are written as
    differences while these are smaller and faster. 1: all weights every time."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Failures of one slot, other than `infra_error`, after which its task is quarantined."""
    max_infra_attempts: Annotated[int, Field(ge=1)] = 10
    """Failures of one slot that neither the policy nor its task caused (`infra_error`, or the agents' process
    exited) before it is given up. They never quarantine the task, and those of an outage do not count."""
    max_stale_retries: Annotated[int, Field(ge=0)] = 2
    """Times that a task is issued again after its group became stale, before another task replaces it."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of AdamW after the warm-up. None: by the number of parameters, from 3e-4 for a million to
    1e-6 for a billion and more; ten times as high with LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate; `linear` and `cosine` fall to a tenth at the last step. A resume with
    more `steps` continues on the longer schedule, whose rate is higher at the same step."""
    ess_scaling: bool = False
    """Multiply the learning rate of each step by √`ess_rows`, the square root of the normalised effective
    sample size of the batch (docs/losses.md)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW on matrices."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Decay rate β₁ of AdamW's mean of gradients. Old batches act as momentum already (Mitliagkas et al.,
    2016), so the usual 0.9 is too much (docs/losses.md). Fine-tuning takes 0.9."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of a linear warm-up of the learning rate from 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2
    """Norm to which gradients are clipped. Most steps have a larger one, so no batch counts much more than
    others."""
    loss: AnyLoss = DPPOLoss()
    """Loss, by its name, with the settings that it has (docs/losses.md)."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Parts of a batch with an equal number of groups. Each is one optimiser step, which requires
    decoupled_ppo, unless `streaming` is on."""
    streaming: bool = False
    """Process each minibatch as soon as its groups are ready, while the others are still sampled; the
    gradients are summed into one optimiser step per batch."""
    reference_model: Path | None = None
    """Frozen model in Hugging Face format; its KL divergence from the policy is measured."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the penalty KL(π_θ‖π_ref)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of this KL divergence: k1 lowers the advantages, k2 and k3 are added to the loss."""
    teacher: TeacherSettings = TeacherSettings()
    """Distillation from a teacher, which scores the sampled tokens."""
    baseline: Literal["group", "leave_one_out", "batch", "key"] = "group"
    """What an episode's reward is compared with: the mean of its group (GRPO), of the group's other episodes
    (RLOO), or of the batch (REINFORCE++). key: the running mean of the episodes of its project key, or of its
    task if the trainer issued it."""
    max_client_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest share of a batch that the groups and conversations of one project key may have."""
    max_stale_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """A publish waits while it would make more than this share of the clients' open conversations exceed the
    staleness bound. None: publishes do not wait."""
    promotion: PromotionSettings = PromotionSettings()
    """Tests of versions before they go live."""
    gate_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit of the wait that `max_stale_share` causes."""
    dynamic_sampling: bool | None = None
    """Drop and replace groups whose rewards are all equal; off: they are trained on with advantage 0. None:
    on, except with `baseline` = batch or key, to which such groups contribute, and with a teacher, which
    scores them too."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Divisor of advantages: the standard deviation of the rewards in the group (GRPO) or in the batch, or
    none (Dr. GRPO). None: the default of the baseline (none for leave_one_out, batch for batch) or of the
    loss (none for dr_grpo, group for the others)."""
    filter: str | None = None
    """Function of your own, as `file.py:function`: called with each group, which is not trained on if it
    returns False (docs/losses.md)."""
    truncated_episodes: Literal["train", "mask"] = "train"
    """mask: rewards of truncated episodes count in their group, but the episodes are not trained on (DAPO's
    overlong filtering)."""
    length_penalty: tuple[int, int] | None = None
    """Two numbers of sampled tokens, as [a, b]: the reward is reduced by 0 up to a tokens, by 1 from b
    tokens, and linearly in between (DAPO's overlong penalty)."""
    microbatch_tokens: Annotated[int, Field(ge=64)] = 8192
    """Padded tokens of one forward and backward pass."""
    device: str = "cpu"
    """Device of the trainer: cpu, cuda, cuda:1."""
    ranks: Processes = 1
    """Trainer processes, each with a shard of the policy (FSDP2); on `cuda` each uses one GPU."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Copies of the sharded policy (HSDP). Each has `ranks` ÷ `replicas` consecutive ranks, such as those of
    one machine; between copies only gradients are reduced."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of forward and backward passes. None: float32 on a CPU, bfloat16 on a GPU. Parameters,
    gradients, AdamW's moments, logits and checkpoints are always float32; weights are published in
    `engine.dtype`."""
    activation_checkpointing: bool = False
    """Store only the inputs of each decoder layer and recompute its activations in the backward pass: less
    memory for a third more arithmetic, with identical gradients."""
    compile: bool = False
    """Compile decoder layers by torch.compile: fewer passes over memory, after minutes of compilation."""
    lora: LoRASettings = LoRASettings()
    routing_replay: bool = False
    """Have engines record the experts of every token of a mixture-of-experts model, and train with them
    (docs/losses.md)."""
    tinker: TinkerSettings = TinkerSettings()
    threads: Processes = 1
    """torch threads of the trainer."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 25
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of checkpoints that are kept; older ones are removed."""
    outage_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest outage (no engine, no worker, or a service that fails) that a run waits for before it stops; it
    can be resumed."""
    watchdog_s: Annotated[float, Field(gt=0)] = 300.0
    """Time without progress after which the run prints its counts of groups and stops; at least twice
    `agent.deadline_s` + `env.reward_timeout_s`."""

    @property
    def staleness_bound(self) -> int | None:
        """`max_staleness` as a number, None if there is no bound."""
        return None if self.max_staleness == "none" else int(self.max_staleness)

    @property
    def pass_dtype(self) -> str:
        """`compute_dtype`, or its default."""
        return self.compute_dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def scale(self) -> str:
        """`advantage_scale`, or the default of the baseline or the loss."""
        by_baseline = {
            "group": self.loss.advantage_scale, "leave_one_out": "none", "batch": "batch", "key": "batch",
        }  # fmt: skip
        return self.advantage_scale or by_baseline[self.baseline]

    @property
    def step_limit(self) -> int | None:
        """`steps`; None for a standing service without a limit."""
        return self.steps if self.steps < ENDLESS else None

    @property
    def filters_equal_rewards(self) -> bool:
        """Whether groups whose rewards are all equal are replaced."""
        default = self.compares_in_groups and not self.teacher.enabled
        return default if self.dynamic_sampling is None else self.dynamic_sampling

    @property
    def may_filter(self) -> bool:
        """Whether a ready group may be replaced because none of it would be trained on."""
        return self.filters_equal_rewards or self.truncated_episodes == "mask"

    def reached(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether the metrics of an evaluation reach `until`; False without an evaluation."""
        reward = metrics.get("eval/reward")
        return self.until is not None and reward is not None and reward >= self.until

    def is_publish_step(self, step: int) -> bool:
        """Returns whether the weights after `step` are published; those of the last step always are."""
        interval = self.publish_interval
        return isinstance(interval, int) and (step % interval == 0 or step == self.steps)

    @property
    def part_sizes(self) -> list[int]:
        """Sizes in groups of the parts in which a batch is assembled: one part, or minibatches if
        streaming."""
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
                f"length_penalty = {list(self.length_penalty)}: it must be two increasing numbers ≥ 0"
            )
        if self.ranks > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"device = {self.device!r} is a single device, but ranks = {self.ranks} need one each: "
                "set it to 'cuda'"
            )
        if self.ranks % self.replicas:
            raise ValueError(
                f"ranks = {self.ranks} are no multiple of replicas = {self.replicas}: change one of them"
            )
        if not self.kl_coef and self.other_than_default("kl_estimator"):
            raise ValueError("kl_estimator has no effect without a penalty: set kl_coef, or remove it")
        if self.max_stale_share is None and self.other_than_default("gate_timeout_s"):
            raise ValueError("gate_timeout_s has no effect without max_stale_share: set it, or remove this")
        if self.max_stale_share is not None and self.staleness_bound is None:
            raise ValueError(
                'max_stale_share has no effect with max_staleness = "none", by which no conversation is too '
                "stale: set a bound, or remove it"
            )
        smallest = min(self.part_sizes)
        if self.max_client_share * smallest < 1:
            raise ValueError(
                f"max_client_share = {self.max_client_share:g} admits no group of a client to a batch or "
                f"minibatch of {smallest}: raise it to at least {math.ceil(1000 / smallest) / 1000:g}"
            )
        self._check_baseline()
        self._check_loss()
        self._check_backend()
        return self

    def _check_backend(self) -> None:
        """Raises ValueError if settings contradict `backend`."""
        service, lora = self.tinker, self.lora
        if self.backend == "own":
            if idle := service.other_than_default(*type(service).model_fields):
                raise ValueError(f'tinker.{idle[0]} has no effect without backend = "tinker"')
            return
        if not (service.base_model and lora.rank and self.learning_rate is not None):
            raise ValueError(
                'backend = "tinker" needs tinker.base_model, lora.rank and learning_rate: set all three'
            )
        idle = self.other_than_default(*OWN_ONLY)
        idle += [f"lora.{name}" for name in lora.other_than_default("alpha", "targets")]
        idle += ["promotion.mode"] if self.promotion.mode != "always" else []
        if idle:
            instead = "set tinker.loss instead" if idle[0] == "loss" else "remove it"
            raise ValueError(f'{idle[0]} is not supported by backend = "tinker": {instead}')

    @property
    def compares_in_groups(self) -> bool:
        """Whether an episode is compared with those of its group alone."""
        return self.baseline in ("group", "leave_one_out")

    def _check_baseline(self) -> None:
        """Raises ValueError if the baseline contradicts the groups, their scale or their filter."""
        if self.teacher.alone:
            self._check_teacher_alone()
        elif self.smallest_group == 1 and self.compares_in_groups:
            raise ValueError(
                f"baseline = {self.baseline!r} has nothing to compare a single episode of a group with: set "
                "baseline to 'batch' or 'key', or group_size and min_group_size to 2 or more"
            )
        if not self.compares_in_groups and self.advantage_scale == "group":
            raise ValueError(
                f"advantage_scale = 'group' contradicts baseline = {self.baseline!r}: set it to batch or none"
            )
        if not self.compares_in_groups and self.dynamic_sampling:
            raise ValueError(
                f"dynamic_sampling has no effect with baseline = {self.baseline!r}: it trains on groups with "
                "equal rewards as well; remove one of the two"
            )

    def _check_teacher_alone(self) -> None:
        """Raises ValueError if a setting concerns rewards, which have no weight."""
        names = ("baseline", "dynamic_sampling", "advantage_scale", "length_penalty")
        if idle := [name for name in self.other_than_default(*names) if getattr(self, name) is not False]:
            raise ValueError(
                f"{idle[0]} has no effect with teacher.reward_weight = 0, as no reward is learned from: "
                "remove it, or raise teacher.reward_weight"
            )

    def _force(self, name: str, value: int) -> None:
        """Sets a value that `on_policy` implies; raises ValueError if the user set another one."""
        current = getattr(self, name)
        if name in self.model_fields_set and current != value:
            raise ValueError(
                f"trainer.on_policy = true means {name} = {value}, but trainer.{name} = {current!r} is set: "
                "remove one of the two"
            )
        object.__setattr__(self, name, value)

    def _check_loss(self) -> None:
        """Raises ValueError if settings of the loss contradict each other."""
        self._check_streaming()
        if self.minibatches > 1 and not self.loss.several_steps and not self.streaming:
            raise ValueError(
                f"minibatches = {self.minibatches} with trainer.loss.name = {self.loss.name!r}: with more "
                "than one optimiser step per batch, π/μ mixes staleness with the updates already taken; "
                f"set trainer.loss.name = {SEVERAL_STEPS[0]!r}, which recomputes π_old for each batch"
            )
        if self.ess_scaling and self.minibatches > 1 and not self.streaming:
            raise ValueError(
                "ess_scaling needs the effective sample size of the whole batch before its first optimiser "
                f"step: set minibatches to 1, not {self.minibatches}"
            )
        if self.minibatches > 1 and self.on_policy and not self.streaming:
            raise ValueError("on_policy allows one optimiser step per batch; set minibatches to 1")
        if self.minibatches > self.groups_per_batch:
            raise ValueError(
                f"minibatches = {self.minibatches} is more than groups_per_batch = {self.groups_per_batch}; "
                "groups are not split"
            )
        if self.kl_coef and self.reference_model is None:
            raise ValueError("kl_coef needs trainer.reference_model, the frozen model of the penalty")

    def _check_streaming(self) -> None:
        """Raises ValueError if streaming contradicts other settings or has no effect."""
        if not self.streaming:
            return
        if self.minibatches == 1:
            raise ValueError("streaming processes minibatches: set trainer.minibatches to 2 or more")
        if self.loss.several_steps:
            raise ValueError(
                f"streaming sums the gradients of minibatches into one step, but {self.loss.name} is for "
                f"several steps. For one step per minibatch use smaller batches: groups_per_batch = "
                f"{max(1, self.groups_per_batch // self.minibatches)}, publish_interval = {self.minibatches}"
            )
        if not self.compares_in_groups or self.scale == "batch":
            name, value = (
                ("advantage_scale", "batch") if self.compares_in_groups else ("baseline", self.baseline)
            )
            raise ValueError(
                f"{name} = {value!r} needs all rewards of a batch at once, but streaming trains on "
                "minibatches as they become ready"
            )
