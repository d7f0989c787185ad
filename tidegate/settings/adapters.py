"""What engines take as a LoRA adapter (`trainer.lora.publish = "adapter"`)."""

from __future__ import annotations

from tidegate.settings.servers import EngineSettings
from tidegate.settings.trainer import TrainerSettings

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
