"""What a policy publishes and stores: its weights under the base model's names, and the state that a resumed
run needs besides them."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from tidegate.errors import CheckpointError, StartError
from tidegate.trainer.checkpoint.checkpoint import OPTIMIZER
from tidegate.trainer.checkpoint.huggingface import (
    as_in_files,
    cast,
    conversion_units,
    kept_exact,
    write_model,
)
from tidegate.trainer.policy.lora import Adapter, base_name, is_adapter
from tidegate.trainer.policy.ranks import Ranks
from tidegate.weights.process_group import buckets


class PolicyWeights:
    """Reads and sets the weights of a model that ranks hold, together: every rank calls the same method.

    Args:
        model: the model; its parameters are sharded if there are several ranks.
        adapter: its LoRA matrices, merged into what is read; None without.
        ranks: the ranks that hold the model.
    """

    def __init__(self, model: Any, adapter: Adapter | None, ranks: Ranks) -> None:
        self._model = model
        self._adapter = adapter
        self._ranks = ranks

    @cached_property
    def _exact(self) -> set[str]:
        return {base_name(name) for name in kept_exact(self._model)}

    @cached_property
    def _unit(self) -> Callable[[str], str]:
        """Computed once: it takes a second for a model of 30 billion parameters."""
        return conversion_units(
            self._model,
            {base_name(name): value for name, value in self._sent().items() if not is_adapter(name)},
        )

    def _sent(self) -> dict[str, Tensor]:
        """Return the tensors that engines receive: parameters, of tied ones only the first, and buffers that
        files have."""
        buffers = dict(self._model.named_buffers())
        stored = self._model.state_dict().keys() & buffers.keys()
        return {
            **dict(self._model.named_parameters()),
            **{name: value for name, value in buffers.items() if name in stored},
        }

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters as published; of tied ones only the first. Empty except on rank 0."""
        return self._gathered(dict(self._model.named_parameters()))

    def in_files(self, dtype: str = "float32") -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: buffers and all tied parameters too. Empty except on rank 0."""
        return cast(self._gathered(self._model.state_dict(keep_vars=True)), dtype, self._exact)

    def buckets(
        self, max_bytes: int, as_files: str | None, *, on_device: bool
    ) -> Generator[dict[str, Tensor], None, None]:
        """Yield `parameters` in buckets, with buffers as files have them; see `Policy.weight_buckets`."""
        live = dict(self._model.named_parameters()) if as_files is None else self._sent()
        unit = str if as_files is None else self._unit
        parts = (
            self._published({name: live[name] for name in names}, as_files, on_device)
            for names in buckets(live, max_bytes, lambda name: unit(base_name(name)))
        )
        try:
            for values in parts:
                if as_files is not None:
                    values = as_in_files(self._model, values)
                yield {name: value.contiguous() for name, value in values.items()}
        finally:
            # The other ranks gather every bucket, and wait for this rank in each.
            for _ in parts:
                pass

    @torch.no_grad()
    def _published(self, live: dict[str, Tensor], dtype: str | None, on_device: bool) -> dict[str, Tensor]:
        """Gather tensors in the published type; an adapter is merged in float32 before."""
        if dtype is not None and self._adapter is None:
            live = cast(live, dtype, self._exact)
        values = self._gathered(live, on_device=on_device)
        if dtype is not None and self._adapter is not None:
            values = cast(values, dtype, self._exact)
        return values if on_device else {name: value.cpu() for name, value in values.items()}

    def _gathered(self, live: Mapping[str, Tensor], *, on_device: bool = False) -> dict[str, Tensor]:
        """Gather tensors under the base model's names, with an adapter merged, which is in host memory."""
        values = self._ranks.gather(live, on_device=on_device)
        return values if self._adapter is None else self._adapter.merged(values)

    def load(self, directory: Path) -> None:
        """Load weights from files, or with an adapter compare them; raises CheckpointError if they differ."""
        try:
            values = self._ranks.read_model(directory).state_dict()
            if self._adapter is None:
                self.copy_into(self._model.state_dict(), values)
            else:
                self._compare(values)
        except (StartError, RuntimeError) as error:
            raise CheckpointError(f"{directory} does not hold this run's model: {error}") from error

    def _compare(self, values: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError if the current weights differ from these."""
        own = self.in_files()
        same = all(name in values and values[name].equal(value.cpu()) for name, value in own.items())
        # Rank 0 alone has values to compare, and all ranks must raise.
        if not self._ranks.collect(same)[0]:
            raise RuntimeError(
                "the base model merged with the trainer's adapter has other weights; set model.path and "
                "trainer.lora.alpha as at the start of the run"
            )

    @torch.no_grad()
    def copy_into(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copy values into tensors; raises RuntimeError if names or shapes differ."""
        if live.keys() != values.keys():
            raise RuntimeError(f"tensor names differ: {', '.join(sorted(live.keys() ^ values.keys()))}")
        for name, tensor in live.items():
            if tensor.shape != values[name].shape:
                raise RuntimeError(f"{name}: {list(values[name].shape)} instead of {list(tensor.shape)}")
            # Into the same memory: the optimiser and a working copy hold these tensors.
            tensor.copy_(self._ranks.shard(values[name], tensor))


@dataclass(frozen=True, slots=True)
class StagedPolicy:
    """A checkpoint of a policy on several ranks, between two of its steps.

    Attributes:
        model: The model, for its config and names; its values change meanwhile.
        values: The weights, gathered; empty except on rank 0.
        state: `trainer.pt`.
        shards: Where the ranks write the optimiser's moments; None before the first step, without any.
        wait: Waits until they have written.
    """

    model: Any
    tokenizer: Mapping[str, bytes]
    values: dict[str, Tensor]
    state: io.BytesIO
    shards: Path | None
    wait: Callable[[], None]

    def save_weights(self, directory: Path) -> Path:
        self.wait()  # first: if this fails, no rank writes any more
        write_model(directory, self.model, self.values, self.tokenizer, durable=False)
        return directory

    def save_state(self, path: Path) -> None:
        path.write_bytes(self.state.getbuffer())
        if self.shards is not None:
            self.shards.rename(path.with_name(OPTIMIZER))


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Reads, stages and restores the state of a policy on its ranks: every rank calls the same method.

    It holds the optimiser, whose moments stay sharded, the step count, the random generators, and the
    adapter, which merged weights do not determine and which is gathered on rank 0.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    adapter: Adapter | None
    weights: PolicyWeights
    ranks: Ranks
    device: torch.device

    def read(self, steps: int) -> dict[str, Any]:
        """Return the state after so many steps."""
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {index: dict(moments) for index, moments in optimizer["state"].items()}
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        state = {"optimizer": optimizer, "steps": steps, "rng": torch.get_rng_state(), "rng_cuda": cuda}
        if self.adapter is not None:
            state["adapter"] = self.ranks.gather(self.adapter.parameters(self.model))
        return state

    def stage(self, steps: int, tokenizer: Mapping[str, bytes], shards: Path) -> StagedPolicy:
        """Copy the weights and the state, and begin to write each rank's moments to `shards`."""
        values = self.weights.in_files()
        state, copied = self.read(steps), io.BytesIO()
        moments = {
            f"{index}.{name}": of_parameter.pop(name)
            for index, of_parameter in state["optimizer"]["state"].items()
            for name in [name for name, value in of_parameter.items() if value.ndim]  # not the step count
        }
        # Into memory: the state changes while the files are being written.
        torch.save({**state, "sharded": list(moments)}, copied)
        written = self.ranks.begin_save(moments, shards)
        return StagedPolicy(self.model, tokenizer, values, copied, shards if moments else None, written)

    def restore(self, path: Path) -> int:
        """Restore a state that any number of ranks wrote, and return its steps; raises CheckpointError.

        The moments that `stage` took out of it are beside it. `PolicyWeights.load` loads the weights.
        """

        def read() -> dict[str, Any]:
            # `weights_only`: a file in a checkpoint must not run code when it is read.
            state: dict[str, Any] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=self.ranks.count > 1
            )
            return state

        try:
            return self._restore(self.ranks.outline(read), path.with_name(OPTIMIZER))
        except (OSError, RuntimeError, ValueError, LookupError, UnpicklingError) as error:
            raise CheckpointError(f"{path} is not a trainer state of this model: {error}") from error

    def _restore(self, state: dict[str, Any], shards: Path) -> int:
        if ("adapter" in state) != (self.adapter is not None):
            raise ValueError("trainer.lora.rank was switched on or off, which a resumed run does not allow")
        if self.adapter is not None:
            self.weights.copy_into(self.adapter.parameters(self.model), state["adapter"])
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {
            index: {name: self.ranks.shard(value, parameters[index]) for name, value in tensors.items()}
            for index, tensors in state["optimizer"]["state"].items()
        }
        sharded = {
            key: torch.empty_like(parameters[int(key.partition(".")[0])], requires_grad=False)
            for key in state.get("sharded", ())
        }
        if sharded:
            self.ranks.load_shards(sharded, shards)
        for key, value in sharded.items():
            index, _, name = key.partition(".")
            moments[int(index)][name] = value
        # The settings' own groups: a weight decay that was changed for the resumed run has an effect.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        torch.set_rng_state(state["rng"].cpu())
        if state["rng_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"].cpu(), self.device)
        steps: int = state["steps"]
        return steps
