"""The policy that is trained: a causal language model, its optimiser, and one step on a batch of rows."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tidegate.config import TrainerSettings
from tidegate.devices import find_device
from tidegate.errors import CheckpointError, StartError, TrainingError
from tidegate.trainer.batch.rows import TrainSequence, minibatches
from tidegate.trainer.checkpoint.huggingface import read_model, tokenizer_files, write_model
from tidegate.trainer.policy.diagnostics import Diagnostics
from tidegate.trainer.policy.forward import Forward, Prefix
from tidegate.trainer.policy.lora import Adapter, layer_of
from tidegate.trainer.policy.loss import make_loss
from tidegate.trainer.policy.microbatch import ForwardPass, Microbatch, PrefixBatch, bundles, padding_ratio
from tidegate.trainer.policy.optimizer import adamw, learning_rate
from tidegate.types import Logprobs
from tidegate.weights.process_group import buckets


@dataclass(slots=True)
class GradientStep:
    """The gradient of one optimiser step: summed over its rows part by part, then divided by their N."""

    rows: list[TrainSequence] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    passes: list[ForwardPass] = field(default_factory=list)
    denominator: float = 0.0
    loss: float = math.nan
    grad_norm: float = math.nan

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(slots=True)
class _PendingBatch:
    """A batch that is being learned from."""

    diagnostics: Diagnostics
    descents: list[GradientStep] = field(default_factory=list)
    seconds: float = 0.0


class Learner(Protocol):
    """What a run does with its policy, in one process or in several."""

    @property
    def non_finite(self) -> list[str]: ...
    def add(self, rows: Sequence[TrainSequence], version: int) -> None: ...
    def finish(self) -> dict[str, float]: ...
    def save_weights(self, directory: Path, *, durable: bool = False) -> Path: ...
    def weight_buckets(self, most_bytes: int) -> Generator[dict[str, Tensor], None, None]: ...
    def save_state(self, path: Path) -> None: ...
    def load_weights(self, directory: Path) -> None: ...
    def load_state_from(self, path: Path) -> None: ...


class Policy:
    """A Hugging Face causal LM with AdamW. It blocks: call it from a thread of its own.

    The model stays in evaluation mode, gradients on: dropout would make π differ from what is sampled.
    `reference` is another model with the same vocabulary, frozen. `steps` counts the batches that were
    stepped on; `non_finite` names the groups of the last step that was not taken, and is empty where all
    steps of the last batch were.
    """

    _way: ClassVar[type[Forward]] = Forward

    def __init__(self, model: Any, base: Path, settings: TrainerSettings, reference: Any = None) -> None:
        self.model = model
        self.settings = settings
        self.device = torch.device(settings.device)
        self.steps = 0
        self.non_finite: list[str] = []
        self._under_way: _PendingBatch | None = None
        self._tokenizer = tokenizer_files(base)
        self._loss = make_loss(settings)
        self._adapter = Adapter.into(model, settings) if settings.lora_rank else None
        self._forward = self._way(model, settings)
        self._reference = None if reference is None else self._way(reference, settings)
        self._optimizer = adamw(model, settings)

    @classmethod
    def load(cls, path: Path, settings: TrainerSettings, seed: int = 0) -> Self:
        """Load a model in float32 and make its optimiser.

        Sets torch's thread count and its global generator and turns transformers' progress bars off: all
        three belong to the whole process.

        Raises StartError where the directory, or that of the reference, holds no causal LM that can be
        loaded or trained as the settings say.
        """
        torch.set_num_threads(settings.threads)
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        device = cls._loaded_on(settings)
        model = read_model(path).to(device).eval()
        if settings.reference is None:
            return cls(model, path, settings)
        reference = read_model(settings.reference).to(device).eval().requires_grad_(False)
        sizes = [one.config.get_text_config().vocab_size for one in (model, reference)]
        if sizes[0] != sizes[1]:
            raise StartError(
                f"trainer.reference = {settings.reference} has a vocabulary of {sizes[1]}, {path} one of "
                f"{sizes[0]}: the reference must be a model with the same tokens"
            )
        return cls(model, path, settings, reference)

    @staticmethod
    def _loaded_on(settings: TrainerSettings) -> torch.device:
        return find_device("trainer.device", settings.device)

    def update(self, rows: Sequence[TrainSequence], version: int) -> dict[str, float]:
        """Train on the rows of a batch; `version` is that of the weights it starts from.

        One optimiser step, or `minibatches` of them, a part of the groups each. A step whose loss or
        gradient is not finite is not taken, nor are those after it, and `non_finite` names its groups;
        `skipped` is 1 where that leaves the policy as it was. Returns the metrics: means over the steps,
        measured before each.

        Raises TrainingError where no row has a trained token.
        """
        self._under_way = None
        for part in minibatches(rows, self.settings.minibatches) if self.settings.streaming else [rows]:
            self.add(part, version)
        return self.finish()

    def add(self, rows: Sequence[TrainSequence], version: int) -> None:
        """Learn from a batch, or when streaming from a minibatch of it: its gradient is kept for `finish`.

        Until then the policy stays as it is, unless the batch is taken in several optimiser steps.
        """
        started = time.perf_counter()
        if self._under_way is None:
            self._under_way = _PendingBatch(Diagnostics(version))
            self.non_finite = []
        batch = self._under_way
        trained = self._anchored([row for row in rows if row.trained])
        if not trained:
            return
        if self.settings.streaming:
            if not batch.descents:
                batch.descents.append(self._begin())
            self._descend(batch.descents[0], trained, batch.diagnostics)
        else:
            self._take_steps(batch, trained)
        batch.seconds += time.perf_counter() - started

    def finish(self) -> dict[str, float]:
        """Take the step that is left to be taken, and return the batch's metrics; see `update`."""
        started = time.perf_counter()
        batch, self._under_way = self._under_way, None
        if batch is None or not batch.descents:
            raise TrainingError("a batch holds no token that can be trained")
        rate = learning_rate(self.settings, self.steps)
        if self.settings.streaming:
            self._step(batch.descents[0], rate)
        taken = sum(descent.finite for descent in batch.descents)
        self.steps += bool(taken)
        descents, passes = batch.descents, [one for descent in batch.descents for one in descent.passes]
        return {
            "loss": sum(descent.loss for descent in descents) / len(descents),
            "grad_norm": sum(descent.grad_norm for descent in descents) / len(descents),
            "learning_rate": rate,
            "optimizer_steps": float(taken),
            "skipped": float(not taken),
            **self._pooled(batch.diagnostics).metrics(),
            "tokens/trained": float(sum(row.trained for descent in descents for row in descent.rows)),
            "tokens/computed": float(sum(one.tokens for one in passes)),
            "padding_ratio": padding_ratio(passes),
            "time/update": batch.seconds + time.perf_counter() - started,
        }

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[Logprobs]:
        """log π of every trained token under the present weights; float32 [t] a row, 0 elsewhere."""
        return self._forward.logprobs(rows, self.settings.microbatch_tokens, share=self._forward.shares)

    def save_weights(self, directory: Path, *, durable: bool = False) -> Path:
        """Write the model in Hugging Face format, with the base's tokenizer and chat template.

        It is written beside its place and renamed when complete; what was there before is replaced. An
        adapter is merged. `durable` also waits until the files are on disk. Raises OSError.
        """
        values = self._plain(self.model.state_dict(keep_vars=True))
        if self._leads:
            write_model(directory, self.model, values, self._tokenizer, durable=durable)
        return directory

    def weights(self) -> dict[str, Tensor]:
        """The values of the parameters as they are published, by name, of tied ones the first; read them
        before the next step. Where there are several ranks it is rank 0 that has them.
        """
        return self._plain(dict(self.model.named_parameters()))

    def weight_buckets(self, most_bytes: int) -> Generator[dict[str, Tensor], None, None]:
        """The same in host memory, in runs of at most so many bytes (what is larger by itself comes alone).

        Each is gathered when it is asked for.
        """
        live = dict(self.model.named_parameters())
        for names in buckets(live, most_bytes, layer_of):  # an adapter is merged layer by layer
            values = self._plain({name: live[name] for name in names})
            yield {name: one.cpu().contiguous() for name, one in values.items()}

    def _plain(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model as the base model has them."""
        values = self._gathered(live)
        return values if self._adapter is None else self._adapter.merged(values)

    def load_weights(self, directory: Path) -> None:
        """Replace the weights by those of a directory that `save_weights` wrote.

        With an adapter they follow from the model it was loaded from and the trainer's state, which is
        loaded first: then they are only compared. Raises CheckpointError where the directory holds
        another model.
        """
        try:
            values = read_model(directory).state_dict()
            if self._adapter is None:
                self._fill(self.model.state_dict(), values)
            else:
                self._compare(values)
        except (StartError, RuntimeError) as error:
            raise CheckpointError(f"{directory} does not hold this run's model: {error}") from error

    def _compare(self, values: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError where these are not the weights."""
        mine = self._plain(self.model.state_dict(keep_vars=True))
        same = all(name in values and values[name].equal(one.cpu()) for name, one in mine.items())
        if not self._agreed(same):
            raise RuntimeError(
                "the base model with the trainer's adapter has other weights; is model.path the model that "
                "the run began with, and trainer.lora_alpha as it was?"
            )

    @torch.no_grad()
    def _fill(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copy values into tensors of the same names and shapes. Raises RuntimeError where they differ."""
        if live.keys() != values.keys():
            raise RuntimeError(f"other tensors: {', '.join(sorted(live.keys() ^ values.keys()))}")
        for name, tensor in live.items():
            if tensor.shape != values[name].shape:
                raise RuntimeError(f"{name}: {list(values[name].shape)} instead of {list(tensor.shape)}")
            tensor.copy_(self._part(values[name], tensor))

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights: optimiser, steps so far, random generators, and the
        adapter, which cannot be told from merged weights."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        state = {
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "rng": torch.get_rng_state(),
            "rng_cuda": cuda,
        }
        if self._adapter is not None:
            state["adapter"] = self._gathered(self._adapter.parameters(self.model))
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up a state that `state` gave; the weights are `load_weights`' business.

        Raises ValueError or RuntimeError where it is of another adapter, or of none.
        """
        if ("adapter" in state) != (self._adapter is not None):
            raise ValueError("trainer.lora_rank was switched on or off since; a run keeps to one of the two")
        if self._adapter is not None:
            self._fill(self._adapter.parameters(self.model), state["adapter"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["rng"].cpu())
        if state["rng_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"].cpu(), self.device)

    def save_state(self, path: Path) -> None:
        """Write `state` to a file. Raises OSError."""
        state = self.state()
        if not self._leads:
            return
        try:
            with path.open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:
            # torch reports a failed write in words of its own; the reason lies beneath.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def load_state_from(self, path: Path) -> None:
        """Take up a state that `save_state` wrote. Raises CheckpointError."""
        try:
            self.load_state(torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
            raise CheckpointError(f"{path}: not a trainer's state of this model: {error}") from error

    def _anchored(self, rows: list[TrainSequence]) -> list[TrainSequence]:
        """The rows with the logprobs of the policies that stand still while they are trained on."""
        if self.settings.minibatches > 1 and not self.settings.streaming:
            rows = [replace(row, old=old) for row, old in zip(rows, self.logprobs(rows), strict=True)]
        if self._reference is not None:
            found = self._reference.logprobs(
                rows, self.settings.microbatch_tokens, share=self._reference.shares
            )
            rows = [replace(row, reference=one) for row, one in zip(rows, found, strict=True)]
        return rows

    def _take_steps(self, batch: _PendingBatch, rows: list[TrainSequence]) -> None:
        """One optimiser step a minibatch, up to the first that is not finite."""
        for part in minibatches(rows, self.settings.minibatches):
            batch.descents.append(self._begin())
            self._descend(batch.descents[-1], part, batch.diagnostics)
            if not self._step(batch.descents[-1], learning_rate(self.settings, self.steps)):
                break

    def _begin(self) -> GradientStep:
        self._optimizer.zero_grad(set_to_none=True)
        return GradientStep()

    def _descend(
        self, descent: GradientStep, rows: Sequence[TrainSequence], diagnostics: Diagnostics
    ) -> None:
        """Add the gradient of the loss over the rows, times N, to the parameters'."""
        weights, denominator = self._loss.aggregation(rows)
        weighted = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
        layout = bundles(weighted, self.settings.microbatch_tokens, share=self._forward.shares)
        descent.losses += [self._accumulate(bundle, diagnostics) for bundle in layout]
        descent.passes += [one for bundle in layout for one in bundle.passes]
        descent.rows += rows
        descent.denominator += denominator

    def _accumulate(self, bundle: PrefixBatch, diagnostics: Diagnostics) -> Tensor:
        """Add a bundle's gradient to the parameters'; returns its share of the loss, times N."""
        prefix = self._forward.prefix(bundle)
        losses = []
        for laid in bundle.microbatches:
            losses.append(self._backward(laid.to(self.device), prefix, diagnostics))
        if prefix is not None:
            prefix.backward()
        return torch.stack(losses).sum()

    def _backward(self, batch: Microbatch, prefix: Prefix | None, diagnostics: Diagnostics) -> Tensor:
        logprobs_n, entropy_n = self._forward(batch, prefix)
        loss, cut_n = self._loss(logprobs_n, batch, 1.0)
        loss.backward()
        diagnostics.add(logprobs_n, entropy_n, cut_n, batch)
        return loss.detach()

    def _step(self, descent: GradientStep, rate: float) -> bool:
        """Take the step if it is finite; returns whether it was."""
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        torch._foreach_div_(gradients, descent.denominator)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        descent.loss = self._whole(torch.stack(descent.losses).sum()) / descent.denominator
        descent.grad_norm = self._whole(norm)
        if not descent.finite:
            self.non_finite = self._suspects(descent.rows)
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return True

    # What processes that train together do together; here it is one process.

    @property
    def _leads(self) -> bool:
        """Whether this is the process that writes."""
        return True

    def _gathered(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole values of tensors, on the process that writes; tied ones stay one."""
        return {name: one.detach() for name, one in live.items()}

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor, laid out as another."""
        return whole

    def _agreed(self, verdict: bool) -> bool:
        """What the process that writes found."""
        return verdict

    def _whole(self, value: Tensor) -> float:
        """A sum whose parts the processes have."""
        return float(value)

    def _pooled(self, diagnostics: Diagnostics) -> Diagnostics:
        """The diagnostics of all that they computed."""
        return diagnostics

    def _suspects(self, rows: Sequence[TrainSequence]) -> list[str]:
        """The groups of the rows whose loss is not finite; all groups if no row by itself explains it."""
        bad = {
            row.group_id
            for row, logprobs in zip(rows, self.logprobs(rows), strict=True)
            if not (np.isfinite(row.advantages).all() and np.isfinite(logprobs).all())
            or np.isnan(row.logprobs[row.mask]).any()
        }
        return sorted(bad or {row.group_id for row in rows})
