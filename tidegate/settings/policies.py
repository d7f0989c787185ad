"""Settings of a run with several policies: the sections `[policies.NAME]`; and what engines take as a LoRA
adapter (`trainer.lora.publish = "adapter"`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tidegate.settings.losses import AnyLoss
from tidegate.settings.sections import SettingsSection
from tidegate.settings.servers import EngineSettings, PolicyName
from tidegate.settings.trainer import LoRASettings, TrainerSettings


class PolicySettings(SettingsSection):
    """One policy of several (docs/policies.md). What is not set here is that of the run."""

    path: Path | None = None
    """Model directory in Hugging Face format. None: that of `model.path`."""
    train: bool = True
    """Whether it is trained. false: its weights stay those of `path`, and its turns are context only."""
    earlier: PolicyName | None = None
    """Name of a trained policy of which this one is an earlier self: its weights are those of `behind`
    versions ago. It is not trained itself."""
    behind: Annotated[int, Field(ge=1)] = 1
    """Number of versions between the weights of `earlier` and of this policy."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Learning rate. None: `trainer.learning_rate`."""
    loss: AnyLoss | None = None
    """Loss, as `trainer.loss`. None: that."""
    lora: LoRASettings | None = None
    """LoRA, as `trainer.lora`. None: that."""
    engine: EngineSettings | None = None
    """Engines of this policy, as `engine`. None: those settings, for engines of its own. Policies of one base
    whose adapters are published share engines unless this is set."""

    @property
    def trained(self) -> bool:
        return self.train and self.earlier is None

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        if self.earlier is None and self.other_than_default("behind"):
            raise ValueError("behind has no effect without earlier: set it, or remove this")
        if self.earlier is not None and (idle := self.other_than_default("path", "train", "lora")):
            raise ValueError(f"{idle[0]} has no effect with earlier: its model is that of {self.earlier!r}")
        if not self.trained and (idle := self.other_than_default("learning_rate", "loss")):
            raise ValueError(f"{idle[0]} has no effect, as this policy is not trained: remove it")
        return self


def check_policies(
    policies: Mapping[str, PolicySettings], trainer: TrainerSettings, engine: EngineSettings
) -> None:
    """Raises ValueError if the policies of a run contradict each other, `trainer` or `engine`."""
    trained = [name for name, policy in policies.items() if policy.trained]
    if not trained:
        raise ValueError("policies: none is trained, so the run has nothing to do")
    for name, policy in policies.items():
        if policy.earlier is not None and policy.earlier not in trained:
            raise ValueError(
                f"policies.{name}.earlier = {policy.earlier!r} is no trained policy; these are: "
                f"{', '.join(trained)}"
            )
        if policy.loss is not None and policy.loss.listed_ids != trainer.loss.listed_ids:
            raise ValueError(
                f"policies.{name}.loss.score_centering must be that of trainer.loss: engines record the "
                "likeliest ids of all policies or of none"
            )
        if policy.engine is not None and policy.engine.urls:
            raise ValueError(
                f"policies.{name}.engine.urls is not supported: a run starts its policies' engines"
            )
        if (policy.engine or engine).kind == "tinker":
            raise ValueError('engine.kind = "tinker" is not supported with policies: use another kind')
        if (policy.engine or engine).pause != engine.pause:
            raise ValueError(
                f"policies.{name}.engine.pause must be engine.pause: all engines load a version together"
            )
        if (policy.engine or engine).device == "cuda":
            raise ValueError(
                'engine.device = "cuda" chooses no GPU for the engines of several policies: give each policy '
                'its own, as policies.NAME.engine.device = "cuda:1"'
            )
    if trainer.baseline == "key":
        raise ValueError('trainer.baseline = "key" is not supported with policies: use "group" or "batch"')


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
SGLANG_NEEDS = (
    ("q_proj", "v_proj"), ("k_proj", "q_proj"), ("k_proj", "v_proj"), ("v_proj", "q_proj"),
    ("up_proj", "gate_proj"),
)  # fmt: skip
"""Layers whose adapters SGLang 0.5.23 reads only beside those of the second one."""


def check_adapter(trainer: TrainerSettings, engine: EngineSettings) -> None:
    """Raises ValueError if engines or transport cannot take a LoRA adapter."""
    if trainer.lora.publish != "adapter":
        return
    kind, promotion, rank = engine.kind, trainer.promotion.mode, trainer.lora.rank
    if kind == "tinker":
        raise ValueError(
            'trainer.lora.publish = "adapter" has no effect with engine.kind = "tinker", whose service '
            "keeps the adapter; remove it"
        )
    if kind != "embedded" and promotion != "always":
        raise ValueError(
            f'trainer.lora.publish = "adapter" does not go with trainer.promotion.mode = "{promotion}" '
            f'and engine.kind = "{kind}", which cannot start with an earlier adapter; use "merged"'
        )
    if kind == "vllm" and rank > max(VLLM_RANKS):
        raise ValueError(
            f"trainer.lora.rank = {rank}: vLLM serves adapters of at most rank {max(VLLM_RANKS)}; lower "
            'it, or use trainer.lora.publish = "merged"'
        )
    targets = {target.rpartition(".")[2] for target in trainer.lora.targets}
    missing = {need for given, need in SGLANG_NEEDS if given in targets} - targets
    if kind == "sglang" and missing:
        raise ValueError(
            f"trainer.lora.targets = {trainer.lora.targets}: SGLang joins matrices of some layers "
            f"and reads these only with {' and '.join(sorted(missing))}, too; add it"
        )
    if engine.pause == "in_place":
        raise ValueError(
            'engine.pause = "in_place" has no effect with trainer.lora.publish = "adapter", whose '
            "publishes pause nothing; remove it"
        )
    if trainer.publish_transport != "files":
        raise ValueError(
            'trainer.lora.publish = "adapter" needs trainer.publish_transport = "files": a broadcast '
            "sends whole models; remove one of the two"
        )
