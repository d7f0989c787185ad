"""The trained policy: a causal language model, its optimiser, and the update on one batch of rows."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tidegate.config import TrainerSettings
from tidegate.errors import StartError, TrainingError
from tidegate.service.heap import share_one_heap
from tidegate.trainer.batch.microbatch import padding_ratio
from tidegate.trainer.batch.rows import (
    TrainingSequence,
    check_listed,
    check_routed,
    check_scored,
    minibatches,
)
from tidegate.trainer.batch.share import RankShare
from tidegate.trainer.checkpoint.checkpoint import OPTIMIZER, Storable
from tidegate.trainer.checkpoint.huggingface import cast, tokenizer_files, write_model
from tidegate.trainer.checkpoint.shards import raise_hidden_os_error
from tidegate.trainer.losses.built_in import make_loss
from tidegate.trainer.policy.diagnostics import Diagnostics, distance_metrics
from tidegate.trainer.policy.forward import Forward
from tidegate.trainer.policy.gradient import GradientStep
from tidegate.trainer.policy.lora import Adapter
from tidegate.trainer.policy.optimizer import adamw, learning_rate, suitable_rate
from tidegate.trainer.policy.ranks import Ranks
from tidegate.trainer.policy.state import PolicyState, PolicyWeights
from tidegate.turn import Logprobs

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(slots=True)
class _PendingBatch:
    """A batch whose last optimiser step has not been taken yet."""

    diagnostics: Diagnostics
    steps: list[GradientStep] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    seconds: float = 0.0


def collective(
    method: Callable[Concatenate[Policy, Parameters], Result],
) -> Callable[Concatenate[Policy, Parameters], Result]:
    """Make the other ranks call a method of the policy whenever rank 0 does."""

    @functools.wraps(method)
    def on_all_ranks(policy: Policy, /, *arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        with policy.ranks.call(method.__name__, *arguments, **options):
            return method(policy, *arguments, **options)

    return on_all_ranks


class Policy:
    """A Hugging Face causal LM with AdamW, held by one rank or sharded over several.

    Its methods block: call them in a thread.

    The model stays in evaluation mode with gradients on: dropout would make π differ from the policy that
    samples.

    Args:
        model: the model to train.
        base: directory of the base model, for its tokenizer files.
        settings: the `[trainer]` settings.
        reference: frozen model with the same vocabulary, for the KL penalty.
        ranks: the ranks that hold the policy; by default only this process.

    Attributes:
        steps: number of batches trained on.
        non_finite: ids of the groups whose loss or gradient was not finite in the last batch.
        untrained: ids of the groups of the last batch on which no optimiser step was taken: those of the
            step that was not finite and of the steps after it.
    """

    def __init__(
        self,
        model: Any,
        base: Path,
        settings: TrainerSettings,
        reference: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        if settings.learning_rate is None:
            rate = suitable_rate(model.num_parameters(), lora=bool(settings.lora.rank))
            settings = settings.model_copy(update={"learning_rate": rate})
        self.model = model
        self.settings = settings
        self.ranks = ranks or Ranks(settings)
        self.steps = 0
        self.non_finite: list[str] = []
        self.untrained: list[str] = []
        self._pending: _PendingBatch | None = None
        # Engines that read it from an adapter's files have other working directories.
        self._base = base.absolute()
        self._tokenizer = tokenizer_files(base)
        self._loss = make_loss(settings)
        self._adapter = Adapter.inject(model, settings.lora) if settings.lora.rank else None
        self._weights = PolicyWeights(model, self._adapter, self.ranks)
        self._forward = Forward(model, settings, self.ranks, replays=settings.routing_replay)
        self._reference = None if reference is None else Forward(reference, settings, self.ranks)
        self._optimizer = adamw(model, settings)
        self.device = self._forward.device
        self._state = PolicyState(
            model, self._optimizer, self._adapter, self._weights, self.ranks, self.device
        )

    @classmethod
    def load(cls, path: Path, settings: TrainerSettings, seed: int = 0, ranks: Ranks | None = None) -> Policy:
        """Load a model in float32 and create its optimiser.

        Sets torch's thread count and seed, disables transformers' progress bars and has glibc keep one heap,
        for the whole process.

        Raises:
            StartError: if the model or the reference cannot be loaded, or not trained with these settings.
        """
        share_one_heap()
        torch.set_num_threads(settings.threads)
        # An adapter's matrix A is drawn from this generator.
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        ranks = ranks or Ranks(settings)
        # Dropout would make π differ from the policy that samples.
        model = ranks.read_model(path).eval()
        if settings.reference_model is None:
            return cls(model, path, settings, ranks=ranks)
        reference = ranks.read_model(settings.reference_model).eval().requires_grad_(False)
        size, reference_size = (each.config.get_text_config().vocab_size for each in (model, reference))
        if size != reference_size:
            raise StartError(
                f"trainer.reference_model = {settings.reference_model} has a vocabulary of {reference_size}, "
                f"{path} one of {size}: the reference must be a model with the same tokens"
            )
        return cls(model, path, settings, reference, ranks)

    def update(self, rows: Sequence[TrainingSequence], version: int) -> dict[str, float]:
        """Train on a batch, in one optimiser step or in `trainer.minibatches` of them.

        If a step's loss or gradient is not finite, this step and the following ones are skipped: see
        `non_finite` and `untrained`.

        Args:
            rows: rows of the batch.
            version: version of the current weights.

        Returns:
            The batch's metrics, means over its steps, each measured before the step. `skipped` is 1 if no
            step was taken.

        Raises:
            TrainingError: if no row has a trained token.
        """
        self._pending = None
        for part in minibatches(rows, self.settings.minibatches) if self.settings.streaming else [rows]:
            self.backward(part, version)
        return self.optimizer_step()

    def backward(self, rows: Sequence[TrainingSequence], version: int) -> None:
        """Run the forward and backward passes of a batch; when streaming, of one of its minibatches.

        If a batch has several optimiser steps, this also takes all but the last one.
        """
        trained = [row for row in rows if row.trained]
        if not trained:
            return
        if self.settings.teacher.enabled:
            check_scored(trained, self.settings.teacher.asked_top_k)
        if self.settings.loss.listed_ids:
            check_listed(trained)
        if (replay := self._forward.replay) is not None:
            check_routed(trained, replay.width, replay.count)
        parts = [trained] if self.settings.streaming else minibatches(trained, self.settings.minibatches)
        self._on_shares(self.backward_shares, parts, version)

    def backward_shares(self, shares: Sequence[RankShare], version: int) -> None:
        """Run a rank's part of `backward`, with its share of each optimiser step."""
        started = time.perf_counter()
        if self._pending is None:
            self._pending = _PendingBatch(Diagnostics(version))
            self.non_finite = []
        batch = self._pending
        shares = [self._with_reference_logprobs(share) for share in shares]
        batch.groups |= {group for share in shares for group in share.groups}
        if self.settings.streaming:
            if not batch.steps:
                batch.steps.append(self._begin_step())
            batch.steps[0].accumulate(shares[0], batch.diagnostics)
        else:
            self._run_minibatches(batch, shares)
        batch.seconds += time.perf_counter() - started

    @property
    def has_batch(self) -> bool:
        """Whether `backward` has computed gradients for which no step was taken yet."""
        return self._pending is not None and bool(self._pending.steps)

    @collective
    def prepare_step(self) -> bool:
        """Compute loss and norm of the batch's last step; returns whether both are finite."""
        if self._pending is None:
            raise TrainingError("a batch has no trainable token")
        step = self._pending.steps[-1]
        self._finish(step)
        return step.finite

    @collective
    def optimizer_step(self, *, skip: bool = False) -> dict[str, float]:
        """Take the batch's last optimiser step, unless `skip`; returns the batch's metrics, see `update`."""
        started = time.perf_counter()
        batch, self._pending = self._pending, None
        if batch is None or not batch.steps:
            raise TrainingError("a batch has no trainable token")
        own = [forward_pass for step in batch.steps for forward_pass in step.passes]
        collected = self.ranks.collect((batch.diagnostics.totals(), own))
        passes = [forward_pass for _, of_rank in collected for forward_pass in of_rank]
        distance = distance_metrics([totals for totals, _ in collected])
        rate = learning_rate(self.settings, self.steps)
        if self.settings.ess_scaling:
            rate *= math.sqrt(distance["ess_rows"])
        steps = batch.steps
        if not skip:
            self._step(steps[-1], rate)
        taken = [step for step in steps if step.taken]
        self.untrained = sorted(batch.groups.difference(*(step.groups for step in taken)))
        self.steps += bool(taken)
        return {
            "loss": sum(step.loss for step in steps) / len(steps),
            "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
            "learning_rate": rate,
            "optimizer_steps": float(len(taken)),
            "skipped": float(not taken),
            **distance,
            "tokens/trained": float(sum(share.tokens for step in taken for share in step.shares)),
            "tokens/computed": float(sum(forward_pass.tokens for forward_pass in passes)),
            "padding_ratio": padding_ratio(passes),
            "time/update": batch.seconds + time.perf_counter() - started,
        }

    def logprobs(self, rows: Sequence[TrainingSequence]) -> list[Logprobs]:
        """Compute log π of every trained token of this rank's share: a float32 [t] per row, 0 elsewhere."""
        return self._forward.logprobs(self._split(rows)[self.ranks.rank])

    def validation_loss(self, rows: Sequence[TrainingSequence]) -> float:
        """Return the mean negative log π of the trained tokens, in nats. Nothing is trained on them."""
        return self._on_shares(self.validate_shares, [rows])

    def validate_shares(self, shares: Sequence[RankShare]) -> float:
        """Compute `validation_loss`, given this rank's share of its rows."""
        (share,) = shares
        own = sum(float(values.sum(dtype=np.float64)) for values in self._forward.logprobs(share))
        return -sum(self.ranks.collect(own)) / share.tokens

    @collective
    def save_weights(self, directory: Path, *, durable: bool = False, dtype: str = "float32") -> Path:
        """Write the model in Hugging Face format, with the base model's tokenizer and chat template.

        The directory is replaced atomically. An adapter is merged. `durable` also syncs the files to disk.
        `dtype` is the data type of the written values; those that engines hold in float32 stay so.

        Raises:
            OSError: if a file cannot be written.
        """
        values = self._weights.in_files(dtype)
        if self.ranks.rank == 0:
            write_model(directory, self.model, values, self._tokenizer, durable=durable)
        return directory

    @collective
    def save_adapter(self, directory: Path, *, dtype: str = "float32") -> Path:
        """Write the LoRA matrices in peft's format (`trainer.lora.publish`); raises OSError."""
        assert self._adapter is not None
        values = self.ranks.gather(self._adapter.parameters(self.model))
        if self.ranks.rank == 0:
            self._adapter.write(directory, cast(values, dtype), self._base)
        return directory

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters as published, by name; of tied ones only the first. Empty except on rank 0.

        Read them before the next step: they share memory with the model.
        """
        return self._weights.parameters()

    def weight_buckets(
        self, max_bytes: int, as_files: str | None = None, *, on_device: bool = False
    ) -> Generator[dict[str, Tensor], None, None]:
        """Yield `weights` in buckets of at most `max_bytes`, each gathered on demand.

        A larger tensor has a bucket of its own. Close the generator if you do not exhaust it: the other ranks
        gather all buckets. `as_files` gives the tensors the names, the shapes and the values that files
        written by `save_weights` with this data type have; ranks then exchange values of this type.
        `on_device` leaves the tensors in the memory of rank 0's device; otherwise they are in host memory.
        """
        with self.ranks.call("weight_buckets", max_bytes, as_files=as_files, on_device=on_device):
            yield from self._weights.buckets(max_bytes, as_files, on_device=on_device)

    @collective
    def load_weights(self, directory: Path) -> None:
        """Load weights that `save_weights` wrote.

        With an adapter they follow from the base model and the trainer's state, which is loaded first, so
        they are only compared.

        Raises:
            CheckpointError: if the directory holds another model.
        """
        self._weights.load(directory)
        self._forward.refresh()

    @collective
    def staged(self, directory: Path) -> Storable:
        """Return what a checkpoint in `directory` holds, for writing while the policy changes.

        The weights, gathered, and the state are copied; each rank begins to write its shards of the
        optimiser's moments beside `directory`. A single rank copies nothing and returns itself.
        """
        # A copy would double the memory, and nothing else changes the policy before it is written.
        if self.ranks.count == 1:
            return self
        return self._state.stage(
            self.steps, self._tokenizer, directory.with_name(f".{directory.name}.{OPTIMIZER}")
        )

    def save_state(self, path: Path) -> None:
        """Write the state of a single rank to a file; raises OSError."""
        try:
            with path.open("wb") as file:
                torch.save(self._state.read(self.steps), file)
        except RuntimeError as error:
            raise_hidden_os_error(error)
            raise

    @collective
    def load_state_from(self, path: Path) -> None:
        """Restore a state that any number of ranks wrote; raises CheckpointError."""
        self.steps = self._state.restore(path)
        self._forward.refresh()

    def _on_shares(
        self,
        method: Callable[Concatenate[Sequence[RankShare], Parameters], Result],
        parts: Sequence[Sequence[TrainingSequence]],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Make every rank call a method with its share of each part of the rows; it gets no other rows."""
        by_rank = list(zip(*(self._split(part) for part in parts), strict=True))
        with self.ranks.call(method.__name__, *arguments, shares=by_rank, **options):
            return method(by_rank[self.ranks.rank], *arguments, **options)

    def _split(self, rows: Sequence[TrainingSequence]) -> list[RankShare]:
        """Weigh the rows of an optimiser step, or of a part of it, and split them among the ranks."""
        weights, denominator = self._loss.aggregation(rows)
        weighted = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
        groups, tokens = frozenset(row.group_id for row in rows), sum(row.trained for row in rows)
        return self.ranks.split(RankShare(weighted, groups, tokens, denominator))

    def _with_reference_logprobs(self, share: RankShare) -> RankShare:
        """Return the share with the logprobs of the fixed policies: π_old and the reference model."""
        rows = share.rows
        if self.settings.minibatches > 1 and not self.settings.streaming:
            old = self._forward.logprobs(share)
            rows = [replace(row, old=values) for row, values in zip(rows, old, strict=True)]
        if self._reference is not None:
            reference = self._reference.logprobs(share)
            rows = [replace(row, reference=values) for row, values in zip(rows, reference, strict=True)]
        return replace(share, rows=rows)

    def _run_minibatches(self, batch: _PendingBatch, shares: Sequence[RankShare]) -> None:
        """Take one optimiser step per minibatch, up to the first that is not finite; the last is left to
        `optimizer_step`."""
        rate = learning_rate(self.settings, self.steps)
        for share in shares:
            if batch.steps and not self._step(batch.steps[-1], rate):
                break
            step = self._begin_step()
            step.accumulate(share, batch.diagnostics)
            batch.steps.append(step)

    def _begin_step(self) -> GradientStep:
        self._optimizer.zero_grad()
        return GradientStep(self._forward, self._loss)

    def _finish(self, step: GradientStep) -> None:
        """Compute a step's loss and norm, and which groups' are not finite, unless they are known."""
        if step.done:  # also one that was not finite, and ended the batch before its last part
            return
        step.finish(self.model, self.settings.max_grad_norm, self.ranks)
        if not step.finite:
            self.non_finite = step.non_finite_groups(self.ranks)

    def _step(self, step: GradientStep, rate: float) -> bool:
        """Take the step if its loss and gradient are finite; returns whether it was taken."""
        self._finish(step)
        if not step.finite:
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._forward.refresh()
        step.taken = True
        return True
