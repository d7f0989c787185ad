"""A gateway's groups as the rollouts of TRL's GRPOTrainer (docs/trainers.md); written for TRL 1.16."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tidegate.errors import ConfigError, TrainingError
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.own import OwnTrainer, rewards_differ
from tidegate.trainer.records.formats import trl_row
from tidegate.types import Group, Trajectory

logger = logging.getLogger(__name__)


class Rollouts(TrainerCallback):  # type: ignore[misc]
    """Groups of a gateway for a `GatewayGRPOTrainer`, whose steps it commits and publishes.

    Use it with `with`. Its arguments are those of `OwnTrainer`.

    Attributes:
        checkpoint: Directory of the newest committed step, to resume from; None before the first one.
    """

    def __init__(self, url: str, engines: Sequence[str], directory: Path, **more: Any) -> None:
        self._own = OwnTrainer(url, engines, directory, **more)
        self._runner = asyncio.Runner()
        self._groups: list[Group] = []
        self._trainer: Any = None

    @property
    def checkpoint(self) -> str | None:
        return None if self._own.checkpoint is None else str(self._own.checkpoint / "model")

    def __enter__(self) -> Self:
        # One event loop for all steps: the clients' connections belong to it.
        self._runner.__enter__()
        try:
            self._runner.run(self._own.__aenter__())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *failure: Any) -> None:
        try:
            self._runner.run(self._own.__aexit__(*failure))
        finally:
            self._runner.close()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Returns a batch for TRL: a row for each prompt, groups one after another.

        Raises:
            ConfigError: TRL evaluates, or a group has another size than `num_generations`.
            TrainingError: A token was sampled at another temperature than TRL's `temperature`, or with top-p,
            top-k or min-p.
        """
        self._trainer, args = trainer, trainer.args
        if not trainer.model.training:
            raise ConfigError('rollouts of a gateway are for training: set eval_strategy = "no"')

        def wanted(group: Group) -> bool:
            if len(group.trajectories) != args.num_generations:
                raise ConfigError(
                    f"group {group.id} has {len(group.trajectories)} episodes, TRL's num_generations is "
                    f"{args.num_generations}: set it to the number of episodes of the clients' groups"
                )
            branched = [one.session_id for one in group.trajectories if len(rows_of(one, 0.0)) > 1]
            if branched:
                logger.warning(
                    "group %s is left out: session %s has several token sequences, TRL takes one per episode",
                    group.id, branched[0],
                )  # fmt: skip
            return not branched and rewards_differ(group)

        number = len(prompts) // args.num_generations
        self._groups = self._runner.run(self._own.batch(number, wanted))
        rows = [
            _row(trajectory, reward, args.temperature, trainer.processing_class.eos_token_id)
            for group in self._groups
            for trajectory, reward in zip(group.trajectories, group.rewards(), strict=True)
        ]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Commits the step: model, optimiser and state of TRL's trainer, from which it can resume."""

        def save(path: Path) -> None:
            directory = str(path / "model")
            self._trainer.save_model(directory)
            self._trainer._save_optimizer_and_scheduler(directory)
            self._trainer._save_rng_state(directory)
            state.save_to_json(str(path / "model" / "trainer_state.json"))

        self._runner.run(self._own.commit(self._groups, save))


class GatewayGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with a gateway's episodes: their ids, masks and rewards, and π/μ as the ratio.

    TRL itself takes its own recomputed logprobs as those of the old policy; here they are the engine's,
    so that tokens of older versions are weighted by their true ratio.

    Args:
        rollouts: Entered rollouts of the gateway.
        args: TRL's settings, with `max_steps`; one optimiser step per batch.
        more: Other arguments of GRPOTrainer, such as `model` and `processing_class`.

    Raises:
        ConfigError: A setting does not go with rollouts of a gateway.
    """

    def __init__(self, rollouts: Rollouts, args: GRPOConfig, **more: Any) -> None:
        steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
        for refused, why in (
            (args.max_steps < 1, "set max_steps to the number of steps"),
            (args.use_vllm, "set use_vllm = False: the gateway's engines sample"),
            (args.num_iterations != 1, f"num_iterations is {args.num_iterations}: set it to 1"),
            (
                steps != accumulated,
                f"steps_per_generation is {steps} and gradient_accumulation_steps {accumulated}: make them "
                "equal, for one optimiser step per batch",
            ),
            (args.world_size != 1, f"there are {args.world_size} processes: start one"),
            (more.get("peft_config"), "leave out peft_config: engines load whole models"),
        ):
            if refused:
                raise ConfigError(f"TRL with a gateway: {why}")
        groups = args.generation_batch_size // args.num_generations
        super().__init__(
            args=args,
            train_dataset=Dataset.from_list([{"prompt": ""}] * (groups * args.max_steps)),
            reward_funcs=episode_reward,
            rollout_func=rollouts,
            callbacks=[*more.pop("callbacks", ()), rollouts],
            **more,
        )

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        # TRL would take its own recomputed logprobs, in which no staleness is left.
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch


def episode_reward(reward: list[float], **_: Any) -> list[float]:
    """Returns the rewards that the episodes' clients gave."""
    return reward


def _row(trajectory: Trajectory, reward: float, temperature: float, padding: int) -> dict[str, Any]:
    rows = rows_of(trajectory, 0.0)
    if not rows:  # nothing to train on, but its reward counts in the group
        empty = {"prompt_ids": [padding], "completion_ids": [padding], "logprobs": [0.0], "env_mask": [0]}
        return {
            **empty, "reward": reward, "versions": [-1], "group_id": trajectory.group_id or "",
            "session_id": trajectory.session_id,
        }  # fmt: skip
    [row] = rows
    if (others := row.temperature[row.mask & (row.temperature != np.float32(temperature))]).size:
        raise TrainingError(
            f"session {trajectory.session_id} was sampled at the temperature {others[0]}, TRL's temperature "
            f"is {temperature}: set it to the agents'"
        )
    if row.kept_ids is not None:
        raise TrainingError(
            f"session {trajectory.session_id} was sampled with top-p, top-k or min-p, and its logprobs are "
            "those among the kept ids; TRL computes them over all ids: leave clients.top_p, top_k, min_p and "
            "narrowed_by_agents out of the gateway's settings"
        )
    return trl_row(row, reward)
